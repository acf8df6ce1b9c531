"""Token-slot pairs sorted by expert: rows into that order, and results out of it.

Pair p = t k + s is token t's slot s. A row is read once and copied to its k places, or its k places are read and summed in
slot order: nothing is scattered with adds, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.linear.triton import INTERPRETED, _round_to, rows_of

COLUMNS = 1024  # of one program
NOWHERE, UNKNOWN = -1, -2  # in place of a place: no expert, and one that there is not
MAX_COUNTED = 1 << 17  # pairs that three kernels sort sooner than torch's radix sort does
MAX_BINS = 256  # one program adds up all blocks' counts, and takes 1 ms for 1024 experts


@dataclass(frozen=True, slots=True)
class Pairs:
    """Where the T k pairs lie when sorted by expert, stably; int32, on the device.

    Expert e has the places edges[e]..edges[e + 1] - 1, with edges[0] = 0. order_P: the pair at a place; behind
    edges[E] lie those without an expert. inverse_P: a pair's place, NOWHERE for an expert below 0, UNKNOWN from E on.
    """

    order_P: Tensor
    edges: Tensor  # [E + 1]
    inverse_P: Tensor
    num_slots: int

    @property
    def num_experts(self) -> int:
        return self.edges.numel() - 1

    @property
    def num_tokens(self) -> int:
        return self.inverse_P.numel() // self.num_slots


def sort_pairs(experts_Tk: Tensor, num_experts: int) -> Pairs:
    """The pairs of experts_Tk (an integer type), for E experts."""
    bins = triton.next_power_of_2(num_experts + 1)
    if 0 < experts_Tk.numel() <= MAX_COUNTED and bins <= MAX_BINS:
        return _by_counting(experts_Tk, num_experts, bins)
    return _by_sorting(experts_Tk, num_experts)


def _by_sorting(experts_Tk: Tensor, num_experts: int) -> Pairs:
    experts_P, device = experts_Tk.flatten(), experts_Tk.device
    is_known = (experts_P >= 0) & (experts_P < num_experts)
    # Few bits are few passes of a radix sort.
    keys_P = torch.where(is_known, experts_P, num_experts).to(torch.int16 if num_experts < 1 << 15 else torch.int32)
    in_order, order_P = torch.sort(keys_P, stable=True)
    groups = torch.arange(num_experts + 1, device=device, dtype=keys_P.dtype)
    edges = torch.searchsorted(in_order, groups, out_int32=True)
    places = torch.arange(order_P.numel(), dtype=torch.int32, device=device)
    inverse_P = torch.empty_like(places).scatter_(0, order_P, places)
    inverse_P = torch.where(is_known, inverse_P, torch.where(experts_P < 0, NOWHERE, UNKNOWN).int())
    return Pairs(order_P.int(), edges, inverse_P, experts_Tk.shape[1])


def _by_counting(experts_Tk: Tensor, num_experts: int, bins: int) -> Pairs:
    experts_P, device = experts_Tk.flatten(), experts_Tk.device
    P = experts_P.numel()
    block = max(16, (1 << 14) // bins)
    num_blocks = triton.cdiv(P, block)
    counts = torch.empty(num_blocks, bins, dtype=torch.int32, device=device)
    order_P, inverse_P = (torch.empty(P, dtype=torch.int32, device=device) for _ in range(2))
    edges = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    count_pairs_kernel[(num_blocks,)](experts_P, counts, P, E=num_experts, BE=bins, BLOCK=block)
    step = max(1, (1 << 13) // bins)
    scan_counts_kernel[(1,)](counts, edges, num_blocks, E=num_experts, BE=bins, STEP=step, num_warps=8)
    place_pairs_kernel[(num_blocks,)](experts_P, counts, order_P, inverse_P, P, E=num_experts, BE=bins, BLOCK=block)
    return Pairs(order_P, edges, inverse_P, experts_Tk.shape[1])


@triton.jit
def _bins_of(experts_ptr, P, E: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block's pairs, their experts, and [BLOCK, BE] with a 1 at each one's bin; bin E is for those without an expert."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + pairs, mask=pairs < P, other=-1)
    bin_of = tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)
    is_it = (bin_of[:, None] == tl.arange(0, BE)[None, :]) & (pairs < P)[:, None]
    return pairs, expert, is_it.to(tl.int32)


@triton.jit(do_not_specialize=["P"])
def count_pairs_kernel(  # type: ignore[no-untyped-def]
    experts_ptr, counts_ptr, P, E: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr
):
    """counts [blocks, BE]: a block's pairs of each bin."""
    _, _, is_it = _bins_of(experts_ptr, P, E, BE, BLOCK)
    tl.store(counts_ptr + tl.program_id(0) * BE + tl.arange(0, BE), tl.sum(is_it, 0))


@triton.jit(do_not_specialize=["num_blocks"])
def scan_counts_kernel(  # type: ignore[no-untyped-def]
    counts_ptr, edges_ptr, num_blocks, E: tl.constexpr, BE: tl.constexpr, STEP: tl.constexpr
):
    """The edges, and counts replaced by the place of a block's first pair of each bin. One program."""
    bins = tl.arange(0, BE)
    total = tl.zeros([BE], tl.int32)
    for start in range(0, num_blocks, STEP):
        blocks = start + tl.arange(0, STEP)
        ptrs = counts_ptr + blocks[:, None] * BE + bins[None, :]
        total += tl.sum(tl.load(ptrs, mask=(blocks < num_blocks)[:, None], other=0), 0)
    before = tl.cumsum(total, 0) - total
    tl.store(edges_ptr + bins, before, mask=bins <= E)
    for start in range(0, num_blocks, STEP):
        blocks = start + tl.arange(0, STEP)
        ptrs = counts_ptr + blocks[:, None] * BE + bins[None, :]
        counts = tl.load(ptrs, mask=(blocks < num_blocks)[:, None], other=0)
        tl.store(ptrs, before[None, :] + tl.cumsum(counts, 0) - counts, mask=(blocks < num_blocks)[:, None])
        before += tl.sum(counts, 0)


@triton.jit(do_not_specialize=["P"])
def place_pairs_kernel(  # type: ignore[no-untyped-def]
    experts_ptr,
    firsts_ptr,
    order_ptr,
    inverse_ptr,
    P,
    E: tl.constexpr,
    BE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A pair's place: its bin's first of the block, and the block's pairs of its bin before it."""
    pairs, expert, is_it = _bins_of(experts_ptr, P, E, BE, BLOCK)
    firsts = tl.load(firsts_ptr + tl.program_id(0) * BE + tl.arange(0, BE))
    places = tl.sum(is_it * (tl.cumsum(is_it, 0) - 1 + firsts[None, :]), 1)
    tl.store(order_ptr + places, pairs, mask=pairs < P)
    is_known = (expert >= 0) & (expert < E)
    tl.store(inverse_ptr + pairs, tl.where(is_known, places, tl.where(expert < 0, -1, -2)), mask=pairs < P)


@triton.jit
def stage_kernel(  # type: ignore[no-untyped-def]
    x_ptr, inverse_ptr, xs_ptr, R, stride_x, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """A token's row to the places of its pairs."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < R
    x = tl.load(x_ptr + token * stride_x + columns, mask=is_in, other=0.0)
    for slot in tl.static_range(SLOTS):
        place = tl.load(inverse_ptr + token * SLOTS + slot).to(tl.int64)
        tl.store(xs_ptr + place * R + columns, x, mask=is_in & (place >= 0))


@triton.jit
def combine_pairs_kernel(  # type: ignore[no-untyped-def]
    ys_ptr,
    weights_ptr,
    inverse_ptr,
    out_ptr,
    R,
    WEIGHS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out_t = sum over slots s of weight_ts ys_(place of ts), in fp32 and in slot order, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(SLOTS):
        place = tl.load(inverse_ptr + token * SLOTS + slot).to(tl.int64)
        y = tl.load(ys_ptr + place * R + columns, mask=(columns < R) & (place >= 0), other=0.0).to(tl.float32)
        weight = tl.load(weights_ptr + token * SLOTS + slot).to(tl.float32) if WEIGHS else 1.0
        total += tl.where(place == -2, float("nan"), weight) * y
    tl.store(out_ptr + token * R + columns, _round_to(total, out_ptr.dtype.element_ty, INTERPRETED), mask=columns < R)


def stage(x_TR: Tensor, pairs: Pairs) -> Tensor:
    """xs [P, R]: the pairs' rows, sorted by expert. Places behind the last expert's are not written."""
    T, R = x_TR.shape
    xs_PR = torch.empty(T * pairs.num_slots, R, dtype=x_TR.dtype, device=x_TR.device)
    if T:
        x_TR = rows_of(x_TR)
        grid = (T, triton.cdiv(R, COLUMNS))
        stage_kernel[grid](x_TR, pairs.inverse_P, xs_PR, R, x_TR.stride(0), SLOTS=pairs.num_slots, BLOCK=COLUMNS)
    return xs_PR


def combine(ys_PR: Tensor, weights_Tk: Tensor | None, pairs: Pairs) -> Tensor:
    """out [T, R] in ys's type: the weighted sum over a token's slots in fp32 and in slot order, rounded once.

    weights_Tk None weighs all with one. A token with a pair of UNKNOWN expert becomes NaN.
    """
    T, R = pairs.num_tokens, ys_PR.shape[1]
    out_TR = torch.empty(T, R, dtype=ys_PR.dtype, device=ys_PR.device)
    if T:
        combine_pairs_kernel[(T, triton.cdiv(R, COLUMNS))](
            ys_PR,
            ys_PR if weights_Tk is None else weights_Tk.contiguous(),
            pairs.inverse_P,
            out_TR,
            R,
            WEIGHS=weights_Tk is not None,
            SLOTS=pairs.num_slots,
            BLOCK=COLUMNS,
            INTERPRETED=INTERPRETED,
        )
    return out_TR


def unstage(grad_xs_PR: Tensor, pairs: Pairs) -> Tensor:
    """Of `stage`: grad_x [T, R], the sum over a token's slots in fp32 and in slot order, rounded once."""
    return combine(grad_xs_PR, None, pairs)


def of_pairs(values_P: Tensor, pairs: Pairs) -> Tensor:
    """Values by place, as [T, k]; 0 for pairs without a place."""
    has_place = pairs.inverse_P >= 0
    values = values_P.index_select(0, pairs.inverse_P.clamp(min=0))
    return torch.where(has_place, values, 0).view(-1, pairs.num_slots)
