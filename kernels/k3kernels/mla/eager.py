"""Causal attention that never holds all scores of a long sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.dtypes import at_least_fp32
from k3kernels.mla import reference

LARGEST_BYTES = 256 * 2**20  # of the scores made at once; three or four tensors of that size are held


def mla_attention_from_start(q_NHQX: Tensor, k_NHQX: Tensor, v_NHQV: Tensor, scale: float) -> Tensor:
    """mla_attention with query_pos = 0, 1, ..., by torch's own fused kernel (training).

    The values are padded to the keys' width, which that kernel wants. Where rows are padded to the longest sequence,
    what lies behind a row's end is seen only by queries behind it.
    """
    V = v_NHQV.shape[-1]
    v_NHQX = F.pad(v_NHQV, (0, q_NHQX.shape[-1] - V))
    return F.scaled_dot_product_attention(q_NHQX, k_NHQX, v_NHQX, is_causal=True, scale=scale)[..., :V]


def mla_attention(q_NHQX: Tensor, k_NHSX: Tensor, v_NHSV: Tensor, query_pos_NQ: Tensor, scale: float) -> Tensor:
    """The definition, in blocks of queries where all scores together would be large (prefill over a history)."""
    N, H, Q, S = *q_NHQX.shape[:3], k_NHSX.shape[2]
    block = max(1, LARGEST_BYTES // (N * H * S * at_least_fp32(q_NHQX.dtype).itemsize))
    if block >= Q:
        return reference.mla_attention(q_NHQX, k_NHSX, v_NHSV, query_pos_NQ, scale)
    pieces = zip(q_NHQX.split(block, 2), query_pos_NQ.split(block, 1), strict=True)
    return torch.cat([reference.mla_attention(q, k_NHSX, v_NHSV, pos, scale) for q, pos in pieces], 2)
