"""Files that appear whole and stay: written beside their place, on the disk before they get their name."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from infra.flock import lock
from k3core.checkpoint.new_folder import sync as sync_directory


@contextmanager
def synced_file(path: Path, data: bytes) -> Iterator[Path]:
    """A temporary file beside `path`, on the disk before it gets its name: the body of `with` gives it that name."""
    with temporary_file(path) as (written, file):
        file.write(data)
        sync(file)
        yield written


@contextmanager
def temporary_file(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file beside `path`, gone at the end unless the body renamed it; the folder is on the disk by then."""
    make_directory(path.parent)
    written = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with written.open("xb") as file:
            yield written, file
    finally:
        written.unlink(missing_ok=True)
        sync_directory(path.parent)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One holder at a time among all threads and processes of this machine; freed by the kernel when the holder dies."""
    while True:
        descriptor = lock(path)
        try:
            # Whoever held it before may have removed the file: then another one is the lock by now.
            if _is_same_file(descriptor, path):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(descriptor)


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def make_directory(directory: Path) -> None:
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
