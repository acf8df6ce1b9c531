"""What a supervisor runs, and what it decides: who may start, what an end means, who is stopped next."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

# Whether a service answers, asked again and again in a thread. It takes the time (Unix) at which the process started.
Check = Callable[[float], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A command, and what must be healthy or done before it starts.

    env: the whole environment of the process; secrets travel here and nowhere else. user: whose rights it gets, for a
    supervisor that runs as root. start_timeout_s: until it is healthy, or, for a OneShot, until it has ended.
    stop_timeout_s: from the stop signal until SIGKILL.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    after: Sequence[str] = ()
    cwd: Path = Path("/")
    user: str | None = None
    start_timeout_s: float = 300.0  # it only has to end what hangs: a busy machine takes its time
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service(Program):
    """Runs until it is stopped, and is started again whenever it ends.

    url: for people. pool: the work pool that it serves. children_work: the processes that it started have work of their
    own. They may finish when it dies; at a stop they are told to end before it is, while it can still report on them.
    """

    ready: Check
    url: str | None = None
    pool: str | None = None
    children_work: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OneShot(Program):
    """Must end with code 0 before what comes after it starts. It runs at every start of the stack."""


class State(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    HEALTHY = "healthy"
    SILENT = "silent"  # it runs and does not answer
    RESTARTING = "restarting"  # it ended, and starts again after a pause
    DONE = "done"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Status:
    """Of one program. since: when the state began, on a clock that never jumps.

    ends: how often in a row the process ended within `STEADY_S`. restarts: how often in all it was started again.
    missed: checks in a row without an answer. reason: why it ended last, in words.
    """

    state: State = State.WAITING
    since: float = 0.0
    pid: int | None = None
    ends: int = 0
    restarts: int = 0
    missed: int = 0
    was_healthy: bool = False
    reason: str = field(default="", compare=False)

    @property
    def settled(self) -> bool:
        return self.state in (State.HEALTHY, State.DONE)


STEADY_S = 60.0  # a service that ran for so long is not blamed for how it ended earlier
MOST_PAUSE_S = 30.0
ATTEMPTS = 3  # of a program that was never healthy
MISSES = 3  # checks without an answer, after which a healthy service counts as silent


def check_order(programs: Sequence[Program]) -> None:
    """Raises ValueError unless each name is used once, and everything comes after what stands above it."""
    seen: set[str] = set()
    for program in programs:
        if program.name in seen:
            raise ValueError(f"{program.name}: two programs have this name")
        if missing := [name for name in program.after if name not in seen]:
            raise ValueError(f"{program.name}: comes after {missing[0]}, which is not listed above it")
        seen.add(program.name)


def pause_s(ends: int) -> float:
    """Half a second after the first end, doubled with each end in a row."""
    return float(min(MOST_PAUSE_S, 0.5 * 2 ** min(ends - 1, 16)))


def may_start(programs: Sequence[Program], statuses: Mapping[str, Status], now: float) -> list[Program]:
    """Those whose turn it is; a service that ended waits for its pause and for what it comes after, as at first."""
    needs = all_needs(programs)
    return [
        program
        for program in programs
        if _is_due(statuses[program.name], now) and all(statuses[name].settled for name in needs[program.name])
    ]


def _is_due(status: Status, now: float) -> bool:
    if status.state is State.RESTARTING:
        return now - status.since >= pause_s(status.ends)
    return status.state is State.WAITING


def may_stop(programs: Sequence[Program], statuses: Mapping[str, Status]) -> list[Program]:
    """Those that run, and that nothing which runs comes after."""
    needs = all_needs(programs)
    alive = [program for program in programs if statuses[program.name].pid is not None]
    needed = frozenset().union(*(needs[program.name] for program in alive))
    return [program for program in alive if program.name not in needed]


def all_needs(programs: Sequence[Program]) -> dict[str, frozenset[str]]:
    """By name, everything that it comes after, however many steps away: a OneShot between two services is long over."""
    needs: dict[str, frozenset[str]] = {}
    for program in programs:
        needs[program.name] = frozenset(program.after).union(*(needs[name] for name in program.after))
    return needs


def after_start(status: Status, pid: int | None, now: float) -> Status:
    restarts = status.restarts + (status.state is State.RESTARTING)
    return replace(status, state=State.STARTING, since=now, pid=pid, missed=0, restarts=restarts)


def after_end(program: Program, status: Status, ended: str, now: float) -> Status:
    """ended: what `how_it_ended` says, or why it could not even begin."""
    if isinstance(program, OneShot) and not ended:
        return replace(status, state=State.DONE, since=now, pid=None)
    was_steady = status.state in (State.HEALTHY, State.SILENT) and now - status.since >= STEADY_S
    ends = 1 if was_steady else status.ends + 1
    gives_up = not status.was_healthy and ends >= ATTEMPTS
    reason = ended or "ended with code 0"
    if gives_up:
        reason += f", {ends} times"
    state = State.FAILED if gives_up else State.RESTARTING
    return replace(status, state=state, since=now, pid=None, ends=ends, reason=reason)


def how_it_ended(returncode: int) -> str:
    """Of a process, as subprocess counts; empty for code 0."""
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"ended with code {returncode}" if returncode else ""


def after_check(status: Status, answers: bool, now: float) -> Status:
    """A service that stops to answer is reported, not ended: it may hold an hour of work."""
    missed = 0 if answers else status.missed + 1
    if answers and status.state in (State.STARTING, State.SILENT):
        return replace(status, state=State.HEALTHY, since=now, missed=0, was_healthy=True)
    if status.state is State.HEALTHY and missed >= MISSES:
        return replace(status, state=State.SILENT, since=now, missed=missed)
    return replace(status, missed=missed)


def after_wait(program: Program, status: Status, now: float) -> Status:
    """Time alone: what takes too long to start has failed, or is silent if it had been healthy before."""
    if status.state is not State.STARTING or now - status.since < program.start_timeout_s:
        return status
    if status.was_healthy:
        return replace(status, state=State.SILENT, since=now)
    wish = "end" if isinstance(program, OneShot) else "answer"
    return replace(status, state=State.FAILED, since=now, reason=f"did not {wish} within {program.start_timeout_s:g} s")
