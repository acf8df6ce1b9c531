"""No process outlives the one that started it, however that one ends (Linux; elsewhere only an orderly end counts).

Three parts. A child is killed by the kernel with its parent. What that child had started becomes a child of the nearest
subreaper above, instead of init's. And the topmost process does nothing but wait there: when the one below it is gone,
it ends all that is left.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import psutil

IS_LINUX = sys.platform == "linux"
# In the environment of every process of a stack: which service of which folder it belongs to.
MARK = "K3_SERVICE"

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


def dies_with_this_process(number: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """To be run in a child between fork and exec. Only the thread that starts the child may be the one it dies with."""
    if not IS_LINUX:
        return None
    parent = os.getpid()

    def obey() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it ended before the kernel was told
            os._exit(1)

    return obey


def adopt_orphans() -> None:
    """What descendants leave behind becomes a child of this process, which has to reap it."""
    if IS_LINUX:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(known: Iterable[int]) -> None:
    """Clear away adopted children that have ended; those in `known` are somebody else's to reap."""
    if not IS_LINUX:
        return
    mine = frozenset(known)
    try:
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in mine:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
    except ChildProcessError:
        pass  # no child at all


def guard(run: Callable[[], int]) -> int:
    """The code of `run` in a process of its own; when that is over, even by kill -9, so are all its descendants.

    Termination signals are handed to it as SIGTERM; it gets SIGTERM as well when this process is killed.
    """
    if not IS_LINUX:
        return run()
    adopt_orphans()
    die_with_guard = dies_with_this_process(signal.SIGTERM)
    child = os.fork()
    if child == 0:
        os.setsid()  # a kill of one process group must not take both
        assert die_with_guard is not None
        die_with_guard()
        _run_and_exit(run)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: send(child, signal.SIGTERM))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    end_descendants()
    return 1 if code < 0 else code


def _run_and_exit(run: Callable[[], int]) -> None:
    code = 1
    try:
        adopt_orphans()
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end_descendants() -> None:
    """SIGKILL, until there is no child left; what a child leaves behind in between comes to this process."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            send(child.pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def members(leader: int, mark: str) -> list[psutil.Process]:
    """What one service consists of now: descendants of this process in the session of its leader, or with its mark."""
    return [process for process in psutil.Process().children(recursive=True) if _belongs(process, leader, mark)]


def _belongs(process: psutil.Process, leader: int, mark: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return os.getsid(process.pid) == leader or process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def strays(mark: str) -> Iterator[psutil.Process]:
    """Processes anywhere whose mark begins so; this process and those above it are none."""
    above = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    for process in psutil.process_iter():
        try:
            if process.pid not in above and process.environ().get(MARK, "").startswith(mark):
                yield process
        except (psutil.Error, OSError):
            continue


def signal_all(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        send(process.pid, number)


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it ended first
        os.kill(pid, number)
