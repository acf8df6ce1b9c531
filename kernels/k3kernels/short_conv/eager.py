"""Short convolution with hand-written backward: one multiply-add per tap and direction (CPU training)."""

from __future__ import annotations

import torch
from torch import Tensor


def short_conv(window_and_x_NLP: Tensor, weight_PJ: Tensor) -> Tensor:
    out: Tensor = _ShortConv.apply(window_and_x_NLP, weight_PJ)
    return out


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        J = weight.shape[1]
        L = x.shape[1] - (J - 1)
        taps = weight.T.contiguous()
        y = x[:, :L] * taps[0]
        for j in range(1, J):
            y.addcmul_(x[:, j : j + L], taps[j])
        ctx.save_for_backward(x, y, taps)
        return torch.nn.functional.silu(y)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, y, taps = ctx.saved_tensors
        J, L = taps.shape[0], y.shape[1]
        grad_y = torch.ops.aten.silu_backward(grad, y)
        grad_x = torch.zeros_like(x)
        grad_taps = torch.empty_like(taps)
        for j in range(J):
            grad_x[:, j : j + L].addcmul_(grad_y, taps[j])
            grad_taps[j] = (grad_y * x[:, j : j + L]).sum((0, 1))
        return grad_x, grad_taps.T
