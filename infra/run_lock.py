"""One training process a run: whoever comes second, a trigger that fired twice, is told so."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from pathlib import Path

from infra.flock import try_lock
from infra.store import Store

_held: dict[Path, int] = {}


def hold_run(root: str, run: str, home: Path) -> None:
    """Until this process is gone, however it ends. Raises ValueError that names the process which has the run.

    The lock is a file in the run's folder; for a run that is stored elsewhere, one in `home`, so that it counts on this
    machine only. Two machines then meet in the ledger and in the store, which let one of two writers win.
    """
    path = _lock_path(root, run, home)
    if path in _held:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = try_lock(path)
    if descriptor is None:
        raise ValueError(
            f"run {run!r} in {root} is going on in {_holder(path)}: let it end, or end it, and then continue it with"
            " the same command; for a run beside it, give this one a name of its own (run=NAME)"
        )
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    _held[path] = descriptor


def _lock_path(root: str, run: str, home: Path) -> Path:
    folder = Store(root).local_path(run)
    if folder is not None:
        return folder / ".lock"
    digest = hashlib.sha256(f"{root.rstrip('/')}/{run}".encode()).hexdigest()[:16]
    return home / "runs" / f"{digest}.lock"


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except ValueError:  # it has the lock and has not written yet
        return "another process"
