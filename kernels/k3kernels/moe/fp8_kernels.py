"""Routed experts in fp8, in Triton: rows quantised, gate and up with their activation, and its gradient. `fp8.py` and
`fp8_train.py` launch them; the products alone are `grouped_kernels.py`'s.

h costs a GPU's special function unit less than in bf16: tanh is an instruction of its own, exact to 5e-4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3kernels.linear.triton import _add_products, _round_to
from k3kernels.moe.grouped_kernels import _halves, _place, _quarters, _scaled, _store
from k3kernels.situ.formulas import _activated, _activation_gradients
from k3kernels.situ.triton import _tanh

GROUP = tl.constexpr(64)  # rows of w1 that lie before the same ones of w3


@triton.jit
def _to_e4m3(x, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """To nearest even; beyond +-448 that, and NaN stays NaN, as a GPU converts. Triton's interpreter cuts off bits and knows
    neither, so there values are made that it converts right."""
    if not INTERPRETED:
        return x.to(tl.float8e4nv)
    x = tl.where(tl.abs(x) > 448, tl.where(x > 0, 448.0, -448.0), x)
    bits = x.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
    tiny = (x + 24576.0) - 24576.0  # whose last place is 2^-9, as that of values below 2^-6
    code = tl.where(tl.abs(x) < 0.015625, tiny, normal).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(x == x, code, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _coarse_tanh(x, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One instruction, to 5e-4 of the result."""
    if INTERPRETED:
        return _tanh(x)
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _coarsely_activated(  # type: ignore[no-untyped-def]
    gate, up, beta, linear_beta, factor, KIND: tl.constexpr, INTERPRETED: tl.constexpr
):
    """`formulas._activated` times factor, to 5e-4 of its value at a sigmoid of 1: a hundredth of what e4m3 tells apart."""
    sigmoid = 0.5 + 0.5 * _coarse_tanh(0.5 * gate, INTERPRETED)
    if KIND == 0:
        return _round_to(gate * sigmoid, tl.bfloat16, INTERPRETED).to(tl.float32) * (up * factor)
    t = _coarse_tanh(gate * (1 / beta), INTERPRETED)
    if KIND == 1:
        return t * sigmoid * (up * (beta * factor))
    return t * sigmoid * (_coarse_tanh(up * (1 / linear_beta), INTERPRETED) * (beta * linear_beta * factor))


@triton.jit
def _scale_of(magnitudes, MAX: tl.constexpr):  # type: ignore[no-untyped-def]
    """(the scale, what values are divided by) of a row: 0 and 1 of one of zeros, NaN and 1 of one with a NaN or infinity."""
    peak = tl.max(tl.where(magnitudes == magnitudes, magnitudes, float("inf")), 0)
    scale = tl.where(peak < float("inf"), peak / MAX, float("nan"))
    return scale, tl.where(scale > 0, scale, 1.0)


@triton.jit
def _quantised(x, MAX: tl.constexpr, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """e4m3 values and the scale of one row; a row of zeros has scale 0, one with a NaN is all NaN."""
    scale, divisor = _scale_of(tl.abs(x), MAX)
    return _to_e4m3(x / divisor, INTERPRETED), scale


@triton.jit
def stage_fp8_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    inverse_ptr,
    xs_ptr,
    scale_ptr,
    R,
    stride_x,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A token's row, quantised, and its scale to the places of its pairs."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * stride_x + columns, mask=columns < R, other=0.0).to(tl.float32)
    values, scale = _quantised(x, MAX, INTERPRETED)
    for slot in tl.static_range(SLOTS):
        place = tl.load(inverse_ptr + token * SLOTS + slot).to(tl.int64)
        tl.store(xs_ptr + place * R + columns, values, mask=(columns < R) & (place >= 0))
        tl.store(scale_ptr + place, scale, mask=place >= 0)


@triton.jit
def quantise_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    edges_ptr,
    values_ptr,
    scale_ptr,
    K,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The rows that have an expert."""
    row = tl.program_id(0)
    if row >= tl.load(edges_ptr + E):
        return
    columns = tl.arange(0, BLOCK)
    places = row.to(tl.int64) * K + columns
    x = tl.load(x_ptr + places, mask=columns < K, other=0.0).to(tl.float32)
    values, scale = _quantised(x, MAX, INTERPRETED)
    tl.store(values_ptr + places, values, mask=columns < K)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _finish_fp8(  # type: ignore[no-untyped-def]
    gate,
    up,
    gate_ptr,
    up_ptr,
    h_ptr,
    row,
    end,
    column,
    F,
    beta,
    linear_beta,
    h_factor,
    KIND: tl.constexpr,
    KEEPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """h of gate and up in bf16, in h_ptr's type."""
    gate = _round_to(gate, tl.bfloat16, INTERPRETED)
    up = _round_to(up, tl.bfloat16, INTERPRETED)
    if KEEPS:
        _store(gate_ptr, gate, row, end, column, F, INTERPRETED)
        _store(up_ptr, up, row, end, column, F, INTERPRETED)
    gate = gate.to(tl.float32)
    up = up.to(tl.float32)
    if h_ptr.dtype.element_ty == tl.float8e4nv:
        h = _coarsely_activated(gate, up, beta, linear_beta, h_factor, KIND, INTERPRETED)
        _store(h_ptr, _to_e4m3(h, INTERPRETED), row, end, column, F, INTERPRETED)
    else:
        h = _activated(gate, up, beta, linear_beta, KIND, tl.bfloat16, INTERPRETED)
        _store(h_ptr, h, row, end, column, F, INTERPRETED)


@triton.jit(do_not_specialize=["beta", "linear_beta", "h_factor"])
def gated_fp8_kernel(  # type: ignore[no-untyped-def]
    x_desc,
    w_desc,
    x_scale_ptr,
    w_scale_ptr,
    gate_ptr,
    up_ptr,
    h_ptr,
    tiles_ptr,
    edges_ptr,
    F,
    R,
    beta,
    linear_beta,
    h_factor,
    KIND: tl.constexpr,
    KEEPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    FLATTEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """h = act(w1_e x, w3_e x) of sorted rows, in e4m3 after h_factor or in bf16, and where KEEPS gate and up in bf16.

    w [E 2G, R], G being F rounded up to GROUPs: of each expert GROUP rows of w1 and the same of w3, in turn, so both are one
    product, of BN columns each. Scales: x's [P], w's [E 2G].
    """
    num_n = tl.cdiv(F, BN)
    num_w = 2 * tl.cdiv(F, GROUP) * GROUP
    num_work = tl.load(tiles_ptr) * num_n
    for work in tl.range(tl.program_id(0), num_work, tl.num_programs(0), flatten=FLATTEN):
        expert, row, end, block = _place(tiles_ptr, edges_ptr, work, num_n, BM)
        column = block * BN
        sums = tl.zeros([BM, 2 * BN], tl.float32)
        for k in range(0, R, BK):
            x = x_desc.load([row, k])
            sums = _add_products(x, w_desc.load([expert * num_w + 2 * column, k]).T, sums, INTERPRETED)
        sums = _scaled(sums, x_scale_ptr, w_scale_ptr, row, end, expert, 2 * column, num_w)
        ptrs = gate_ptr, up_ptr, h_ptr
        numbers = beta, linear_beta, h_factor
        if BN == GROUP:
            gate, up = _halves(sums)
            _finish_fp8(gate, up, *ptrs, row, end, column, F, *numbers, KIND, KEEPS, INTERPRETED)
        else:
            tl.static_assert(BN == 2 * GROUP)
            gate_0, up_0, gate_1, up_1 = _quarters(sums)
            middle = column + GROUP
            _finish_fp8(gate_0, up_0, *ptrs, row, end, column, F, *numbers, KIND, KEEPS, INTERPRETED)
            _finish_fp8(gate_1, up_1, *ptrs, row, end, middle, F, *numbers, KIND, KEEPS, INTERPRETED)


@triton.jit(do_not_specialize=["beta", "linear_beta"])
def gated_gradient_fp8_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    weights_ptr,
    order_ptr,
    gate_ptr,
    up_ptr,
    both_ptr,
    scale_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    h_ptr,
    parts_ptr,
    edges_ptr,
    F,
    beta,
    linear_beta,
    E: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A row of h's gradient, whole: the gradients of gate and up are quantised as they are after rounding to bf16."""
    row = tl.program_id(0)
    if row >= tl.load(edges_ptr + E):
        return
    columns = tl.arange(0, BLOCK)
    is_in = columns < F
    places = row.to(tl.int64) * F + columns
    weight = tl.load(weights_ptr + tl.load(order_ptr + row)).to(tl.float32)
    grad = tl.load(grad_ptr + places, mask=is_in, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + places, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + places, mask=is_in, other=0.0).to(tl.float32)
    h, of_gate, of_up = _activation_gradients(grad, gate, up, beta, linear_beta, KIND, tl.bfloat16, INTERPRETED)
    of_gate = _round_to(of_gate * weight, tl.bfloat16, INTERPRETED)
    of_up = _round_to(of_up * weight, tl.bfloat16, INTERPRETED)
    if h_ptr is not None:
        tl.store(grad_gate_ptr + places, of_gate, mask=is_in)
        tl.store(grad_up_ptr + places, of_up, mask=is_in)
        tl.store(h_ptr + places, _round_to(h * weight, tl.bfloat16, INTERPRETED), mask=is_in)
    h = _round_to(h, tl.bfloat16, INTERPRETED).to(tl.float32)
    tl.store(parts_ptr + row, tl.sum(tl.where(is_in, h * grad, 0.0), 0))
    of_gate = of_gate.to(tl.float32)
    of_up = of_up.to(tl.float32)
    scale, divisor = _scale_of(tl.maximum(tl.abs(of_gate), tl.abs(of_up), tl.PropagateNan.ALL), MAX)
    tl.store(scale_ptr + row, scale)
    both_ptrs = both_ptr + places + row.to(tl.int64) * F
    tl.store(both_ptrs, _to_e4m3(of_gate / divisor, INTERPRETED), mask=is_in)
    tl.store(both_ptrs + F, _to_e4m3(of_up / divisor, INTERPRETED), mask=is_in)
