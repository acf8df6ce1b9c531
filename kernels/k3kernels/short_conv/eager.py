"""Short convolution with hand-written backward: one multiply-add per tap and direction.

Narrow types are accumulated in fp32 and kept as they came; the sum before SiLU is then computed again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.dtypes import at_least_fp32


def short_conv(window_and_x_NLP: Tensor, weight_PJ: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return F.silu(_convolve(window_and_x_NLP, _taps(window_and_x_NLP, weight_PJ))).to(window_and_x_NLP.dtype)
    out: Tensor = _ShortConv.apply(window_and_x_NLP, weight_PJ)
    return out


def _taps(x: Tensor, weight_PJ: Tensor) -> Tensor:
    return weight_PJ.T.contiguous().to(at_least_fp32(x.dtype))


def _convolve(x: Tensor, taps_JP: Tensor) -> Tensor:
    """Before SiLU, in at least fp32."""
    J = taps_JP.shape[0]
    L = x.shape[1] - (J - 1)
    y = x[:, :L] * taps_JP[0]
    for j in range(1, J):
        y.addcmul_(x[:, j : j + L].to(y.dtype), taps_JP[j])
    return y


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        taps = _taps(x, weight)
        y = _convolve(x, taps)
        ctx.save_for_backward(x, taps, y if y.dtype == x.dtype else None)
        ctx.weight_dtype = weight.dtype
        return F.silu(y).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, taps, y = ctx.saved_tensors
        if y is None:
            y = _convolve(x, taps)
        J, L = taps.shape[0], y.shape[1]
        grad_y = torch.ops.aten.silu_backward(grad.to(y.dtype), y)
        grad_x = torch.zeros_like(x, dtype=y.dtype)
        grad_taps = torch.empty_like(taps)
        for j in range(J):
            grad_x[:, j : j + L].addcmul_(grad_y, taps[j])
            grad_taps[j] = (grad_y * x[:, j : j + L]).sum((0, 1))
        return grad_x.to(x.dtype), grad_taps.T.to(ctx.weight_dtype)
