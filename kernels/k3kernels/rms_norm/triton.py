"""RMSNorm forward, plain and gated: a row's sum has one order, whatever rows are beside it.

A program has as many whole rows as make TILE elements, set by the width alone. So one compiled kernel serves every
number of rows, and all rows of a tile are summed by the same pattern of threads. Rounds where the reference does.
Without gradients; nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.alignment import aligned
from k3kernels.linear.triton import INTERPRETED, _round_to

TILE = 1024  # elements of a program, more where a row is longer
ELEMENTS_PER_WARP = 256
MAX_WARPS = 16


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


def launch_options(D: int) -> dict[str, int | bool]:
    """Set by the width alone."""
    block = triton.next_power_of_2(D)
    rows = max(1, TILE // block)
    num_warps = min(MAX_WARPS, max(1, block * rows // ELEMENTS_PER_WARP))
    return {"D": D, "ROWS": rows, "BLOCK": block, "INTERPRETED": INTERPRETED, "num_warps": num_warps}


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm` of the last axis, in x's shape and type; a row has the same bits in every batch.

    x and weight bf16 or fp32, each of its own type. Raises ValueError for other types of x.
    """
    check_type(x_TD)
    x_TD = aligned(x_TD)
    out_TD = torch.empty_like(x_TD)
    D = x_TD.shape[-1]
    options = launch_options(D)
    num_rows = x_TD.numel() // D
    if num_rows:
        grid = (triton.cdiv(num_rows, options["ROWS"]),)
        rms_norm_kernel[grid](x_TD, aligned(weight_D), out_TD, num_rows, eps, **options)
    return out_TD


def gated_rms_norm(o_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """`reference.gated_rms_norm`: of the last axis, in gate's type; a row has the same bits in every batch.

    o, gate [..., V] and weight [V] bf16 or fp32, each of its own type. Raises ValueError for other types of o and gate.
    """
    check_type(o_THV)
    check_type(gate_THV)
    assert o_THV.shape == gate_THV.shape, (o_THV.shape, gate_THV.shape)
    o_THV, gate_THV = aligned(o_THV), aligned(gate_THV)
    out_THV = torch.empty_like(gate_THV)
    V = o_THV.shape[-1]
    options = launch_options(V)
    num_rows = o_THV.numel() // V
    if num_rows:
        grid = (triton.cdiv(num_rows, options["ROWS"]),)
        gated_rms_norm_kernel[grid](o_THV, gate_THV, aligned(weight_V), out_THV, num_rows, eps, **options)
    return out_THV


def check_type(x: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"the norm's kernel takes bf16 or fp32, got {x.dtype}: convert it")
