"""Bytes by reference and documents by key, on a disk, in memory or in S3.

Whole objects appear at once or not at all; what exists is asked by key and never by a listing, which may be old.
Nothing is ever deleted.
"""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import split_protocol, url_to_fs

from k3core.errors import IntegrityError
from k3core.sealed import canonical_json, parse_canonical
from k3core.types import Ref

# A listing cache would hide what other processes write; a shared instance would share their caches.
OPTIONS: dict[str, dict[str, Any]] = {
    "file": {},
    "memory": {},
    "s3": {"use_listings_cache": False, "skip_instance_cache": True},
}
# What a server answers to the loser of an exclusive create: the second is Amazon's, while the winner still writes.
LOST_RACE = frozenset({"PreconditionFailed", "ConditionalRequestConflict"})

_memory_lock = threading.Lock()


class AlreadyCommitted(Exception):
    """Another document stands under this key; the first one stays."""


class Store:
    """A folder: `root` is a path, `file://`, `memory://` or `s3://bucket/prefix` (credentials from the environment)."""

    def __init__(self, root: str) -> None:
        self.protocol = split_protocol(root)[0] or "file"
        if self.protocol not in OPTIONS:
            raise ValueError(f"store {root!r}: expected a path or one of {', '.join(f'{p}://' for p in OPTIONS)}")
        self._fs, path = url_to_fs(root, **OPTIONS[self.protocol])
        self._root: str = path.rstrip("/")

    def uri(self, key: str) -> str:
        return str(self._fs.unstrip_protocol(self._path(key)))

    def ref(self, key: str, data: bytes) -> Ref:
        """The reference that `data` has, or would have, under `key`."""
        return Ref(self.uri(key), hashlib.sha256(data).hexdigest(), len(data))

    def resolve(self, ref: Ref) -> str:
        """Its path for this store's file system, under whatever root it was written."""
        if split_protocol(ref.uri)[0] != self.protocol:
            raise ValueError(f"{ref.uri}: a {self.protocol}:// store cannot read it; open a store of that scheme")
        return str(self._fs._strip_protocol(ref.uri))

    def put(self, key: str, data: bytes) -> Ref:
        """Readers see the old bytes or the new ones, never part of them; once it returns, they are on the disk."""
        path = self._path(key)
        if self.protocol == "file":
            with _synced_file(Path(path), data) as written:
                os.replace(written, path)
        else:
            self._fs.pipe_file(path, data)
        return self.ref(key, data)

    def get(self, ref: Ref) -> bytes:
        """Raises IntegrityError naming the uri when the bytes are missing or others."""
        try:
            data: bytes = self._fs.cat_file(self.resolve(ref))
        except FileNotFoundError as error:
            raise IntegrityError(f"{ref.uri}: missing; expected {ref.size_bytes} bytes") from error
        if len(data) != ref.size_bytes:
            raise IntegrityError(f"{ref.uri}: expected {ref.size_bytes} bytes, found {len(data)}")
        found = hashlib.sha256(data).hexdigest()
        if found != ref.sha256:
            raise IntegrityError(f"{ref.uri}: expected sha256 {ref.sha256}, found {found}")
        return data

    def commit(self, key: str, document: Mapping[str, Any]) -> Ref:
        """Writes a document once: whoever comes second with other content gets AlreadyCommitted.

        A writer commits after all that the document refers to; from then on readers see it.
        """
        data = canonical_json(document)
        path = self._path(key)
        try:
            self._create(path, data)
        except FileExistsError as error:
            if self._fs.cat_file(path) != data:
                raise AlreadyCommitted(f"{self.uri(key)}: another document is committed here") from error
        return self.ref(key, data)

    def read_manifest(self, key: str) -> dict[str, Any] | None:
        """The document under `key`, None when there is none. Raises IntegrityError for bytes that are no document."""
        data = self.read(key)
        return None if data is None else parse_canonical(data, self.uri(key))

    def read(self, key: str) -> bytes | None:
        """What stands under `key` now, unverified; None when nothing does."""
        try:
            data: bytes = self._fs.cat_file(self._path(key))
        except FileNotFoundError:
            return None
        return data

    def local_path(self, key: str) -> Path | None:
        """Where other programs find `key` on this machine's disk; None when the store is elsewhere."""
        return Path(self._path(key)) if self.protocol == "file" else None

    def _path(self, key: str) -> str:
        if any(part in ("", ".", "..") for part in key.split("/")):
            raise ValueError(f"store key {key!r}: expected names joined by single slashes")
        return f"{self._root}/{key}"

    def _create(self, path: str, data: bytes) -> None:
        """Raises FileExistsError when the path exists, also for all but one of those who try at the same time."""
        if self.protocol == "file":
            with _synced_file(Path(path), data) as written:
                os.link(written, path)
        elif self.protocol == "memory":
            with _memory_lock:
                self._fs.pipe_file(path, data, mode="create")
        else:
            try:
                self._fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                raise
            except OSError as error:
                # s3fs says FileExistsError only to servers that name the failed condition; SeaweedFS does not.
                response = getattr(error.__cause__, "response", {})
                if response.get("Error", {}).get("Code") in LOST_RACE:
                    raise FileExistsError(path) from error
                raise


@contextmanager
def _synced_file(path: Path, data: bytes) -> Iterator[Path]:
    """A temporary file beside `path`, on the disk before it gets its name: the body of `with` gives it that name."""
    _make_directory(path.parent)
    written = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with written.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield written
    finally:
        written.unlink(missing_ok=True)
        _sync_directory(path.parent)


def _make_directory(directory: Path) -> None:
    if not directory.is_dir():
        _make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
