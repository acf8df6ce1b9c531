"""x W^T whose rows do not depend on each other, and LoRA pairs above it. Says where they round; the CPU's sums run in
whatever order its BLAS takes, so that only `triton.py` keeps a row's bits in batches of every size."""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.dtypes import at_least_fp32


def linear(x_MK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T, summed in at least fp32 and rounded once, to out_dtype (none: x's; fp32 for a head's logits)."""
    wide = at_least_fp32(x_MK.dtype)
    return (x_MK.to(wide) @ weight_NK.to(wide).T).to(out_dtype or x_MK.dtype)


def lora_branch(
    x_MK: Tensor, A_arK: Tensor, B_aNr: Tensor, adapter_M: Tensor, scale_a: Tensor, onto_MN: Tensor | None = None
) -> Tensor:
    """onto + scale_a (x A_a^T) B_a^T for each row's adapter a (arXiv 2106.09685), below 0 for none.

    A and B in x's type. x A^T is rounded to it; the rest, with the addition, runs in at least fp32 and is rounded once.
    Without onto_MN it is 0, in x's type.
    """
    wide = at_least_fp32(x_MK.dtype)
    if onto_MN is None:
        onto_MN = x_MK.new_zeros(x_MK.shape[0], B_aNr.shape[1])
    out_MN = onto_MN.clone()
    for a in range(A_arK.shape[0]):
        rows = (adapter_M == a).nonzero(as_tuple=True)[0]
        z_mr = linear(x_MK[rows], A_arK[a])
        addend_mN = scale_a[a].to(wide) * linear(z_mr, B_aNr[a], wide)
        out_MN[rows] = (onto_MN[rows].to(wide) + addend_mN).to(onto_MN.dtype)
    return out_MN
