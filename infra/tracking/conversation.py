"""An episode taken apart again: what the policy wrote turn by turn, and what each call gave back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from k3core.chat import MalformedTurn, chat_format
from k3core.tokenizer import Tokenizer
from k3core.types import Message, ToolCall, Trajectory

ERROR_PREFIX = "error: "  # how every tool begins the answer to a wrong call


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
    chat = chat_format(tokenizer)
    ids = trajectory.tokens_T.tolist()
    spans = list(_sampled_spans(trajectory.loss_mask_T))
    starts = [start for start, _ in spans] or [len(ids)]
    opening = tuple(chat.read_messages(ids[: starts[0]]))
    turns = []
    for n, (start, end) in enumerate(spans):
        # A turn that a stop of the sampling ended was closed for the policy.
        closed = end + (ids[end : end + 1] == [chat.stop_token])
        try:
            message = chat.parse_turn(ids[start:closed], thinking=chat.thinks_after(ids[:start]))
        except MalformedTurn:
            message = None
        calls = () if message is None else message.tool_calls
        answers = {m.index: m.content for m in chat.read_messages(ids[closed : [*starts, len(ids)][n + 1]], calls)}
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
