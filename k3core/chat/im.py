"""The chat format of Kimi-Linear, which is Kimi-K2's.

    message          = <|im_system|> or <|im_user|> or <|im_assistant|>, name <|im_middle|> body <|im_end|>
    assistant's body = [<think> … </think>] content [calls]
    calls            = <|tool_calls_section_begin|> { <|tool_call_begin|> functions.NAME:NUMBER
                       <|tool_call_argument_begin|> JSON object <|tool_call_end|> }+ <|tool_calls_section_end|>
    tool's message   = <|im_system|> tool <|im_middle|> "## Return of functions.NAME:NUMBER" line end, result <|im_end|>

The name is that of the role; a declaration of tools is a message of <|im_system|> named tool_declare. All text between
two control tokens is one piece, since that is how the released tokenizer encodes a rendered template. A call without an
id gets the number of its place in the turn, from 0; an id that the policy chose is kept, and its result repeats it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from k3core.chat.grammar import Grammar
from k3core.chat.json_text import dump_arguments, dump_schema, load_json, type_of
from k3core.chat.reader import Control, MalformedTurn, Piece, Reader
from k3core.chat.settings import ChatSettings
from k3core.types import Message, ToolCall

IM_SYSTEM = Control("<|im_system|>")
IM_USER = Control("<|im_user|>")
IM_ASSISTANT = Control("<|im_assistant|>")
IM_MIDDLE = Control("<|im_middle|>")
IM_END = Control("<|im_end|>")
SECTION_BEGIN = Control("<|tool_calls_section_begin|>")
SECTION_END = Control("<|tool_calls_section_end|>")
CALL_BEGIN = Control("<|tool_call_begin|>")
ARGUMENT_BEGIN = Control("<|tool_call_argument_begin|>")
CALL_END = Control("<|tool_call_end|>")
THINK = Control("<think>")
THINK_END = Control("</think>")

_ID = re.compile(r"functions\.(.*):([0-9]+)", re.DOTALL)
_RETURN = "## Return of "


class Im(Grammar):
    name: ClassVar[str] = "IM (Kimi-Linear)"
    controls: ClassVar[tuple[Control, ...]] = (
        *(IM_SYSTEM, IM_USER, IM_ASSISTANT, IM_MIDDLE, IM_END),
        *(SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENT_BEGIN, CALL_END),
    )
    end_of_turn: ClassVar[Control] = IM_END

    def __init__(self, has_thinking: bool) -> None:
        """has_thinking: the tokenizer has <think> and </think> as control tokens, as that of a thinking model does."""
        self._has_thinking = has_thinking

    @property
    def has_thinking(self) -> bool:
        return self._has_thinking

    def declarations(self, settings: ChatSettings) -> Iterator[Piece]:
        if settings.thinking_effort is not None:
            raise ValueError(f"thinking_effort: the chat format {self.name} cannot say it; leave it out")
        if settings.tools:
            yield from _message(IM_SYSTEM, "tool_declare", dump_schema(list(settings.tools)))

    def requests(self, settings: ChatSettings) -> Iterator[Piece]:
        for key in ("tool_choice", "response_format"):
            if getattr(settings, key) is not None:
                raise ValueError(f"{key}: the chat format {self.name} cannot say it; leave it out")
        return iter(())

    def stub_pieces(self, thinking: bool) -> Iterator[Piece]:
        self._check(thinking)
        yield IM_ASSISTANT
        yield "assistant"
        yield IM_MIDDLE
        if self.has_thinking:
            yield THINK
            if not thinking:  # such a model takes an empty block as "do not think"
                yield THINK_END

    def turn_pieces(self, message: Message, thinking: bool) -> Iterator[Piece]:
        assert message.role == "assistant", message.role
        self._check(thinking)
        if thinking:
            yield message.thinking or ""
            yield THINK_END
        elif message.thinking is not None:
            raise ValueError("an assistant message has thinking, but thinking is off: turn it on or drop the thinking")
        yield message.content
        if message.tool_calls:
            yield SECTION_BEGIN
            for index, call in enumerate(message.tool_calls, start=1):
                yield CALL_BEGIN
                yield _id_of(call, index)
                yield ARGUMENT_BEGIN
                yield _arguments_text(call, index)
                yield CALL_END
            yield SECTION_END
        yield IM_END

    def parse(self, reader: Reader, thinking: bool) -> Message:
        self._check(thinking)
        thought: str | None = None
        content = reader.text()
        if thinking and reader.sees(THINK_END):
            reader.expect(THINK_END)
            thought, content = content, reader.text()
        calls: list[ToolCall] = []
        if reader.sees(SECTION_BEGIN):
            reader.expect(SECTION_BEGIN)
            while not calls or reader.sees(CALL_BEGIN):
                calls.append(_read_call(reader, index=len(calls) + 1))
            reader.expect(SECTION_END)
        reader.expect(IM_END)
        reader.expect_end(IM_END)
        return Message("assistant", content, thinking=thought, tool_calls=tuple(calls))

    def read(self, reader: Reader, calls: Sequence[ToolCall], num_answered: int) -> Message:
        role = IM_USER if reader.sees(IM_USER) else IM_SYSTEM
        reader.expect(role)
        name = reader.text()
        reader.expect(IM_MIDDLE)
        body = reader.text()
        reader.expect(IM_END)
        reader.expect_end(IM_END)
        match role, name:
            case (_, "user") if role == IM_USER:
                return Message("user", body)
            case (_, "system") if role == IM_SYSTEM:
                return Message("system", body)
            case (_, "tool_declare") if role == IM_SYSTEM:
                return Message("system", body, type="tool-declare")
            case (_, "tool") if role == IM_SYSTEM:
                return _read_result(body, calls, num_answered)
        raise MalformedTurn(f"{role.name} names no role: {name!r}")

    def _given_pieces(self, message: Message) -> Iterator[Piece]:
        if message.role == "user":
            yield from _message(IM_USER, "user", message.content)
        elif message.type is None:
            yield from _message(IM_SYSTEM, "system", message.content)
        elif message.type == "tool-declare":
            yield from _message(IM_SYSTEM, "tool_declare", message.content)
        else:
            raise ValueError(f"the chat format {self.name} has no system message of type {message.type!r}")

    def _result_pieces(self, message: Message, tool: str, index: int, call: ToolCall | None) -> Iterator[Piece]:
        answered = _id_of(ToolCall(tool, {}) if call is None else call, index)
        yield from _message(IM_SYSTEM, "tool", f"{_RETURN}{answered}\n{message.content}")

    def _check(self, thinking: bool) -> None:
        if thinking and not self.has_thinking:
            raise ValueError(
                f"thinking: the tokenizer lacks {THINK.name} and {THINK_END.name}, so its model does not think; turn it off"
            )


def _message(role: Control, name: str, body: str) -> Iterator[Piece]:
    yield role
    yield name
    yield IM_MIDDLE
    yield body
    yield IM_END


def _id_of(call: ToolCall, index: int) -> str:
    return f"functions.{call.name}:{index - 1}" if call.id is None else call.id


def _arguments_text(call: ToolCall, index: int) -> str:
    if call.arguments is not None:
        return dump_arguments(call.arguments)
    if call.unparsed is not None:
        return call.unparsed
    raise ValueError(f"call {index} ({call.name!r}) has no arguments ({call.error}): keep its sampled ids instead")


def _read_call(reader: Reader, index: int) -> ToolCall:
    """First the structure, to the call's end, whatever the texts say; then their meaning."""
    reader.expect(CALL_BEGIN)
    written = reader.text()
    reader.expect(ARGUMENT_BEGIN)
    data = reader.text_bytes()
    reader.expect(CALL_END)

    named = _ID.fullmatch(written.strip())
    name = named.group(1) if named else ""
    own_id = None if named and written == f"functions.{name}:{index - 1}" else written
    unparsed: str | None = None
    try:
        unparsed = _decoded(data)
        if not named:
            raise ValueError(f"its id {written!r} is not of the form functions.NAME:NUMBER")
        return ToolCall(name, _arguments(unparsed), id=own_id)
    except ValueError as error:
        return ToolCall(name, None, error=str(error), id=own_id, unparsed=unparsed)


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError("its arguments are not UTF-8") from error


def _arguments(text: str) -> Mapping[str, object]:
    try:
        parsed = load_json(text)
    except ValueError as error:
        raise ValueError(f"its arguments are not JSON: {error}") from error
    if not isinstance(parsed, Mapping):
        raise ValueError(f"its arguments must be an object but are {type_of(parsed)}")
    return parsed


def _read_result(body: str, calls: Sequence[ToolCall], num_answered: int) -> Message:
    """Two calls may have one id, if the policy chose so: hence the order counts too."""
    for index, call in enumerate(calls[num_answered:], start=num_answered + 1):
        if body.startswith(head := f"{_RETURN}{_id_of(call, index)}\n"):
            return Message("tool", body[len(head) :], tool=call.name, index=index)
    first, _, content = body.partition("\n")
    named = _ID.fullmatch(first.removeprefix(_RETURN))
    if not first.startswith(_RETURN) or named is None:
        raise MalformedTurn(f"a tool message begins with {first!r}, not with the call that it answers")
    return Message("tool", content, tool=named.group(1), index=int(named.group(2)) + 1)
