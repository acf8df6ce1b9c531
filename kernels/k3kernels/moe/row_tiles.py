"""Tiles of rows of one expert, for the kernels whose tiles are of any height."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.linear.triton import max_tiles
from k3kernels.moe.pairs import Pairs

ROUNDED = 16
BLOCK = 8  # tiles of a program


@triton.jit
def row_tiles_kernel(  # type: ignore[no-untyped-def]
    edges_ptr,
    tiles_ptr,
    count,
    E: tl.constexpr,
    BE: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program counts all experts' tiles, and writes its own."""
    experts = tl.arange(0, BE)
    edges = tl.load(edges_ptr + experts, mask=experts < E, other=0)
    rows = tl.load(edges_ptr + experts + 1, mask=experts < E, other=0) - edges
    tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
    before = tl.cumsum(tiles, 0) - tiles
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_mine = (tile[:, None] >= before[None, :]) & (tile[:, None] < (before + tiles)[None, :])
    expert = tl.sum(tl.where(is_mine, experts[None, :], 0), 1)
    place = tile - tl.sum(tl.where(is_mine, before[None, :], 0), 1)
    num_rows = tl.sum(tl.where(is_mine, rows[None, :], 0), 1)  # of the expert; 0 behind the last tile
    num_tiles = tl.maximum(tl.sum(tl.where(is_mine, tiles[None, :], 0), 1), 1)
    size = ((num_rows + num_tiles - 1) // num_tiles + ROUNDED - 1) // ROUNDED * ROUNDED
    start = tl.sum(tl.where(is_mine, edges[None, :], 0), 1) + place * size
    size = tl.where(num_rows > 0, tl.minimum(size, num_rows - place * size), 0)
    entry = tiles_ptr + 3 * tile
    tl.store(entry, expert, mask=tile < count)
    tl.store(entry + 1, start, mask=tile < count)
    tl.store(entry + 2, size, mask=tile < count)


def row_tiles(pairs: Pairs, max_rows: int) -> Tensor:
    """[tiles, 3] int32: expert, first row, number of rows; those that no row needs come last, with none.

    An expert's rows are divided evenly, in multiples of ROUNDED, among as few tiles of at most max_rows as there can be.
    """
    E = pairs.num_experts
    count = max_tiles(pairs.order_P.numel(), E, max_rows)
    tiles = torch.empty(count, 3, dtype=torch.int32, device=pairs.edges.device)
    if count:
        row_tiles_kernel[(triton.cdiv(count, BLOCK),)](
            *(pairs.edges, tiles, count),
            E=E,
            BE=triton.next_power_of_2(E),
            MAX_ROWS=max_rows,
            ROUNDED=ROUNDED,
            BLOCK=BLOCK,
        )
    return tiles
