"""From logits to a token: the sampling distribution, its log-probabilities, and the draw.

The distribution of a row, in this order:
1. logits / temperature; temperature 0 keeps the likeliest token alone, whatever else is asked for;
2. top-k keeps the k likeliest tokens;
3. top-p keeps the fewest likeliest of those that hold that much of their probability;
4. min-p keeps of those the tokens with at least that share of the likeliest one's probability;
5. what is left is renormalised once: log_softmax over the kept tokens, -inf elsewhere.
The likeliest token always stays, and of equal tokens the lower id is the likelier. No row depends on another one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from k3core.rollout.sampling_rules import truncates
from k3core.types import SamplingParams

WORDS_PER_BLOCK = 4  # Philox 4x64


@dataclass(frozen=True, slots=True)
class Draws:
    """One token for each row.

    tokens_N int64; logprobs_N under the distribution it was drawn from (the behaviour policy); raw_logprobs_N under
    log_softmax of the untouched logits, both in the logits' type; supports: the kept token ids of each row, int32 and
    ascending, None where the whole vocabulary was kept.
    """

    tokens_N: Tensor
    logprobs_N: Tensor
    raw_logprobs_N: Tensor
    supports: tuple[np.ndarray | None, ...]


def sample(logits_NV: Tensor, params: Sequence[SamplingParams], uniform_N: Sequence[float]) -> Draws:
    """Draw from each row with its own parameters and its own u in [0, 1); the logits must have no NaN."""
    rows, kept_RV = _kept(logits_NV, params)
    logprobs_NV = _logprobs(logits_NV, params, rows, kept_RV)
    tokens_N = draw(logprobs_NV, uniform_N)
    at_N1 = tokens_N.unsqueeze(-1)
    logprobs_N = logprobs_NV.gather(1, at_N1).squeeze(-1)
    raw_N = logprobs_N
    if rows or any(p.temperature != 1 for p in params):
        raw_N = torch.log_softmax(logits_NV, -1).gather(1, at_N1).squeeze(-1)
    return Draws(tokens_N, logprobs_N, raw_N, _supports(len(params), rows, kept_RV))


def sampling_logprobs(logits_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log of the distribution that tokens are drawn from; -inf at tokens that were left out.

    This is what `rollout_logprobs` reports. Where nothing is left out it is log_softmax(logits / temperature), which
    the trainer computes too; where something is, `k3core.rl.renormalise` computes the same.
    """
    return _logprobs(logits_NV, params, *_kept(logits_NV, params))


def _tempered(logits_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Not to be written into: where no temperature changes anything it is the logits themselves."""
    if all(p.temperature == 1 for p in params):
        return logits_NV
    temperature_N1 = torch.tensor([[p.temperature or 1.0] for p in params], dtype=logits_NV.dtype)
    return logits_NV / temperature_N1.to(logits_NV.device)


def _logprobs(logits_NV: Tensor, params: Sequence[SamplingParams], rows: list[int], kept_RV: Tensor) -> Tensor:
    scaled_NV = _tempered(logits_NV, params)
    if rows:
        cut_RV = scaled_NV[rows].masked_fill(~kept_RV, -math.inf)
        scaled_NV = scaled_NV.index_copy(0, torch.tensor(rows, device=scaled_NV.device), cut_RV)
    return torch.log_softmax(scaled_NV, -1)


def _kept(logits_NV: Tensor, params: Sequence[SamplingParams]) -> tuple[list[int], Tensor]:
    """The rows R whose parameters leave tokens out, and which tokens each of them keeps."""
    rows = [n for n, p in enumerate(params) if truncates(p)]
    if not rows:
        return rows, torch.empty(0, logits_NV.shape[1], dtype=torch.bool, device=logits_NV.device)
    cut = [params[n] for n in rows]
    num_tokens = logits_NV.shape[1]

    def column(values: list[float] | list[int]) -> Tensor:
        wide = torch.float64 if isinstance(values[0], float) else torch.long
        return torch.tensor(values, dtype=wide, device=logits_NV.device).unsqueeze(-1)

    k_R1 = column([1 if p.temperature == 0 else p.top_k or num_tokens for p in cut])
    # Rounding must not cut anything where top-p is off.
    top_p_R1 = column([math.inf if p.top_p == 1 else float(p.top_p) for p in cut])
    min_p_R1 = column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in cut])

    sorted_RV, order_RV = _tempered(logits_NV[rows], cut).sort(dim=-1, descending=True, stable=True)
    sorted_RV = sorted_RV.double()
    stays_RV = torch.arange(num_tokens, device=logits_NV.device) < k_R1
    mass_RV = torch.softmax(sorted_RV.masked_fill(~stays_RV, -math.inf), -1).cumsum(-1)
    stays_RV[:, 1:] &= mass_RV[:, :-1] < top_p_R1
    stays_RV[:, 1:] &= (sorted_RV - sorted_RV[:, :1])[:, 1:] >= min_p_R1
    return rows, torch.zeros_like(stays_RV).scatter_(1, order_RV, stays_RV)


def _supports(num_rows: int, rows: list[int], kept_RV: Tensor) -> tuple[np.ndarray | None, ...]:
    supports: list[np.ndarray | None] = [None] * num_rows
    if rows:
        counts_R = kept_RV.sum(-1).cpu().numpy()
        ids = kept_RV.nonzero()[:, 1].to(torch.int32).cpu().numpy()
        for row, support in zip(rows, np.split(ids, counts_R.cumsum()[:-1]), strict=True):
            if len(support) < kept_RV.shape[1]:
                supports[row] = support.copy()  # a view would keep every other row's ids alive
    return tuple(supports)


def draw(logprobs_NV: Tensor, uniform_N: Sequence[float]) -> Tensor:
    """Inverse transform: the first token whose cumulative probability exceeds u, one u in [0, 1) per row.

    u times the total stays below the total after rounding too, so there always is one.
    """
    cumulative_NV = logprobs_NV.double().exp().cumsum(-1)
    u_N1 = torch.tensor(uniform_N, dtype=torch.float64, device=logprobs_NV.device).unsqueeze(-1) * cumulative_NV[:, -1:]
    return torch.searchsorted(cumulative_NV, u_N1, right=True).squeeze(-1)


def sequence_generator(seed: int, num_drawn: int = 0) -> np.random.Generator:
    """A counter-based stream of one sequence, from number `num_drawn` on: what it draws depends on its seed and on how
    many tokens it has drawn, so one that is retried or resumed goes on as it would have."""
    block, word = divmod(num_drawn, WORDS_PER_BLOCK)
    generator = np.random.Generator(np.random.Philox(key=seed, counter=block))
    generator.random(word)
    return generator
