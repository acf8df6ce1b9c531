"""Supervised steps on demonstrations: the warm start and the control arms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from k3core.chat import PLAIN, ChatSettings, History, chat_format
from k3core.rl.optim import StepResult
from k3core.rl.trainer import Trainer
from k3core.tokenizer import Tokenizer
from k3core.types import Message, ToolCall
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


def demonstration(messages: Sequence[Message], tokenizer: Tokenizer, settings: ChatSettings = PLAIN) -> Demonstration:
    """The same token layout as an episode's: tools and prompt, then stub, turn, tool results, stub, turn, ..."""
    chat = chat_format(tokenizer)
    history = History()
    history.append_context(chat.render_messages((), settings))
    calls: tuple[ToolCall, ...] | None = None
    for role, group in groupby(messages, key=lambda message: message.role):
        if role == "assistant":
            for message in group:
                history.append_context(chat.generation_stub(settings.thinking))
                history.append_sampled(chat.render_turn(message, settings.thinking))
                calls = message.tool_calls
        elif role == "tool":
            history.append_context(chat.render_tool_results(list(group), calls))
        else:
            history.append_context(chat.render_messages(list(group)))
    return Demonstration(tuple(history.tokens), tuple(history.loss_mask))


def supervised_step(
    trainer: Trainer, demonstrations: Sequence[Demonstration], microbatch_rows: int, learning_rate: float
) -> SupervisedStep:
    """One optimizer step of the mean negative log-likelihood over all trained tokens of these demonstrations.

    Without a trained token the mean is not a number, and the step is refused.
    """
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
