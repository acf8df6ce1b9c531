"""Decoded chat text taken apart for display: messages by role, control tokens apart from what they enclose."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A tag of XTML; the name of an IM message; the id of an IM call; any other control token by itself.
_MARKUP = re.compile(
    r"(<\|(?:open|close)\|>)([^<]*)(<\|sep\|>)"
    r"|(<\|im_(?:system|user|assistant)\|>)([^<]*)(<\|im_middle\|>)"
    r"|(<\|tool_call_begin\|>)([^<]*)(<\|tool_call_argument_begin\|>)"
    r"|(<\|[A-Za-z0-9_]+\|>|</?think>)"
)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_ANSWERED = re.compile(r"## Return of functions\.(.*):[0-9]+\n")
_ENDS = ("<|end_of_msg|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive text. Markup has `start`, and `end` when a tag is between: ("<|open|>", "think", "<|sep|>")."""

    start: str
    text: str
    end: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """`role` is empty outside every message; `detail` is the tool of a tool message or the type of a system one."""

    role: str
    detail: str
    pieces: tuple[Piece, ...]

    @property
    def num_chars(self) -> int:
        return sum(len(piece.start) + len(piece.text) + len(piece.end) for piece in self.pieces)


def messages_of(text: str) -> list[ChatMessage]:
    """Joined again, the pieces are the text. Malformed markup stays visible as it is: policies write such things."""
    messages: list[ChatMessage] = []
    role, detail, pieces = "", "", list[Piece]()

    def close_message() -> None:
        if pieces:
            messages.append(ChatMessage(role, detail, tuple(pieces)))
            pieces.clear()

    at = 0
    for match in _MARKUP.finditer(text):
        if match.start() > at:
            pieces.append(Piece("", text[at : match.start()], ""))
        at = match.end()
        start, tag, end, lone = _one_of(match)
        if start == "<|open|>" and tag.split(" ")[0] == "message":
            close_message()
            attributes = dict(_ATTRIBUTE.findall(tag))
            role = attributes.get("role", "")
            detail = attributes.get("tool") or attributes.get("type") or attributes.get("name") or ""
        elif end == "<|im_middle|>":
            close_message()
            role, detail = _im_role(start, tag, text, at)
        pieces.append(Piece(lone, "", "") if lone else Piece(start, tag, end))
        if lone in _ENDS:
            close_message()
            role, detail = "", ""
    if at < len(text):
        pieces.append(Piece("", text[at:], ""))
    close_message()
    return messages


def _one_of(match: re.Match[str]) -> tuple[str, str, str, str]:
    """What begins a tag, the tag, what ends it; or, in the fourth place, a control token by itself."""
    *tags, lone = match.groups(default="")
    for begin in range(0, len(tags), 3):
        if tags[begin]:
            return tags[begin], tags[begin + 1], tags[begin + 2], ""
    return "", "", "", lone


def _im_role(start: str, name: str, text: str, at: int) -> tuple[str, str]:
    """Role and detail of the IM message whose body begins at `at`."""
    if start != "<|im_system|>":
        return start.removeprefix("<|im_").removesuffix("|>"), ""
    if name == "tool":
        answered = _ANSWERED.match(text, at)
        return "tool", answered.group(1) if answered else ""
    return "system", "" if name == "system" else name
