"""The tokenizer that everything else uses, whichever form its vocabulary came in.

Text can never become a control token: `encode_text("<|open|>")` gives the ids of eight characters. Control ids are put
into a sequence by name only (`tokenizer.control["<|open|>"]`), which is what `k3core.chat` does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from k3core.tokenizer.byte_pairs import BytePairs
from k3core.tokenizer.ranks import Ranks
from k3core.tokenizer.tiktoken_file import RANKS_FILE, read_tiktoken
from k3core.tokenizer.vocabulary import NUM_BYTES, Vocabulary

MERGES_FILE = "tokenizer.json"


class Tokenizer:
    """Immutable. Lossless: `decode_bytes(encode_bytes(data)) == data`, `decode(encode_text(text)) == text`.

    control: every control token's id by name, in id order. vocab_size: control tokens included.
    """

    __slots__ = ("_bytes_of_id", "_control_ids", "_id_of_byte", "_vocabulary", "control", "sha256", "vocab_size")

    control: Mapping[str, int]
    sha256: str
    vocab_size: int

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._bytes_of_id = vocabulary.bytes_of_id
        self.control = vocabulary.control
        self._control_ids = frozenset(self.control.values())
        self.vocab_size = len(self._bytes_of_id)
        self.sha256 = hashlib.sha256(vocabulary.serialized).hexdigest()
        single = {
            data[0]: i for i, data in enumerate(self._bytes_of_id) if len(data) == 1 and i not in self._control_ids
        }
        self._id_of_byte = tuple(single[byte] for byte in range(NUM_BYTES))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Learn merges from `texts`; equal texts give equal bytes. No merge spans two texts.

        Raises ValueError when the texts do not hold enough merges to use every id of `vocab_size`.
        """
        return cls(BytePairs.train(texts, vocab_size))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a checkpoint's folder: tiktoken.model with tokenizer_config.json, else tokenizer.json.

        Raises ValueError, in one line with the file's name, when a file is absent or broken.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder, so no tokenizer; name the checkpoint's folder")
        if (folder / RANKS_FILE).exists():
            return cls(read_tiktoken(folder))
        path = folder / MERGES_FILE
        if not path.exists():
            raise ValueError(
                f"{folder}: holds neither {RANKS_FILE} nor {MERGES_FILE}; copy the tokenizer's files there from the"
                " checkpoint's page"
            )
        try:
            return cls.from_bytes(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Tokenizer:
        """Read what `to_bytes` wrote."""
        return cls(Ranks.from_bytes(data) if Ranks.recognise(data) else BytePairs.from_bytes(data))

    def to_bytes(self) -> bytes:
        """One JSON document that holds the whole tokenizer: a tokenizer.json, or ranks and slots."""
        return self._vocabulary.serialized

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        return (Tokenizer.from_bytes, (self.to_bytes(),))

    def encode_text(self, text: str) -> list[int]:
        """Never a control id, whatever the text says. Raises ValueError on a lone surrogate, which no UTF-8 holds."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a lone surrogate at {error.start} cannot be encoded: repair the text") from error
        return self._vocabulary.encode(text)

    def encode_bytes(self, data: bytes) -> list[int]:
        """As `encode_text` where the bytes are UTF-8; each stray byte is one id."""
        ids: list[int] = []
        for part in re.split("([\udc80-\udcff])", data.decode("utf-8", errors="surrogateescape")):
            stray = len(part) == 1 and 0xDC80 <= ord(part) <= 0xDCFF
            ids += [self._id_of_byte[ord(part) - 0xDC00]] if stray else self.encode_text(part)
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
