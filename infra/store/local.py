"""A store on a disk: temporary files that get their name when they are whole and on the disk."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from fsspec.implementations.local import LocalFileSystem

from infra.atomic_files import locked, make_directory, sync, synced_file, temporary_file
from infra.store.backend import Content, Stored, content_of, mismatch
from k3core.checkpoint.new_folder import sync as sync_directory
from k3core.errors import IntegrityError

CHUNK_BYTES = 1 << 20
# There is no object of that name: nothing, a folder, or something below an object.
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Beside the objects, never one of them: what a killed writer left, and the locks of pointers.
_NOT_AN_OBJECT = re.compile(r"^\..*\.(?:[0-9a-f]{32}\.tmp|lock)$")


class LocalBackend:
    """Paths are absolute; a file system with hard links is expected."""

    scheme = "file"
    num_reads = 1

    def __init__(self) -> None:
        self._names = LocalFileSystem()

    def uri(self, path: str) -> str:
        return str(self._names.unstrip_protocol(path))

    def path(self, uri: str) -> str:
        return str(self._names._strip_protocol(uri))

    def read(self, path: str) -> Stored | None:
        try:
            data = Path(path).read_bytes()
        except ABSENT:
            return None
        return Stored(data, hashlib.sha256(data).hexdigest())

    def read_verified(self, path: str, content: Content) -> bytes:
        with _opened(path) as file:
            data = file.read()
        if (found := content_of(data)) != content:
            raise IntegrityError(mismatch(self.uri(path), content, found))
        return data

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        with _opened(path) as file:
            file.seek(start)
            return file.read(stop - start)

    def size(self, path: str) -> int | None:
        file = Path(path)
        try:
            return file.stat().st_size if file.is_file() else None
        except FileNotFoundError:
            return None  # deleted since the look

    def write(self, path: str, data: bytes) -> None:
        with synced_file(Path(path), data) as written:
            os.replace(written, path)

    def create(self, path: str, data: bytes) -> bool:
        with synced_file(Path(path), data) as written:
            return _link(written, path)

    def replace(self, path: str, data: bytes, version: str | None) -> str | None:
        target = Path(path)
        make_directory(target.parent)
        with locked(target.with_name(f".{target.name}.lock")):
            now = self.read(path)
            if (None if now is None else now.version) != version:
                return None
            self.write(path, data)
        return hashlib.sha256(data).hexdigest()

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)
            sync_directory(Path(path).parent)

    def list_paths(self, prefix: str) -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        for parent, folders, names in os.walk(folder, onerror=_unless_gone):
            folders.sort()
            for name in sorted(names):
                path = f"{parent.rstrip('/')}/{name}"
                if path.startswith(prefix) and not _NOT_AN_OBJECT.match(name):
                    yield path

    def upload(self, path: str, source: Path, _state_folder: Path, /, *, is_exclusive: bool) -> Content | None:
        with source.open("rb") as file:
            if is_exclusive and Path(path).is_file():
                content = _file_content(file)
                return content if self._content(path) == content else None
            with temporary_file(Path(path)) as (written, out):
                content = _copy_hashed(file, out)
                sync(out)
                if not is_exclusive:
                    os.replace(written, path)
                elif not _link(written, path) and self._content(path) != content:
                    return None
        return content

    def download(self, path: str, content: Content, target: Path) -> None:
        with _opened(path) as file, temporary_file(target) as (written, out):
            found = _copy_hashed(file, out)
            if found != content:
                raise IntegrityError(mismatch(self.uri(path), content, found))
            sync(out)
            os.replace(written, target)

    def abort_uploads(self, path: str) -> None:
        """Deletes what killed writers of this path left. A living writer of it fails."""
        target = Path(path)
        for left in target.parent.glob(f".{_escaped(target.name)}.*.tmp"):
            if _NOT_AN_OBJECT.match(left.name):
                left.unlink(missing_ok=True)

    def _content(self, path: str) -> Content:
        with _opened(path) as file:
            return _file_content(file)


def _link(written: Path, path: str) -> bool:
    try:
        os.link(written, path)
    except FileExistsError:
        return False
    return True


def _opened(path: str) -> BufferedReader:
    try:
        return open(path, "rb")
    except ABSENT as error:
        raise FileNotFoundError(path) from error


def _file_content(file: BufferedReader) -> Content:
    return Content(hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size)


def _escaped(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _copy_hashed(source: BinaryIO, target: BinaryIO) -> Content:
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)
        size += len(chunk)
    return Content(digest.hexdigest(), size)


def _unless_gone(error: OSError) -> None:
    """A folder may vanish during the walk; one that cannot be read is told."""
    if not isinstance(error, ABSENT):
        raise error
