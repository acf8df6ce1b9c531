"""Gated activations forward, SiTU and SiLU, element by element, with the reference's rounding points.

tanh and sigmoid are within a few units of fp32's last place. Without gradients; nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.linear.triton import INTERPRETED, _round_to, rows_of

BLOCK = 1024  # columns of a program


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """A polynomial where 1 - 2 / (exp 2x + 1) would cancel."""
    y = x * x
    series = 0.021869488536155203 + y * -0.008863235529902197
    series = 0.13333333333333333 + y * (-0.05396825396825397 + y * series)
    series = x + x * y * (-0.3333333333333333 + y * series)
    return tl.where(tl.abs(x) < 0.25, series, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def _activate(  # type: ignore[no-untyped-def]
    gate, up, beta, linear_beta, KIND: tl.constexpr, dtype: tl.constexpr, INTERPRETED: tl.constexpr
):
    """KIND 0 is SiLU, 1 SiTU, 2 SiTU with a linear beta. gate and up are rounded first, and come in fp32."""
    gate = _round_to(gate, dtype, INTERPRETED).to(tl.float32)
    up = _round_to(up, dtype, INTERPRETED).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    if KIND == 0:
        return _round_to(gate * sigmoid, dtype, INTERPRETED).to(tl.float32) * up
    if KIND == 2:
        up = linear_beta * _tanh(up / linear_beta)
    return beta * _tanh(gate / beta) * sigmoid * up


@triton.jit(do_not_specialize=["beta", "linear_beta"])
def gated_activation_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    out_ptr,
    F,
    stride_gate,
    stride_up,
    beta,
    linear_beta,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Rows of gate and up lie stride_gate and stride_up apart, so they may be halves of one product."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    blocks = tl.cdiv(F, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < F
    gate = tl.load(gate_ptr + token * stride_gate + columns, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + token * stride_up + columns, mask=is_in, other=0.0).to(tl.float32)
    out = _activate(gate, up, beta, linear_beta, KIND, dtype, INTERPRETED)
    tl.store(out_ptr + token * F + columns, _round_to(out, dtype, INTERPRETED), mask=is_in)


def kind_of(situ_betas: tuple[float, float | None] | None) -> int:
    """`_activate`'s KIND."""
    return 0 if situ_betas is None else 1 if situ_betas[1] is None else 2


def gated_activation(gate_TF: Tensor, up_TF: Tensor, situ_betas: tuple[float, float | None] | None) -> Tensor:
    """SiTU of (beta, linear_beta), or where situ_betas is None round(round(silu(gate)) up). [T, F], contiguous.

    gate and up of one type; rows need not follow each other, so both may be slices of one product [T, 2F].
    Raises ValueError for types other than bf16 and fp32.
    """
    if gate_TF.dtype not in (torch.bfloat16, torch.float32) or up_TF.dtype != gate_TF.dtype:
        raise ValueError(
            f"gated_activation takes bf16 or fp32 on both sides, got {gate_TF.dtype} and {up_TF.dtype}: convert one"
        )
    assert gate_TF.shape == up_TF.shape, (gate_TF.shape, up_TF.shape)
    T, F = gate_TF.shape
    gate_TF, up_TF = rows_of(gate_TF), rows_of(up_TF)
    out_TF = torch.empty(T, F, dtype=gate_TF.dtype, device=gate_TF.device)
    beta, linear_beta = (0.0, None) if situ_betas is None else situ_betas
    if T:
        gated_activation_kernel[(T * triton.cdiv(F, BLOCK),)](
            gate_TF,
            up_TF,
            out_TF,
            F,
            gate_TF.stride(0),
            up_TF.stride(0),
            float(beta),
            float(linear_beta or 0.0),
            KIND=kind_of(situ_betas),
            BLOCK=BLOCK,
            INTERPRETED=INTERPRETED,
        )
    return out_TF


def situ(gate_TF: Tensor, up_TF: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """`reference.situ`; see `gated_activation`."""
    return gated_activation(gate_TF, up_TF, (beta, linear_beta))
