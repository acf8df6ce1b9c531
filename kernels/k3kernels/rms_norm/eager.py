"""RMSNorm with hand-written backward: fewer passes over memory than autograd makes of the reference.

In bf16 and fp16 the backward runs in fp32 and keeps only the inputs in their own type; gradients are rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.dtypes import at_least_fp32, constant


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if not torch.is_grad_enabled():
        return _norm(x_TD, weight_D, _inverse_rms(x_TD, eps))
    out: Tensor = _RmsNorm.apply(x_TD, weight_D, eps)
    return out


def gated_rms_norm(o_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    if not torch.is_grad_enabled():
        return _gated_norm(o_THV, gate_THV, weight_V, _inverse_rms(o_THV, eps))
    out: Tensor = _GatedRmsNorm.apply(o_THV, gate_THV, weight_V, eps)
    return out


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """In at least fp32. Narrow inputs take the reference's own sum, so that both round the same way."""
    if x.dtype != at_least_fp32(x.dtype):
        return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.mul_(norm).div_(constant(x.shape[-1], norm.dtype)).add_(constant(eps, norm.dtype)).rsqrt_()


def _norm(x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    unit = x * inverse
    if unit.dtype == x.dtype == weight.dtype:
        return unit.mul_(weight)
    return (unit.to(x.dtype) * weight).to(x.dtype)


def _gated_norm(o: Tensor, gate: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    unit = o * inverse
    return (unit * weight).mul_(torch.sigmoid(gate.to(unit.dtype))).to(gate.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, inverse, weight)
        return _norm(x, weight, inverse)

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
        ctx.save_for_backward(o, inverse, gate, weight)
        return _gated_norm(o, gate, weight, inverse)

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
