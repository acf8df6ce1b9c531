"""Attention Residual read with hand-written backward, row by row: no [R, T, D] tensor is ever made (CPU training)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attn_res_mix(rows: Sequence[Tensor], norm_D: Tensor, proj_D: Tensor, eps: float) -> Tensor:
    out: Tensor = _Mix.apply(norm_D * proj_D, eps, *rows)
    return out


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, eps, *rows):  # type: ignore[no-untyped-def]
        inverse_RT = torch.stack([torch.linalg.vector_norm(row, dim=-1) for row in rows])
        inverse_RT = torch.rsqrt(inverse_RT * inverse_RT / query.shape[0] + eps)
        dot_RT = torch.stack([row @ query for row in rows])
        prob_RT = torch.softmax(dot_RT * inverse_RT, dim=0)
        out = rows[0] * prob_RT[0].unsqueeze(-1)
        for row, prob_T in zip(rows[1:], prob_RT[1:], strict=True):
            out.addcmul_(row, prob_T.unsqueeze(-1))
        ctx.save_for_backward(query, inverse_RT, dot_RT, prob_RT, *rows)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        query, inverse_RT, dot_RT, prob_RT, *rows = ctx.saved_tensors
        grad_prob_RT = torch.stack([(grad * row).sum(-1) for row in rows])
        grad_score_RT = prob_RT * (grad_prob_RT - (prob_RT * grad_prob_RT).sum(0))
        along_query_RT = grad_score_RT * inverse_RT
        along_row_RT = grad_score_RT * dot_RT * inverse_RT.pow(3) / query.shape[0]
        grad_query = torch.zeros_like(query)
        grad_rows = []
        for r, row in enumerate(rows):
            grad_row = grad * prob_RT[r].unsqueeze(-1)
            grad_row.addr_(along_query_RT[r], query)
            grad_row.addcmul_(row, along_row_RT[r].unsqueeze(-1), value=-1)
            grad_rows.append(grad_row)
            grad_query.addmv_(row.T, along_query_RT[r])
        return grad_query, None, *grad_rows
