"""Triton kernels of LoRA with an adapter a row: x A^T of each row's adapter, its product added, and both gradients.

Rows are sorted by adapter once a batch (`SortedRows` in `multi_lora_launch.py`) and read where they lie. `shrink` walks K
in pieces, whose sums are added in order; `accumulate` walks an adapter's own rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

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


@triton.jit(do_not_specialize=["T", "num_adapters"])
def shrink_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    parts_ptr,
    order_ptr,
    tiles_ptr,
    T,
    num_adapters,
    K,
    rank,
    stride_x,
    stride_wr,
    stride_wk,
    PIECE: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """parts [pieces, T, R]: of rows in sorted order, a piece of x W^T. A program makes a tile of one piece."""
    entry = tiles_ptr + 3 * tl.program_id(0)
    adapter = tl.load(entry)
    if adapter >= num_adapters:
        return
    places = tl.load(entry + 1) + tl.arange(0, BM)
    is_row = places < tl.load(entry + 2)
    rows = tl.load(order_ptr + places, mask=is_row, other=0).to(tl.int64)
    columns = tl.arange(0, R)
    step = tl.arange(0, BK)
    x_ptrs = x_ptr + rows[:, None] * stride_x
    w_ptrs = w_ptr + adapter.to(tl.int64) * rank * K + columns[None, :] * stride_wr
    sums = tl.zeros([BM, R], tl.float32)
    begin = tl.program_id(1) * PIECE
    for start in range(begin, min(begin + PIECE, K), BK):
        ks = start + step
        if EVEN:
            x = tl.load(x_ptrs + ks[None, :], mask=is_row[:, None], other=0.0)
            w = tl.load(w_ptrs + ks[:, None] * stride_wk)
        else:
            is_w = (ks < K)[:, None] & (columns < rank)[None, :]
            x = tl.load(x_ptrs + ks[None, :], mask=is_row[:, None] & (ks < K)[None, :], other=0.0)
            w = tl.load(w_ptrs + ks[:, None] * stride_wk, mask=is_w, other=0.0)
        sums = _add_products(x, w, sums, INTERPRETED)
    out = parts_ptr + (tl.program_id(1).to(tl.int64) * T + places)[:, None] * R + columns[None, :]
    tl.store(out, sums, mask=is_row[:, None])


@triton.jit(do_not_specialize=["T", "num_adapters"])
def sum_parts_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    z_ptr,
    tiles_ptr,
    scale_ptr,
    ranks_ptr,
    T,
    num_adapters,
    rank,
    PIECES: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """z [T, R] = scale times the pieces' sum, rounded once; 0 above the adapter's rank."""
    ROWS: tl.constexpr = 16  # of the tile's rows
    entry = tiles_ptr + 3 * (tl.program_id(0) // (BM // ROWS))
    adapter = tl.load(entry)
    if adapter >= num_adapters:
        return
    places = tl.load(entry + 1) + (tl.program_id(0) % (BM // ROWS)) * ROWS + tl.arange(0, ROWS)
    is_row = (places < tl.load(entry + 2))[:, None]
    columns = tl.arange(0, R)
    at = places.to(tl.int64)[:, None] * R + columns[None, :]
    sums = tl.zeros([ROWS, R], tl.float32)
    for piece in tl.static_range(PIECES):
        sums += tl.load(parts_ptr + piece * T.to(tl.int64) * R + at, mask=is_row, other=0.0)
    if ranks_ptr is not None:
        rank = tl.load(ranks_ptr + adapter)
    z = tl.where((columns < rank)[None, :], sums * tl.load(scale_ptr + adapter), 0.0)
    tl.store(z_ptr + at, _round_to(z, z_ptr.dtype.element_ty, INTERPRETED), mask=is_row)


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
    IN_PLACE: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """y = onto + z W^T, without onto_ptr z W^T alone; IN_PLACE: onto is y, whose rows of no adapter stay as they are."""
    num_n = tl.cdiv(N, BN)
    entry = tiles_ptr + 3 * (tl.program_id(0) // num_n)
    adapter = tl.load(entry)
    if adapter >= num_adapters + (0 if IN_PLACE else 1):
        return
    places = tl.load(entry + 1) + tl.arange(0, BM)
    is_row = places < tl.load(entry + 2)
    rows = tl.load(order_ptr + places, mask=is_row, other=0).to(tl.int64)
    columns = (tl.program_id(0) % num_n) * BN + tl.arange(0, BN)
    at = rows[:, None] * N + columns[None, :]
    is_in = is_row[:, None] & (columns < N)[None, :]
    if onto_ptr is not None:
        onto = tl.load(onto_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    has_adapter = adapter < num_adapters
    if ranks_ptr is not None:
        own_rank = tl.load(ranks_ptr + adapter, mask=has_adapter, other=0)
    sums = tl.zeros([BM, BN], tl.float32)
    for start in range(0, R, BR):
        ks = start + tl.arange(0, BR)
        z_ptrs = z_ptr + places.to(tl.int64)[:, None] * R + ks[None, :]
        z = tl.load(z_ptrs, mask=is_row[:, None] & has_adapter, other=0.0)
        w_ptrs = w_ptr + adapter.to(tl.int64) * rank * N + columns[None, :] * stride_wn + ks[:, None] * stride_wr
        is_w = (columns < N)[None, :] & has_adapter
        if not FULL_RANK:
            is_w = is_w & (ks < rank)[:, None]
        w = tl.load(w_ptrs, mask=is_w, other=0.0)
        if ranks_ptr is not None:
            # Not in the load's mask, which would then be read an element at a time.
            w = tl.where((ks < own_rank)[:, None], w, 0.0)
        sums = _add_products(z, w, sums, INTERPRETED)
    if onto_ptr is not None:
        sums += onto
    tl.store(y_ptr + at, _round_to(sums, y_ptr.dtype.element_ty, INTERPRETED), mask=is_in)


@triton.jit
def accumulate_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    z_ptr,
    grad_ptr,
    order_ptr,
    edges_ptr,
    C,
    rank,
    stride_x,
    stride_c,
    stride_r,
    R: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    FULL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """grad_a = x^T z over adapter a's rows, first to last: [C, rank] with strides stride_c and stride_r.

    The last columns come first: where `shrink` has just read the same rows, they are still in the cache.
    """
    num_c = tl.cdiv(C, BC)
    num_adapters = tl.num_programs(0) // num_c
    adapter = tl.program_id(0) % num_adapters
    columns = (num_c - 1 - tl.program_id(0) // num_adapters) * BC + tl.arange(0, BC)
    ks, step = tl.arange(0, R), tl.arange(0, BK)
    begin, end = tl.load(edges_ptr + adapter), tl.load(edges_ptr + adapter + 1)
    sums = tl.zeros([BC, R], tl.float32)
    for start in range(begin, end, BK):
        places = start + step
        is_row = (places < end)[:, None]
        rows = tl.load(order_ptr + places, mask=places < end, other=0).to(tl.int64)
        x_ptrs = x_ptr + rows[:, None] * stride_x + columns[None, :]
        if FULL:
            x = tl.load(x_ptrs, mask=is_row, other=0.0)
        else:
            x = tl.load(x_ptrs, mask=is_row & (columns < C)[None, :], other=0.0)
        z = tl.load(z_ptr + places.to(tl.int64)[:, None] * R + ks[None, :], mask=is_row, other=0.0)
        sums = _add_products(tl.trans(x), z, sums, INTERPRETED)
    out = grad_ptr + adapter.to(tl.int64) * rank * C + columns[:, None] * stride_c + ks[None, :] * stride_r
    is_in = (columns < C)[:, None] & (ks < rank)[None, :]
    tl.store(out, _round_to(sums, grad_ptr.dtype.element_ty, INTERPRETED), mask=is_in)
