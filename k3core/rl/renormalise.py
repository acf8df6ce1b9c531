"""The trainer's log-probabilities over the tokens that the engine's sampling had kept.

Top-k, top-p and min-p leave tokens out and renormalise the rest. The trainer must not choose again, since its weights
differ; it takes the recorded support as given, as DeepSeek-V3.2 does (arXiv:2512.02556, "keep sampling mask"). At equal
logits the result is the engine's behaviour logprob bit for bit: both are log_softmax over the whole row with -inf at
what was left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Head = Callable[[Tensor], Tensor]  # hidden_MD -> logits_MV


def supported_logprobs(
    logits_MV: Tensor, tokens_M: Tensor, temperature: float, supports: Sequence[np.ndarray | None]
) -> Tensor:
    """log p(token | support) under softmax(logits / temperature), [M] in the logits' type, differentiable.

    supports: the kept token ids of each row; None for the whole vocabulary. Raises ValueError for a temperature that is
    not positive, an id outside the vocabulary, and a token that is not in its support.
    """
    _check(tokens_M, temperature, supports, logits_MV.shape[-1])
    return _logprobs(logits_MV, tokens_M, temperature, supports)


def head_supported_logprobs(
    hidden_MD: Tensor,
    head: Head,
    weights: Sequence[Tensor],
    num_tokens: int,
    tokens_M: Tensor,
    temperature: float,
    supports: Sequence[np.ndarray | None],
    block_rows: int,
) -> Tensor:
    """`supported_logprobs` of head(hidden), [M]; the logits of block_rows rows exist at a time.

    weights: what the head multiplies by, whose gradients are wanted; num_tokens: the vocabulary's. The values are always
    those of the head without gradients, which is how the engine computes them and which the first ratio needs; the
    backward pass computes each block's logits again, and holds what autograd keeps of the head for that long.
    """
    _check(tokens_M, temperature, supports, num_tokens)
    parts: list[Tensor] = []
    for start in range(0, len(tokens_M), block_rows):
        rows = slice(start, start + block_rows)
        block = partial(_of_head, head, tokens_M[rows], temperature, supports[rows])
        parts.append(_Recomputed.apply(block, hidden_MD[rows], *weights))
    return torch.cat(parts) if parts else hidden_MD.new_zeros(0)


class _Recomputed(torch.autograd.Function):
    """compute(hidden), without gradients forward, and again with them backward. weights: what else it depends on."""

    @staticmethod
    def forward(ctx, compute, hidden, *weights):  # type: ignore[no-untyped-def]
        ctx.compute, ctx.weights = compute, weights
        ctx.save_for_backward(hidden)
        return compute(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (hidden,) = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            again = hidden.detach().requires_grad_(needs[0])
            value = ctx.compute(again)
        wanted = [x for x, is_needed in zip((again, *ctx.weights), needs, strict=True) if is_needed]
        found = iter(torch.autograd.grad(value, wanted, grad))
        return None, *(next(found) if is_needed else None for is_needed in needs)


def _of_head(
    head: Head, tokens_M: Tensor, temperature: float, supports: Sequence[np.ndarray | None], hidden_MD: Tensor
) -> Tensor:
    return _logprobs(head(hidden_MD), tokens_M, temperature, supports)


def _logprobs(logits_MV: Tensor, tokens_M: Tensor, temperature: float, supports: Sequence[np.ndarray | None]) -> Tensor:
    # A tensor divides in the logits' type, as the engine's temperatures do.
    scaled_MV = logits_MV / torch.tensor([[temperature]], dtype=logits_MV.dtype).to(logits_MV.device)
    if any(support is not None for support in supports):
        scaled_MV = scaled_MV.masked_fill(~_mask(supports, logits_MV), -math.inf)
    return torch.log_softmax(scaled_MV, -1).gather(1, tokens_M.long().unsqueeze(-1)).squeeze(-1)


def _mask(supports: Sequence[np.ndarray | None], like_MV: Tensor) -> Tensor:
    is_whole_M1 = torch.tensor([[support is None] for support in supports], device=like_MV.device)
    mask_MV = is_whole_M1.expand(like_MV.shape).clone()
    rows, ids = (torch.from_numpy(index).to(like_MV.device) for index in _flat(supports))
    mask_MV[rows, ids] = True
    return mask_MV


def _flat(supports: Sequence[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray]:
    """All (row, kept id) pairs."""
    lengths = [0 if support is None else len(support) for support in supports]
    ids = [np.asarray(support, dtype=np.int64) for support in supports if support is not None]
    return np.repeat(np.arange(len(supports)), lengths), np.concatenate([np.empty(0, np.int64), *ids])


def _check(tokens_M: Tensor, temperature: float, supports: Sequence[np.ndarray | None], num_tokens: int) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: a trainer needs the positive one that the tokens were drawn at")
    if len(supports) != len(tokens_M):
        raise ValueError(f"{len(supports)} supports for {len(tokens_M)} tokens: record one for each, None where whole")
    rows, ids = _flat(supports)
    if len(ids) and not (ids.min() >= 0 and ids.max() < num_tokens):
        raise ValueError(f"a support has ids {ids.min()} to {ids.max()}, the vocabulary {num_tokens} tokens")
    tokens = tokens_M.cpu().numpy()
    inside = np.array([support is None for support in supports], dtype=bool)
    inside[rows[ids == tokens[rows]]] = True
    if not inside.all():
        row = int(np.flatnonzero(~inside)[0])
        raise ValueError(f"row {row}: token {tokens[row]} is not in the support it was drawn from; the record is torn")
