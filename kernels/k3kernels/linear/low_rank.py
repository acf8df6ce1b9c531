"""A frozen product with one LoRA pair above it, and a router's logits: the library's GEMMs, each tensor passed over once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from k3kernels.linear_logprob.wide import product_in_fp32


def lora_linear(x_TI: Tensor, W_OI: Tensor, A_rI: Tensor, B_Or: Tensor, scale: float) -> Tensor:
    """x W^T + scale (x A^T) B^T [T, O] in x's type (arXiv 2106.09685), bf16 on a GPU.

    The product is rounded, then the branch is added to it within the branch's own GEMM and the sum rounded again; x A^T is
    rounded, A and B are rounded to x's type. Gradients of A and B are fp32 sums, in the parameter's type; W may have one.
    """
    out: Tensor = _LoraLinear.apply(x_TI.flatten(0, -2), W_OI, A_rI, B_Or, scale)
    return out.view(*x_TI.shape[:-1], W_OI.shape[0])


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, W, A, B, scale):  # type: ignore[no-untyped-def]
        A_x, B_x = A.to(x.dtype), B.to(x.dtype)
        z = x @ A_x.T
        y = x @ W.T
        y.addmm_(z, B_x.T, alpha=scale)
        ctx.save_for_backward(x, W, A_x, B_x, z)
        ctx.scale, ctx.dtypes = scale, (A.dtype, B.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, W, A, B, z = ctx.saved_tensors
        needs_x, needs_W, needs_A, needs_B, _ = ctx.needs_input_grad
        grad_z = (grad @ B).mul_(ctx.scale)
        grad_x = (grad @ W).addmm_(grad_z, A) if needs_x else None
        grad_W = grad.T @ x if needs_W else None
        grad_A = product_in_fp32(grad_z.T, x).to(ctx.dtypes[0]) if needs_A else None
        grad_B = product_in_fp32(grad.T, z).mul_(ctx.scale).to(ctx.dtypes[1]) if needs_B else None
        return grad_x, grad_W, grad_A, grad_B, None


def wide_output(x_TI: Tensor, W_OI: Tensor) -> Tensor:
    """x W^T in fp32 of bf16 factors, whose products fp32 holds exactly: a router's logits. Differentiable.

    The gradient, fp32, is multiplied as the sum of two bf16 numbers, 16 bits of it.
    """
    out: Tensor = _WideOutput.apply(x_TI, W_OI)
    return out


class _WideOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, W):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, W)
        return product_in_fp32(x, W.T)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, W = ctx.saved_tensors
        high = grad.to(x.dtype)
        low = (grad - high).to(x.dtype)
        grad_x = (product_in_fp32(high, W) + product_in_fp32(low, W)).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_W = (
            (product_in_fp32(high.T, x) + product_in_fp32(low.T, x)).to(W.dtype) if ctx.needs_input_grad[1] else None
        )
        return grad_x, grad_W
