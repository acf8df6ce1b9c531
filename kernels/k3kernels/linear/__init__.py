"""Batch-invariant x W^T; `multi_lora.py` has LoRA pairs above it, an adapter a row."""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.linear import reference


def linear(x_MK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T, bf16 or fp32, rounded once to out_dtype (none: x's). On a GPU a row has the same bits in every batch.

    Differentiable; gradients come from torch.mm and are not batch invariant.
    """
    if not x_MK.is_cuda:
        return reference.linear(x_MK, weight_NK, out_dtype)
    from k3kernels.linear import triton  # where there is no GPU, Triton need not be installed

    with torch.cuda.device(x_MK.device):
        return triton.linear(x_MK, weight_NK, out_dtype)
