"""Objects that were read from afar, kept on this machine's disk under their digest."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import uuid
from contextlib import suppress
from pathlib import Path

from infra.atomic_files import locked

FOLDER, MAX_BYTES = "K3_CACHE", "K3_CACHE_BYTES"
DEFAULT_MAX_BYTES = 32 << 30


class Cache:
    """Files named after the sha256 of their bytes; the least recently used ones go when they exceed `max_bytes`.

    Any number of processes share a folder. A file is whole when it gets its name and verified at each read: one that
    was altered since counts as absent and is removed. Processes look at the sum now and then, so that it may exceed
    `max_bytes` by a sixteenth for each of them.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"a cache needs room: {MAX_BYTES} is {max_bytes}")
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._unseen_bytes = max_bytes  # written since the last look at the sum: look at the first write

    @classmethod
    def from_environment(cls) -> Cache | None:
        """None unless K3_CACHE names a folder. K3_CACHE_BYTES bounds it, 32 GiB without."""
        folder = os.environ.get(FOLDER)
        if not folder:
            return None
        text = os.environ.get(MAX_BYTES) or str(DEFAULT_MAX_BYTES)
        if not text.isdecimal():
            raise ValueError(f"{MAX_BYTES}={text!r}: expected a number of bytes")
        return cls(Path(folder).expanduser(), int(text))

    def get(self, sha256: str, size_bytes: int) -> bytes | None:
        """The bytes of that digest, verified; None when they are not here."""
        file = self._file(sha256)
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None
        if len(data) != size_bytes or hashlib.sha256(data).hexdigest() != sha256:
            file.unlink(missing_ok=True)
            return None
        with suppress(FileNotFoundError):  # another process made room meanwhile; the bytes are whole all the same
            os.utime(file)
        return data

    def put(self, sha256: str, data: bytes) -> None:
        """Raises ValueError for bytes of another digest. What the cache, or a full disk, has no room for is not kept."""
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(f"cache: expected bytes with sha256 {sha256}")
        if len(data) > self._max_bytes:
            return
        try:
            self._write(self._file(sha256), data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return  # its reader has the bytes all the same
        with self._lock:
            self._unseen_bytes += len(data)
            if self._unseen_bytes > self._max_bytes // 16:
                self._unseen_bytes = 0
                self._make_room()

    def _write(self, file: Path, data: bytes) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
        try:
            written.write_bytes(data)  # and not synced: what a power loss leaves is verified like all else
            with suppress(FileNotFoundError):  # removed by another process that makes room: then it is not kept
                os.replace(written, file)
        finally:
            written.unlink(missing_ok=True)

    def _make_room(self) -> None:
        with locked(self._folder / ".lock"):
            found = []
            for file in self._folder.glob("??/*"):
                try:
                    status = file.stat()
                except FileNotFoundError:
                    continue  # a temporary file that got its name
                found.append((status.st_mtime_ns, status.st_size, file))
            total = sum(size for _, size, _ in found)
            for _, size, file in sorted(found):
                if total <= self._max_bytes:
                    return
                file.unlink(missing_ok=True)
                total -= size

    def _file(self, sha256: str) -> Path:
        return self._folder / sha256[:2] / sha256
