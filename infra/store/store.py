"""Bytes by reference, documents and pointers by key, on a disk, in memory or in S3.

Whole objects appear at once or not at all; what exists is asked by key and never by a listing, which may be old.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fsspec.core import split_protocol

from infra.cache import Cache
from infra.fence import pass_fence
from infra.store.backend import Backend, Content, content_of
from infra.store.errors import AlreadyCommitted, Conflict, StoreUnavailable
from infra.store.local import LocalBackend
from infra.store.memory import MemoryBackend
from infra.store.options import StoreOptions
from infra.store.s3 import S3Backend
from k3core.errors import IntegrityError, RunError
from k3core.sealed import canonical_json, parse_canonical
from k3core.types import Ref

Document = TypeVar("Document")

SCHEMES = ("file", "memory", "s3")
# How many swaps may follow ours before we learn that its answer got lost, and still know that it was done.
WRITERS_KEPT = 32
# Of a document that is there for those who write and not for those who read: deleted meanwhile, or an old answer.
NUM_CREATES = 3
# Equal bytes that are no document, before they are taken for what is stored.
NUM_BELIEVED = 3


class Store:
    """A folder: `root` is a path, `file://`, `memory://` or `s3://bucket/prefix`.

    S3's credentials, region and endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    AWS_REGION, AWS_ENDPOINT_URL_S3), and K3_CACHE may name a folder that keeps what was read from it. Raises
    StoreUnavailable when the server did not answer within all tries, StoreDenied when it refuses the credentials.
    Safe for threads; nothing is opened before the first use.
    """

    def __init__(self, root: str, options: StoreOptions | None = None) -> None:
        self.root = root
        self.options = options or StoreOptions()
        self.protocol = split_protocol(root)[0] or "file"
        self._backend = _backend(root, self.protocol, self.options)
        self._root = self._backend.path(root).rstrip("/")
        if not self._root and self.protocol == "s3":
            raise ValueError(f"store {root!r}: expected s3://bucket/prefix")
        self._cache = Cache.from_environment() if self.protocol == "s3" else None

    def __reduce__(self) -> tuple[type[Store], tuple[str, StoreOptions]]:
        return type(self), (self.root, self.options)

    def uri(self, key: str) -> str:
        return self._backend.uri(self._path(key))

    def ref(self, key: str, data: bytes) -> Ref:
        """The reference that `data` has, or would have, under `key`."""
        return self._ref(key, content_of(data))

    def resolve(self, ref: Ref) -> str:
        """Its path for this store's file system, under whatever root it was written."""
        if split_protocol(ref.uri)[0] != self.protocol:
            raise ValueError(f"{ref.uri}: a {self.protocol}:// store cannot read it; open a store of that scheme")
        return self._backend.path(ref.uri)

    def put(self, key: str, data: bytes) -> Ref:
        """Readers see the old bytes or the new ones, never part of them; once it returns, they are on the disk."""
        path = self._path(key)
        pass_fence()
        self._backend.write(path, data)
        return self.ref(key, data)

    def get(self, ref: Ref) -> bytes:
        """Raises IntegrityError naming the uri when the bytes are missing or others."""
        path = self.resolve(ref)
        cached = None if self._cache is None else self._cache.get(ref.sha256, ref.size_bytes)
        if cached is not None:
            return cached
        data = _unless_missing(ref, lambda: self._backend.read_verified(path, _content(ref)))
        if self._cache is not None:
            self._cache.put(ref.sha256, data)
        return data

    def get_range(self, ref: Ref, start: int, stop: int) -> bytes:
        """Bytes [start, stop) as they stand there now, UNVERIFIED: the caller has a digest of its own for them.

        Raises IntegrityError when the object is missing or ends before `stop`.
        """
        if not 0 <= start <= stop <= ref.size_bytes:
            raise ValueError(f"{ref.uri}: expected a range within {ref.size_bytes} bytes, found {start}:{stop}")
        path = self.resolve(ref)
        if start == stop:
            return b""
        data = _unless_missing(ref, lambda: self._backend.read_range(path, start, stop))
        if len(data) != stop - start:
            raise IntegrityError(f"{ref.uri}: expected {ref.size_bytes} bytes, found {start + len(data)}")
        return data

    def put_file(self, key: str, path: Path, *, replace: bool = False, state_folder: Path | None = None) -> Ref:
        """A file of any size, in memory only by parts. Of 16 who try at once with other bytes exactly one is stored.

        The key may hold the same bytes already; then nothing is sent. Raises AlreadyCommitted when it holds others,
        unless `replace`. On S3 a try after a killed one sends only what the server lacks: a small state file tells it,
        beside `path` or in `state_folder`. Raises RunError when the file changes meanwhile.
        """
        target = self._path(key)
        pass_fence()
        content = self._backend.upload(target, path, state_folder or path.absolute().parent, is_exclusive=not replace)
        if content is None:
            raise AlreadyCommitted(f"{self.uri(key)}: other content than {path} stands here")
        return self._ref(key, content)

    def get_file(self, ref: Ref, path: Path) -> None:
        """The file appears whole and verified, or not at all. Raises as `get`.

        On S3 a try after a killed one fetches only what is missing; the parts are in a hidden file beside `path`.
        """
        source = self.resolve(ref)
        _unless_missing(ref, lambda: self._backend.download(source, _content(ref), path))

    def commit(self, key: str, document: Mapping[str, Any]) -> Ref:
        """Writes a document once: whoever comes second with other content gets AlreadyCommitted.

        A writer commits after all that the document refers to; from then on readers see it.
        """
        data = canonical_json(document)
        path = self._path(key)
        for num_failed in range(1, NUM_CREATES + 1):
            pass_fence()
            if self._backend.create(path, data):
                return self.ref(key, data)
            # Ours as well when the answer to an earlier try got lost.
            if (now := self._backend.read(path)) is not None:
                if now.data == data:
                    return self.ref(key, data)
                raise AlreadyCommitted(f"{self.uri(key)}: another document is committed here")
            time.sleep(self.options.pause(num_failed, 0.0))
        raise StoreUnavailable(f"{self.uri(key)}: a document is there for those who write and not for those who read")

    def read_manifest(self, key: str) -> dict[str, Any] | None:
        """The document under `key`, None when there is none. Raises IntegrityError for bytes that are no document."""
        found = self._read_parsed(key, parse_canonical)
        return None if found is None else found[0]

    def read(self, key: str) -> bytes | None:
        """What stands under `key` now, unverified; None when nothing does."""
        stored = self._backend.read(self._path(key))
        return None if stored is None else stored.data

    def read_pointer(self, key: str) -> tuple[dict[str, Any], str] | None:
        """The document that was swapped in last and its version for the next `swap`; None when there is none.

        Raises IntegrityError for bytes that no `swap` wrote.
        """
        found = self._read_parsed(key, _parse_pointer)
        return None if found is None else (found[0]["document"], found[1])

    def swap(self, key: str, document: Mapping[str, Any], expected_version: str | None) -> str:
        """Points `key` at a document if it still is at that version (None: if it was never set); the new version.

        Of all who expect the same version exactly one succeeds, the others get Conflict and change nothing. No version
        comes back: what is stored counts the swaps and names the writer, so that equal documents differ. A key is
        either swapped or else committed and put. After StoreUnavailable it may have happened: read the pointer.
        """
        path = self._path(key)
        pass_fence()
        now = self._read_parsed(key, _parse_pointer)
        if (None if now is None else now[1]) != expected_version:
            raise Conflict(f"{self.uri(key)}: not at version {expected_version} any more")
        sequence, writers = (0, []) if now is None else (now[0]["sequence"], now[0]["writers"])
        me = uuid.uuid4().hex
        pointer = {
            "document": dict(document),
            "sequence": sequence + 1,
            "writers": [me, *writers][:WRITERS_KEPT],
        }
        data = canonical_json(pointer)
        version = self._backend.replace(path, data, expected_version)
        if version is not None:
            return version
        # Lost, or won by a try whose answer got lost: then this writer is among those that stand there.
        after = self._read_parsed(key, _parse_pointer)
        if after is None or me not in after[0]["writers"]:
            raise Conflict(f"{self.uri(key)}: not at version {expected_version} any more")
        return after[1] if after[0]["writers"][0] == me else f"before {after[1]}"

    def size(self, key: str) -> int | None:
        """Bytes of the object under `key` now; None when there is none."""
        return self._backend.size(self._path(key))

    def delete(self, key: str) -> None:
        """Afterwards there is no such object; there need not have been one. Only garbage collection deletes."""
        path = self._path(key)
        pass_fence()
        self._backend.delete(path)

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        """Keys that begin with `prefix`. A listing may PROPOSE candidates and never decides.

        It may lack what was just written and still name what was just deleted: ask `size`, `read_manifest` or `get` by
        key before anything depends on the answer.
        """
        if prefix.startswith("/") or any(part in (".", "..") for part in prefix.split("/")):
            raise ValueError(f"store prefix {prefix!r}: expected the beginning of a key")
        for path in self._backend.list_paths(f"{self._root}/{prefix}"):
            yield path.removeprefix(f"{self._root}/")

    def abort_uploads(self, key: str) -> None:
        """Frees what unfinished uploads to `key` hold. One that is still under way fails and begins anew when retried."""
        self._backend.abort_uploads(self._path(key))

    def check_conditions(self) -> None:
        """Raises RunError for a server that takes conditional writes and ignores the condition, as some do.

        Commits and swaps would overwrite each other there. Writes one small object and removes it again.
        """
        path = self._path(f"condition-{uuid.uuid4().hex}")
        try:
            self._backend.write(path, b"first")
            if self._backend.create(path, b"second") or self._backend.replace(path, b"third", '"other"') is not None:
                raise RunError(f"{self.root}: this place ignores If-None-Match or If-Match, so no two may write to it")
        finally:
            self._backend.delete(path)

    def local_path(self, key: str) -> Path | None:
        """Where other programs find `key` on this machine's disk; None when the store is elsewhere."""
        return Path(self._path(key)) if self.protocol == "file" else None

    def _path(self, key: str) -> str:
        if any(part in ("", ".", "..") for part in key.split("/")):
            raise ValueError(f"store key {key!r}: expected names joined by single slashes")
        return f"{self._root}/{key}"

    def _ref(self, key: str, content: Content) -> Ref:
        return Ref(self.uri(key), content.sha256, content.size_bytes)

    def _read_parsed(self, key: str, parse: Callable[[bytes, str], Document]) -> tuple[Document, str] | None:
        """The document and its version. Bytes that are none are read again, for they may have been cut on the way."""
        path, answers = self._path(key), Counter[bytes]()
        for num_failed in range(1, self._backend.num_reads + 1):
            stored = self._backend.read(path)
            if stored is None:
                return None
            try:
                return parse(stored.data, self.uri(key)), stored.version
            except IntegrityError:
                answers[stored.data] += 1
                if answers[stored.data] == NUM_BELIEVED or num_failed == self._backend.num_reads:
                    raise
            time.sleep(self.options.pause(num_failed, 0.0))
        raise AssertionError("a backend reads at least once")


def _backend(root: str, protocol: str, options: StoreOptions) -> Backend:
    if protocol == "file":
        return LocalBackend()
    if protocol == "memory":
        return MemoryBackend()
    if protocol == "s3":
        return S3Backend(options)
    raise ValueError(f"store {root!r}: expected a path or one of {', '.join(f'{p}://' for p in SCHEMES)}")


def _content(ref: Ref) -> Content:
    return Content(ref.sha256, ref.size_bytes)


def _unless_missing(ref: Ref, read: Callable[[], Document]) -> Document:
    try:
        return read()
    except FileNotFoundError as error:
        raise IntegrityError(f"{ref.uri}: missing; expected {ref.size_bytes} bytes") from error


def _parse_pointer(data: bytes, uri: str) -> dict[str, Any]:
    pointer = parse_canonical(data, uri)
    if sorted(pointer) != ["document", "sequence", "writers"] or not pointer["writers"]:
        raise IntegrityError(f"{uri}: expected a pointer, found another document")
    return pointer
