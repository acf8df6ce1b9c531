"""Attention Residuals (arXiv 2603.15031), the read of the block form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3kernels.dtypes import at_least_fp32


def attn_res_mix(rows: Sequence[Tensor], norm_D: Tensor, proj_D: Tensor, eps: float) -> Tensor:
    """Softmax-weighted sum over R residual rows [T, D] per token.

    score_r = sum_c row_rc * rsqrt(mean_c row_r^2 + eps) * (norm_c proj_c), softmax over r without a scale.
    Only the keys are normalised; the values are the raw rows. At least fp32 inside (norm proj and scores too), rounded
    once.
    """
    return _mix(rows, norm_D, proj_D, eps).to(rows[0].dtype)


def attn_res_norm(
    rows: Sequence[Tensor], norm_D: Tensor, proj_D: Tensor, eps: float, next_norm_D: Tensor, next_eps: float
) -> Tensor:
    """round(mix / rms(mix) * next_norm): the read and the RMSNorm of the sub-layer that reads.

    The mix is kept in at least fp32 and never rounded; weight and quotient are multiplied there too, and rounded once.
    `rms_norm.reference` of `attn_res_mix` differs in bf16: it rounds the mix, and the quotient before the weight.
    """
    mix_TD = _mix(rows, norm_D, proj_D, eps)
    inverse_T1 = torch.rsqrt(mix_TD.square().mean(-1, keepdim=True) + next_eps)
    return (mix_TD * inverse_T1 * next_norm_D.to(mix_TD.dtype)).to(rows[0].dtype)


def _mix(rows: Sequence[Tensor], norm_D: Tensor, proj_D: Tensor, eps: float) -> Tensor:
    wide = at_least_fp32(rows[0].dtype)
    rows_RTD = torch.stack([row.to(wide) for row in rows])
    scale_RT = torch.rsqrt(rows_RTD.square().mean(-1) + eps)
    score_RT = (rows_RTD @ (norm_D.to(wide) * proj_D.to(wide))) * scale_RT
    prob_RT = torch.softmax(score_RT, dim=0)
    return (prob_RT.unsqueeze(-1) * rows_RTD).sum(0)
