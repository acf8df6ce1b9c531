"""What each kind of place does for a store: whole objects by path, and three kinds of write."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as it stands. `version` is another one whenever the bytes are others."""

    data: bytes
    version: str


@dataclass(frozen=True, slots=True)
class Content:
    """What an object holds, or must hold."""

    sha256: str
    size_bytes: int


class Backend(Protocol):
    """Every write is all or nothing, and what it wrote outlives this process. A path names an object, never a folder.

    num_reads: how often bytes that are not the expected ones are worth reading again: on a network they may have been
    cut or altered on the way.
    """

    scheme: str
    num_reads: int

    def uri(self, path: str) -> str: ...

    def path(self, uri: str) -> str: ...

    def read(self, path: str) -> Stored | None:
        """None when there is no such object."""

    def read_verified(self, path: str, content: Content) -> bytes:
        """Raises FileNotFoundError without an object, IntegrityError for other bytes."""

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """[start, stop), less where the object ends before. Raises FileNotFoundError without an object."""

    def size(self, path: str) -> int | None: ...

    def write(self, path: str, data: bytes) -> None: ...

    def create(self, path: str, data: bytes) -> bool:
        """False, and nothing written, when the path exists; also for all but one of those who try at once."""

    def replace(self, path: str, data: bytes, version: str | None) -> str | None:
        """The new version; None, and nothing written, unless the object is at `version` (None: unless there is none).

        When an answer got lost it is None although the write happened: read to know.
        """

    def delete(self, path: str) -> None:
        """Nothing happens when there is no such object."""

    def list_paths(self, prefix: str) -> Iterator[str]: ...

    def upload(self, path: str, source: Path, state_folder: Path, /, *, is_exclusive: bool) -> Content | None:
        """What was stored; None, and nothing changed, when `is_exclusive` and other content stands there."""

    def download(self, path: str, content: Content, target: Path) -> None:
        """Raises as `read_verified`; `target` is then untouched."""

    def abort_uploads(self, path: str) -> None: ...


def content_of(data: bytes) -> Content:
    return Content(hashlib.sha256(data).hexdigest(), len(data))


def mismatch(uri: str, expected: Content, found: Content) -> str:
    if found.size_bytes != expected.size_bytes:
        return f"{uri}: expected {expected.size_bytes} bytes, found {found.size_bytes}"
    return f"{uri}: expected sha256 {expected.sha256}, found {found.sha256}"
