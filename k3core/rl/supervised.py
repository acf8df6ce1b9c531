"""Supervised steps on demonstrations: the warm start and the control arms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3kernels.packing import Packing


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Token ids of a whole conversation and which of them are the assistant's own (trained)."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def cross_entropy_loss(logprobs_M: Tensor, num_targets: int) -> Tensor:
    """Mean negative log-likelihood over the step's trained tokens; micro-batches add up."""
    return -logprobs_M.sum() / num_targets


def pack(demonstrations: Sequence[Demonstration]) -> tuple[Tensor, Packing, Tensor]:
    """tokens_T, packing, and target_M as in Batch."""
    tokens_T = torch.tensor([token for d in demonstrations for token in d.tokens])
    mask_T = torch.tensor([m for d in demonstrations for m in d.loss_mask])
    return tokens_T, Packing(tuple(len(d.tokens) for d in demonstrations)), mask_T.nonzero().squeeze(-1)


def warmup_cosine(step: int, steps: int, warmup: int, floor: float) -> float:
    """Factor of the learning rate at 0-based `step`: linear over `warmup` steps, then cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + float(torch.cos(torch.tensor(progress * torch.pi))))


Draw = Callable[[int], Demonstration]
