"""Triton kernels of LoRA with an adapter a row: x A^T of each row's adapter, its product added, and both gradients.

Rows are sorted by adapter once a batch (`SortedRows` in `multi_lora_launch.py`) and read where they lie. A program takes
rows of one adapter, and walks over columns: `shrink` sums over a piece of K, whose sums the last program adds in order;
`expand` writes its columns. `shrink` can make the gradient of the factor that it reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3kernels.linear.multi_lora_gradient import _other_gradients, _start_early
from k3kernels.linear.triton import _add_products, _round_to, _tile_of_group


@triton.jit
def tile_table_kernel(  # type: ignore[no-untyped-def]
    edges_ptr, tiles_ptr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr
):
    """See `SortedRows`."""
    group, first, end = _tile_of_group(edges_ptr, tl.program_id(0), E, BE, BM)
    entry = tiles_ptr + 3 * tl.program_id(0)
    tl.store(entry, group)
    tl.store(entry + 1, first)
    tl.store(entry + 2, end)


@triton.jit
def _rows_of(tiles_ptr, number, SHARE: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """(adapter, first place, end of the adapter's places): BM rows, of which SHARE make a tile of the table."""
    entry = tiles_ptr + 3 * (number // SHARE)
    return tl.load(entry), tl.load(entry + 1) + (number % SHARE) * BM, tl.load(entry + 2)


@triton.jit(do_not_specialize=["T", "num_tiles", "num_adapters"])
def shrink_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    parts_ptr,
    z_ptr,
    arrived_ptr,
    scale_ptr,
    ranks_ptr,
    other_ptr,
    grad_ptr,
    order_ptr,
    edges_ptr,
    tiles_ptr,
    T,
    num_tiles,
    num_adapters,
    K,
    rank,
    stride_x,
    stride_wr,
    stride_wk,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    R: tl.constexpr,
    SHARE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """parts [PIECES, T, R]: of rows in sorted order, pieces of x W^T; and z [T, R] of them, see `_sum_parts`.

    With grad_ptr also x^T other, in w's layout. A program makes one piece of BM rows; the last of these rows' programs to
    arrive, whichever it is, adds the pieces. After the tiles' programs come the adapters', for those without rows.
    """
    _start_early(EARLY)
    begin = tl.program_id(1) * PIECE
    to = min(begin + PIECE, K)
    if grad_ptr is not None:  # noqa: SIM102 - known when it is compiled
        if tl.program_id(0) >= num_tiles:
            adapter = tl.program_id(0) - num_tiles
            if tl.load(edges_ptr + adapter) == tl.load(edges_ptr + adapter + 1):
                _other_gradients(
                    x_ptr,
                    other_ptr,
                    grad_ptr,
                    order_ptr,
                    edges_ptr,
                    adapter,
                    0,
                    begin,
                    to,
                    K,
                    rank,
                    stride_x,
                    stride_wk,
                    stride_wr,
                    R,
                    BM,
                    BK,
                    EVEN,
                    INTERPRETED,
                )
            return
    adapter, first, end = _rows_of(tiles_ptr, tl.program_id(0), SHARE, BM)
    if (adapter >= num_adapters) | (first >= end):
        return
    places = first + tl.arange(0, BM)
    is_row = places < end
    rows = tl.load(order_ptr + places, mask=is_row, other=0).to(tl.int64)
    columns = tl.arange(0, R)
    step = tl.arange(0, BK)
    x_ptrs = x_ptr + rows[:, None] * stride_x
    factor = adapter.to(tl.int64) * rank * K
    w_ptrs = w_ptr + factor + columns[None, :] * stride_wr
    at = places.to(tl.int64)[:, None] * R + columns[None, :]
    if grad_ptr is not None:
        other = tl.load(other_ptr + at, mask=is_row[:, None], other=0.0)
        grad_ptrs = grad_ptr + factor + columns[None, :] * stride_wr
        group_begin = tl.load(edges_ptr + adapter)
        is_grad = (end - group_begin <= BM) & (columns < rank)[None, :]
    sums = tl.zeros([BM, R], tl.float32)
    for start in range(begin, to, BK):
        ks = start + step
        if EVEN:
            x = tl.load(x_ptrs + ks[None, :], mask=is_row[:, None], other=0.0)
            w = tl.load(w_ptrs + ks[:, None] * stride_wk)
        else:
            is_w = (ks < K)[:, None] & (columns < rank)[None, :]
            x = tl.load(x_ptrs + ks[None, :], mask=is_row[:, None] & (ks < K)[None, :], other=0.0)
            w = tl.load(w_ptrs + ks[:, None] * stride_wk, mask=is_w, other=0.0)
        sums = _add_products(x, w, sums, INTERPRETED)
        if grad_ptr is not None:
            grad = _add_products(tl.trans(x), other, tl.zeros([BK, R], tl.float32), INTERPRETED)
            grad = _round_to(grad, grad_ptr.dtype.element_ty, INTERPRETED)
            tl.store(grad_ptrs + ks[:, None] * stride_wk, grad, mask=is_grad & (ks < K)[:, None])
    tl.store(parts_ptr + tl.program_id(1) * T.to(tl.int64) * R + at, sums, mask=is_row[:, None])
    if grad_ptr is not None:
        tile = (first - group_begin) // BM
        _other_gradients(
            x_ptr,
            other_ptr,
            grad_ptr,
            order_ptr,
            edges_ptr,
            adapter,
            tile,
            begin,
            to,
            K,
            rank,
            stride_x,
            stride_wk,
            stride_wr,
            R,
            BM,
            BK,
            EVEN,
            INTERPRETED,
        )
    tl.debug_barrier()  # all of this program's part is stored before it counts as arrived
    if tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu") == PIECES - 1:
        tl.store(arrived_ptr + tl.program_id(0), 0)
        end = min(first + BM, end)
        _sum_parts(parts_ptr, z_ptr, scale_ptr, ranks_ptr, adapter, first, end, T, rank, PIECES, R, 32, INTERPRETED)


@triton.jit
def _sum_parts(  # type: ignore[no-untyped-def]
    parts_ptr,
    z_ptr,
    scale_ptr,
    ranks_ptr,
    adapter,
    first,
    end,
    T,
    rank,
    PIECES: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """z [T, R] = scale times the pieces' sum, rounded once; 0 above the adapter's rank. ROWS at a time."""
    if ranks_ptr is not None:
        rank = tl.load(ranks_ptr + adapter)
    scale = tl.load(scale_ptr + adapter)
    columns = tl.arange(0, R)[None, :]
    for start in range(first, end, ROWS):
        places = start + tl.arange(0, ROWS)[:, None]
        at = places.to(tl.int64) * R + columns
        sums = tl.zeros([ROWS, R], tl.float32)
        for piece in tl.static_range(PIECES):
            # Not from the first-level cache, which may hold what was there before other programs' parts.
            part_ptrs = parts_ptr + piece * T.to(tl.int64) * R + at
            sums += tl.load(part_ptrs, mask=places < end, other=0.0, cache_modifier=".cg")
        z = _round_to(tl.where(columns < rank, sums * scale, 0.0), z_ptr.dtype.element_ty, INTERPRETED)
        tl.store(z_ptr + at, z, mask=places < end)


@triton.jit(do_not_specialize=["num_adapters"])
def expand_kernel(  # type: ignore[no-untyped-def]
    z_ptr,
    w_ptr,
    onto_ptr,
    y_ptr,
    order_ptr,
    tiles_ptr,
    ranks_ptr,
    num_adapters,
    N,
    rank,
    stride_wn,
    stride_wr,
    FULL_RANK: tl.constexpr,
    EVEN: tl.constexpr,
    IN_PLACE: tl.constexpr,
    COLUMNS: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    SHARE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """y = onto + z W^T, without onto_ptr z W^T alone; IN_PLACE: onto is y, whose rows of no adapter stay as they are.

    A program makes COLUMNS columns of BM rows, BN at a time.
    """
    _start_early(EARLY)
    begin = tl.program_id(1) * COLUMNS
    to = min(begin + COLUMNS, N)
    adapter, first, end = _rows_of(tiles_ptr, tl.program_id(0), SHARE, BM)
    if (adapter >= num_adapters + (0 if IN_PLACE else 1)) | (first >= end):
        return
    places = first + tl.arange(0, BM)
    is_row = places < end
    rows = tl.load(order_ptr + places, mask=is_row, other=0).to(tl.int64)[:, None]
    has_adapter = adapter < num_adapters
    is_z = is_row[:, None] & has_adapter
    z_ptrs = z_ptr + places.to(tl.int64)[:, None] * R
    factor = adapter.to(tl.int64) * rank * N
    own_rank = rank
    if ranks_ptr is not None:
        own_rank = tl.load(ranks_ptr + adapter, mask=has_adapter, other=0)
    ranks = tl.arange(0, R)
    if R == BR:
        z = tl.load(z_ptrs + ranks[None, :], mask=is_z, other=0.0)
    for start in tl.range(begin, to, BN, num_stages=STAGES):
        columns = start + tl.arange(0, BN)
        at = rows * N + columns[None, :]
        is_column = (columns < N)[None, :]
        is_in = is_row[:, None]
        is_w = has_adapter
        if not EVEN:
            is_in = is_in & is_column
            is_w = is_w & is_column
        sums = tl.zeros([BM, BN], tl.float32)
        w_ptrs = w_ptr + factor + columns[None, :] * stride_wn
        if R == BR:
            w = _factor(w_ptrs, stride_wr, is_w, ranks, rank, own_rank, FULL_RANK, ranks_ptr is not None)
            sums = _add_products(z, w, sums, INTERPRETED)
        else:
            for from_rank in range(0, R, BR):
                ks = from_rank + tl.arange(0, BR)
                part = tl.load(z_ptrs + ks[None, :], mask=is_z, other=0.0)
                w = _factor(w_ptrs, stride_wr, is_w, ks, rank, own_rank, FULL_RANK, ranks_ptr is not None)
                sums = _add_products(part, w, sums, INTERPRETED)
        if onto_ptr is not None:
            sums += tl.load(onto_ptr + at, mask=is_in, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, _round_to(sums, y_ptr.dtype.element_ty, INTERPRETED), mask=is_in)


@triton.jit
def _factor(  # type: ignore[no-untyped-def]
    w_ptrs, stride_wr, is_w, ks, rank, own_rank, FULL_RANK: tl.constexpr, HAS_RANKS: tl.constexpr
):
    if not FULL_RANK:
        is_w = is_w & (ks < rank)[:, None]
    w = tl.load(w_ptrs + ks[:, None] * stride_wr, mask=is_w, other=0.0)
    if HAS_RANKS:
        # Not in the load's mask, which would then be read an element at a time.
        w = tl.where((ks < own_rank)[:, None], w, 0.0)
    return w
