"""Batch-invariant x W^T, and LoRA pairs above it, an adapter a row; `multi_lora.py` has those with gradients."""

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


def lora_branch(
    x_MK: Tensor, A_arK: Tensor, B_aNr: Tensor, adapter_M: Tensor, scale_a: Tensor, onto_MN: Tensor | None = None
) -> Tensor:
    """See the reference. On a GPU a row has the same bits in every batch, whatever adapters share it."""
    if not x_MK.is_cuda:
        return reference.lora_branch(x_MK, A_arK, B_aNr, adapter_M, scale_a, onto_MN)
    from k3kernels.linear import triton  # where there is no GPU, Triton need not be installed

    with torch.cuda.device(x_MK.device):
        return triton.lora_branch(x_MK, A_arK, B_aNr, adapter_M, scale_a, onto_MN)
