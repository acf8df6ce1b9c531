"""What a chat format is: the seam with two implementations, XTML (K3) and IM (Kimi-Linear)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import ClassVar

from k3core.chat.reader import Control, Piece, Reader
from k3core.chat.settings import PLAIN, ChatSettings
from k3core.types import Message, ToolCall


class Grammar(ABC):
    """Messages as pieces: control tokens, and texts that are each encoded by themselves.

    name: for errors. controls: the control tokens that it is written with. end_of_turn: the last of every message, and
    the one at which an engine stops. All methods but `parse` and `read` raise ValueError on what the format cannot say.
    """

    name: ClassVar[str]
    controls: ClassVar[tuple[Control, ...]]
    end_of_turn: ClassVar[Control]

    @property
    @abstractmethod
    def has_thinking(self) -> bool:
        """Can an assistant turn have a think channel?"""

    @abstractmethod
    def declarations(self, settings: ChatSettings) -> Iterator[Piece]:
        """What stands before the conversation."""

    @abstractmethod
    def requests(self, settings: ChatSettings) -> Iterator[Piece]:
        """What stands after the conversation, before the stub."""

    @abstractmethod
    def stub_pieces(self, thinking: bool) -> Iterator[Piece]:
        """What precedes the policy's first token of a turn."""

    @abstractmethod
    def turn_pieces(self, message: Message, thinking: bool) -> Iterator[Piece]:
        """What the policy itself writes after the stub, up to and including `end_of_turn`."""

    @abstractmethod
    def parse(self, reader: Reader, thinking: bool) -> Message:
        """The inverse of `turn_pieces`; raises MalformedTurn. Reads to the end."""

    @abstractmethod
    def read(self, reader: Reader, calls: Sequence[ToolCall], num_answered: int) -> Message:
        """A message of any role but assistant, from its first token to `end_of_turn`; raises MalformedTurn.

        calls: those that a tool message may answer, empty when nobody knows; the first num_answered are behind us.
        """

    @abstractmethod
    def _given_pieces(self, message: Message) -> Iterator[Piece]:
        """A checked message of role system or user."""

    @abstractmethod
    def _result_pieces(self, message: Message, tool: str, index: int, call: ToolCall | None) -> Iterator[Piece]:
        """A checked message of role tool. index: from 1, of the call in its turn; None when nobody knows the call."""

    def pieces(self, messages: Sequence[Message], settings: ChatSettings = PLAIN) -> Iterator[Piece]:
        """Complete messages: the one description of the format that all else reads.

        The results of one turn's calls are put into call order. With thinking, an assistant message without any gets
        an empty think block. Raises ValueError on an assistant message that has thinking when thinking is off, on a
        call whose arguments are unknown, and on fields that a role does not have.
        """
        yield from self.declarations(settings)
        calls: tuple[ToolCall, ...] | None = None
        for role, run in groupby(messages, key=lambda message: message.role):
            if role == "tool":
                yield from self.results_pieces(list(run), calls)
                continue
            for message in run:
                _check_fields(message)
                if role == "assistant":
                    calls = message.tool_calls
                    yield from self.stub_pieces(settings.thinking)
                    yield from self.turn_pieces(message, settings.thinking)
                else:
                    yield from self._given_pieces(message)
        yield from self.requests(settings)

    def results_pieces(self, messages: Sequence[Message], calls: Sequence[ToolCall] | None = None) -> Iterator[Piece]:
        """The results of one turn's calls, in any order; written in call order.

        calls: the turn's, so that a result names its call as the policy did; None when nobody knows them.
        """
        numbered = []
        for message in messages:
            _check_fields(message)
            if message.tool is None or message.index is None or message.index < 1:
                raise ValueError("a message of role 'tool' needs `tool` and `index`, from 1: which call it answers")
            numbered.append((message.index, message.tool, message))
        indices = sorted(index for index, _, _ in numbered)
        if len(set(indices)) != len(indices):
            raise ValueError(f"two tool results answer the same call: indices {indices}")
        for index, tool, message in sorted(numbered, key=lambda entry: entry[0]):
            call = None
            if calls is not None:
                if index > len(calls):
                    raise ValueError(f"a tool result answers call {index}, but the turn before it makes {len(calls)}")
                call = calls[index - 1]
                if call.name != tool:
                    raise ValueError(f"a tool result of {tool!r} answers call {index}, which is of {call.name!r}")
            yield from self._result_pieces(message, tool, index, call)


def _check_fields(message: Message) -> None:
    if message.role != "tool" and (message.tool is not None or message.index is not None):
        raise ValueError(f"only a message of role 'tool' answers a call, not one of role {message.role!r}")
    if message.role != "system" and message.type is not None:
        raise ValueError(f"only a system message has a type, not one of role {message.role!r}")
    if message.role != "assistant" and (message.tool_calls or message.thinking is not None):
        raise ValueError(f"only an assistant message has tool calls or thinking, not one of role {message.role!r}")
