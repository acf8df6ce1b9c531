"""An episode taken apart again: what the policy wrote turn by turn, and what each call gave back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from k3core.chat import MalformedTurn, generation_stub, parse_turn
from k3core.tokenizer import Tokenizer
from k3core.types import Message, ToolCall, Trajectory

ERROR_PREFIX = "error: "  # how every tool begins the answer to a wrong call

_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Called:
    """A call, and what the policy read back. `output` is None when the episode ended before it could read anything."""

    call: ToolCall
    output: str | None

    @property
    def is_error(self) -> bool:
        return self.call.error is not None or (self.output is not None and self.output.startswith(ERROR_PREFIX))


@dataclass(frozen=True, slots=True)
class Turn:
    """`message` is None for what is no assistant turn; `text` is what was sampled, control tokens by name.

    num_context: tokens that it was sampled after. mean_logprob: of its tokens, nat, as the engine reported them.
    """

    text: str
    message: Message | None
    calls: tuple[Called, ...]
    num_context: int
    num_sampled: int
    mean_logprob: float


@dataclass(frozen=True, slots=True)
class Conversation:
    opening: tuple[Message, ...]
    turns: tuple[Turn, ...]


def conversation_of(trajectory: Trajectory, tokenizer: Tokenizer) -> Conversation:
    """Read from the tokens and their mask alone. A tool's answer belongs to the call of its index."""
    ids = trajectory.tokens_T.tolist()
    spans = list(_sampled_spans(trajectory.loss_mask_T))
    starts = [start for start, _ in spans] or [len(ids)]
    ends = [end for _, end in spans]
    opening = tuple(_messages(ids[: starts[0]], tokenizer))
    turns = []
    for n, (start, end) in enumerate(spans):
        answers = {m.index: m.content for m in _messages(ids[end : [*starts, len(ids)][n + 1]], tokenizer)}
        message = _parse(ids, start, ends[n], tokenizer)
        calls = () if message is None else message.tool_calls
        turns.append(
            Turn(
                text=tokenizer.decode(ids[start:end]),
                message=message,
                calls=tuple(Called(call, answers.get(index)) for index, call in enumerate(calls, start=1)),
                num_context=start,
                num_sampled=end - start,
                mean_logprob=float(trajectory.rollout_logprobs_T[start:end].mean()),
            )
        )
    return Conversation(opening, tuple(turns))


def _sampled_spans(loss_mask_T: np.ndarray) -> Iterator[tuple[int, int]]:
    """Between two turns there is at least the stub of the later one, so that each run of true is one turn."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], loss_mask_T, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _parse(ids: Sequence[int], start: int, end: int, tokenizer: Tokenizer) -> Message | None:
    """The stub before it says whether the turn begins in the think channel."""
    stub = generation_stub(tokenizer, thinking=True)
    thinking = list(ids[max(0, start - len(stub)) : start]) == stub
    try:
        return parse_turn(ids[start:end], tokenizer, thinking)
    except MalformedTurn:
        return None


def _messages(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[Message]:
    """Complete messages, split at control ids; what follows the last one, the stub of a turn, is none."""
    begin = 0
    for at, token in enumerate(ids):
        if token != tokenizer.end_of_msg:
            continue
        message = list(ids[begin:at])
        begin = at + 1
        head = message.index(tokenizer.sep)
        tail = len(message) - 1 - message[::-1].index(tokenizer.close)
        attributes = {key: _unescape(value) for key, value in _ATTRIBUTE.findall(tokenizer.decode(message[1:head]))}
        index = attributes.get("index")
        yield Message(
            role=attributes["role"],  # type: ignore[arg-type]  # rendering wrote it from one
            content=tokenizer.decode(message[head + 1 : tail]),
            tool=attributes.get("tool"),
            index=None if index is None else int(index),
            type=attributes.get("type"),
        )


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")
