"""Decoded K3 chat text taken apart for display: messages by role, control tokens apart from what they enclose."""

from __future__ import annotations

import re
from dataclasses import dataclass

_MARKUP = re.compile(r"(<\|(?:open|close)\|>)([^<]*)(<\|sep\|>)|(<\|[A-Za-z0-9_]+\|>)")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


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
        start, tag, end, lone = match.groups()
        if start == "<|open|>" and tag.split(" ")[0] == "message":
            close_message()
            attributes = dict(_ATTRIBUTE.findall(tag))
            role = attributes.get("role", "")
            detail = attributes.get("tool") or attributes.get("type") or attributes.get("name") or ""
        pieces.append(Piece(lone, "", "") if lone else Piece(start, tag, end))
        if lone == "<|end_of_msg|>":
            close_message()
            role, detail = "", ""
    if at < len(text):
        pieces.append(Piece("", text[at:], ""))
    close_message()
    return messages
