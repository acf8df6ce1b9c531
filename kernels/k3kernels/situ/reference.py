"""SiTU, the gated activation of K3's MLPs."""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.dtypes import at_least_fp32


def situ(gate_TF: Tensor, up_TF: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """beta tanh(g/beta) sigmoid(g) * lb tanh(u/lb), at least fp32 inside, rounded once; linear_beta None leaves u as it is."""
    wide = at_least_fp32(gate_TF.dtype)
    g_TF, u_TF = gate_TF.to(wide), up_TF.to(wide)
    if linear_beta is not None:
        u_TF = linear_beta * torch.tanh(u_TF / linear_beta)
    return (beta * torch.tanh(g_TF / beta) * torch.sigmoid(g_TF) * u_TF).to(gate_TF.dtype)
