"""Experts over tokens sorted by expert, with hand-written backward: only gathers, no scatter-add (CPU training).

Every token's k results are added in slot order and no GEMM is narrower than MIN_ROWS, so a token's result does not
depend on what else is in the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.situ.eager import situ_backward, situ_forward

MIN_ROWS = 16  # a BLAS multiplies a few rows by other kernels than many, and those sum in another order


def moe_experts(
    x_TR: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    w1_EFR: Tensor,
    w3_EFR: Tensor,
    w2_ERF: Tensor,
    situ_betas: tuple[float, float | None] | None,
) -> Tensor:
    out: Tensor = _Experts.apply(x_TR, experts_Tk, weights_Tk, w1_EFR, w3_EFR, w2_ERF, situ_betas)
    return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, experts, weights, w1, w3, w2, situ_betas):  # type: ignore[no-untyped-def]
        T, k = experts.shape
        order = torch.argsort(experts.flatten(), stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(T * k)
        spans = _spans(torch.bincount(experts.flatten(), minlength=w1.shape[0]))
        xs = x.index_select(0, order // k)
        gate, up = xs.new_empty(T * k, w1.shape[1]), xs.new_empty(T * k, w1.shape[1])
        for e, a, b in spans:
            _multiply_rows(xs, a, b, w1[e].T, gate)
            _multiply_rows(xs, a, b, w3[e].T, up)
        if situ_betas is None:
            h, saved = F.silu(gate) * up, [gate, up]
        else:
            h, *saved = situ_forward(gate, up, *situ_betas)
        ys = torch.empty_like(xs)
        for e, a, b in spans:
            _multiply_rows(h, a, b, w2[e].T, ys)
        y_TkR = ys.index_select(0, inverse).view(T, k, -1)
        out = y_TkR[:, 0] * weights[:, :1]
        for slot in range(1, k):
            out.addcmul_(y_TkR[:, slot], weights[:, slot : slot + 1])
        ctx.save_for_backward(xs, h, y_TkR, weights, order, inverse, w1, w3, w2, *saved)
        ctx.spans, ctx.situ_betas = spans, situ_betas
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        xs, h, y_TkR, weights, order, inverse, w1, w3, w2, *saved = ctx.saved_tensors
        T, k = weights.shape
        grad_weights = (grad.unsqueeze(1) * y_TkR).sum(-1)
        grad_ys = (grad.unsqueeze(1) * weights.unsqueeze(-1)).view(T * k, -1).index_select(0, order)
        grad_w1, grad_w3, grad_w2 = torch.zeros_like(w1), torch.zeros_like(w3), torch.zeros_like(w2)
        grad_h = torch.empty_like(h)
        for e, a, b in ctx.spans:
            torch.mm(grad_ys[a:b], w2[e], out=grad_h[a:b])
            torch.mm(grad_ys[a:b].T, h[a:b], out=grad_w2[e])
        if ctx.situ_betas is None:
            gate, up = saved
            grad_gate, grad_up = torch.ops.aten.silu_backward(grad_h * up, gate), grad_h * F.silu(gate)
        else:
            grad_gate, grad_up = situ_backward(grad_h, *saved, *ctx.situ_betas)
        grad_xs = torch.empty_like(xs)
        for e, a, b in ctx.spans:
            torch.mm(grad_gate[a:b], w1[e], out=grad_xs[a:b])
            grad_xs[a:b].addmm_(grad_up[a:b], w3[e])
            torch.mm(grad_gate[a:b].T, xs[a:b], out=grad_w1[e])
            torch.mm(grad_up[a:b].T, xs[a:b], out=grad_w3[e])
        grad_x = grad_xs.index_select(0, inverse).view(T, k, -1).sum(1)
        return grad_x, None, grad_weights, grad_w1, grad_w3, grad_w2, None


def _multiply_rows(x: Tensor, a: int, b: int, w: Tensor, out: Tensor) -> None:
    """out[a:b] = x[a:b] @ w, computed with neighbouring rows where these are fewer than MIN_ROWS."""
    if b - a >= MIN_ROWS or x.shape[0] < MIN_ROWS:
        torch.mm(x[a:b], w, out=out[a:b])
    else:
        start = min(a, x.shape[0] - MIN_ROWS)
        out[a:b] = (x[start : start + MIN_ROWS] @ w)[a - start : b - start]


def _spans(counts_E: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, row after the last) for every expert that has rows."""
    spans, start = [], 0
    for e, count in enumerate(counts_E.tolist()):
        if count:
            spans.append((e, start, start + count))
        start += count
    return spans
