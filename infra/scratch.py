"""A folder for large files on their way, which a process that was killed does not leave behind for ever."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.flock import try_lock

LOCK = "lock"


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent`, gone at the end; those of the same prefix whose owner is dead go first."""
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{prefix}*"):
        if (left / LOCK).exists() and (descriptor := try_lock(left / LOCK)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(descriptor)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        owned = try_lock(Path(folder) / LOCK)
        assert owned is not None, "nobody else knows the new folder"
        try:
            yield Path(folder)
        finally:
            os.close(owned)
