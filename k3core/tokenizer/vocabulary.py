"""What a tokenizer is made of: the seam with two implementations, merges (`tokenizers`) and ranks (`tiktoken`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

NUM_BYTES = 256


class Vocabulary(Protocol):
    """Immutable. Ids are 0..len(bytes_of_id)-1; those in `control` are control tokens, all others stand for bytes.

    bytes_of_id: what each id decodes to, a control token to its name. Each single byte is an id of its own.
    serialized: enough to build the same vocabulary again; equal vocabularies have equal bytes.
    """

    @property
    def bytes_of_id(self) -> Sequence[bytes]: ...

    @property
    def control(self) -> Mapping[str, int]: ...

    @property
    def serialized(self) -> bytes: ...

    def encode(self, text: str) -> list[int]:
        """Without control ids, whatever the text says. `text` can be written as UTF-8."""
        ...


def reserved_name(token_id: int) -> str:
    """Of a control slot that nothing names, as Kimi's tokenizers call it."""
    return f"<|reserved_token_{token_id}|>"
