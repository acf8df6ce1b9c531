"""Gated activations with gradients, in two kernels: a value, or the gradients of both inputs, each read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.linear.triton import INTERPRETED, _round_to, rows_of
from k3kernels.situ.formulas import _activation_gradients
from k3kernels.situ.triton import BLOCK, gated_activation, kind_of

Betas = tuple[float, float | None] | None


@triton.jit(do_not_specialize=["beta", "linear_beta"])
def gated_activation_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    F,
    stride_grad,
    stride_gate,
    stride_up,
    beta,
    linear_beta,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    dtype: tl.constexpr = grad_gate_ptr.dtype.element_ty
    blocks = tl.cdiv(F, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < F
    grad = tl.load(grad_ptr + token * stride_grad + columns, mask=is_in, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * stride_gate + columns, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + token * stride_up + columns, mask=is_in, other=0.0).to(tl.float32)
    _, grad_gate, grad_up = _activation_gradients(grad, gate, up, beta, linear_beta, KIND, dtype, INTERPRETED)
    tl.store(grad_gate_ptr + token * F + columns, _round_to(grad_gate, dtype, INTERPRETED), mask=is_in)
    tl.store(grad_up_ptr + token * F + columns, _round_to(grad_up, dtype, INTERPRETED), mask=is_in)


def gated_activation_train(gate_TF: Tensor, up_TF: Tensor, situ_betas: Betas) -> Tensor:
    """`triton.gated_activation`, with gradients. Backward computes wide and rounds each gradient once."""
    out: Tensor = _Gated.apply(gate_TF, up_TF, situ_betas)
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, betas):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        ctx.betas = betas
        return gated_activation(gate, up, betas)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        gate, up = ctx.saved_tensors
        return *gated_activation_gradient(grad, gate, up, ctx.betas), None


def gated_activation_gradient(grad_TF: Tensor, gate_TF: Tensor, up_TF: Tensor, betas: Betas) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up [T, F], contiguous; rows of the inputs need not follow each other."""
    T, F = gate_TF.shape
    grad_TF, gate_TF, up_TF = rows_of(grad_TF), rows_of(gate_TF), rows_of(up_TF)
    grads = [torch.empty(T, F, dtype=gate_TF.dtype, device=gate_TF.device) for _ in range(2)]
    beta, linear_beta = betas or (1.0, None)
    if T:
        gated_activation_gradient_kernel[(T * triton.cdiv(F, BLOCK),)](
            *(grad_TF, gate_TF, up_TF, *grads, F, grad_TF.stride(0), gate_TF.stride(0), up_TF.stride(0)),
            *(float(beta), float(linear_beta or 1.0)),
            KIND=kind_of(betas),
            BLOCK=BLOCK,
            INTERPRETED=INTERPRETED,
        )
    return grads[0], grads[1]
