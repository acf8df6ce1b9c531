"""Stop strings in a text that arrives token by token, as bytes.

Tokens may cut a stop string, or a character, anywhere; what is found depends on the bytes alone and not on how they
were cut. Tokens themselves are never cut, only the text is. The automaton is Aho and Corasick's (CACM 18(6), 1975):
each byte is looked at once, whatever the number of stop strings.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """A prefix of a stop string. fail: the longest proper suffix that is one too; stop: the longest that ends here."""

    depth: int
    edges: dict[int, _Node] = field(default_factory=dict)
    fail: _Node | None = None
    stop: str | None = None


class StopMatcher:
    """Finds the stop string that is complete first; of two complete at the same byte, the longer one.

    `feed` returns text that no stop string can take back any more. The text is the bytes before the stop string as
    UTF-8, with U+FFFD for what is not. stop: the string found, None so far. Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("stop '': the empty string is in every text; leave it out")
        self.stop: str | None = None
        self._root = _automaton(stops)
        self._node = self._root
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = bytearray()  # exactly the node's prefix, after the decoder's unfinished character

    @property
    def held_characters(self) -> int:
        """Trailing characters of the text so far that `feed` has not returned yet, an unfinished one included."""
        unfinished, _ = self._decoder.getstate()
        return len((unfinished + self._held).decode("utf-8", "replace"))

    def feed(self, data: bytes) -> str:
        """The bytes of one more token; returns the text that is now certain. Not to be called after a stop."""
        if self.stop is not None:
            raise ValueError(f"the text ended at stop {self.stop!r}; nothing can follow")
        for n, byte in enumerate(data):
            self._node = self._next(byte)
            if self._node.stop is not None:
                self.stop = self._node.stop
                self._held += data[: n + 1]
                before = bytes(self._held[: len(self._held) - len(self.stop.encode())])
                self._held.clear()
                return self._decoder.decode(before, final=True)
        self._held += data
        certain = len(self._held) - self._node.depth
        text = self._decoder.decode(bytes(self._held[:certain]))
        del self._held[:certain]
        return text

    def finish(self) -> str:
        """The held text of a sequence that ended without a stop string."""
        rest = bytes(self._held)
        self._held.clear()
        self._node = self._root
        return self._decoder.decode(rest, final=True)

    def _next(self, byte: int) -> _Node:
        node: _Node | None = self._node
        while node is not None and byte not in node.edges:
            node = node.fail
        return self._root if node is None else node.edges[byte]


def _automaton(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for byte in stop.encode():
            node = node.edges.setdefault(byte, _Node(node.depth + 1))
        node.stop = stop
    waiting = deque([root])
    while waiting:  # shorter prefixes first: a node's fail is shorter than itself
        node = waiting.popleft()
        for byte, child in node.edges.items():
            fail = node.fail
            while fail is not None and byte not in fail.edges:
                fail = fail.fail
            child.fail = root if fail is None else fail.edges[byte]
            child.stop = child.stop or child.fail.stop
            waiting.append(child)
    return root
