"""A chat format in a tokenizer's ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from k3core.chat.grammar import Grammar
from k3core.chat.im import THINK, THINK_END, Im
from k3core.chat.reader import Control, Piece, Reader
from k3core.chat.settings import PLAIN, ChatSettings
from k3core.chat.wording import Wording
from k3core.chat.xtml import Xtml
from k3core.tokenizer import Tokenizer
from k3core.types import Message, ToolCall


class ChatFormat:
    """Messages <-> token ids. stop_token: the id that ends every turn, for the engine."""

    __slots__ = ("_tokenizer", "grammar", "stop_token")

    grammar: Grammar
    stop_token: int

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer) -> None:
        self.grammar = grammar
        self._tokenizer = tokenizer
        self.stop_token = tokenizer.control[grammar.end_of_turn.name]

    @property
    def has_thinking(self) -> bool:
        """Can a turn have a think channel? Where not, `thinking=True` raises ValueError everywhere."""
        return self.grammar.has_thinking

    def render_messages(self, messages: Sequence[Message], settings: ChatSettings = PLAIN) -> list[int]:
        """Complete messages and what the settings add, without a generation stub; see `Grammar.pieces`."""
        return self._encode(self.grammar.pieces(messages, settings))

    def generation_stub(self, thinking: bool) -> list[int]:
        """What precedes the policy's first token of a turn."""
        return self._encode(self.grammar.stub_pieces(thinking))

    def render_turn(self, message: Message, thinking: bool) -> list[int]:
        """`generation_stub(…) + render_turn(message, …) == render_messages([message], …)`. For demonstrations only."""
        return self._encode(self.grammar.turn_pieces(message, thinking))

    def render_tool_results(self, messages: Sequence[Message], calls: Sequence[ToolCall] | None = None) -> list[int]:
        """The results of one turn's calls, in any order; rendered in call order.

        calls: the turn's, so that a result names its call as the policy did; None when nobody knows them.
        """
        if wrong := [message.role for message in messages if message.role != "tool"]:
            raise ValueError(f"tool results have the role 'tool', not {wrong[0]!r}")
        return self._encode(self.grammar.results_pieces(messages, calls))

    def parse_turn(self, ids: Sequence[int], thinking: bool) -> Message:
        """The message in what was sampled after the stub, `stop_token` included. Structure is control ids alone.

        A call that cannot be carried out (unknown argument type, bad JSON, wrong index, …) becomes a ToolCall whose
        `arguments` are None and whose `error` says why; its `name` is "" when it could not be read.
        With thinking, a turn that skips the think channel has `thinking=None`.
        Raises MalformedTurn when the structure itself is broken or incomplete.
        """
        return self.grammar.parse(Reader(ids, self._tokenizer), thinking)

    def read_messages(self, ids: Sequence[int], calls: Sequence[ToolCall] = ()) -> list[Message]:
        """The complete messages in rendered context; what follows the last one, the stub of a turn, is none.

        calls: those that the tool messages in it answer. Raises MalformedTurn when the ids are no such context.
        """
        messages: list[Message] = []
        start = num_answered = 0
        for end, token in enumerate(ids, start=1):
            if token == self.stop_token:
                message = self._read(ids[start:end], calls, num_answered)
                num_answered = message.index or 0
                messages.append(message)
                start = end
        return messages

    def thinks_after(self, context: Sequence[int]) -> bool:
        """Does the stub at its end let the policy think?"""
        if not self.has_thinking:
            return False
        stub = self.generation_stub(thinking=True)
        return list(context[-len(stub) :]) == stub

    def _read(self, ids: Sequence[int], calls: Sequence[ToolCall], num_answered: int) -> Message:
        for thinking in (False, True) if self.has_thinking else (False,):
            stub = self.generation_stub(thinking)
            if list(ids[: len(stub)]) == stub:
                return self.parse_turn(ids[len(stub) :], thinking)
        return self.grammar.read(Reader(ids, self._tokenizer), calls, num_answered)

    def _encode(self, source: Iterable[Piece]) -> list[int]:
        ids: list[int] = []
        for piece in source:
            if isinstance(piece, Control):
                ids.append(self._tokenizer.control[piece.name])
            else:
                ids += self._tokenizer.encode_text(piece)
        return ids


def chat_format(tokenizer: Tokenizer, wording: Wording | None = None) -> ChatFormat:
    """The one whose control tokens the tokenizer has. wording: of XTML's own system messages.

    Raises ValueError when it has those of none.
    """
    has_thinking = {THINK.name, THINK_END.name} <= tokenizer.control.keys()
    lacking = []
    for grammar in (Xtml(wording), Im(has_thinking)):
        missing = [control.name for control in grammar.controls if control.name not in tokenizer.control]
        if not missing:
            return ChatFormat(grammar, tokenizer)
        lacking.append(f"{grammar.name} needs {', '.join(missing)}")
    raise ValueError(
        f"the tokenizer lacks the control tokens of every chat format: {'; '.join(lacking)};"
        " bring the tokenizer of a K3 or Kimi-Linear checkpoint, or train one with this project"
    )
