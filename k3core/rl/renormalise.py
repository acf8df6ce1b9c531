"""The trainer's log-probabilities over the tokens that the engine's sampling had kept.

Top-k, top-p and min-p leave tokens out and renormalise the rest. The trainer must not choose again, since its weights
differ; it takes the recorded support as given, as DeepSeek-V3.2 does (arXiv:2512.02556, "keep sampling mask"). At equal
logits the result is the engine's behaviour logprob bit for bit: both are log_softmax over the whole row with -inf at
what was left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BLOCK_ROWS = 256  # rows of logits that exist at a time where the head is applied here


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
    weight_VD: Tensor,
    tokens_M: Tensor,
    temperature: float,
    supports: Sequence[np.ndarray | None],
    block_rows: int = BLOCK_ROWS,
) -> Tensor:
    """`supported_logprobs` of hidden @ weight^T, [M] in at least fp32; the logits of one block of rows exist at a time.

    The backward pass computes each block's logits again.
    """
    _check(tokens_M, temperature, supports, weight_VD.shape[0])
    wide = torch.promote_types(hidden_MD.dtype, torch.float32)

    def block(hidden_BD: Tensor, weight_VD: Tensor, tokens_B: Tensor, kept: Sequence[np.ndarray | None]) -> Tensor:
        return _logprobs(F.linear(hidden_BD.to(wide), weight_VD.to(wide)), tokens_B, temperature, kept)

    parts: list[Tensor] = []
    for start in range(0, len(tokens_M), block_rows):
        rows = slice(start, start + block_rows)
        part = checkpoint(block, hidden_MD[rows], weight_VD, tokens_M[rows], supports[rows], use_reentrant=False)
        assert isinstance(part, Tensor)
        parts.append(part)
    return torch.cat(parts) if parts else hidden_MD.new_zeros(0, dtype=wide)


def _logprobs(logits_MV: Tensor, tokens_M: Tensor, temperature: float, supports: Sequence[np.ndarray | None]) -> Tensor:
    # A tensor divides in the logits' type, as the engine's temperatures do.
    scaled_MV = logits_MV / torch.tensor([[temperature]], dtype=logits_MV.dtype).to(logits_MV.device)
    if any(support is not None for support in supports):
        scaled_MV = scaled_MV.masked_fill(~_mask(supports, logits_MV.shape[-1]).to(logits_MV.device), -math.inf)
    return torch.log_softmax(scaled_MV, -1).gather(1, tokens_M.long().unsqueeze(-1)).squeeze(-1)


def _mask(supports: Sequence[np.ndarray | None], num_tokens: int) -> Tensor:
    whole_M = np.array([support is None for support in supports])
    mask_MV = np.repeat(whole_M[:, None], num_tokens, axis=1)
    rows, ids = _flat(supports)
    mask_MV[rows, ids] = True
    return torch.from_numpy(mask_MV)


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
