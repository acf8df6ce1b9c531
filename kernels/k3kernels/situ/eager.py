"""SiTU with hand-written backward. Narrow types are computed in fp32 and kept as they came, to be computed again."""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.dtypes import at_least_fp32, constant


def situ(gate_TF: Tensor, up_TF: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    if not torch.is_grad_enabled():
        return situ_forward(gate_TF, up_TF, beta, linear_beta)[0]
    out: Tensor = _Situ.apply(gate_TF, up_TF, beta, linear_beta)
    return out


def situ_forward(
    gate: Tensor, up: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The value, and what the backward needs, in at least fp32.

    t = tanh(g/beta), s = sigmoid(g), tau = tanh(u/lb) (u itself without lb).
    """
    wide = at_least_fp32(gate.dtype)
    g, u = gate.to(wide), up.to(wide)
    t = (g / constant(beta, wide)).tanh_()
    s = torch.sigmoid(g)
    tau = u if linear_beta is None else (u / constant(linear_beta, wide)).tanh_()
    return (t * s).mul_(constant(beta * (linear_beta or 1.0), wide)).mul_(tau).to(gate.dtype), t, s, tau


def situ_backward(
    grad: Tensor, t: Tensor, s: Tensor, tau: Tensor, beta: float, linear_beta: float | None
) -> tuple[Tensor, Tensor]:
    """d/dg = [(1 - t^2) s + beta t s (1 - s)] lb tau;  d/du = beta t s (1 - tau^2). Rounded once, to grad's dtype."""
    ts = t * s
    slope = torch.addcmul(s, ts, t, value=-1).addcmul_(ts, 1 - s, value=beta)
    grad_gate = slope.mul_(tau).mul_(grad)
    if linear_beta is not None:
        grad_gate.mul_(linear_beta)
    grad_up = ts.mul_(grad).mul_(beta)
    if linear_beta is not None:
        grad_up.addcmul_(grad_up, tau * tau, value=-1)
    return grad_gate.to(grad.dtype), grad_up.to(grad.dtype)


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, beta, linear_beta):  # type: ignore[no-untyped-def]
        out, t, s, tau = situ_forward(gate, up, beta, linear_beta)
        is_narrow = t.dtype != gate.dtype  # the inputs are then a third of the size of the three
        ctx.save_for_backward(*((gate, up) if is_narrow else (t, s, tau)))
        ctx.betas, ctx.is_narrow = (beta, linear_beta), is_narrow
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors
        if ctx.is_narrow:
            _, *saved = situ_forward(*saved, *ctx.betas)
        return *situ_backward(grad, *saved, *ctx.betas), None, None
