"""Byte-level BPE in a tokenizer.json, over the public `tokenizers` library: learnt here, or brought by a checkpoint.

In those learnt here, ids 0..255 are the 256 bytes, then come the merges, then the control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from k3core.tokenizer.vocabulary import NUM_BYTES, reserved_name

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

# K3's pattern (Han runs; a word with one optional leading non-letter; digits by three; punctuation; newlines; blanks),
# with two changes: an attribute's opening such as ` role="` stays in one word, so that the BPE can make it one token;
# and a blank stays with the digits that follow it, as it does with a word, so that ` 120` can be one token. What no
# alternative matches is a word of its own; the split never drops a character.
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

# Loses something under every normalizer and prefix that tokenizer files are known to ask for.
_PROBE = "A\u0301 e\u0301  \ufb01\r\n\u212bX "


def _byte_of_symbol() -> dict[str, int]:
    """The alphabet of byte-level BPE: a printable Latin-1 byte stands for itself, the others start at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(NUM_BYTES + i): byte for i, byte in enumerate(hidden)}


BYTE_OF_SYMBOL = _byte_of_symbol()


class BytePairs:
    """A `Vocabulary` of merges. Ids that a file leaves out above its merges are reserved control slots."""

    __slots__ = ("_library", "bytes_of_id", "control", "serialized")

    bytes_of_id: Sequence[bytes]
    control: Mapping[str, int]
    serialized: bytes

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        """Takes ownership of `library`; raises ValueError when it is no lossless byte-level BPE."""
        # Without this flag, a control token's name inside a text would be encoded as the control token.
        # The library stores it neither in tokenizer.json nor in a pickle.
        library.encode_special_tokens = True
        library.no_truncation()
        library.no_padding()
        self._library = library
        self.serialized = library.to_str().encode()
        vocab: dict[str, int] = library.get_vocab(with_added_tokens=True)
        added = {token_id: token.content for token_id, token in library.get_added_tokens_decoder().items()}
        merged = {symbols: token_id for symbols, token_id in vocab.items() if token_id not in added}
        if not BYTE_OF_SYMBOL.keys() <= merged.keys():
            raise ValueError("the tokenizer lacks some of the 256 byte symbols: it is not byte-level BPE")
        if strange := sorted(symbols for symbols in merged if not BYTE_OF_SYMBOL.keys() >= set(symbols)):
            raise ValueError(f"the token {strange[0]!r} is not made of byte symbols: it is not byte-level BPE")
        size, num_merged = max(vocab.values()) + 1, max(merged.values()) + 1
        missing = sorted(set(range(size)) - set(vocab.values()))
        if missing and missing[0] < num_merged:
            raise ValueError(f"the tokenizer's ids are not 0..{size - 1}: no token has the id {missing[0]}")
        added |= {token_id: reserved_name(token_id) for token_id in missing}
        self.control = MappingProxyType({name: token_id for token_id, name in sorted(added.items())})
        if len(self.control) != len(added):
            raise ValueError("the tokenizer names two control tokens alike: give each a name of its own")
        spelled = [b""] * size
        for token_id, name in added.items():
            spelled[token_id] = name.encode()
        for symbols, token_id in merged.items():
            spelled[token_id] = bytes(BYTE_OF_SYMBOL[symbol] for symbol in symbols)
        self.bytes_of_id = tuple(spelled)
        for name in self.control:
            if any(token_id in added for token_id in self.encode(name)):
                raise ValueError(f"the text {name!r} would be encoded as a control token: mark it special in the file")
        if (read := b"".join(self.bytes_of_id[token_id] for token_id in self.encode(_PROBE))) != _PROBE.encode():
            raise ValueError(
                f"the tokenizer changes texts ({_PROBE!r} becomes {read.decode(errors='replace')!r}):"
                " remove its normalizer and add_prefix_space"
            )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BytePairs:
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
    def from_bytes(cls, data: bytes) -> BytePairs:
        """The text of a tokenizer.json. Raises ValueError when it is none."""
        try:
            library = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises this very class
            raise ValueError(f"not a tokenizer.json: {error}") from error
        for entry in json.loads(data)["added_tokens"]:
            name, token_id = entry["content"], library.token_to_id(entry["content"])
            if token_id != entry["id"]:  # the library counts on, whatever the file says
                raise ValueError(
                    f"{name!r} has the id {entry['id']} in the file but would get {token_id}:"
                    " list every added token with its id in model.vocab too"
                )
        return cls(library)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids
