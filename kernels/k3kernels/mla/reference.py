"""Multi-head latent attention without positions: over each head's keys and values, and absorbed over latent rows."""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.dtypes import at_least_fp32


def mla_attention(q_NHQX: Tensor, k_NHSX: Tensor, v_NHSV: Tensor, query_pos_NQ: Tensor, scale: float) -> Tensor:
    """softmax(q k^T scale) v with key s visible to a query at position p iff s <= p.

    Scores and softmax in at least fp32, probabilities rounded to v's dtype, the sum rounded once more.
    Keys of a row lie at positions 0, 1, ...; what lies behind a row's last key is never visible to its queries.
    """
    wide = at_least_fp32(q_NHQX.dtype)
    scores_NHQS = (q_NHQX.to(wide) @ k_NHSX.to(wide).mT) * scale
    hidden_NQS = torch.arange(k_NHSX.shape[2], device=q_NHQX.device) > query_pos_NQ.unsqueeze(-1)
    scores_NHQS = scores_NHQS.masked_fill(hidden_NQS.unsqueeze(1), float("-inf"))
    return torch.softmax(scores_NHQS, -1).to(v_NHSV.dtype) @ v_NHSV


def mla_paged(
    q_THC: Tensor,
    pool_PSC: Tensor,
    page_table_NM: Tensor,
    sequence_T: Tensor,
    position_T: Tensor,
    R: int,
    scale: float,
) -> Tensor:
    """softmax(q c^T scale) c[:R] over rows s <= position_T of the query's sequence: [T, H, R] in q's type.

    Row s of sequence n is pool[page_table[n, s // page], s % page]. A position below 0 gives zeros.
    """
    page, wide = pool_PSC.shape[1], at_least_fp32(q_THC.dtype)
    out_THR = q_THC.new_zeros(*q_THC.shape[:2], R)
    for t, (n, position) in enumerate(zip(sequence_T.tolist(), position_T.tolist(), strict=True)):
        if position >= 0:
            pages = page_table_NM[n, : position // page + 1].long()
            rows_SC = pool_PSC[pages].flatten(0, 1)[: position + 1].to(wide)
            prob_HS = torch.softmax(q_THC[t].to(wide) @ rows_SC.mT * scale, -1)
            out_THR[t] = (prob_HS @ rows_SC[:, :R]).to(q_THC.dtype)
    return out_THR
