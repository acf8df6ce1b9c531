"""Byte-level BPE as K3 and Kimi-Linear ship it: tokens by rank, over the public `tiktoken` library.

The ranks are the ids 0..n-1, and a merge of lower rank goes first. The 256 ids after them are control slots.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import tiktoken

from k3core.tokenizer.vocabulary import reserved_name

NUM_SLOTS = 256
# Where the Kimi tokenizers cut a text before they look at its words, since tiktoken's time and stack grow with both. A
# cut is also a border between tokens, so other numbers would give other ids.
MAX_CHARS = 400_000
MAX_RUN = 25_000  # characters in a row that are all white space, or all not

# Words as Kimi's tokenizers tell them apart: Han runs; a word with one optional leading mark, split where capitals
# begin and without Han letters; digits by three; punctuation; line ends; blanks.
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEADING_MARK = r"[^\r\n\p{L}\p{N}]?"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEADING_MARK}{_CAPITALS}*{_SMALL}+{_ENDING}",
        f"{_LEADING_MARK}{_CAPITALS}+{_SMALL}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_FORM = b'{"form":"tiktoken",'
_RUNS = re.compile(r"\s+|\S+")


class Ranks:
    """A `Vocabulary` of ranked tokens, given in rank order, and the names of its control slots by id.

    Nothing is checked here: `tiktoken_file` does, where it can name file and line.
    """

    __slots__ = ("_encoding", "bytes_of_id", "control", "serialized")

    bytes_of_id: Sequence[bytes]
    control: Mapping[str, int]
    serialized: bytes

    def __init__(self, tokens: Sequence[bytes], slots: Mapping[int, str], pattern: str = PATTERN) -> None:
        """slots: those that have a name of their own."""
        ids = range(len(tokens), len(tokens) + NUM_SLOTS)
        self.control = MappingProxyType({slots.get(i, reserved_name(i)): i for i in ids})
        self.bytes_of_id = (*tokens, *(name.encode() for name in self.control))
        document = {
            "pattern": pattern,
            "slots": {str(i): slots[i] for i in sorted(slots)},
            "tokens": " ".join(base64.b64encode(token).decode() for token in tokens),
        }
        self.serialized = _FORM + json.dumps(document, separators=(",", ":")).encode()[1:]
        # No special tokens: then no text can become one.
        self._encoding = tiktoken.Encoding(
            "ranks",
            pat_str=pattern,
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens={},
        )

    @staticmethod
    def recognise(data: bytes) -> bool:
        """Is this what `serialized` holds?"""
        return data.startswith(_FORM)

    @classmethod
    def from_bytes(cls, data: bytes) -> Ranks:
        document = json.loads(data)
        tokens = [base64.b64decode(token) for token in document["tokens"].split(" ")]
        return cls(tokens, {int(i): name for i, name in document["slots"].items()}, document["pattern"])

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in _parts(text):
            ids += self._encoding.encode_ordinary(part)
        return ids


def _parts(text: str) -> Iterator[str]:
    """The text in order, cut every MAX_CHARS, and in each such slice within runs of more than MAX_RUN."""
    if len(text) <= MAX_RUN:
        yield text
        return
    for begin in range(0, len(text), MAX_CHARS):
        piece = text[begin : begin + MAX_CHARS]
        done = 0
        for run in _RUNS.finditer(piece):
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield piece[done:cut]
                done = cut
        yield piece[done:]
