"""Gated activations: SiTU, and SiLU in its place."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from k3kernels.dispatch import uses_kernel
from k3kernels.situ.eager import situ as situ
from k3kernels.two_forms import forward_and_gradient

Betas = tuple[float, float | None] | None
"""SiTU's (beta, linear_beta); None is SiLU."""


def gated_activation(gate_TF: Tensor, up_TF: Tensor, situ_betas: Betas) -> Tensor:
    if not uses_kernel(gate_TF):
        return _eager(gate_TF, up_TF, situ_betas)
    from k3kernels.situ import triton  # where there is no GPU, Triton need not be installed

    forms = (partial(triton.gated_activation, situ_betas=situ_betas), partial(_eager, situ_betas=situ_betas))
    return forward_and_gradient(*forms, gate_TF, up_TF)


def _eager(gate_TF: Tensor, up_TF: Tensor, situ_betas: Betas) -> Tensor:
    return F.silu(gate_TF) * up_TF if situ_betas is None else situ(gate_TF, up_TF, *situ_betas)
