"""Byte-level BPE with K3's control tokens, over the public `tokenizers` library.

Ids 0..255 are the 256 bytes, then the learnt merges, then the control tokens. Text can never become a control token:
`encode_text("<|open|>")` gives the ids of eight characters. Control ids are put into a sequence by name only
(`tokenizer.open`), which is what `k3core.chat` does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CONTROL_TOKENS: tuple[str, ...] = (
    "[BOS]",
    "[EOS]",
    "<|end_of_msg|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "[UNK]",
    "[PAD]",
)
NUM_BYTES = 256

# K3's pattern (Han runs; a word with one optional leading non-letter; digits by three; punctuation; newlines; blanks),
# with two changes: an attribute's opening such as ` role="` stays in one word, so that the BPE can make it one token; and
# a blank stays with the digits that follow it, as it does with a word, so that ` 120` can be one token. What no alternative matches is a word of its own; the split never drops a character.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    (
        r" [a-z]+=\"",
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r" ?\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def _byte_of_symbol() -> dict[str, int]:
    """The alphabet of byte-level BPE: a printable Latin-1 byte stands for itself, the others start at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(NUM_BYTES + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_SYMBOL = _byte_of_symbol()


class Tokenizer:
    """Immutable. Lossless: `decode_bytes(encode_bytes(data)) == data`, `decode(encode_text(text)) == text`."""

    __slots__ = ("_bytes_of_id", "_control_ids", "_library", "_serialized", "control", "sha256", "vocab_size")

    control: Mapping[str, int]
    sha256: str
    vocab_size: int

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        """Takes ownership of `library`; raises ValueError when it is no byte-level BPE with K3's control tokens."""
        # Without this flag, a control token's name inside a text would be encoded as the control token.
        # The library stores it neither in tokenizer.json nor in a pickle.
        library.encode_special_tokens = True
        self._library = library
        self._serialized = library.to_str().encode()
        self.sha256 = hashlib.sha256(self._serialized).hexdigest()
        self.vocab_size = library.get_vocab_size(with_added_tokens=True)
        vocab: dict[str, int] = library.get_vocab(with_added_tokens=True)
        if missing := [name for name in CONTROL_TOKENS if name not in vocab]:
            raise ValueError(f"the tokenizer lacks the control tokens {', '.join(missing)}: train it with this project")
        if not _BYTE_OF_SYMBOL.keys() <= vocab.keys():
            raise ValueError("the tokenizer lacks some of the 256 byte symbols: it is not byte-level BPE")
        if set(vocab.values()) != set(range(self.vocab_size)):
            raise ValueError(f"the tokenizer's ids are not 0..{self.vocab_size - 1}")
        added = {token_id: token.content for token_id, token in library.get_added_tokens_decoder().items()}
        self.control = MappingProxyType({name: token_id for token_id, name in sorted(added.items())})
        self._control_ids = frozenset(added)
        self._bytes_of_id = [b""] * self.vocab_size
        for token, token_id in vocab.items():
            self._bytes_of_id[token_id] = (
                token.encode() if token_id in added else bytes(_BYTE_OF_SYMBOL[symbol] for symbol in token)
            )
        for name in self.control:
            if not self._control_ids.isdisjoint(self.encode_text(name)):
                raise ValueError(f"the text {name!r} would be encoded as a control token: mark it special in the file")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn merges from `texts`; equal texts give equal bytes. No merge spans two texts.

        Raises ValueError when the texts do not hold enough merges to use every id of `vocab_size`.
        """
        smallest = NUM_BYTES + len(CONTROL_TOKENS)
        if vocab_size < smallest:
            raise ValueError(f"vocab_size={vocab_size} is too small: bytes and control tokens alone need {smallest}")
        library = tokenizers.Tokenizer(models.BPE())
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(_PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        library.decoder = decoders.ByteLevel()
        library.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=vocab_size - len(CONTROL_TOKENS),
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        library.add_special_tokens(list(CONTROL_TOKENS))
        learnt = library.get_vocab_size(with_added_tokens=True)
        if learnt != vocab_size:
            raise ValueError(
                f"vocab_size={vocab_size} needs {vocab_size - smallest} merges, but the texts yield only "
                f"{learnt - smallest}: give more text or set vocab_size={learnt}"
            )
        return cls(library)

    @classmethod
    def from_bytes(cls, data: bytes) -> Tokenizer:
        """Read what `to_bytes` wrote: the text of a tokenizer.json."""
        return cls(tokenizers.Tokenizer.from_str(data.decode()))

    def to_bytes(self) -> bytes:
        return self._serialized

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        return (Tokenizer.from_bytes, (self._serialized,))

    def encode_text(self, text: str) -> list[int]:
        """Never a control id, whatever the text says. Raises ValueError on a lone surrogate, which no UTF-8 holds."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a lone surrogate at {error.start} cannot be encoded: repair the text") from error
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def encode_bytes(self, data: bytes) -> list[int]:
        """As `encode_text` where the bytes are UTF-8; each stray byte is one id."""
        ids: list[int] = []
        for part in re.split("([\udc80-\udcff])", data.decode("utf-8", errors="surrogateescape")):
            stray = len(part) == 1 and 0xDC80 <= ord(part) <= 0xDCFF
            ids += [self._id_of_byte(ord(part) - 0xDC00)] if stray else self.encode_text(part)
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Control tokens become their names. Raises ValueError on an id outside the vocabulary."""
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return b"".join(self._bytes_of_id[token_id] for token_id in ids)

    def decode(self, ids: Sequence[int]) -> str:
        """For reading: control tokens by name, broken UTF-8 as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def is_control(self, token_id: int) -> bool:
        return token_id in self._control_ids

    @property
    def open(self) -> int:
        return self.control["<|open|>"]

    @property
    def close(self) -> int:
        return self.control["<|close|>"]

    @property
    def sep(self) -> int:
        return self.control["<|sep|>"]

    @property
    def end_of_msg(self) -> int:
        return self.control["<|end_of_msg|>"]

    @property
    def bos(self) -> int:
        return self.control["[BOS]"]

    @property
    def eos(self) -> int:
        return self.control["[EOS]"]

    @property
    def pad(self) -> int:
        return self.control["[PAD]"]

    def _id_of_byte(self, byte: int) -> int:
        return self._bytes_of_id.index(bytes([byte]))
