"""Launches of multi-LoRA's kernels: rows sorted by adapter, low-rank products, and gradients of A and B.

K alone sets how many pieces it is summed in, and an adapter's rows how its gradient is. So neither a row of the one nor an
adapter of the other depends on what else is in the batch. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from k3kernels.linear.multi_lora_gradient import accumulate_kernel
from k3kernels.linear.multi_lora_kernels import expand_kernel, shrink_kernel, tile_table_kernel
from k3kernels.linear.reference import AdapterRows
from k3kernels.linear.triton import INTERPRETED, bucket, max_tiles

PIECE = 1792  # products of a piece of K, about: enough programs for a GPU at 4,096 rows
# Of large ranks, and of fp32, in which a program takes less at a time.
MAX_STAGES_BYTES = 200 << 10
MAX_FACTOR_BYTES = 32 << 10  # of a block of B, or of A
MAX_SUMS = 128 * 128  # of a program that accumulates a gradient
MAX_NARROW_RANK = 64  # in bf16, for tiles of over 128 rows and for a gradient in `shrink`'s pass
MAX_FUSED_ROWS = 200  # of an adapter, on average: of more, too few would fit a program
# BM: at most, of a tile's rows. COLUMNS: of a program, BN at a time.
SHRINK: dict[str, int] = {"BM": 256, "BK": 64, "num_stages": 4}
EXPAND: dict[str, int] = {"BM": 256, "BN": 64, "COLUMNS": 896, "num_stages": 3}
ACCUMULATE: dict[str, int] = {"BC": 128, "BK": 64, "num_warps": 4, "num_stages": 3}


@dataclass(frozen=True, slots=True)
class SortedRows(AdapterRows):
    """Adapter a has order_T[edges[a]:edges[a + 1]]; rows of none are one more adapter, number `num_adapters`.

    tiles_N3: (adapter, first, end) of at most block_m places each; the table is as long as it can get, and entries that
    are no tile have the adapter num_adapters + 1. All int32.
    """

    order_T: Tensor
    edges: Tensor  # [num_adapters + 2]
    tiles_N3: Tensor
    block_m: int
    arrived_M: Tensor  # by tiles of 64 rows at least: `shrink`'s programs that are done, 0 between calls


def sorted_rows(adapter_T: Tensor, num_adapters: int, block_m: int | None = None) -> SortedRows:
    """block_m: rows of a tile, 64, 128 or 256; by default what holds an adapter's rows, up to 256. It changes no bits.

    One stream at a time may use what it returns.
    """
    T = adapter_T.numel()
    average = T // num_adapters
    block_m = block_m or (64 if average <= 40 else 256 if 96 < average <= MAX_FUSED_ROWS else 128)
    num_groups = num_adapters + 1
    is_one = (adapter_T >= 0) & (adapter_T < num_adapters)
    buckets = bucket(torch.where(is_one, adapter_T, num_adapters), num_groups)
    num_tiles = max_tiles(T, num_groups, block_m)
    tiles_N3 = torch.empty(num_tiles, 3, dtype=torch.int32, device=adapter_T.device)
    if num_tiles:
        BE = triton.next_power_of_2(num_groups)
        tile_table_kernel[(num_tiles,)](buckets.edges, tiles_N3, E=num_groups, BE=BE, BM=block_m)
    arrived_M = torch.zeros(num_tiles * block_m // 64, dtype=torch.int32, device=adapter_T.device)
    return SortedRows(adapter_T, num_adapters, buckets.order_P, buckets.edges, tiles_N3, block_m, arrived_M)


def fitting(num_stages: int, stage_bytes: int, kept_bytes: int = 0) -> int:
    """As many stages as shared memory holds beside what is kept there."""
    return max(1, min(num_stages, (MAX_STAGES_BYTES - kept_bytes) // stage_bytes))


def padded_rank(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))


def piece_of(K: int, block_k: int) -> int:
    """Multiples of block_k that divide K about evenly."""
    num_pieces = -(-K // PIECE)
    return -(-K // (num_pieces * block_k)) * block_k


def is_narrow(z: Tensor) -> bool:
    return z.itemsize == 2 and z.shape[-1] <= MAX_NARROW_RANK


def rows_at_once(z_TR: Tensor, rows: SortedRows, most: int) -> int:
    return min(rows.block_m, most if is_narrow(z_TR) else min(most, 128))


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a launch's programs take their places while those of the launch before end: from Hopper on."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


def early(x: Tensor) -> dict[str, bool]:
    """Options of a launch."""
    return {"EARLY": True, "launch_pdl": True} if starts_early(x.device) else {"EARLY": False}


def shrink(
    x_TK: Tensor,
    w: Tensor,
    scale_n: Tensor,
    rows: SortedRows,
    ranks_n: Tensor | None,
    is_nrK: bool,
    other_TR: Tensor | None = None,
    grad: Tensor | None = None,
) -> Tensor:
    """scale_a x A_a^T of each row, in sorted order and x's type: [T, R], R the padded rank. w: [n, r, K] or [n, K, r].

    With grad, of w's shape, also x^T other of each adapter, where `fuses_gradient` says so.
    """
    T, K = x_TK.shape
    rank = w.shape[1] if is_nrK else w.shape[2]
    R, block_k, device = padded_rank(rank), SHRINK["BK"], x_TK.device
    z_TR = torch.empty(T, R, dtype=x_TK.dtype, device=device)
    if T == 0:
        return z_TR
    piece = piece_of(K, block_k)
    block_m = rows_at_once(z_TR, rows, SHRINK["BM"])
    share = rows.block_m // block_m
    num_pieces, num_tiles = -(-K // piece), len(rows.tiles_N3) * share
    parts = torch.empty(num_pieces, T, R, dtype=torch.float32, device=device)
    kept_bytes = 0 if grad is None else block_m * R * w.itemsize
    num_programs = num_tiles + (0 if grad is None else rows.num_adapters)
    shrink_kernel[(num_programs, num_pieces)](
        x_TK,
        w,
        parts,
        z_TR,
        rows.arrived_M,
        scale_n,
        ranks_n,
        other_TR,
        grad,
        rows.order_T,
        rows.edges,
        rows.tiles_N3,
        T,
        num_tiles,
        rows.num_adapters,
        K,
        rank,
        x_TK.stride(0),
        K if is_nrK else 1,
        1 if is_nrK else rank,
        PIECE=piece,
        PIECES=num_pieces,
        R=R,
        SHARE=share,
        BM=block_m,
        BK=block_k,
        EVEN=K % block_k == 0 and rank == R,
        INTERPRETED=INTERPRETED,
        num_warps=min(8, block_m // 16),
        num_stages=fitting(SHRINK["num_stages"], (block_m + R) * block_k * w.itemsize, kept_bytes),
        **early(z_TR),
    )
    return z_TR


def expand(
    z_TR: Tensor,
    w: Tensor,
    onto_TN: Tensor | None,
    y_TN: Tensor,
    rows: SortedRows,
    ranks_n: Tensor | None,
    is_nNr: bool,
) -> None:
    """y = onto + z B_a^T, where onto is none 0, and may be y itself. w: B [n, N, r] or [n, r, N]; onto and y contiguous."""
    T, N = y_TN.shape
    if T == 0:
        return
    rank = w.shape[2] if is_nNr else w.shape[1]
    R = z_TR.shape[1]
    block_m = rows_at_once(z_TR, rows, EXPAND["BM"])
    share = rows.block_m // block_m
    block_n = max(32, min(EXPAND["BN"], MAX_FACTOR_BYTES // (R * w.itemsize)))
    num_columns = max(EXPAND["COLUMNS"] // block_n, 1) * block_n
    kept_bytes = block_m * (R + block_n) * w.itemsize  # z, and a block to be written
    stage_bytes = (R + (0 if onto_TN is None else block_m)) * block_n * w.itemsize
    expand_kernel[(len(rows.tiles_N3) * share, -(-N // num_columns))](
        z_TR,
        w,
        onto_TN,
        y_TN,
        rows.order_T,
        rows.tiles_N3,
        ranks_n,
        rows.num_adapters,
        N,
        rank,
        rank if is_nNr else 1,
        1 if is_nNr else N,
        FULL_RANK=rank == R,
        EVEN=N % block_n == 0,
        IN_PLACE=onto_TN is y_TN,
        COLUMNS=num_columns,
        R=R,
        BR=R if w.itemsize == 2 else 16,  # without tensor cores products of a step are written out
        SHARE=share,
        BM=block_m,
        BN=block_n,
        STAGES=fitting(EXPAND["num_stages"], stage_bytes, kept_bytes),
        INTERPRETED=INTERPRETED,
        num_warps=min(8, block_m // 16),
        **early(z_TR),
    )


def fuses_gradient(z_TR: Tensor, rows: SortedRows) -> bool:
    """Whether B's gradient is to come from the pass that shrinks dy: where an adapter's rows are about one tile."""
    return is_narrow(z_TR) and 0 < len(z_TR) // rows.num_adapters <= MAX_FUSED_ROWS


@contextmanager
def beside(product: Callable[[], object] | None) -> Iterator[None]:
    """The work within runs where the product leaves room, which is first to get a processor; without one, as it is."""
    if product is None or INTERPRETED:
        yield
        if product is not None:
            product()
        return
    current = torch.cuda.current_stream()
    stream = _first_stream(current.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        product()
    yield
    current.wait_stream(stream)


@cache
def _first_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def accumulate(x_TC: Tensor, z_TR: Tensor, grad: Tensor, rows: SortedRows, is_nrC: bool) -> None:
    """grad_a = z^T x over each adapter's rows. grad: [n, r, C] or [n, C, r], contiguous, fp32 or bf16; all of it is
    written."""
    C, R = x_TC.shape[1], z_TR.shape[1]
    rank = grad.shape[1] if is_nrC else grad.shape[2]
    block_c, block_k = min(ACCUMULATE["BC"], max(64, MAX_SUMS // R)), ACCUMULATE["BK"]
    accumulate_kernel[(rows.num_adapters * -(-C // block_c),)](
        x_TC,
        z_TR,
        grad,
        rows.order_T,
        rows.edges,
        C,
        rank,
        x_TC.stride(0),
        1 if is_nrC else rank,
        C if is_nrC else 1,
        R=R,
        BC=block_c,
        BK=block_k,
        FULL=C % block_c == 0,
        INTERPRETED=INTERPRETED,
        num_warps=ACCUMULATE["num_warps"],
        num_stages=fitting(ACCUMULATE["num_stages"], (block_c + R) * block_k * x_TC.itemsize),
        **early(z_TR),
    )
