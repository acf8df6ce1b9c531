"""Attention Residuals."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from k3kernels.attn_res import eager
from k3kernels.dispatch import uses_kernel
from k3kernels.two_forms import forward_and_gradient


def attn_res_mix(rows: Sequence[Tensor], norm_D: Tensor, proj_D: Tensor, eps: float) -> Tensor:
    """See the reference."""
    if not uses_kernel(rows[0]):
        return eager.attn_res_mix(rows, norm_D, proj_D, eps)
    from k3kernels.attn_res import triton  # where there is no GPU, Triton need not be installed

    def kernel(norm_D: Tensor, proj_D: Tensor, *rows: Tensor) -> Tensor:
        return triton.attn_res_mix(rows, norm_D, proj_D, eps)

    def gradient(norm_D: Tensor, proj_D: Tensor, *rows: Tensor) -> Tensor:
        return eager.attn_res_mix(rows, norm_D, proj_D, eps)

    return forward_and_gradient(kernel, gradient, norm_D, proj_D, *rows)
