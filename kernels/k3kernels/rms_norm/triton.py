"""RMSNorm, plain and gated, with a gradient: a row's sum has one order, whatever rows are beside it.

A program has as many whole rows as make TILE elements, set by the width alone. So one compiled kernel serves every
number of rows, and all rows of a tile are summed by the same pattern of threads. Rounds where the reference does.

The gradient is one pass in fp32, each result rounded once; only the inputs are kept for it. A program takes every P-th
tile, P set by the width: the weight's gradient is a sum of P parts, and equal calls give equal bits.
Nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.alignment import aligned
from k3kernels.linear.triton import INTERPRETED, _round_to

TILE = 1024  # elements of a program, more where a row is longer
ELEMENTS_PER_WARP = 256
MAX_WARPS = 16
GRADIENT_WARPS = 132 * 16  # of all programs: not of the GPU there is, on which the weight's gradient would depend


@triton.jit
def _inverse_rms(x, eps, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS, 1] of x [ROWS, BLOCK] with zeros behind D."""
    return tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]


@triton.jit(do_not_specialize=["num_rows", "eps"])
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = rows.to(tl.int64)[:, None] * D + columns[None, :]
    is_in = (rows < num_rows)[:, None] & (columns < D)[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    unit = _round_to(x * _inverse_rms(x, eps, D), dtype, INTERPRETED).to(tl.float32)
    tl.store(out_ptr + at, _round_to(unit * weight[None, :], dtype, INTERPRETED), mask=is_in)


@triton.jit(do_not_specialize=["num_rows", "eps"])
def gated_rms_norm_kernel(  # type: ignore[no-untyped-def]
    o_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = rows.to(tl.int64)[:, None] * D + columns[None, :]
    is_in = (rows < num_rows)[:, None] & (columns < D)[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    o = tl.load(o_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    out = o * _inverse_rms(o, eps, D) * weight[None, :] * (1 / (1 + tl.exp(-gate)))
    tl.store(out_ptr + at, _round_to(out, out_ptr.dtype.element_ty, INTERPRETED), mask=is_in)


@triton.jit
def _places(tile, num_rows, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    return rows.to(tl.int64)[:, None] * D + columns[None, :], (rows < num_rows)[:, None] & (columns < D)[None, :]


@triton.jit
def _load_tile(x_ptr, grad_ptr, gate_ptr, at, is_in):  # type: ignore[no-untyped-def]
    """As it is in memory; without a gate the last is the gradient again."""
    x, grad = tl.load(x_ptr + at, mask=is_in, other=0.0), tl.load(grad_ptr + at, mask=is_in, other=0.0)
    gate = grad
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + at, mask=is_in, other=0.0)
    return x, grad, gate


@triton.jit(do_not_specialize=["num_rows", "eps"])
def rms_norm_gradient_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    gate_ptr,
    weight_ptr,
    grad_ptr,
    grad_x_ptr,
    grad_gate_ptr,
    parts_ptr,
    num_rows,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    P: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Gradients of x, of the gate (both gate pointers are None in the plain norm) and in parts [P, D] fp32 of the weight.

    A tile is on its way while the one before is computed.
    """
    first = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    at_ahead, is_in_ahead = _places(first, num_rows, D, ROWS, BLOCK)
    x_ahead, grad_ahead, gate_ahead = _load_tile(x_ptr, grad_ptr, gate_ptr, at_ahead, is_in_ahead)
    for step in range(tl.cdiv(num_rows - first * ROWS, P * ROWS)):
        at, is_in = at_ahead, is_in_ahead
        x, grad, gate = x_ahead.to(tl.float32), grad_ahead.to(tl.float32), gate_ahead.to(tl.float32)
        at_ahead, is_in_ahead = _places(first + (step + 1) * P, num_rows, D, ROWS, BLOCK)
        x_ahead, grad_ahead, gate_ahead = _load_tile(x_ptr, grad_ptr, gate_ptr, at_ahead, is_in_ahead)
        inverse = _inverse_rms(x, eps, D)
        unit = x * inverse
        if gate_ptr is not None:
            sigmoid = 1 / (1 + tl.exp(-gate))
            grad *= sigmoid
            grad_gate = grad * unit * weight * (1 - sigmoid)
            tl.store(grad_gate_ptr + at, _round_to(grad_gate, grad_gate_ptr.dtype.element_ty, INTERPRETED), mask=is_in)
        sums += grad * unit
        grad *= weight
        mean = (tl.sum(grad * unit, 1) / D)[:, None]
        grad_x = tl.fma(-mean, unit, grad) * inverse
        tl.store(grad_x_ptr + at, _round_to(grad_x, grad_x_ptr.dtype.element_ty, INTERPRETED), mask=is_in)
    tl.store(parts_ptr + first * D + columns, tl.sum(sums, 0), mask=columns < D)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm` of the last axis, in x's shape and type; a row has the same bits in every batch.

    x and weight bf16 or fp32, each of its own type. Raises ValueError for other types of x.
    """
    check_type(x_TD)
    out_TD: Tensor = _RmsNorm.apply(x_TD, None, weight_D, eps)
    return out_TD


def gated_rms_norm(o_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """`reference.gated_rms_norm`: of the last axis, in gate's type; a row has the same bits in every batch.

    o, gate [..., V] and weight [V] bf16 or fp32, each of its own type. Raises ValueError for other types of o and gate.
    """
    check_type(o_THV)
    check_type(gate_THV)
    assert o_THV.shape == gate_THV.shape, (o_THV.shape, gate_THV.shape)
    out_THV: Tensor = _RmsNorm.apply(o_THV, gate_THV, weight_V, eps)
    return out_THV


class _RmsNorm(torch.autograd.Function):
    """Plain where the gate is None."""

    @staticmethod
    def forward(ctx, x, gate, weight, eps):  # type: ignore[no-untyped-def]
        inputs = [x if x is None else aligned(x) for x in (x, gate, weight)]
        x, gate, weight = inputs
        ctx.save_for_backward(*inputs)
        ctx.eps = eps
        out = torch.empty_like(x if gate is None else gate)
        options = launch_options(x.shape[-1])
        num_rows = x.numel() // options["D"]
        if num_rows:
            grid = (triton.cdiv(num_rows, options["ROWS"]),)
            if gate is None:
                rms_norm_kernel[grid](x, weight, out, num_rows, eps, **options)
            else:
                gated_rms_norm_kernel[grid](x, gate, weight, out, num_rows, eps, **options)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, gate, weight = ctx.saved_tensors  # once: under activation checkpointing each access computes it again
        grad_x, grad_gate = torch.empty_like(x), None if gate is None else torch.empty_like(gate)
        options = gradient_options(x.shape[-1])
        num_rows = x.numel() // options["D"]
        num_programs = min(options["P"], triton.cdiv(num_rows, options["ROWS"]))
        parts = torch.empty(num_programs, options["D"], dtype=torch.float32, device=x.device)
        if num_rows:
            rms_norm_gradient_kernel[(num_programs,)](
                x, gate, weight, aligned(grad), grad_x, grad_gate, parts, num_rows, ctx.eps, **options
            )
        return grad_x, grad_gate, parts.sum(0).to(weight.dtype), None


def launch_options(D: int) -> dict[str, Any]:
    """Set by the width alone."""
    block = triton.next_power_of_2(D)
    rows = max(1, TILE // block)
    num_warps = min(MAX_WARPS, max(1, block * rows // ELEMENTS_PER_WARP))
    return {"D": D, "ROWS": rows, "BLOCK": block, "INTERPRETED": INTERPRETED, "num_warps": num_warps}


def gradient_options(D: int) -> dict[str, Any]:
    options = launch_options(D)
    return options | {"P": GRADIENT_WARPS // options["num_warps"]}


def check_type(x: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"the norm's kernel takes bf16 or fp32, got {x.dtype}: convert it")
