"""Child processes that do a stage's work beside this one, and that never outlive it."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from k3core.errors import RunError


class ChildFailed(RunError):
    """A child process ended with another code than 0; its last words are the message."""


_PR_SET_PDEATHSIG = 1
_running: set[subprocess.Popen[str]] = set()
_is_stopping = threading.Event()


@contextmanager
def children_end_with_this() -> Iterator[None]:
    """Whatever ends the body early, an exception or a termination signal, ends the child processes and starts no more,
    until a body is entered again."""
    _is_stopping.clear()
    try:
        yield
    except BaseException:
        _is_stopping.set()
        for child in list(_running):
            child.kill()
        raise


def is_stopping() -> bool:
    return _is_stopping.is_set()


def run_job(module: str, job: Mapping[str, Any], timeout_s: float, on_progress: Callable[[int, int], None]) -> None:
    """Run `python -m module` with the job as JSON on stdin, until it ends.

    Takes lines `progress DONE OF` from its stdout. The kernel kills the child when this process dies, however it dies;
    the time-out, or an exception here (a cancel), kills it too. Raises ChildFailed.
    """
    if _is_stopping.is_set():
        raise ChildFailed(f"{module} was not started: the run is ending")
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", module],  # not a package of the same name in the working directory
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    too_long = threading.Event()

    def give_up() -> None:
        too_long.set()
        child.kill()

    _running.add(child)
    timer = threading.Timer(timeout_s, give_up)
    timer.start()
    try:
        child.stdin.write(json.dumps(job))
        child.stdin.close()
        for line in child.stdout:
            word, *numbers = line.split()
            if word == "progress":
                on_progress(int(numbers[0]), int(numbers[1]))
        assert child.stderr is not None
        errors = child.stderr.read()
        if child.wait() != 0:
            if too_long.is_set():
                raise ChildFailed(f"{module} took longer than {timeout_s:g} s (tasks.timeout_s) and was ended")
            last = "\n".join(errors.strip().splitlines()[-15:])
            raise ChildFailed(f"{module} ended with code {child.returncode}: {last}")
    finally:
        timer.cancel()
        _running.discard(child)
        if child.poll() is None:
            child.kill()
            child.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
