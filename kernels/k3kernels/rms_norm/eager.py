"""RMSNorm with hand-written backward: fewer passes over memory than autograd makes of the reference.

In bf16 and fp16 the backward runs in fp32 and keeps only the inputs in their own type; gradients are rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.dtypes import at_least_fp32


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    out: Tensor = _RmsNorm.apply(x_TD, weight_D, eps)
    return out


def gated_rms_norm(o_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    out: Tensor = _GatedRmsNorm.apply(o_THV, gate_THV, weight_V, eps)
    return out


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """In at least fp32. Narrow inputs take the reference's own sum, so that both round the same way."""
    if x.dtype != at_least_fp32(x.dtype):
        return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.rsqrt(norm * norm / x.shape[-1] + eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        inverse = _inverse_rms(x, eps)
        unit = (x * inverse).to(x.dtype)
        ctx.save_for_backward(x, inverse, weight)
        return (unit * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, inverse, weight = ctx.saved_tensors
        unit = x * inverse
        grad_unit = grad.to(inverse.dtype) * weight
        mean = (grad_unit * unit).mean(-1, keepdim=True)
        grad_x = grad_unit.addcmul_(unit, mean, value=-1).mul_(inverse)
        return grad_x.to(x.dtype), (grad * unit).flatten(0, -2).sum(0).to(weight.dtype), None


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, gate, weight, eps):  # type: ignore[no-untyped-def]
        inverse = _inverse_rms(o, eps)
        unit = o * inverse
        ctx.save_for_backward(o, inverse, gate, weight)
        return (unit * weight).mul_(torch.sigmoid(gate.to(unit.dtype))).to(gate.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        o, inverse, gate, weight = ctx.saved_tensors
        unit, sig = o * inverse, torch.sigmoid(gate.to(inverse.dtype))
        grad_scaled = grad * sig
        grad_gate = (grad_scaled * unit).mul_(weight).mul_(1 - sig)
        grad_weight = (grad_scaled * unit).flatten(0, -2).sum(0)
        grad_unit = grad_scaled.mul_(weight)
        mean = (grad_unit * unit).mean(-1, keepdim=True)
        grad_o = grad_unit.addcmul_(unit, mean, value=-1).mul_(inverse)
        return grad_o.to(o.dtype), grad_gate.to(gate.dtype), grad_weight.to(weight.dtype), None
