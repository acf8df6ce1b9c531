"""Locks on files, which the kernel gives back when their holder is gone, however it ended."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock(path: Path, *, shared: bool = False) -> int:
    """Waits for the lock, which is held until the descriptor is closed: by `os.close`, or with the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def try_lock(path: Path, *, shared: bool = False) -> int | None:
    """The same at once or not at all: None when somebody else, or another descriptor of this process, has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether somebody has it for himself alone."""
    descriptor = try_lock(path, shared=True)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None
