"""A folder that is there whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def refuse_taken(target: Path) -> None:
    """Raises ValueError unless `target` is absent or an empty folder."""
    if target.is_dir():
        if any(target.iterdir()):
            raise ValueError(f"{target}: is not empty; name a new folder, nothing is ever written over")
    elif target.exists() or target.is_symlink():
        raise ValueError(f"{target}: is there and is no folder; name a new one")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields `.NAME.partial-…` beside the target, which takes its name when the block ends and vanishes when it raises.

    Whoever writes a file in it calls `sync` on it; the folder is synced here. A process that is killed leaves the
    partial folder, and never the target. Raises ValueError for a target that is taken or cannot be made.
    """
    refuse_taken(target)
    target = target.resolve()
    partial = target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:12]}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise ValueError(f"{target}: cannot be made: {error.strerror}") from error
    try:
        yield partial
        for folder, _, _ in os.walk(partial):
            sync(Path(folder))
        refuse_taken(target)
        try:
            os.rename(partial, target)
        except OSError as error:  # a mount point, for one
            raise ValueError(f"{target}: cannot be put in place: {error.strerror}; name a new folder") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(target.parent)


def sync(path: Path) -> None:
    """A file or folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
