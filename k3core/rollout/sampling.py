"""From logits to a token: the sampling distribution, its log-probabilities, and the draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from k3core.types import SamplingParams


def sampling_logprobs(logits_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log of the distribution that tokens are drawn from: temperature, then top-k, then top-p, renormalised after each.

    top-p keeps the fewest likeliest tokens that hold that much. This is what `rollout_logprobs` reports. With top_p = 1 and top_k = 0 it is log_softmax(logits / temperature),
    which the trainer computes too.
    """
    temperature_N1 = torch.tensor([[p.temperature] for p in params], dtype=logits_NV.dtype)
    logprobs_NV = torch.log_softmax(logits_NV / temperature_N1, -1)
    for n, p in enumerate(params):
        if p.top_k > 0 or p.top_p < 1.0:
            logprobs_NV[n] = _truncate(logprobs_NV[n], p)
    return logprobs_NV


def _truncate(logprobs_V: Tensor, p: SamplingParams) -> Tensor:
    sorted_V, order_V = logprobs_V.sort(descending=True, stable=True)
    if p.top_k > 0:
        sorted_V = torch.log_softmax(sorted_V[: p.top_k], -1)
    mass_V = sorted_V.exp().cumsum(0)
    num_kept = 1 + int((mass_V[:-1] < p.top_p).sum())  # the first token always stays
    kept_V = torch.full_like(logprobs_V, float("-inf"))
    kept_V[order_V[:num_kept]] = torch.log_softmax(sorted_V[:num_kept], -1)
    return kept_V


def draw(logprobs_NV: Tensor, uniform_N: Sequence[float]) -> Tensor:
    """Inverse transform: the first token whose cumulative probability exceeds u, one u in [0, 1) per row.

    u times the total stays below the total after rounding too, so there always is one.
    """
    cumulative_NV = logprobs_NV.double().exp().cumsum(-1)
    u_N1 = torch.tensor(uniform_N, dtype=torch.float64).unsqueeze(-1) * cumulative_NV[:, -1:]
    return (cumulative_NV <= u_N1).sum(-1)


def sequence_generator(seed: int) -> np.random.Generator:
    """A counter-based stream of one sequence: what it draws depends on its seed and on how many tokens it has."""
    return np.random.Generator(np.random.Philox(key=seed))
