"""Gated activations: SiTU, and SiLU in its place."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from k3kernels.dispatch import uses_kernel
from k3kernels.situ.eager import situ as situ

Betas = tuple[float, float | None] | None
"""SiTU's (beta, linear_beta); None is SiLU."""


def gated_activation(gate_TF: Tensor, up_TF: Tensor, situ_betas: Betas) -> Tensor:
    if not uses_kernel(gate_TF):
        return _eager(gate_TF, up_TF, situ_betas)
    from k3kernels.situ.train import gated_activation_train  # where there is no GPU, Triton need not be installed

    return gated_activation_train(gate_TF, up_TF, situ_betas)


def _eager(gate_TF: Tensor, up_TF: Tensor, situ_betas: Betas) -> Tensor:
    return F.silu(gate_TF) * up_TF if situ_betas is None else situ(gate_TF, up_TF, *situ_betas)
