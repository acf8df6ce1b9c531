"""Starts programs in their order, watches them, starts again what ends, and stops all in reverse.

What it does next is decided in infra/services.py; that nothing outlives it is the work of infra/descendants.py.
In its folder: `supervisor.lock`, `state.json` (never an environment, hence never a secret) and `logs/`.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.descendants import MARK, dies_with_this_process, guard, members, reap_orphans, send, signal_all, strays
from infra.flock import is_locked, try_lock
from infra.services import (
    Program,
    Service,
    State,
    Status,
    after_check,
    after_end,
    after_start,
    after_wait,
    check_order,
    how_it_ended,
    may_start,
    may_stop,
)
from k3core.errors import RunError

LOCK = "supervisor.lock"
LOG_LIMIT_BYTES = 16 << 20
_TICK_S = 0.1
_CHECK_S = {State.STARTING: 0.25, State.SILENT: 1.0, State.HEALTHY: 5.0}


class AlreadyRuns(RunError):
    """Another supervisor holds this folder."""


def supervise(folder: Path, programs: Callable[[], Sequence[Program]]) -> int:
    """Until SIGTERM or SIGINT (0), or until a program cannot be started (1); all is stopped then.

    programs: asked for once the folder is ours. Raises AlreadyRuns, ValueError for programs in an impossible order, and
    what `programs` raises, before anything is started.
    """
    (folder / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone_in(folder):
        state_path(folder).unlink(missing_ok=True)
        listed = programs()
        check_order(listed)
        return guard(lambda: Supervisor(folder, listed).run())


def is_supervised(folder: Path) -> bool:
    """Whether a supervisor, or what is left of it, holds the folder now."""
    path = folder / LOCK
    return path.exists() and is_locked(path)


def read_state(folder: Path) -> dict[str, Any] | None:
    """What the supervisor wrote last, which outlives it; `is_supervised` says whether it is still true.

    None before its first word.
    """
    try:
        state: dict[str, Any] = json.loads(state_path(folder).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return state


def state_path(folder: Path) -> Path:
    return folder / "state.json"


def log_path(folder: Path, name: str) -> Path:
    return folder / "logs" / f"{name}.log"


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """The kernel ends the lock with its holders: the supervisor, and the guard that clears up behind it."""
    for _ in range(40):  # somebody may just be asking whether it is held
        if (descriptor := try_lock(folder / LOCK)) is not None:
            break
        time.sleep(0.05)
    else:
        raise AlreadyRuns(f"{folder}: servers already run from this folder; `k3 down` stops them")
    try:
        yield
    finally:
        os.close(descriptor)


class Supervisor:
    """Every tick: who ended, who answers, who may start; then the state file, if something changed.

    One thread starts and stops the processes (a child dies with the thread that started it); others ask for health.
    """

    def __init__(self, folder: Path, programs: Sequence[Program]) -> None:
        self._folder = folder
        self._programs = {program.name: program for program in programs}
        self._statuses = {name: Status() for name in self._programs}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started_at: dict[str, float] = {}  # Unix time
        self._asked: dict[str, Future[bool]] = {}
        self._asked_at: dict[str, float] = {}
        self._stops: dict[str, float] = {}  # since when
        self._told: set[int] = set()  # processes that got their stop signal
        self._failed: str | None = None
        self._is_stopping = False
        self._written: dict[str, Any] | None = None
        self._began = time.time()

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._write_state()
        signal_all(strays(f"{self._folder}#"), signal.SIGKILL)  # of a supervisor that was killed with its guard
        with ThreadPoolExecutor(max_workers=8, thread_name_prefix="check") as self._threads:
            while not (self._is_stopping and all(status.pid is None for status in self._statuses.values())):
                self._tick(time.monotonic())
                self._write_state()
                time.sleep(_TICK_S)
        for name, status in self._statuses.items():
            if status.state not in (State.FAILED, State.DONE):
                self._note(name, replace(status, state=State.STOPPED))
        self._write_state()
        return 1 if self._failed else 0

    def _on_signal(self, *_: object) -> None:
        self._is_stopping = True

    def _tick(self, now: float) -> None:
        reap_orphans(process.pid for process in self._processes.values())
        for name, process in list(self._processes.items()):
            if process.poll() is not None and name not in self._stops:
                self._note_end(name, process.returncode, now)
        for name, status in list(self._statuses.items()):
            self._note(name, after_wait(self._programs[name], status, now))
        for name, status in self._statuses.items():
            if status.state is State.FAILED and self._failed is None:
                self._failed = name
                self._is_stopping = True
        programs, statuses = list(self._programs.values()), self._statuses
        if self._is_stopping:
            for program in may_stop(programs, statuses):
                self._stop(program, now)
            return
        self._check_health(now)
        for program in may_start(programs, statuses, now):
            self._start(program, now)

    def _start(self, program: Program, now: float) -> None:
        path = log_path(self._folder, program.name)
        bound_log(path)
        rights: dict[str, Any] = {}
        if program.user is not None:
            rights = {"user": program.user, "group": _group_of(program.user), "extra_groups": []}
        with open(path, "ab") as log:
            try:
                process = subprocess.Popen(
                    list(program.argv),
                    env={**program.env, MARK: self._mark(program.name)},
                    cwd=program.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=dies_with_this_process(),
                    **rights,
                )
            except OSError as error:
                log.write(f"{program.argv[0]}: {error.strerror}\n".encode())
                started = after_start(self._statuses[program.name], None, now)
                self._note(program.name, after_end(program, started, f"could not be started: {error.strerror}", now))
                return
        self._processes[program.name] = process
        self._started_at[program.name] = time.time()
        self._note(program.name, after_start(self._statuses[program.name], process.pid, now))

    def _note(self, name: str, status: Status) -> None:
        before = self._statuses[name]
        self._statuses[name] = status
        if status.state is not before.state:
            why = f": {status.reason}" if status.state in (State.RESTARTING, State.FAILED) else ""
            print(f"{time.strftime('%F %T')} {name} {status.state}{why}", flush=True)

    def _note_end(self, name: str, returncode: int, now: float) -> None:
        """What the dead process had started goes with it, or it would still hold the port; unless it may finish."""
        program = self._programs[name]
        process = self._processes.pop(name)
        self._asked.pop(name, None)
        if not (isinstance(program, Service) and program.children_work):
            signal_all(members(process.pid, self._mark(name)), signal.SIGKILL)
        self._note(name, after_end(program, self._statuses[name], how_it_ended(returncode), now))

    def _check_health(self, now: float) -> None:
        for name, program in self._programs.items():
            status = self._statuses[name]
            if not isinstance(program, Service) or status.state not in _CHECK_S:
                continue
            if (answer := self._asked.get(name)) is not None:
                if answer.done():
                    del self._asked[name]
                    self._note(name, after_check(status, answer.result(), now))
            elif now - self._asked_at.get(name, 0.0) >= _CHECK_S[status.state]:
                self._asked_at[name] = now
                self._asked[name] = self._threads.submit(program.ready, self._started_at[name])
                bound_log(log_path(self._folder, name))

    def _stop(self, program: Program, now: float) -> None:
        """Called until nothing is left: the leader, then its children, or the other way round where they work.

        After the time-out SIGKILL goes to all of them.
        """
        name = program.name
        leader = self._processes[name]
        if name not in self._stops:
            self._stops[name] = now
            if self._statuses[name].state is not State.FAILED:
                self._note(name, replace(self._statuses[name], state=State.STOPPING, since=now))
        left = members(leader.pid, self._mark(name))
        children = [process for process in left if process.pid != leader.pid]
        is_over = leader.poll() is not None
        if is_over and not children:
            del self._processes[name]
            state = State.FAILED if self._statuses[name].state is State.FAILED else State.STOPPED
            self._note(name, replace(self._statuses[name], state=state, pid=None))
        elif now - self._stops[name] > program.stop_timeout_s:
            signal_all(left, signal.SIGKILL)
        elif children and (is_over or (isinstance(program, Service) and program.children_work)):
            self._tell([process.pid for process in children], signal.SIGTERM)
        elif not is_over:
            self._tell([leader.pid], program.stop_signal)

    def _tell(self, pids: Sequence[int], number: signal.Signals) -> None:
        """Once each."""
        for pid in set(pids) - self._told:
            send(pid, number)
            self._told.add(pid)

    def _mark(self, name: str) -> str:
        return f"{self._folder}#{name}"

    def _write_state(self) -> None:
        state = {
            "pid": os.getpid(),
            "started": self._began,
            "is_stopping": self._is_stopping,
            "failed": self._failed,
            "services": [
                _described(program, self._statuses[name], self._started_at.get(name), log_path(self._folder, name))
                for name, program in self._programs.items()
            ],
        }
        if state != self._written:
            path = state_path(self._folder)
            new = path.with_suffix(".new")
            new.write_text(json.dumps(state, indent=1), encoding="utf-8")
            os.replace(new, path)
            self._written = state


def _described(program: Program, status: Status, started: float | None, log: Path) -> dict[str, Any]:
    return {
        "name": program.name,
        "kind": "service" if isinstance(program, Service) else "one-shot",
        "state": status.state.value,
        "pid": status.pid,
        "restarts": status.restarts,
        "reason": status.reason,
        "started": started,
        "url": program.url if isinstance(program, Service) else None,
        "pool": program.pool if isinstance(program, Service) else None,
        "log": str(log),
    }


def bound_log(path: Path, limit_bytes: int = LOG_LIMIT_BYTES) -> None:
    """A log above the limit becomes the `.1` beside it, in place of the one before.

    The file stays the same, since its writer appends to it; a line written at this very moment may be lost.
    """
    if path.exists() and path.stat().st_size > limit_bytes:
        shutil.copyfile(path, path.with_name(path.name + ".1"))
        os.truncate(path, 0)


def last_lines(path: Path, count: int = 15) -> list[str]:
    """Of a log, without its empty lines; none when there is no log."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - (64 << 10)))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return [line for line in lines if line.strip()][-count:]


def failure(state: Mapping[str, Any]) -> tuple[str, list[str]] | None:
    """Which program could not be started and why, in one line, and the last words of its log; None if each could."""
    for service in state["services"]:
        if service["name"] == state["failed"]:
            return f"{service['name']} {service['reason']}: see {service['log']}", last_lines(Path(service["log"]))
    return None


def is_up(state: Mapping[str, Any]) -> bool:
    """Everything that `read_state` tells of is healthy or done."""
    return all(service["state"] in (State.HEALTHY, State.DONE) for service in state["services"])


def _group_of(user: str) -> int:
    return pwd.getpwnam(user).pw_gid
