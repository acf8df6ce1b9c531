"""SiTU with hand-written backward (CPU training)."""

from __future__ import annotations

import torch
from torch import Tensor


def situ(gate_TF: Tensor, up_TF: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    out: Tensor = _Situ.apply(gate_TF, up_TF, beta, linear_beta)
    return out


def situ_forward(
    gate: Tensor, up: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The value, and what the backward needs: t = tanh(g/beta), s = sigmoid(g), tau = tanh(u/lb) (u itself without lb)."""
    t = (gate / beta).tanh_()
    s = torch.sigmoid(gate)
    tau = up if linear_beta is None else (up / linear_beta).tanh_()
    return (t * s).mul_(beta * (linear_beta or 1.0)).mul_(tau), t, s, tau


def situ_backward(
    grad: Tensor, t: Tensor, s: Tensor, tau: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor]:
    """d/dg = [(1 - t^2) s + beta t s (1 - s)] lb tau;  d/du = beta t s (1 - tau^2)."""
    ts = t * s
    slope = torch.addcmul(s, ts, t, value=-1).addcmul_(ts, 1 - s, value=beta)
    grad_gate = slope.mul_(tau).mul_(grad)
    if linear_beta is not None:
        grad_gate.mul_(linear_beta)
    grad_up = ts.mul_(grad).mul_(beta)
    if linear_beta is not None:
        grad_up.addcmul_(grad_up, tau * tau, value=-1)
    return grad_gate, grad_up


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, beta, linear_beta):  # type: ignore[no-untyped-def]
        out, t, s, tau = situ_forward(gate, up, beta, linear_beta)
        ctx.save_for_backward(t, s, tau)
        ctx.betas = beta, linear_beta
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return *situ_backward(grad, *ctx.saved_tensors, *ctx.betas), None, None
