"""The text of a turn while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from k3core.rollout.stops import StopMatcher
from k3core.tokenizer import Tokenizer


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """U+FFFD for an id that only the model's embedding has: many vocabularies are padded."""
    return tokenizer.decode_bytes([token]) if token < tokenizer.vocab_size else "\ufffd".encode()


class TurnText:
    """`feed` tokens; `text` is what no later token can take back.

    The engine ends the turn; here its stop strings are held back while they arrive, and they are no part of the text,
    nor are the ids that end a turn.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int], strings: Sequence[str] = ()) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._stops = StopMatcher(strings)

    @property
    def num_characters(self) -> int:
        """Those that are held back included."""
        return len(self.text) + self._stops.held_characters

    def feed(self, token: int) -> None:
        if token not in self._end_ids and self._stops.stop is None:
            self.text += self._stops.feed(token_bytes(self._tokenizer, token))

    def finish(self) -> None:
        """No more tokens: what was held back for a stop string is text after all."""
        if self._stops.stop is None:
            self.text += self._stops.finish()
