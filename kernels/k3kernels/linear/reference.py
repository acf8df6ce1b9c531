"""x W^T whose rows do not depend on each other, and LoRA pairs above it. Says where they round; the CPU's sums run in
whatever order its BLAS takes, so that only `triton.py` keeps a row's bits in batches of every size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3kernels.dtypes import at_least_fp32


def linear(x_MK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T, summed in at least fp32 and rounded once, to out_dtype (none: x's; fp32 for a head's logits)."""
    wide = at_least_fp32(x_MK.dtype)
    return (x_MK.to(wide) @ weight_NK.to(wide).T).to(out_dtype or x_MK.dtype)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """adapter_T: each row's adapter, an integer; any that is not in 0..num_adapters-1 is none."""

    adapter_T: Tensor
    num_adapters: int


def multi_lora_reference(
    x_TI: Tensor,
    W_OI: Tensor,
    A_nrI: Tensor,
    B_nOr: Tensor,
    scale_n: Tensor,
    rows: AdapterRows,
    ranks_n: Tensor | None = None,
) -> Tensor:
    """x W^T, rounded to x's type, and on it each row's adapter. Differentiable."""
    return multi_lora_onto_reference(linear(x_TI, W_OI), x_TI, A_nrI, B_nOr, scale_n, rows, ranks_n)


def multi_lora_onto_reference(
    onto_TO: Tensor,
    x_TI: Tensor,
    A_nrI: Tensor,
    B_nOr: Tensor,
    scale_n: Tensor,
    rows: AdapterRows,
    ranks_n: Tensor | None = None,
) -> Tensor:
    """onto + z B_a^T with z = scale_a x A_a^T, for each row's adapter a. Differentiable.

    A and B are rounded to x's type, and without what lies above an adapter's rank. z is rounded to x's type, and so is
    the sum, which is at least fp32.
    """
    wide = at_least_fp32(x_TI.dtype)
    if ranks_n is not None:
        is_in_nr = torch.arange(A_nrI.shape[1], device=ranks_n.device) < ranks_n[:, None]
        A_nrI = torch.where(is_in_nr[:, :, None], A_nrI, 0)
        B_nOr = torch.where(is_in_nr[:, None, :], B_nOr, 0)
    A_nrI, B_nOr = A_nrI.to(x_TI.dtype), B_nOr.to(x_TI.dtype)
    y_TO = onto_TO
    for a in range(rows.num_adapters):
        of_a = (rows.adapter_T == a).nonzero(as_tuple=True)[0]
        z_tr = (scale_n[a].to(wide) * linear(x_TI[of_a], A_nrI[a], wide)).to(x_TI.dtype)
        sum_tO = onto_TO[of_a].to(wide) + linear(z_tr, B_nOr[a], wide)
        y_TO = y_TO.index_copy(0, of_a, sum_tO.to(onto_TO.dtype))
    return y_TO
