"""Launches of multi-LoRA's kernels: rows sorted by adapter, low-rank products, and gradients of A and B.

K alone sets how many pieces it is summed in, and an adapter's rows how its gradient is. So neither a row of the one nor an
adapter of the other depends on what else is in the batch. Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from k3kernels.linear.multi_lora_kernels import (
    accumulate_kernel,
    expand_kernel,
    shrink_kernel,
    sum_parts_kernel,
    tile_table_kernel,
)
from k3kernels.linear.reference import AdapterRows
from k3kernels.linear.triton import INTERPRETED, bucket, max_tiles

PIECE = 1792  # products of a piece of K, about: enough programs for a GPU at 4,096 rows
# Of large ranks, and of fp32, in which a program takes less at a time.
MAX_STAGES_BYTES = 200 << 10
MAX_FACTOR_BYTES = 32 << 10  # of a block of B, or of A
MAX_SUMS = 128 * 128  # of a program that accumulates a gradient
SHRINK: dict[str, int] = {"BK": 64, "num_stages": 4}
EXPAND: dict[str, int] = {"BN": 128}
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


def sorted_rows(adapter_T: Tensor, num_adapters: int, block_m: int | None = None) -> SortedRows:
    """block_m: rows of a tile, 64 or 128; by default as many as an adapter fills. It changes no bits."""
    T = adapter_T.numel()
    block_m = block_m or (128 if T // num_adapters >= 256 else 64)
    num_groups = num_adapters + 1
    is_one = (adapter_T >= 0) & (adapter_T < num_adapters)
    buckets = bucket(torch.where(is_one, adapter_T, num_adapters), num_groups)
    num_tiles = max_tiles(T, num_groups, block_m)
    tiles_N3 = torch.empty(num_tiles, 3, dtype=torch.int32, device=adapter_T.device)
    if num_tiles:
        BE = triton.next_power_of_2(num_groups)
        tile_table_kernel[(num_tiles,)](buckets.edges, tiles_N3, E=num_groups, BE=BE, BM=block_m)
    return SortedRows(adapter_T, num_adapters, buckets.order_P, buckets.edges, tiles_N3, block_m)


def fitting(num_stages: int, stage_bytes: int) -> int:
    """As many stages as shared memory holds."""
    return max(1, min(num_stages, MAX_STAGES_BYTES // stage_bytes))


def padded_rank(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))


def piece_of(K: int, block_k: int) -> int:
    """Multiples of block_k that divide K about evenly."""
    num_pieces = -(-K // PIECE)
    return -(-K // (num_pieces * block_k)) * block_k


def shrink(x_TK: Tensor, w: Tensor, scale_n: Tensor, rows: SortedRows, ranks_n: Tensor | None, is_nrK: bool) -> Tensor:
    """scale_a x A_a^T of each row, in sorted order and x's type: [T, R], R the padded rank. w: [n, r, K] or [n, K, r]."""
    T, K = x_TK.shape
    rank = w.shape[1] if is_nrK else w.shape[2]
    R, block_k, device = padded_rank(rank), SHRINK["BK"], x_TK.device
    z_TR = torch.empty(T, R, dtype=x_TK.dtype, device=device)
    if T == 0:
        return z_TR
    piece = piece_of(K, block_k)
    num_pieces, num_tiles = -(-K // piece), len(rows.tiles_N3)
    parts = torch.empty(num_pieces, T, R, dtype=torch.float32, device=device)
    shrink_kernel[(num_tiles, num_pieces)](
        x_TK,
        w,
        parts,
        rows.order_T,
        rows.tiles_N3,
        T,
        rows.num_adapters,
        K,
        rank,
        x_TK.stride(0),
        K if is_nrK else 1,
        1 if is_nrK else rank,
        PIECE=piece,
        R=R,
        BM=rows.block_m,
        BK=block_k,
        EVEN=K % block_k == 0 and rank == R,
        INTERPRETED=INTERPRETED,
        num_warps=rows.block_m // 16,
        num_stages=fitting(SHRINK["num_stages"], (rows.block_m + R) * block_k * w.itemsize),
    )
    sum_parts_kernel[(num_tiles * rows.block_m // 16,)](
        parts,
        z_TR,
        rows.tiles_N3,
        scale_n,
        ranks_n,
        T,
        rows.num_adapters,
        rank,
        PIECES=num_pieces,
        R=R,
        BM=rows.block_m,
        INTERPRETED=INTERPRETED,
        num_warps=1,
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
    block_n = max(32, min(EXPAND["BN"], MAX_FACTOR_BYTES // (R * w.itemsize)))
    expand_kernel[(len(rows.tiles_N3) * -(-N // block_n),)](
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
        IN_PLACE=onto_TN is y_TN,
        R=R,
        BR=R if w.itemsize == 2 else 16,  # without tensor cores the products of a step are written out
        BM=rows.block_m,
        BN=block_n,
        INTERPRETED=INTERPRETED,
        num_warps=rows.block_m // 16,
    )


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
    )
