"""Reads token ids from the left: control tokens are structure, what stands between them is text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3core.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Control:
    """A control token of a grammar, by name. Not a str, so that no text can be taken for one."""

    name: str


Piece = Control | str


class MalformedTurn(ValueError):
    """What was sampled is no assistant turn. The episode cannot go on; the trajectory stands as it was sampled."""


class Reader:
    """Every method raises MalformedTurn when the next ids are not what it reads."""

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

    def sees(self, control: Control) -> bool:
        return self._at < len(self._ids) and self._ids[self._at] == self._tokenizer.control[control.name]

    def expect(self, control: Control) -> None:
        if not self.sees(control):
            rest = self._ids[self._at : self._at + 1]
            found = repr(self._tokenizer.decode(rest)) if len(rest) else "the end"
            raise MalformedTurn(f"expected {control.name} at token {self._at}, found {found}")
        self._at += 1

    def expect_end(self, last: Control) -> None:
        """`last` has just been read."""
        if self._at != len(self._ids):
            raise MalformedTurn(f"{len(self._ids) - self._at} tokens after {last.name}")
