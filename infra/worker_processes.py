"""Processes of this machine that stay between calls and share a call's jobs: a job each, with the results in order.

A worker that dies is found at once and fails the call; whatever ends a call early ends its workers too, and the next
call starts others. None outlives the process that started it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, TypeVar

import torch

from infra.fence import pass_fence
from infra.host import keep_freed_memory
from infra.services import how_it_ended
from k3core.errors import IntegrityError, RunError

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")
# A function of a module, which a worker imports by name: a job, and what it calls for each part that is done.
Work = Callable[[JobT, Callable[[], None]], ResultT]

GRACE_S = 3.0  # for a worker that was told to end, to leave its folders clean
_POLL_S = 0.2  # between looks at the fence; a time-out reaches a waiting thread no sooner either
_SPAWN = multiprocessing.get_context("spawn")  # a fork would copy torch's locks and threads


class WorkerLost(OSError):
    """A worker ended in the middle of its job. Another try starts new ones."""


@dataclass(frozen=True, slots=True)
class _Tick:
    pass


@dataclass(frozen=True, slots=True)
class _Result:
    value: Any


@dataclass(frozen=True, slots=True)
class _Fault:
    error: Exception


@dataclass(frozen=True, slots=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection


@dataclass(slots=True)
class WorkerProcesses:
    """Started when they are first needed; one torch thread each. Calls come one after the other, from any thread."""

    _workers: list[_Worker] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.process.pid or 0 for worker in self._workers)

    def run(self, work: Work[JobT, ResultT], jobs: Sequence[JobT], tick: Callable[[], None]) -> list[ResultT]:
        """The results in the order of `jobs`; `tick` is called here for each of the workers' ticks.

        Raises WorkerLost, and what `work` raised, with its class; of several faults the one that arrives first.
        """
        with self._lock:
            try:
                return _Call(self._ready(len(jobs)), work, jobs, tick).results()
            except BaseException:
                self._end()
                raise

    def end(self) -> None:
        with self._lock:
            self._end()

    def _ready(self, count: int) -> Sequence[_Worker]:
        """Workers that died while they had nothing to do are replaced."""
        for worker in [worker for worker in self._workers if not worker.process.is_alive()]:
            self._workers.remove(worker)
            worker.pipe.close()
        while len(self._workers) < count:
            self._workers.append(_start())
        return self._workers[:count]

    def _end(self) -> None:
        ending, self._workers = self._workers, []
        for worker in ending:
            worker.process.terminate()
        deadline = time.monotonic() + GRACE_S
        try:
            for worker in ending:
                worker.process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for worker in ending:
                worker.process.kill()
                worker.process.join()
                worker.pipe.close()


@dataclass(frozen=True, slots=True)
class _Call(Generic[JobT, ResultT]):
    workers: Sequence[_Worker]
    work: Work[JobT, ResultT]
    jobs: Sequence[JobT]
    tick: Callable[[], None]

    def results(self) -> list[ResultT]:
        for number, job in enumerate(self.jobs):
            try:
                self.workers[number].pipe.send((self.work, job))
            except (BrokenPipeError, ConnectionResetError):
                raise self._lost(number) from None
        results: dict[int, ResultT] = {}
        while len(results) < len(self.jobs):
            pass_fence()
            running = {self.workers[n].pipe: n for n in range(len(self.jobs)) if n not in results}
            for pipe in wait(list(running), _POLL_S):
                assert isinstance(pipe, Connection)
                message = self._received(running[pipe])
                if isinstance(message, _Tick):
                    self.tick()
                elif isinstance(message, _Fault):
                    raise message.error
                else:
                    results[running[pipe]] = message.value
        return [results[number] for number in range(len(self.jobs))]

    def _received(self, number: int) -> _Tick | _Result | _Fault:
        try:
            message = self.workers[number].pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._lost(number) from None
        assert isinstance(message, _Tick | _Result | _Fault)
        return message

    def _lost(self, number: int) -> WorkerLost:
        process = self.workers[number].process
        process.join(GRACE_S)
        ended = "closed its pipe" if process.exitcode is None else how_it_ended(process.exitcode) or "ended"
        hint = ", which the kernel does when memory is short" if process.exitcode == -signal.SIGKILL else ""
        return WorkerLost(
            f"worker process {number + 1} of {len(self.jobs)} (pid {process.pid}) {ended} in the middle of its work{hint}"
        )


def _start() -> _Worker:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(theirs,), name="k3-worker", daemon=True)
    process.start()
    theirs.close()  # the worker's is then the only one, and its end is the pipe's
    return _Worker(process, ours)


def _serve(pipe: Connection) -> None:
    """A worker's life: job after job, until the pipe or the process that started it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, to all at once: our starter decides what it means
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_end_with_starter, daemon=True).start()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        while True:
            work, job = pipe.recv()
            pipe.send(_outcome(work, job, lambda: pipe.send(_Tick())))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _leave(*_: object) -> None:
    """The work's own clean-up runs, and no second signal cuts it short; what asyncio says of it is of no use to anybody."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.disable()
    sys.exit(128 + signal.SIGTERM)


def _outcome(work: Work[Any, Any], job: Any, tick: Callable[[], None]) -> _Result | _Fault:
    try:
        return _Result(work(job, tick))
    except Exception as error:
        return _Fault(portable(error))


def portable(error: Exception) -> Exception:
    """The error as it is, with where it was raised as a note; if it cannot travel, the nearest class that callers decide
    on, with its text."""
    error.add_note(f"In a worker process:\n{''.join(traceback.format_exception(error))}")
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # whatever a class's own pickling raises
        pass
    known = next((kind for kind in (IntegrityError, RunError, ValueError, OSError) if isinstance(error, kind)), None)
    portable = RuntimeError(f"{type(error).__name__}: {error}") if known is None else known(str(error))
    for note in error.__notes__:
        portable.add_note(note)
    return portable


def _end_with_starter() -> None:
    """The starter may be killed in a way that leaves it no time to end anybody."""
    starter = multiprocessing.parent_process()
    assert starter is not None
    starter.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
