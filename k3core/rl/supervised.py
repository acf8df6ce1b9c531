"""Supervised steps on demonstrations: the warm start and the control arms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from k3core.chat import History, generation_stub, render_messages, render_tool_results, render_turn
from k3core.rl.optim import StepResult
from k3core.rl.trainer import Trainer
from k3core.tokenizer import Tokenizer
from k3core.types import Message
from k3kernels.packing import Packing


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Token ids of a whole conversation and which of them are the assistant's own (trained)."""

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class SupervisedStep:
    """loss: mean negative log-likelihood in nats per trained token."""

    loss: float
    num_tokens: int
    result: StepResult


def demonstration(messages: Sequence[Message], tokenizer: Tokenizer, thinking: bool) -> Demonstration:
    """The same token layout as an episode's: prompt, then stub, turn, tool results, stub, turn, ..."""
    history = History()
    for role, group in groupby(messages, key=lambda message: message.role):
        if role == "assistant":
            for message in group:
                history.append_context(generation_stub(tokenizer, thinking))
                history.append_sampled(render_turn(message, tokenizer, thinking))
        elif role == "tool":
            history.append_context(render_tool_results(list(group), tokenizer))
        else:
            history.append_context(render_messages(list(group), tokenizer, thinking=thinking))
    return Demonstration(tuple(history.tokens), tuple(history.loss_mask))


def supervised_step(
    trainer: Trainer, demonstrations: Sequence[Demonstration], microbatch_rows: int, learning_rate: float
) -> SupervisedStep:
    """One optimizer step of the mean negative log-likelihood over all trained tokens of these demonstrations."""
    by_length = sorted(demonstrations, key=lambda d: len(d.tokens))
    num_targets = sum(sum(d.loss_mask) for d in by_length)

    def loss(logprobs_M: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value = -logprobs_M.sum() / num_targets
        return value, {"loss": value.detach()}

    total, num_tokens = 0.0, 0
    for start in range(0, len(by_length), microbatch_rows):
        rows = by_length[start : start + microbatch_rows]
        tokens_T = torch.tensor([token for d in rows for token in d.tokens])
        target_M = torch.tensor([m for d in rows for m in d.loss_mask]).nonzero().squeeze(-1)
        packing = Packing(tuple(len(d.tokens) for d in rows))
        total += float(trainer.forward_backward(tokens_T, packing, target_M, loss)["loss"])
        num_tokens += packing.num_tokens
    return SupervisedStep(total, num_tokens, trainer.optim_step(learning_rate))


def warmup_cosine(step: int, steps: int, warmup: int, floor: float) -> float:
    """Factor of the learning rate at 0-based `step`: linear over `warmup` steps, then cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
