"""K3's chat format.

    open(tag attributes) = <|open|> tag[ key="value"]* <|sep|>          close(tag) = <|close|> tag <|sep|>
    message              = open(message role="…") body close(message) <|end_of_msg|>
    assistant's body     = [open(think) … close(think)] open(response) … close(response)
                           [open(tools) { open(call tool="…" index="1") arguments close(call) }+ close(tools)]
    arguments            = { open(argument key="…" type="…") value close(argument) }*
                           | open(json type="object") JSON close(json)
    tool's message       = open(message role="tool" tool="…" index="1") result close(message) <|end_of_msg|>

A conversation is: the tools, declared in a system message of type "tool-declare"; one of type "thinking-effort"; the
messages; system messages of types "tool-choice" and "response-format"; the stub that the policy continues.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from k3core.chat.grammar import Grammar
from k3core.chat.json_text import JSON_TYPES, dump_arguments, load_json, type_of
from k3core.chat.reader import Control, MalformedTurn, Piece, Reader
from k3core.chat.settings import THINKING_EFFORTS, TOOL_CHOICES, ChatSettings
from k3core.chat.wording import Wording
from k3core.types import Message, ToolCall

OPEN = Control("<|open|>")
CLOSE = Control("<|close|>")
SEP = Control("<|sep|>")
END_OF_MSG = Control("<|end_of_msg|>")


class Xtml(Grammar):
    name: ClassVar[str] = "XTML (K3)"
    controls: ClassVar[tuple[Control, ...]] = (OPEN, CLOSE, SEP, END_OF_MSG)
    end_of_turn: ClassVar[Control] = END_OF_MSG

    def __init__(self, wording: Wording | None = None) -> None:
        self._wording = wording or Wording()

    @property
    def has_thinking(self) -> bool:
        return True

    def declarations(self, settings: ChatSettings) -> Iterator[Piece]:
        if settings.tools:
            yield from self._system("tool-declare", self._wording.of_tools(settings.tools))
        if (effort := settings.thinking_effort) is not None:
            if effort not in THINKING_EFFORTS:
                raise ValueError(f"thinking_effort: must be one of {', '.join(THINKING_EFFORTS)}, not {effort!r}")
            if not settings.thinking:
                raise ValueError("thinking_effort: thinking is off; turn it on or leave the effort out")
            yield from self._system("thinking-effort", self._wording.of_thinking_effort(effort))

    def requests(self, settings: ChatSettings) -> Iterator[Piece]:
        if (choice := settings.tool_choice) is not None:
            if choice not in TOOL_CHOICES:
                raise ValueError(f"tool_choice: must be one of {', '.join(TOOL_CHOICES)}, not {choice!r}")
            yield from self._system("tool-choice", self._wording.of_tool_choice(choice))
        if (wanted := settings.response_format) is not None:
            if isinstance(wanted, str) and wanted != "json_object":
                raise ValueError(f"response_format: must be 'json_object' or a JSON schema, not {wanted!r}")
            yield from self._system("response-format", self._wording.of_response_format(wanted))

    def stub_pieces(self, thinking: bool) -> Iterator[Piece]:
        yield from _open("message", {"role": "assistant"})
        yield from _open("think" if thinking else "response")

    def turn_pieces(self, message: Message, thinking: bool) -> Iterator[Piece]:
        assert message.role == "assistant", message.role
        if thinking:
            yield message.thinking or ""
            yield from _close("think")
            yield from _open("response")
        elif message.thinking is not None:
            raise ValueError("an assistant message has thinking, but thinking is off: turn it on or drop the thinking")
        yield message.content
        yield from _close("response")
        if message.tool_calls:
            yield from _open("tools")
            for index, call in enumerate(message.tool_calls, start=1):
                yield from _call_pieces(call, index)
            yield from _close("tools")
        yield from _close("message")
        yield END_OF_MSG

    def parse(self, reader: Reader, thinking: bool) -> Message:
        thought: str | None = None
        content = reader.text()
        closed = _read_close(reader)
        if thinking and closed == "think":
            thought = content
            _expect_open(reader, "response")
            content = reader.text()
            closed = _read_close(reader)
        if closed != "response":
            raise MalformedTurn(f"{closed!r} is closed where 'response' is open")
        calls: list[ToolCall] = []
        if reader.sees(OPEN):
            _expect_open(reader, "tools")
            while not calls or reader.sees(OPEN):
                calls.append(_read_call(reader, index=len(calls) + 1))
            _expect_close(reader, "tools")
        _expect_close(reader, "message")
        reader.expect(END_OF_MSG)
        reader.expect_end(END_OF_MSG)
        return Message("assistant", content, thinking=thought, tool_calls=tuple(calls))

    def read(self, reader: Reader, calls: Sequence[ToolCall], num_answered: int) -> Message:
        del calls, num_answered  # a result says by itself which one it answers
        header = _read_open(reader)
        content = reader.text()
        _expect_close(reader, "message")
        reader.expect(END_OF_MSG)
        reader.expect_end(END_OF_MSG)
        attributes = dict(_attribute_pairs(header)) if _tag(header) == "message" else {}
        match attributes:
            case {"role": "tool", "tool": tool, "index": index} if index.isdecimal():
                return Message("tool", content, tool=tool, index=int(index))
            case {"role": "user"}:
                return Message("user", content)
            case {"role": "system"}:
                return Message("system", content, type=attributes.get("type"))
        raise MalformedTurn(f"{header!r} opens no message")

    def _given_pieces(self, message: Message) -> Iterator[Piece]:
        attributes = {"role": str(message.role)} | ({} if message.type is None else {"type": message.type})
        yield from _message(attributes, message.content)

    def _result_pieces(self, message: Message, tool: str, index: int, call: ToolCall | None) -> Iterator[Piece]:
        del call  # named by its place alone
        yield from _message({"role": "tool", "tool": tool, "index": str(index)}, message.content)

    def _system(self, kind: str, content: str) -> Iterator[Piece]:
        yield from _message({"role": "system", "type": kind}, content)


def _message(attributes: Mapping[str, str], content: str) -> Iterator[Piece]:
    yield from _open("message", attributes)
    yield content
    yield from _close("message")
    yield END_OF_MSG


def _open(tag: str, attributes: Mapping[str, str] | None = None) -> Iterator[Piece]:
    yield OPEN
    yield tag
    for key, value in (attributes or {}).items():
        yield f' {key}="'
        yield value.replace("&", "&amp;").replace('"', "&quot;")
        yield '"'
    yield SEP


def _close(tag: str) -> Iterator[Piece]:
    yield CLOSE
    yield tag
    yield SEP


def _call_pieces(call: ToolCall, index: int) -> Iterator[Piece]:
    yield from _open("call", {"tool": call.name, "index": str(index)})
    if call.arguments is not None:
        for key, value in call.arguments.items():
            if not isinstance(key, str):
                raise ValueError(f"call {index} ({call.name!r}): the argument {key!r} has no name: use a string")
            yield from _open("argument", {"key": key, "type": type_of(value)})
            yield value if isinstance(value, str) else dump_arguments(value)
            yield from _close("argument")
    elif call.unparsed is not None:
        yield from _open("json", {"type": "object"})
        yield call.unparsed
        yield from _close("json")
    else:
        raise ValueError(f"call {index} ({call.name!r}) has no arguments ({call.error}): keep its sampled ids instead")
    yield from _close("call")


def _read_open(reader: Reader) -> str:
    """The tag with its attributes, as they are written."""
    reader.expect(OPEN)
    header = reader.text()
    reader.expect(SEP)
    return header


def _read_close(reader: Reader) -> str:
    reader.expect(CLOSE)
    tag = reader.text()
    reader.expect(SEP)
    return tag


def _expect_open(reader: Reader, tag: str) -> None:
    if (header := _read_open(reader)) != tag:
        raise MalformedTurn(f"{header!r} is opened where {tag!r} belongs")


def _expect_close(reader: Reader, tag: str) -> None:
    if (closed := _read_close(reader)) != tag:
        raise MalformedTurn(f"{closed!r} is closed where {tag!r} is open")


def _read_call(reader: Reader, index: int) -> ToolCall:
    """First the structure, to the call's end, whatever the texts say; then their meaning."""
    header = _read_open(reader)
    if _tag(header) != "call":
        raise MalformedTurn(f"{header!r} is opened where a call belongs")
    stray = reader.text()
    blocks: list[tuple[str, bytes]] = []
    while reader.sees(OPEN):
        block = _read_open(reader)
        blocks.append((block, reader.text_bytes()))
        _expect_close(reader, _tag(block))
        stray += reader.text()
    _expect_close(reader, "call")

    name = ""
    unparsed: str | None = None
    try:
        attributes = _attributes(header, ("tool", "index"))
        name = attributes["tool"]
        if attributes["index"] != str(index):
            raise ValueError(f"its index is {attributes['index']!r}, not {str(index)!r}")
        if stray:
            raise ValueError("it holds text outside its arguments")
        unparsed = _json_block(blocks)
        return ToolCall(name, _arguments(blocks))
    except ValueError as error:
        return ToolCall(name, None, error=str(error), unparsed=unparsed)


def _json_block(blocks: Sequence[tuple[str, bytes]]) -> str | None:
    """The text of the one well-formed block that holds whatever could not be written as arguments."""
    if len(blocks) == 1 and blocks[0][0] == 'json type="object"':
        try:
            return blocks[0][1].decode()
        except UnicodeDecodeError:
            return None
    return None


def _arguments(blocks: Sequence[tuple[str, bytes]]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for header, value in blocks:
        match _tag(header):
            case "argument":
                attributes = _attributes(header, ("key", "type"))
                key = attributes["key"]
                if key in arguments:
                    raise ValueError(f"argument {key!r} is repeated")
                arguments[key] = _value(f"argument {key!r}", attributes["type"], value)
            case "json":
                if len(blocks) != 1:
                    raise ValueError("a json block stands beside other arguments")
                return _value("the json block", _attributes(header, ("type",))["type"], value, allowed=("object",))
            case tag:
                raise ValueError(f"{tag!r} is neither an argument nor a json block")
    return arguments


def _value(what: str, declared: str, value: bytes, allowed: Sequence[str] = JSON_TYPES) -> Any:
    if declared not in allowed:
        raise ValueError(f"{what} has the type {declared!r}, not one of {', '.join(allowed)}")
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8") from error
    if declared == "string":
        return text
    try:
        parsed = load_json(text)
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}") from error
    if type_of(parsed) != declared:
        raise ValueError(f"{what} is declared {declared} but is {type_of(parsed)}")
    return parsed


_ATTRIBUTES = re.compile(r'(?: [a-z]+="(?:[^"&]|&amp;|&quot;)*")*')
_ATTRIBUTE = re.compile(r' ([a-z]+)="([^"]*)"')


def _tag(header: str) -> str:
    return header.split(" ", 1)[0]


def _attribute_pairs(header: str) -> list[tuple[str, str]]:
    """Empty when they are not written as they must be."""
    rest = header[len(_tag(header)) :]
    if not _ATTRIBUTES.fullmatch(rest):
        return []
    return [(key, value.replace("&quot;", '"').replace("&amp;", "&")) for key, value in _ATTRIBUTE.findall(rest)]


def _attributes(header: str, keys: Sequence[str]) -> dict[str, str]:
    """The attributes of a tag, which must be exactly `keys`, in this order."""
    pairs = _attribute_pairs(header)
    if [key for key, _ in pairs] != list(keys):
        raise ValueError(f"the tag {_tag(header)!r} needs the attributes {', '.join(keys)} and no others")
    return dict(pairs)
