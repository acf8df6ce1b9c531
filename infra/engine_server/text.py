"""The text of a turn while its tokens arrive, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence

from k3core.rollout.stops import StopMatcher
from k3core.tokenizer import Tokenizer


class TurnText:
    """`feed` tokens; `text` is what no later token can take back.

    matched: the stop string, or the id that ended the turn: stop_token or one of `ids`, which are no part of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop_token: int, strings: Sequence[str] = (), ids: Sequence[int] = ()
    ) -> None:
        self.text = ""
        self.matched: str | int | None = None
        self._tokenizer = tokenizer
        self._ids = {stop_token, *ids}
        self._stops = StopMatcher(strings)

    def feed(self, token: int) -> bool:
        """True when the turn ends here."""
        if token in self._ids:
            self.matched = token
            return True
        self.text += self._stops.feed(self._tokenizer.decode_bytes([token]))
        self.matched = self._stops.stop
        return self.matched is not None

    def finish(self) -> None:
        """No more tokens: what was held back for a stop string is text after all."""
        if self._stops.stop is None:
            self.text += self._stops.finish()
