"""A chat turn while its tokens arrive: what of it is content, and at its end the reasoning and the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infra.engine_server.text import TurnText
from k3core.chat import ChatFormat, MalformedTurn
from k3core.tokenizer import Tokenizer
from k3core.types import Message, ToolCall

MAX_PROBES = 8  # control tokens within which a think channel closes; garbage is not read again and again


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """What the policy said. reasoning None: it did not think."""

    content: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]


class ChatText(TurnText):
    """`content` only ever grows, and `turn()` begins with it.

    Content is told as it comes; reasoning only once its channel is closed, because a policy may skip the channel and
    then what it wrote is content.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: ChatFormat,
        thinking: bool,
        end_ids: Sequence[int] = (),
        strings: Sequence[str] = (),
    ) -> None:
        super().__init__(tokenizer, (chat.stop_token, *end_ids), strings)
        self.reasoning: str | None = None
        self._chat = chat
        self._thinking = thinking
        self._ids: list[int] = []
        self._closing = chat.render_turn(Message("assistant"), thinking=False)
        self._probes_left = MAX_PROBES if thinking else 0
        self._start: int | None = None if thinking else 0  # of the content, in the characters of the text
        self._end: int | None = None

    @property
    def content(self) -> str:
        return "" if self._start is None else self.text[self._start : self._end]

    def feed(self, token: int) -> None:
        is_control = self._tokenizer.is_control(token)
        if is_control and self._start is not None and self._end is None:
            self._end = self.num_characters
        self._ids.append(token)
        super().feed(token)
        if is_control and self._start is None and self._probes_left:
            self._probes_left -= 1
            self._find_content()

    def turn(self) -> ChatTurn:
        """Of the finished turn. One that is not well formed, because it was cut or says nonsense, is content as it
        stands; so is one with a call that names no tool or whose arguments cannot be told."""
        try:
            message = self._chat.parse_turn(self._ids, self._thinking)
        except MalformedTurn:
            message = None
        if message is None or not all(map(_can_be_told, message.tool_calls)):
            return ChatTurn(self.text[self._start or 0 :], self.reasoning, ())
        return ChatTurn(message.content, message.thinking, message.tool_calls)

    def _find_content(self) -> None:
        """The think channel is closed when the turn would be well formed if its response ended here."""
        try:
            message = self._chat.parse_turn([*self._ids, *self._closing], thinking=True)
        except MalformedTurn:
            return
        if message.thinking is not None:
            self.reasoning, self._start = message.thinking, self.num_characters


def _can_be_told(call: ToolCall) -> bool:
    return bool(call.name) and (call.arguments is not None or call.unparsed is not None)
