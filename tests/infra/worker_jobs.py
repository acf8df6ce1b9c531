"""What the workers of test_rollout_workers.py are given to do: a worker imports it by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from k3core.errors import IntegrityError, RunError

LONG_S = 60
CLEAN_UP_S = 0.5


class TwoArguments(Exception):
    """A class whose instances do not come back from their own pickle."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} {number}")


class TwoArgumentsOfIntegrity(TwoArguments, IntegrityError):
    pass


def square(job: int, tick: Callable[[], None]) -> int:
    for _ in range(job):
        tick()
    return job * job


def fail(job: str, tick: Callable[[], None]) -> None:
    tick()
    kinds = {"integrity": IntegrityError, "run": RunError, "value": ValueError, "memory": MemoryError}
    if job.startswith("two"):
        raise (TwoArguments if job == "two" else TwoArgumentsOfIntegrity)("of", 2)
    if job in kinds:
        raise kinds[job](f"broken: {job}")
    time.sleep(LONG_S)


def work_in_a_folder(job: Path, tick: Callable[[], None]) -> None:
    """Long work that leaves nothing behind when it is told to end."""
    job.mkdir()
    try:
        tick()
        time.sleep(LONG_S)
    finally:
        time.sleep(CLEAN_UP_S)
        job.rmdir()
