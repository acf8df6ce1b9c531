"""The same experts in fp8 from torch's own parts, forward and backward: `torch._scaled_grouped_mm` with a scale a row and a
scale an output channel, the rest compiled; the matrices' gradients are `torch._grouped_mm`s of bf16 rows.

It is our recipe (`k3kernels.moe.fp8_train`): gate and up are one product and so are their inputs' gradients, a pair's weight is
applied to h and to the gradients of gate and up, and quantised matrices are given. h has a scale a row, or a known one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moe_inputs import BETAS
from moe_torch import Work, activate, activate_wide, compiled, sort_routes, weigh
from torch import Tensor

FP8_MAX = 448.0
HIDDEN_SCALE = BETAS[0] * BETAS[1] / FP8_MAX
VARIANTS = ("rowwise", "static")

Scaled = tuple[Tensor, Tensor]  # e4m3 values [.., K], fp32 scales [..]


@dataclass(frozen=True, slots=True)
class Matrices:
    """forward: [E, 2F, R] and [E, R, F]; backward, along the other axis: [E, R, 2F] and [E, F, R], None without gradients."""

    w13: Scaled
    w2: Scaled
    backward_w13: Scaled | None = None
    backward_w2: Scaled | None = None

    @classmethod
    def of(cls, w13: Tensor, w2: Tensor, with_gradients: bool) -> Matrices:
        backward = [quantise_matrices(w.mT) if with_gradients else None for w in (w13, w2)]
        return cls(quantise_matrices(w13), quantise_matrices(w2), *backward)


def quantise(x: Tensor) -> Scaled:
    scale = x.float().abs().amax(-1) / FP8_MAX
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def quantise_matrices(w_ENK: Tensor) -> Scaled:
    """An expert at a time."""
    values = torch.empty(w_ENK.shape, dtype=torch.float8_e4m3fn, device=w_ENK.device)
    scales = torch.empty(w_ENK.shape[:2], dtype=torch.float32, device=w_ENK.device)
    for w_NK, of_values, of_scales in zip(w_ENK.detach(), values, scales, strict=True):
        got, scale = quantise(w_NK)
        of_values.view(torch.uint8).copy_(got.view(torch.uint8))
        of_scales.copy_(scale)
    return values, scales


def scaled_grouped_mm(x: Scaled, w: Scaled, ends: Tensor) -> Tensor:
    """x w_e^T [P, N] in bf16. torch has it on a GPU alone."""
    if x[0].is_cuda:
        y: Tensor = torch._scaled_grouped_mm(
            x[0], w[0].mT, x[1], w[1], offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return y
    x_PK, w_ENK = ((values.float() * scale[..., None]) for values, scale in (x, w))
    y = torch.zeros(len(x_PK), w_ENK.shape[1], dtype=torch.bfloat16)
    for e, (begin, end) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)):
        y[begin:end] = x_PK[begin:end] @ w_ENK[e].T
    return y


def gather(rows: Tensor, order: Tensor, k: int) -> Tensor:
    return rows[order // k]


def gather_scaled(values: Tensor, scale: Tensor, order: Tensor, k: int) -> Scaled:
    tokens = order // k
    return values.view(torch.uint8)[tokens].view(values.dtype), scale[tokens]


def activate_rowwise(gate_up: Tensor) -> Scaled:
    return quantise(activate(gate_up))


def activate_static(gate_up: Tensor) -> Scaled:
    h = (activate_wide(gate_up) * (1 / HIDDEN_SCALE)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return h, torch.full((h.shape[0],), HIDDEN_SCALE, dtype=torch.float32, device=h.device)


def activate_backward(grad_h: Tensor, gate_up: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, ...]:
    """The gradients of gate and up in e4m3, their scale, the same in bf16, weight h, and the weights' gradients by place."""
    beta, linear_beta = BETAS
    gate, up = gate_up.float().chunk(2, -1)
    grad, weight = grad_h.float(), weights.flatten()[order][:, None]
    t, s, tau = torch.tanh(gate / beta), torch.sigmoid(gate), torch.tanh(up / linear_beta)
    h = beta * t * s * linear_beta * tau
    grad_gate = (grad * (s * (1 - t * t) + beta * t * s * (1 - s)) * linear_beta * tau * weight).to(grad_h.dtype)
    grad_up = (grad * beta * t * s * (1 - tau * tau) * weight).to(grad_h.dtype)
    scale = torch.maximum(grad_gate.abs().amax(-1), grad_up.abs().amax(-1)).float() / FP8_MAX
    both = torch.cat((grad_gate, grad_up), -1)
    values = (both.float() / scale[:, None]).to(torch.float8_e4m3fn)
    return values, scale, both, (h * weight).to(grad_h.dtype), (h.to(grad_h.dtype).float() * grad).sum(-1)


def sum_slots(rows: Tensor, inverse: Tensor, k: int) -> Tensor:
    return rows[inverse].view(-1, k, rows.shape[1]).float().sum(1).to(rows.dtype)


class Glue:
    """What lies between the products, each part compiled."""

    def __init__(self, variant: str) -> None:
        activation = {"rowwise": activate_rowwise, "static": activate_static}[variant]
        self.sort, self.activate, self.weigh = compiled(sort_routes), compiled(activation), compiled(weigh)
        self.quantise, self.gather_scaled, self.gather = compiled(quantise), compiled(gather_scaled), compiled(gather)
        self.backward, self.sum_slots = compiled(activate_backward), compiled(sum_slots)

    def stage(self, x: Tensor, order: Tensor, k: int) -> Scaled:
        """Quantised once a token, then copied."""
        rows: Scaled = self.gather_scaled(*self.quantise(x), order, k)
        return rows

    def forward(
        self, x: Tensor, experts: Tensor, weights: Tensor, matrices: Matrices
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """out, gate and up, and the routes' order, inverse and ends."""
        order, inverse, ends = routes = self.sort(experts, len(matrices.w2[0]))
        gate_up = scaled_grouped_mm(self.stage(x, order, experts.shape[1]), matrices.w13, ends)
        ys = scaled_grouped_mm(self.activate(gate_up), matrices.w2, ends)
        return self.weigh(ys, weights, inverse), gate_up, routes


class Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, _w13, _w2, experts, matrices, glue):  # type: ignore[no-untyped-def]
        out, gate_up, routes = glue.forward(x, experts, weights, matrices)
        ctx.save_for_backward(x, weights, gate_up, *routes)
        ctx.matrices, ctx.glue = matrices, glue
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weights, gate_up, order, inverse, ends = ctx.saved_tensors
        matrices, glue, k = ctx.matrices, ctx.glue, weights.shape[1]
        grad_h = scaled_grouped_mm(glue.stage(grad, order, k), matrices.backward_w2, ends)
        values, scale, both, weighted_h, of_pairs = glue.backward(grad_h, gate_up, weights, order)
        del grad_h
        grad_w2 = torch._grouped_mm(glue.gather(grad, order, k).mT, weighted_h, offs=ends)
        del weighted_h
        grad_x = glue.sum_slots(scaled_grouped_mm((values, scale), matrices.backward_w13, ends), inverse, k)
        del values
        grad_w13 = torch._grouped_mm(both.mT, glue.gather(x, order, k), offs=ends)
        return grad_x, of_pairs[inverse].view_as(weights), grad_w13, grad_w2, None, None, None


def load(variant: str, w13: Tensor, w2: Tensor, with_gradients: bool) -> Work:
    """Takes x, experts and weights, and with gradients the two matrices, which are quantised here."""
    glue, matrices = Glue(variant), Matrices.of(w13, w2, with_gradients)

    def run(x: Tensor, experts: Tensor, weights: Tensor, *trained: Tensor) -> Tensor:
        if not trained:
            return glue.forward(x, experts, weights, matrices)[0]
        out: Tensor = Experts.apply(x, weights, *trained, experts, matrices, glue)
        return out

    return run
