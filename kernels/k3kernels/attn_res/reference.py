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
    wide = at_least_fp32(rows[0].dtype)
    rows_RTD = torch.stack([row.to(wide) for row in rows])
    scale_RT = torch.rsqrt(rows_RTD.square().mean(-1) + eps)
    score_RT = (rows_RTD @ (norm_D.to(wide) * proj_D.to(wide))) * scale_RT
    prob_RT = torch.softmax(score_RT, dim=0)
    return (prob_RT.unsqueeze(-1) * rows_RTD).sum(0).to(rows[0].dtype)
