"""What the log-probability of a token under a linear head is, over whole logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.dtypes import wider


def linear_logprob(hidden_MD: Tensor, weight_VD: Tensor, tokens_M: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(hidden W^T / temperature) at each row's token, fp32 [M].

    Logits are computed in the next wider type than hidden's and normalised in fp64; only the result is rounded to fp32.
    """
    logits_MV = _logits(hidden_MD, weight_VD, temperature).double()
    return -F.cross_entropy(logits_MV, tokens_M, reduction="none").float()


def linear_entropy(hidden_MD: Tensor, weight_VD: Tensor, temperature: float = 1.0) -> Tensor:
    """-sum p log p of softmax(hidden W^T / temperature) in nats, fp32 [M]."""
    logprob_MV = torch.log_softmax(_logits(hidden_MD, weight_VD, temperature).double(), -1)
    return -(logprob_MV.exp() * logprob_MV).sum(-1).float()


def _logits(hidden_MD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    wide = wider(hidden_MD.dtype)
    logits_MV = F.linear(hidden_MD.to(wide), weight_VD.to(wide))
    return logits_MV if temperature == 1.0 else logits_MV / temperature
