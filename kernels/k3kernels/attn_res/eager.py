"""Attention Residual read with hand-written backward, row by row: no [R, T, D] tensor is ever made.

Rows are widened one at a time, where they are read, and kept in their own type.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3kernels.dtypes import at_least_fp32


def attn_res_mix(rows: Sequence[Tensor], norm_D: Tensor, proj_D: Tensor, eps: float) -> Tensor:
    return attn_res(rows, norm_D, proj_D, eps)


def attn_res(
    rows: Sequence[Tensor],
    norm_D: Tensor,
    proj_D: Tensor,
    eps: float,
    next_norm_D: Tensor | None = None,
    next_eps: float = 1e-5,
) -> Tensor:
    """`reference.attn_res_mix`, or with a next_norm_D `reference.attn_res_norm`."""
    wide = at_least_fp32(rows[0].dtype)
    query_D = norm_D.to(wide) * proj_D.to(wide)
    if not torch.is_grad_enabled():
        mix, *_ = _mix(query_D, eps, rows)
        return _finish(mix, next_norm_D, next_eps, rows[0].dtype)
    out: Tensor = _Mix.apply(query_D, eps, next_norm_D, next_eps, *rows)
    return out


def _mix(query: Tensor, eps: float, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mixture, not yet rounded, and what its backward needs: 1/rms, dot and weight of each row [R, T]."""
    wide = query.dtype
    norms, dots = [], []
    for row in rows:
        row_wide = row.to(wide)
        norms.append(torch.linalg.vector_norm(row_wide, dim=-1))
        dots.append(row_wide @ query)
    inverse_RT = torch.stack(norms)
    inverse_RT = torch.rsqrt(inverse_RT * inverse_RT / query.shape[0] + eps)
    dot_RT = torch.stack(dots)
    prob_RT = torch.softmax(dot_RT * inverse_RT, dim=0)
    return _weighted_sum(prob_RT, rows, wide), inverse_RT, dot_RT, prob_RT


def _weighted_sum(prob_RT: Tensor, rows: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    out = rows[0] * prob_RT[0].unsqueeze(-1)
    for row, prob_T in zip(rows[1:], prob_RT[1:], strict=True):
        out.addcmul_(row.to(wide), prob_T.unsqueeze(-1))
    return out


def _finish(mix: Tensor, next_norm: Tensor | None, next_eps: float, dtype: torch.dtype) -> Tensor:
    if next_norm is not None:
        mix = mix * _inverse_rms(mix, next_eps) * next_norm
    return mix.to(dtype)


def _inverse_rms(mix: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(mix.square().mean(-1, keepdim=True) + eps)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, eps, next_norm, next_eps, *rows):  # type: ignore[no-untyped-def]
        mix, *saved = _mix(query, eps, rows)
        ctx.next_eps = next_eps
        ctx.save_for_backward(query, next_norm, *saved, *rows)
        return _finish(mix, next_norm, next_eps, rows[0].dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        query, next_norm, inverse_RT, dot_RT, prob_RT, *rows = ctx.saved_tensors
        grad = grad.to(query.dtype)
        grad_next_norm = None
        if next_norm is not None:
            mix = _weighted_sum(prob_RT, rows, query.dtype)
            inverse = _inverse_rms(mix, ctx.next_eps)
            unit = mix.mul_(inverse)
            grad_next_norm = (grad * unit).sum(0).to(next_norm.dtype)
            grad = grad * next_norm
            grad = grad.addcmul_(unit, (grad * unit).mean(-1, keepdim=True), value=-1).mul_(inverse)
        grad_prob_RT = torch.stack([(grad * row).sum(-1) for row in rows])
        grad_score_RT = prob_RT * (grad_prob_RT - (prob_RT * grad_prob_RT).sum(0))
        along_query_RT = grad_score_RT * inverse_RT
        along_row_RT = grad_score_RT * dot_RT * inverse_RT.pow(3) / query.shape[0]
        grad_query = torch.zeros_like(query)
        grad_rows = []
        for r, row in enumerate(rows):
            row_wide = row.to(query.dtype)
            grad_row = grad * prob_RT[r].unsqueeze(-1)
            grad_row.addr_(along_query_RT[r], query)
            grad_row.addcmul_(row_wide, along_row_RT[r].unsqueeze(-1), value=-1)
            grad_rows.append(grad_row.to(row.dtype))
            grad_query.addmv_(row_wide.T, along_query_RT[r])
        return grad_query, None, grad_next_norm, None, *grad_rows
