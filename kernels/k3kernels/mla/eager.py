"""Causal attention by torch's own fused kernel, which keeps no scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from k3kernels.dispatch import uses_kernel

CUDNN_WIDTHS = (192, 128)  # of keys and values, K3's and Kimi-Linear's: what was measured


def mla_attention_from_start(q_NHQX: Tensor, k_NHQX: Tensor, v_NHQV: Tensor, scale: float) -> Tensor:
    """The definition `mla_attention` with query_pos = 0, 1, ...

    The values are padded to the keys' width, which that kernel wants. Where rows are padded to the longest sequence, what
    lies behind a row's end is seen only by queries behind it. In kernels' mode and bf16 it is cuDNN's, without padding, but
    in torch's deterministic mode: backward, cuDNN's adds in no fixed order.
    """
    if _takes_cudnn(q_NHQX, v_NHQV):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q_NHQX, k_NHQX, v_NHQV, is_causal=True, scale=scale)
    V = v_NHQV.shape[-1]
    v_NHQX = F.pad(v_NHQV, (0, q_NHQX.shape[-1] - V))
    return F.scaled_dot_product_attention(q_NHQX, k_NHQX, v_NHQX, is_causal=True, scale=scale)[..., :V]


def _takes_cudnn(q_NHQX: Tensor, v_NHQV: Tensor) -> bool:
    return (
        uses_kernel(q_NHQX)
        and q_NHQX.dtype == torch.bfloat16
        and (q_NHQX.shape[-1], v_NHQV.shape[-1]) == CUDNN_WIDTHS
        and not torch.are_deterministic_algorithms_enabled()
    )
