"""Messages <-> token ids in K3's XTML.

    open(tag attributes) = <|open|> tag[ key="value"]* <|sep|>          close(tag) = <|close|> tag <|sep|>
    message              = open(message role="…") body close(message) <|end_of_msg|>
    assistant's body     = [open(think) … close(think)] open(response) … close(response)
                           [open(tools) { open(call tool="…" index="1") {open(argument key="…" type="…") value
                           close(argument)}* close(call) }+ close(tools)]

Structure is made of control ids alone, and every text between two of them (tag, ` key="`, value, `"`, content) is
encoded by itself. A user, a document or an argument that says `<|open|>` is therefore text, and no token that we encode
spans two pieces.

Token in, token out: an id that the policy sampled is never decoded and encoded again. BPE is not a bijection: the
policy may spell a word with other tokens than `encode_text` would, and training on the canonical ones would put
gradients on tokens that were never sampled. So an episode grows only at its end: `History.append_sampled` takes the
engine's ids as they are, `parse_turn` reads them without changing them, and only what the environment adds
(`render_tool_results`, `generation_stub`) is encoded anew. `render_turn` is for demonstrations, which nobody sampled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import groupby
from typing import Any, Literal

from k3core.tokenizer import Tokenizer
from k3core.types import Message, ToolCall

ThinkingEffort = Literal["low", "medium", "high", "max"]


class Marker(Enum):
    """A control token of the grammar. Not a str, so that no text can be taken for one."""

    OPEN = "<|open|>"
    CLOSE = "<|close|>"
    SEP = "<|sep|>"
    END_OF_MSG = "<|end_of_msg|>"


Piece = Marker | str


class MalformedTurn(ValueError):
    """What was sampled is no assistant turn. The episode cannot go on; the trajectory stands as it was sampled."""


class History:
    """The tokens of one episode and who made each of them. It only ever grows at its end."""

    __slots__ = ("_loss_mask", "_tokens")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._loss_mask: list[bool] = []

    def append_context(self, ids: Iterable[int]) -> None:
        """Tokens of the prompt, the environment or the stub: no loss."""
        self._append(ids, sampled=False)

    def append_sampled(self, ids: Iterable[int]) -> None:
        """Tokens exactly as the engine returned them: these, and only these, carry loss."""
        self._append(ids, sampled=True)

    @property
    def tokens(self) -> list[int]:
        """A copy."""
        return list(self._tokens)

    @property
    def loss_mask(self) -> list[bool]:
        """A copy; true where the policy sampled the token."""
        return list(self._loss_mask)

    def __len__(self) -> int:
        return len(self._tokens)

    def _append(self, ids: Iterable[int], sampled: bool) -> None:
        added = list(ids)
        self._tokens += added
        self._loss_mask += [sampled] * len(added)


def pieces(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = False,
    thinking_effort: ThinkingEffort | None = None,
) -> Iterator[Piece]:
    """Complete messages as control markers and texts: the one description of the format that all else reads.

    The results of one turn's calls are put into call order. With thinking, an assistant message without any gets an
    empty think block. Raises ValueError on an assistant message that has thinking when thinking is off, on a call whose
    arguments could not be parsed, and on fields that a role does not have.
    """
    if tools:
        yield from _message_pieces(Message("system", _declare(tools), type="tool-declare"), thinking)
    if thinking_effort is not None:
        yield from _message_pieces(Message("system", thinking_effort, type="thinking-effort"), thinking)
    for role, run in groupby(messages, key=lambda message: message.role):
        for message in _in_call_order(list(run)) if role == "tool" else run:
            yield from _message_pieces(message, thinking)


def stub_pieces(thinking: bool) -> Iterator[Piece]:
    """What precedes the policy's first token of a turn."""
    yield from _open("message", {"role": "assistant"})
    yield from _open("think" if thinking else "response")


def turn_pieces(message: Message, thinking: bool) -> Iterator[Piece]:
    """What the policy itself writes after the stub, up to and including <|end_of_msg|>."""
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
    yield Marker.END_OF_MSG


def training_texts(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = False,
    thinking_effort: ThinkingEffort | None = None,
) -> Iterator[str]:
    """The texts that rendering will encode, one by one: what `Tokenizer.train` should see."""
    for piece in pieces(messages, tools, thinking, thinking_effort):
        if isinstance(piece, str) and piece:
            yield piece


def render_messages(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = False,
    thinking_effort: ThinkingEffort | None = None,
) -> list[int]:
    """Complete messages, without a generation stub; see `pieces`."""
    return _encode(pieces(messages, tools, thinking, thinking_effort), tokenizer)


def generation_stub(tokenizer: Tokenizer, thinking: bool) -> list[int]:
    return _encode(stub_pieces(thinking), tokenizer)


def render_turn(message: Message, tokenizer: Tokenizer, thinking: bool) -> list[int]:
    """`generation_stub(…) + render_turn(message, …) == render_messages([message], …)`. For demonstrations only."""
    return _encode(turn_pieces(message, thinking), tokenizer)


def render_tool_results(messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """The results of one turn's calls, in any order; rendered in call order."""
    if wrong := [message.role for message in messages if message.role != "tool"]:
        raise ValueError(f"tool results have the role 'tool', not {wrong[0]!r}")
    return _encode(pieces(messages), tokenizer)


def parse_turn(ids: Sequence[int], tokenizer: Tokenizer, thinking: bool) -> Message:
    """The message in what was sampled after the stub, <|end_of_msg|> included. Structure comes from control ids alone.

    A call that cannot be carried out (unknown argument type, bad JSON, wrong index, …) becomes a ToolCall whose
    `arguments` are None and whose `error` says why; its `name` is "" when the call's tag could not be read.
    With thinking, a turn that skips the think channel and closes `response` directly has `thinking=None`.
    Raises MalformedTurn when the structure itself is broken or incomplete.
    """
    reader = _Reader(ids, tokenizer)
    thought: str | None = None
    content = reader.text()
    closed = reader.close()
    if thinking and closed == "think":
        thought = content
        reader.expect_open("response")
        content = reader.text()
        closed = reader.close()
    if closed != "response":
        raise MalformedTurn(f"{closed!r} is closed where 'response' is open")
    calls: list[ToolCall] = []
    if reader.sees(Marker.OPEN):
        reader.expect_open("tools")
        while not calls or reader.sees(Marker.OPEN):
            calls.append(_read_call(reader, index=len(calls) + 1))
        reader.expect_close("tools")
    reader.expect_close("message")
    reader.expect(Marker.END_OF_MSG)
    reader.expect_end()
    return Message("assistant", content, thinking=thought, tool_calls=tuple(calls))


def _encode(source: Iterable[Piece], tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = []
    for piece in source:
        if isinstance(piece, Marker):
            ids.append(tokenizer.control[piece.value])
        else:
            ids += tokenizer.encode_text(piece)
    return ids


def _open(tag: str, attributes: Mapping[str, str] | None = None) -> Iterator[Piece]:
    yield Marker.OPEN
    yield tag
    for key, value in (attributes or {}).items():
        yield f' {key}="'
        yield value.replace("&", "&amp;").replace('"', "&quot;")
        yield '"'
    yield Marker.SEP


def _close(tag: str) -> Iterator[Piece]:
    yield Marker.CLOSE
    yield tag
    yield Marker.SEP


def _message_pieces(message: Message, thinking: bool) -> Iterator[Piece]:
    if message.role != "tool" and (message.tool is not None or message.index is not None):
        raise ValueError(f"only a message of role 'tool' answers a call, not one of role {message.role!r}")
    if message.role != "system" and message.type is not None:
        raise ValueError(f"only a system message has a type, not one of role {message.role!r}")
    if message.role == "assistant":
        yield from stub_pieces(thinking)
        yield from turn_pieces(message, thinking)
        return
    if message.tool_calls or message.thinking is not None:
        raise ValueError(f"only an assistant message has tool calls or thinking, not one of role {message.role!r}")
    attributes: dict[str, str] = {"role": message.role}
    if message.role == "tool":
        if message.tool is None or message.index is None or message.index < 1:
            raise ValueError("a message of role 'tool' needs `tool` and `index`, from 1: which call it answers")
        attributes |= {"tool": message.tool, "index": str(message.index)}
    if message.type is not None:
        attributes |= {"type": message.type}
    yield from _open("message", attributes)
    yield message.content
    yield from _close("message")
    yield Marker.END_OF_MSG


def _in_call_order(results: list[Message]) -> list[Message]:
    """A result that lacks an index is refused later, by `_message_pieces`."""
    indices = [message.index for message in results if message.index is not None]
    if len(set(indices)) != len(indices):
        raise ValueError(f"two tool results answer the same call: indices {sorted(indices)}")
    return sorted(results, key=lambda message: message.index or 0)


def _call_pieces(call: ToolCall, index: int) -> Iterator[Piece]:
    if call.arguments is None:
        raise ValueError(f"call {index} ({call.name!r}) has no arguments ({call.error}): keep its sampled ids instead")
    yield from _open("call", {"tool": call.name, "index": str(index)})
    for key, value in call.arguments.items():
        yield from _open("argument", {"key": key, "type": _type_of(value)})
        yield value if isinstance(value, str) else _dump_json(value)
        yield from _close("argument")
    yield from _close("call")


def _declare(tools: Sequence[Mapping[str, Any]]) -> str:
    declared = _dump_json(list(tools))
    return f"# Tools\n\nThese are the tools that you may call, as JSON.\n\n```json\n{declared}\n```"


def _dump_json(value: Any) -> str:
    """Compact, keys sorted at every depth. Raises ValueError on NaN and infinities."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_dict_of
    )


def _dict_of(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} is no type of JSON's")
    return dict(value)


def _load_json(text: str) -> Any:
    """JSON as the RFC has it: no NaN, no infinity, no repeated key, no lone surrogate. Raises ValueError."""

    def refuse_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def finite(digits: str) -> float:
        if math.isinf(number := float(digits)):
            raise ValueError(f"{digits} is too large")
        return number

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            raise ValueError("a key is repeated")
        return value

    try:
        value = json.loads(text, parse_constant=refuse_constant, parse_float=finite, object_pairs_hook=unique)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("it holds a lone surrogate") from error
    return value


def _type_of(value: Any) -> str:
    match value:
        case str():
            return "string"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case None:
            return "null"
        case Mapping():
            return "object"
        case list() | tuple():
            return "array"
    raise ValueError(f"an argument of type {type(value).__name__} has no XTML type: use JSON's types")


_ATTRIBUTES = re.compile(r'(?: [a-z]+="(?:[^"&]|&amp;|&quot;)*")*')
_ATTRIBUTE = re.compile(r' ([a-z]+)="([^"]*)"')


class _Reader:
    """Reads sampled ids from the left. Every method raises MalformedTurn when the next ids are not what it reads."""

    def __init__(self, ids: Sequence[int], tokenizer: Tokenizer) -> None:
        for token_id in ids:
            if not 0 <= token_id < tokenizer.vocab_size:
                raise MalformedTurn(f"token id {token_id} is outside the vocabulary of {tokenizer.vocab_size}")
        self._ids = ids
        self._tokenizer = tokenizer
        self._at = 0

    def text_bytes(self) -> bytes:
        """Up to the next control token, which may follow at once."""
        start = self._at
        while self._at < len(self._ids) and not self._tokenizer.is_control(self._ids[self._at]):
            self._at += 1
        return self._tokenizer.decode_bytes(self._ids[start : self._at])

    def text(self) -> str:
        return self.text_bytes().decode("utf-8", errors="replace")

    def sees(self, marker: Marker) -> bool:
        return self._at < len(self._ids) and self._ids[self._at] == self._tokenizer.control[marker.value]

    def expect(self, marker: Marker) -> None:
        if not self.sees(marker):
            rest = self._ids[self._at : self._at + 1]
            found = repr(self._tokenizer.decode(rest)) if len(rest) else "the end"
            raise MalformedTurn(f"expected {marker.value} at token {self._at}, found {found}")
        self._at += 1

    def expect_end(self) -> None:
        if self._at != len(self._ids):
            raise MalformedTurn(f"{len(self._ids) - self._at} tokens after {Marker.END_OF_MSG.value}")

    def open(self) -> str:
        """The tag with its attributes, unparsed."""
        self.expect(Marker.OPEN)
        header = self.text()
        self.expect(Marker.SEP)
        return header

    def close(self) -> str:
        self.expect(Marker.CLOSE)
        tag = self.text()
        self.expect(Marker.SEP)
        return tag

    def expect_open(self, tag: str) -> None:
        if (header := self.open()) != tag:
            raise MalformedTurn(f"{header!r} is opened where {tag!r} belongs")

    def expect_close(self, tag: str) -> None:
        if (closed := self.close()) != tag:
            raise MalformedTurn(f"{closed!r} is closed where {tag!r} is open")


def _read_call(reader: _Reader, index: int) -> ToolCall:
    """First the structure, to the call's end, whatever the texts say; then their meaning."""
    header = reader.open()
    if _tag(header) != "call":
        raise MalformedTurn(f"{header!r} is opened where a call belongs")
    stray = reader.text()
    blocks: list[tuple[str, bytes]] = []
    while reader.sees(Marker.OPEN):
        block = reader.open()
        blocks.append((block, reader.text_bytes()))
        reader.expect_close(_tag(block))
        stray += reader.text()
    reader.expect_close("call")

    name = ""
    try:
        attributes = _attributes(header, ("tool", "index"))
        name = attributes["tool"]
        if attributes["index"] != str(index):
            raise ValueError(f"its index is {attributes['index']!r}, not {str(index)!r}")
        if stray:
            raise ValueError("it holds text outside its arguments")
        return ToolCall(name, _arguments(blocks))
    except ValueError as error:
        return ToolCall(name, None, error=str(error))


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


def _value(
    what: str,
    declared: str,
    value: bytes,
    allowed: Sequence[str] = ("string", "number", "boolean", "null", "object", "array"),
) -> Any:
    if declared not in allowed:
        raise ValueError(f"{what} has the type {declared!r}, not one of {', '.join(allowed)}")
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} is not UTF-8") from error
    if declared == "string":
        return text
    try:
        parsed = _load_json(text)
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {error}") from error
    if _type_of(parsed) != declared:
        raise ValueError(f"{what} is declared {declared} but is {_type_of(parsed)}")
    return parsed


def _tag(header: str) -> str:
    return header.split(" ", 1)[0]


def _attributes(header: str, keys: Sequence[str]) -> dict[str, str]:
    """The attributes of a tag, which must be exactly `keys`, in this order."""
    rest = header[len(_tag(header)) :]
    pairs = _ATTRIBUTE.findall(rest)
    if not _ATTRIBUTES.fullmatch(rest) or [key for key, _ in pairs] != list(keys):
        raise ValueError(f"the tag {_tag(header)!r} needs the attributes {', '.join(keys)} and no others")
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in pairs}
