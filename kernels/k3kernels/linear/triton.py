"""GEMMs in which every element's sum has one order, whatever the number of rows.

The order is set by K alone: one program walks K from 0 up with one fp32 accumulator an element, and no sum is split. In
bf16 a program has a multiple of 64 rows, so that a step is a tensor-core instruction of 16 products an element (on sm_90
m64nSk16), whose sums do not depend on its width S = SLICE; wider tiles are PARTS accumulators of SLICE columns each. fp32
("ieee") is one fused multiply-add a k, in order, in any tile. So `pick_tile` may take the rows' number into account
(kernels/bench/check_linear_moe.py compares its choices bit by bit), and many rows go to `persistent.py`
(kernels/bench/bench_invariant.py).

The result is rounded once, to the output's type. Grouped rows, each with the matrix of its group (an adapter, an
expert), are bucketed on the device: nothing here waits for it, and a CUDA graph can hold all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Triton's interpreter has no bf16 products, rounds to no nearest and adds in BLAS's order: all three are spelled out."""
SLICE = 64  # columns of one instruction; fewer where N is smaller
FULL_GPU = 100  # programs; with fewer, smaller tiles are faster
MAX_PROGRAMS = 200  # with more, wider slices read x less often
MAX_PAIRWISE = 4096  # rows that are bucketed by comparing each with all


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes: block_m rows and parts * slice columns, block_k products at a time. None changes bits."""

    block_m: int
    slice: int
    parts: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """P rows sorted by group, stably. Group e has order_P[edges[e]:edges[e + 1]]; int32. Rows of no group are in none."""

    order_P: Tensor
    edges: Tensor  # [E + 1]


def block_k(K: int, dtype: torch.dtype) -> int:
    return min(64 if dtype == torch.bfloat16 else 16, max(16, triton.next_power_of_2(K)))


def slice_columns(N: int) -> int:
    return min(SLICE, max(16, triton.next_power_of_2(N)))


def pick_tile(M: int, N: int, K: int, dtype: torch.dtype) -> Tile:
    """The largest tile that still makes enough programs. Every choice for (N, K, dtype) gives the same bits."""
    columns, step = slice_columns(N), block_k(K, dtype)
    if dtype == torch.float32:
        if -(-M // 16) * -(-N // 16) <= 4 * MAX_PROGRAMS:
            return Tile(16, 16, 1, 128 if K % 128 == 0 else step, 4, 3)
        return Tile(16 if M <= 16 else 64, columns, 1, step, 4, 3)
    large = (Tile(256, columns, 2, step, 8, 4), Tile(128, columns, 2, step, 8, 4), Tile(128, columns, 1, step, 8, 4))
    for tile in large:
        if tile.block_m <= M and -(-M // tile.block_m) * -(-N // (columns * tile.parts)) >= FULL_GPU:
            return tile
    # Few rows: a program waits for memory, so narrow slices make as many programs as run at once.
    narrow = next((c for c in (16, 32) if -(-M // 64) * -(-N // c) <= MAX_PROGRAMS), columns)
    narrow = min(narrow, columns)
    wide_step = 2 * step if K % (2 * step) == 0 else step
    return Tile(64, narrow, 1, wide_step, 4, 4 if narrow == SLICE else 5)


def pick_grouped_tile(rows_per_group: int, N: int, K: int, dtype: torch.dtype, parts: int = 2) -> Tile:
    """As `pick_tile`, for a group's rows on average; parts: the most of a program."""
    columns, step = slice_columns(N), block_k(K, dtype)
    if dtype == torch.float32:
        return Tile(16 if rows_per_group <= 16 else 64, columns, 1, step, 4, 3)
    if rows_per_group <= 64:
        return Tile(64, columns, 1, step, 4, 4)
    return Tile(128, columns, parts, step, 8, 4)


@triton.jit
def _round_to(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 x in another type, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def _add_products(x, w, sums, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """sums + x w. numpy's BLAS, which interprets `dot`, has another order for each number of rows."""
    if INTERPRETED:
        return sums + tl.sum(x.to(tl.float32)[:, :, None] * w.to(tl.float32)[None, :, :], 1)
    return tl.dot(x, w, sums, input_precision="ieee")


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    x_ptrs,
    is_row,
    a_ptrs,
    b_ptrs,
    K,
    TWO: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """x A^T and, where TWO, x B^T of the same rows; fp32. x_ptrs [BM, 1] are rows' starts, a_ptrs and b_ptrs [1, S].

    Rows that are none (is_row [BM]) are not loaded: as copies of another row they would all wait for one bank.
    """
    step = tl.arange(0, BK)
    sum_a = tl.zeros([x_ptrs.shape[0], a_ptrs.shape[1]], tl.float32)
    sum_b = tl.zeros([x_ptrs.shape[0], a_ptrs.shape[1]], tl.float32)
    for start in range(0, K, BK):
        ks = start + step
        if EVEN_K:
            x = tl.load(x_ptrs + ks[None, :], mask=is_row[:, None], other=0.0)
            a = tl.load(a_ptrs + ks[:, None])
        else:
            x = tl.load(x_ptrs + ks[None, :], mask=is_row[:, None] & (ks[None, :] < K), other=0.0)
            a = tl.load(a_ptrs + ks[:, None], mask=ks[:, None] < K, other=0.0)
        sum_a = _add_products(x, a, sum_a, INTERPRETED)
        if TWO:
            if EVEN_K:
                b = tl.load(b_ptrs + ks[:, None])
            else:
                b = tl.load(b_ptrs + ks[:, None], mask=ks[:, None] < K, other=0.0)
            sum_b = _add_products(x, b, sum_b, INTERPRETED)
    return sum_a, sum_b


@triton.jit
def _store_rows(y_ptrs, sums, columns, is_row, N, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """y_ptrs [BM, 1] are rows' starts."""
    rounded = _round_to(sums, y_ptrs.dtype.element_ty, INTERPRETED)
    tl.store(y_ptrs + columns[None, :], rounded, mask=is_row[:, None] & (columns < N)[None, :])


@triton.jit
def _tile_of_group(edges_ptr, tile, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """(group, first, last + 1): the rows, at most BM of one group, that are tile number `tile`; group E: no more."""
    groups = tl.arange(0, BE)
    begins = tl.load(edges_ptr + groups, mask=groups < E, other=0)
    ends = tl.load(edges_ptr + groups + 1, mask=groups < E, other=0)
    num_tiles = (ends - begins + BM - 1) // BM
    last_tiles = tl.cumsum(num_tiles, 0)
    group = tl.sum(((last_tiles <= tile) & (groups < E)).to(tl.int32), 0)
    is_it = groups == group
    inside = tile - tl.sum(tl.where(is_it, last_tiles - num_tiles, 0), 0)
    first = tl.sum(tl.where(is_it, begins, 0), 0) + inside * BM
    return group, first, tl.sum(tl.where(is_it, ends, 0), 0)


@triton.jit(do_not_specialize=["M"])
def linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    y_ptr,
    M,
    N,
    K,
    stride_x,
    stride_w,
    BM: tl.constexpr,
    SLICE: tl.constexpr,
    PARTS: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """x [M, K] and w [N, K] with rows stride_x and stride_w apart; y [M, N], contiguous."""
    ROW_BLOCKS: tl.constexpr = 8  # programs that follow each other share as many blocks of x, and one of w
    num_m, num_n = tl.cdiv(M, BM), tl.cdiv(N, SLICE * PARTS)
    program = tl.program_id(0)
    group = program // (ROW_BLOCKS * num_n)
    in_group = min(num_m - group * ROW_BLOCKS, ROW_BLOCKS)
    block_m = group * ROW_BLOCKS + (program % (ROW_BLOCKS * num_n)) % in_group
    block_n = (program % (ROW_BLOCKS * num_n)) // in_group

    rows = block_m * BM + tl.arange(0, BM)
    columns_a = block_n * SLICE * PARTS + tl.arange(0, SLICE)
    columns_b = columns_a + SLICE
    # Columns outside read column 0 and are not stored: their loads need no mask.
    x_ptrs = x_ptr + tl.where(rows < M, rows, 0).to(tl.int64)[:, None] * stride_x
    a_ptrs = w_ptr + tl.where(columns_a < N, columns_a, 0).to(tl.int64)[None, :] * stride_w
    b_ptrs = w_ptr + tl.where(columns_b < N, columns_b, 0).to(tl.int64)[None, :] * stride_w
    sum_a, sum_b = _sums(x_ptrs, rows < M, a_ptrs, b_ptrs, K, PARTS == 2, BK, EVEN_K, INTERPRETED)
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * N
    _store_rows(y_ptrs, sum_a, columns_a, rows < M, N, INTERPRETED)
    if PARTS == 2:
        _store_rows(y_ptrs, sum_b, columns_b, rows < M, N, INTERPRETED)


@triton.jit
def grouped_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    y_ptr,
    order_ptr,
    edges_ptr,
    N,
    K,
    stride_x,
    E: tl.constexpr,
    BE: tl.constexpr,
    IN_ORDER: tl.constexpr,
    BM: tl.constexpr,
    SLICE: tl.constexpr,
    PARTS: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """y_row = x_row W_e^T for the rows of `Buckets`. w [E, N, K] is contiguous.

    IN_ORDER: x's rows are already sorted. A program that finds no tile ends.
    """
    num_n = tl.cdiv(N, SLICE * PARTS)
    group, first, end = _tile_of_group(edges_ptr, tl.program_id(0) // num_n, E, BE, BM)
    if group >= E:
        return
    places = first + tl.arange(0, BM)
    is_row = places < end
    places = tl.where(is_row, places, first)
    rows = tl.load(order_ptr + places).to(tl.int64)
    columns_a = (tl.program_id(0) % num_n) * SLICE * PARTS + tl.arange(0, SLICE)
    columns_b = columns_a + SLICE
    w_start = w_ptr + group.to(tl.int64) * N * K
    x_ptrs = x_ptr + (places.to(tl.int64) if IN_ORDER else rows)[:, None] * stride_x
    a_ptrs = w_start + tl.where(columns_a < N, columns_a, 0).to(tl.int64)[None, :] * K
    b_ptrs = w_start + tl.where(columns_b < N, columns_b, 0).to(tl.int64)[None, :] * K
    sum_a, sum_b = _sums(x_ptrs, is_row, a_ptrs, b_ptrs, K, PARTS == 2, BK, EVEN_K, INTERPRETED)
    y_ptrs = y_ptr + rows[:, None] * N
    _store_rows(y_ptrs, sum_a, columns_a, is_row, N, INTERPRETED)
    if PARTS == 2:
        _store_rows(y_ptrs, sum_b, columns_b, is_row, N, INTERPRETED)


@triton.jit(do_not_specialize=["P"])
def bucket_kernel(  # type: ignore[no-untyped-def]
    group_ptr, order_ptr, edges_ptr, P, E: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """Stable counting sort by comparing all with all; the last programs count the edges. See `Buckets`."""
    num_rank_blocks = tl.cdiv(P, BLOCK)
    block = tl.program_id(0)
    is_edges = block >= num_rank_blocks
    mine = tl.where(is_edges, block - num_rank_blocks, block) * BLOCK + tl.arange(0, BLOCK)
    is_row = (mine < P) & (block < num_rank_blocks)
    # An edge stands before its group's first row, whose number is -1.
    key = tl.where(is_edges, mine, tl.load(group_ptr + mine, mask=is_row, other=0).to(tl.int32))
    number = tl.where(is_edges, -1, mine)
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, P, STEP):
        others = start + tl.arange(0, STEP)
        theirs = tl.load(group_ptr + others, mask=others < P, other=0).to(tl.int32)
        is_equal = theirs[None, :] == key[:, None]
        precedes = (theirs[None, :] < key[:, None]) | (is_equal & (others[None, :] < number[:, None]))
        rank += tl.sum((precedes & (others < P)[None, :]).to(tl.int32), 1)
    tl.store(order_ptr + rank, mine, mask=is_row)
    tl.store(edges_ptr + mine, rank, mask=is_edges & (mine <= E))


def bucket(group_P: Tensor, num_groups: int) -> Buckets:
    """Rows by group, on the device and without waiting for it. Rows whose group is not one of 0..num_groups-1 drop out."""
    P, device = group_P.numel(), group_P.device
    if P > MAX_PAIRWISE:
        in_order, order = torch.sort(group_P, stable=True)
        groups = torch.arange(num_groups + 1, device=device, dtype=group_P.dtype)
        return Buckets(order.int(), torch.searchsorted(in_order, groups, out_int32=True))
    order_P = torch.empty(P, dtype=torch.int32, device=device)
    edges = torch.empty(num_groups + 1, dtype=torch.int32, device=device)
    block, step = 32, 128
    grid = (-(-P // block) - (-(num_groups + 1) // block),)
    bucket_kernel[grid](group_P, order_P, edges, P, E=num_groups, BLOCK=block, STEP=step)
    return Buckets(order_P, edges)


def max_tiles(num_rows: int, num_groups: int, block_m: int) -> int:
    """How many tiles of block_m rows any division of the rows into groups can make."""
    return (num_rows + min(num_rows, num_groups) * (block_m - 1)) // block_m


def grouped_linear(
    x: Tensor,
    weight_ENK: Tensor,
    buckets: Buckets,
    y: Tensor,
    in_order: bool = False,
    tile: Tile | None = None,
) -> None:
    """Writes x_row W_e^T to y's rows that are in a group; other rows are left alone.

    x [P, K] in the rows' order, or (in_order) sorted; y [P, N], contiguous.
    """
    E, N, K = weight_ENK.shape
    P = buckets.order_P.numel()
    if P == 0:
        return
    tile = tile or pick_grouped_tile(P // E, N, K, x.dtype)
    grid = (max_tiles(P, E, tile.block_m) * -(-N // (tile.slice * tile.parts)),)
    grouped_linear_kernel[grid](
        x,
        weight_ENK,
        y,
        buckets.order_P,
        buckets.edges,
        N,
        K,
        x.stride(0),
        E=E,
        BE=triton.next_power_of_2(E),
        IN_ORDER=in_order,
        **launch_options(tile, K),
    )


def per_head(x_THK: Tensor, weight_HNK: Tensor) -> Tensor:
    """x_h W_h^T [T, H, N] in x's type: a group of rows for each head, so a row has the same bits in every batch."""
    T, H, K = x_THK.shape
    N, device = weight_HNK.shape[1], x_THK.device
    y_HTN = torch.empty(H, T, N, dtype=x_THK.dtype, device=device)
    if T:
        rows = x_THK.transpose(0, 1).reshape(H * T, K)
        edges = torch.arange(0, (H + 1) * T, T, dtype=torch.int32, device=device)
        buckets = Buckets(torch.arange(H * T, dtype=torch.int32, device=device), edges)
        grouped_linear(rows, weight_HNK.contiguous(), buckets, y_HTN.view(H * T, N), in_order=True)
    return y_HTN.transpose(0, 1)


def launch_options(tile: Tile, K: int) -> dict[str, int | bool]:
    return {
        "BM": tile.block_m,
        "SLICE": tile.slice,
        "PARTS": tile.parts,
        "BK": tile.block_k,
        "EVEN_K": K % tile.block_k == 0,
        "INTERPRETED": INTERPRETED,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def multiply(x_MK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype | None = None, tile: Tile | None = None) -> Tensor:
    """`reference.linear` without autograd; the same bits for a row in every batch. Raises ValueError for other types."""
    from k3kernels.linear import persistent  # it takes its sums' order, and other things, from here

    check_types(x_MK, weight_NK)
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    x_MK, weight_NK = rows_of(x_MK), rows_of(weight_NK)
    if tile is None and persistent.is_for(x_MK, weight_NK, out_dtype or x_MK.dtype):
        return persistent.multiply(x_MK, weight_NK, out_dtype or x_MK.dtype)
    y_MN = torch.empty(M, N, dtype=out_dtype or x_MK.dtype, device=x_MK.device)
    if M == 0:
        return y_MN
    tile = tile or pick_tile(M, N, K, x_MK.dtype)
    grid = (-(-M // tile.block_m) * -(-N // (tile.slice * tile.parts)),)
    strides = x_MK.stride(0), weight_NK.stride(0)
    linear_kernel[grid](x_MK, weight_NK, y_MN, M, N, K, *strides, **launch_options(tile, K))
    return y_MN


def rows_of(x: Tensor) -> Tensor:
    """x, copied if its rows are not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check_types(x: Tensor, *weights: Tensor) -> None:
    for weight in weights:
        if x.dtype not in (torch.bfloat16, torch.float32) or weight.dtype != x.dtype or weight.shape[-1] < 1:
            raise ValueError(
                f"the batch-invariant GEMM takes bf16 or fp32 on both sides, got {x.dtype} and {weight.dtype}: convert one"
            )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MK, weight_NK, out_dtype):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_MK, weight_NK)
        return multiply(x_MK, weight_NK, out_dtype)

    @staticmethod
    def backward(ctx, grad_MN):  # type: ignore[no-untyped-def]
        x_MK, weight_NK = ctx.saved_tensors
        grad_MN = grad_MN.to(x_MK.dtype)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = torch.mm(grad_MN, weight_NK) if needs_x else None
        grad_weight = torch.mm(grad_MN.T, x_MK) if needs_weight else None
        return grad_x, grad_weight, None


def linear(x_MK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """`multiply` with gradients by torch.mm, of out_dtype's gradient rounded to x's type."""
    out: Tensor = _Linear.apply(x_MK, weight_NK, out_dtype)
    return out
