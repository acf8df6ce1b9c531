"""Multi-head latent attention without positions: causal attention over latent rows, in two forms."""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.dtypes import at_least_fp32

KEY_BLOCK = 128  # keys that one GEMM of the absorbed form sums over; a BLAS splits longer sums by their length


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


def mla_absorbed(
    q_nope_NHX: Tensor,
    q_pe_NHP: Tensor,
    cache_NSC: Tensor,
    kv_b_HXR: Tensor,
    kv_b_HVR: Tensor,
    pos_N: Tensor,
    scale: float,
) -> Tensor:
    """One query per row straight on the latent cache rows (latent R | shared key P): kv_b is folded into q and the output.

    Equal to mla_attention over kv_b's expansion up to rounding: here only probabilities and result are rounded, not the
    keys and values of each head. pos_N is the position of the query, its row included. Rows behind it weigh 0 (they
    must be finite) and are summed block by block, so their number changes no bit.
    """
    R, wide = kv_b_HXR.shape[-1], at_least_fp32(q_nope_NHX.dtype)
    q_NHR = torch.einsum("nhx,hxr->nhr", q_nope_NHX.to(wide), kv_b_HXR.to(wide))
    cache_wide_NSC = cache_NSC.to(wide)
    scores_NHS = (torch.cat([q_NHR, q_pe_NHP.to(wide)], -1) @ cache_wide_NSC.mT) * scale
    hidden_NS = torch.arange(cache_NSC.shape[1], device=cache_NSC.device) > pos_N.unsqueeze(-1)
    prob_NHS = torch.softmax(scores_NHS.masked_fill(hidden_NS.unsqueeze(1), float("-inf")), -1)
    prob_NHS = prob_NHS.to(cache_NSC.dtype).to(wide)
    latent_NHR = prob_NHS[..., :KEY_BLOCK] @ cache_wide_NSC[:, :KEY_BLOCK, :R]
    for block in range(KEY_BLOCK, cache_NSC.shape[1], KEY_BLOCK):
        keys = slice(block, block + KEY_BLOCK)
        latent_NHR = latent_NHR + prob_NHS[..., keys] @ cache_wide_NSC[:, keys, :R]
    return torch.einsum("nhr,hvr->nhv", latent_NHR, kv_b_HVR.to(wide)).to(q_nope_NHX.dtype)
