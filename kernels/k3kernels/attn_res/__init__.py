"""Attention Residuals."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from k3kernels.attn_res import eager
from k3kernels.dispatch import uses_kernel


def attn_res_mix(rows: Sequence[Tensor], norm_D: Tensor, proj_D: Tensor, eps: float) -> Tensor:
    """See the reference."""
    return attn_res(rows, norm_D, proj_D, eps)


def attn_res(
    rows: Sequence[Tensor],
    norm_D: Tensor,
    proj_D: Tensor,
    eps: float,
    next_norm_D: Tensor | None = None,
    next_eps: float = 1e-5,
) -> Tensor:
    """`reference.attn_res_mix` of the rows or, with a next_norm_D, `reference.attn_res_norm`: the read and the norm
    after it, between which nothing is rounded. On a GPU rows are read where they lie, so slices of a bank are fine."""
    if not uses_kernel(rows[0]):
        return eager.attn_res(rows, norm_D, proj_D, eps, next_norm_D, next_eps)
    from k3kernels.attn_res import triton  # where there is no GPU, Triton need not be installed

    return triton.attn_res(rows, norm_D, proj_D, eps, next_norm_D, next_eps)


def attn_res_bank(
    bank_TBD: Tensor,
    num_rows: int,
    current_TD: Tensor,
    norm_D: Tensor,
    proj_D: Tensor,
    eps: float,
    next_norm_D: Tensor | None = None,
    next_eps: float = 1e-5,
) -> Tensor:
    """`attn_res` of the first num_rows rows of a token-major bank and the current one. On a GPU the bank's gradient is
    one tensor [T, B, D], written once, with zeros behind num_rows."""
    if not uses_kernel(bank_TBD):
        rows = [*bank_TBD.unbind(1)[:num_rows], current_TD]
        return eager.attn_res(rows, norm_D, proj_D, eps, next_norm_D, next_eps)
    from k3kernels.attn_res import triton

    return triton.attn_res_bank(bank_TBD, num_rows, current_TD, norm_D, proj_D, eps, next_norm_D, next_eps)
