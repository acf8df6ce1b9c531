"""Triton kernel of the gradient of LoRA's factors, an adapter's from its own rows; and the same for other kernels' programs.

See `multi_lora_kernels.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3kernels.linear.triton import _add_products, _round_to


@triton.jit
def _start_early(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next launch's programs take their places, and wait in turn until this launch is through."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    x_ptr,
    z_ptr,
    grad_ptr,
    order_ptr,
    adapter,
    begin,
    end,
    columns,
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
    """BC columns of grad_a = x^T z over adapter a's rows, first to last: [C, rank] with strides stride_c and stride_r."""
    ks, step = tl.arange(0, R), tl.arange(0, BK)
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


@triton.jit
def _other_gradients(  # type: ignore[no-untyped-def]
    x_ptr,
    z_ptr,
    grad_ptr,
    order_ptr,
    edges_ptr,
    adapter,
    tile,
    from_column,
    to_column,
    C,
    rank,
    stride_x,
    stride_c,
    stride_r,
    R: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    FULL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The gradient of an adapter whose rows are not one tile: of several, whose programs divide the columns, or of none."""
    begin, end = tl.load(edges_ptr + adapter), tl.load(edges_ptr + adapter + 1)
    num_tiles = tl.cdiv(end - begin, BM)
    if num_tiles != 1:
        for start in range(from_column + tile * BC, to_column, max(num_tiles, 1) * BC):
            _gradient(
                x_ptr,
                z_ptr,
                grad_ptr,
                order_ptr,
                adapter,
                begin,
                end,
                start + tl.arange(0, BC),
                C,
                rank,
                stride_x,
                stride_c,
                stride_r,
                R,
                BC,
                64,
                FULL,
                INTERPRETED,
            )


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
    EARLY: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """See `_gradient`. The last columns come first: where `shrink` has just read the same rows, the cache has them still."""
    _start_early(EARLY)
    num_c = tl.cdiv(C, BC)
    num_adapters = tl.num_programs(0) // num_c
    adapter = tl.program_id(0) % num_adapters
    columns = (num_c - 1 - tl.program_id(0) // num_adapters) * BC + tl.arange(0, BC)
    begin, end = tl.load(edges_ptr + adapter), tl.load(edges_ptr + adapter + 1)
    _gradient(
        x_ptr,
        z_ptr,
        grad_ptr,
        order_ptr,
        adapter,
        begin,
        end,
        columns,
        C,
        rank,
        stride_x,
        stride_c,
        stride_r,
        R,
        BC,
        BK,
        FULL,
        INTERPRETED,
    )
