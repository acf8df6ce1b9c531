"""Depthwise causal short convolution with SiLU, over padded rows that carry their own window."""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.dtypes import at_least_fp32


def short_conv(window_and_x_NLP: Tensor, weight_PJ: Tensor) -> Tensor:
    """y_t = SiLU(sum_j w_j x_{t-J+1+j}) for every position after the window.

    window_and_x_NLP: the J-1 inputs before the first token (zeros at a sequence start), then the L tokens.
    Taps may be wider than the activations. Accumulates in at least fp32, one rounding to x's dtype. Returns [N, L, P].
    """
    J = weight_PJ.shape[1]
    L = window_and_x_NLP.shape[1] - (J - 1)
    wide = at_least_fp32(window_and_x_NLP.dtype)
    x_NLP = window_and_x_NLP.to(wide)
    w_PJ = weight_PJ.to(wide)
    y_NLP = x_NLP[:, 0:L] * w_PJ[:, 0]
    for j in range(1, J):
        y_NLP = y_NLP + x_NLP[:, j : j + L] * w_PJ[:, j]
    return torch.nn.functional.silu(y_NLP).to(window_and_x_NLP.dtype)
