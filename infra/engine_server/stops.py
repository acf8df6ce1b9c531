"""Where a turn's text ends: stop strings and stop ids, over tokens that arrive one by one."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field

from k3core.tokenizer import Tokenizer


@dataclass(slots=True)
class StopMatcher:
    """`feed` tokens; `text` is what precedes a stop, `sure` how much of it no later token can take back.

    stop_token ends every turn; it is no part of the text. matched: the stop string or id that was found.
    """

    tokenizer: Tokenizer
    stop_token: int
    strings: Sequence[str] = ()
    ids: Sequence[int] = ()
    text: str = ""
    matched: str | int | None = None
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def feed(self, token: int) -> bool:
        """True when the turn ends here."""
        if token == self.stop_token or token in self.ids:
            self.matched = token
            return True
        start = len(self.text)
        self.text += self._decoder.decode(self.tokenizer.decode_bytes([token]))
        return self._search(start)

    def finish(self) -> None:
        """No more tokens: an unfinished character becomes U+FFFD."""
        start = len(self.text)
        self.text += self._decoder.decode(b"", final=True)
        if self.matched is None:
            self._search(start)

    @property
    def sure(self) -> int:
        """Characters that cannot be the beginning of a stop string."""
        held = 0
        for string in self.strings:
            longest = min(len(string) - 1, len(self.text))
            held = max(held, next((n for n in range(longest, 0, -1) if self.text.endswith(string[:n])), 0))
        return len(self.text) - held

    def _search(self, start: int) -> bool:
        found = [
            (at, string)
            for string in self.strings
            if (at := self.text.find(string, max(0, start - len(string) + 1))) >= 0
        ]
        if not found:
            return False
        at, self.matched = min(found)
        self.text = self.text[:at]
        return True
