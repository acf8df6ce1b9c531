"""A store in this process, for tests and trials: fsspec's `memory://`, which all stores of the process share."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

from fsspec.implementations.memory import MemoryFileSystem

from infra.atomic_files import synced_file
from infra.store.backend import Content, Stored, content_of, mismatch
from k3core.errors import IntegrityError

_lock = threading.RLock()


class MemoryBackend:
    scheme = "memory"
    num_reads = 1

    def __init__(self) -> None:
        self._fs = MemoryFileSystem()

    def uri(self, path: str) -> str:
        return str(self._fs.unstrip_protocol(path))

    def path(self, uri: str) -> str:
        return str(self._fs._strip_protocol(uri))

    def read(self, path: str) -> Stored | None:
        try:
            data: bytes = self._fs.cat_file(path)
        except FileNotFoundError:
            return None
        return Stored(data, hashlib.sha256(data).hexdigest())

    def read_verified(self, path: str, content: Content) -> bytes:
        data = self._data(path)
        if (found := content_of(data)) != content:
            raise IntegrityError(mismatch(self.uri(path), content, found))
        return data

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        return self._data(path)[start:stop]

    def size(self, path: str) -> int | None:
        stored = self.read(path)
        return None if stored is None else len(stored.data)

    def write(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(path, data)

    def create(self, path: str, data: bytes) -> bool:
        with _lock:
            if self.read(path) is not None:
                return False
            self.write(path, data)
            return True

    def replace(self, path: str, data: bytes, version: str | None) -> str | None:
        with _lock:
            now = self.read(path)
            if (None if now is None else now.version) != version:
                return None
            self.write(path, data)
        return hashlib.sha256(data).hexdigest()

    def delete(self, path: str) -> None:
        with _lock:
            if self.read(path) is not None:
                self._fs.rm_file(path)

    def list_paths(self, prefix: str) -> Iterator[str]:
        found = self._fs.find(prefix.rpartition("/")[0] or "/")
        yield from sorted(path for path in found if path.startswith(prefix))

    def upload(self, path: str, source: Path, _state_folder: Path, /, *, is_exclusive: bool) -> Content | None:
        data = source.read_bytes()
        if not is_exclusive:
            self.write(path, data)
        elif not self.create(path, data) and self._data(path) != data:
            return None
        return content_of(data)

    def download(self, path: str, content: Content, target: Path) -> None:
        with synced_file(target, self.read_verified(path, content)) as written:
            written.replace(target)

    def abort_uploads(self, path: str) -> None:
        """Nothing is ever half written."""

    def _data(self, path: str) -> bytes:
        data: bytes = self._fs.cat_file(path)
        return data
