"""The reaper: what a dead process leaves in Prefect's database is brought to an end, and a crashed loop goes on.

Prefect's workers report the flow processes that die under them. When worker and process die together, the run would
stay Running for ever and hold a slot of its pool. `python -m flows.reaper` runs beside the server.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import httpx
from prefect import State
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Crashed

from flows.heartbeat import EVENT, heartbeat_s
from infra.console import say
from infra.task_settings import TasksConfig
from tasks.pool import CALLER_ENDED

TAG = "k3rl"
LOOP = "loop"
MISSED_BEATS = 3
RESTARTED = "taken up again after a crash"
RESTART_WITHIN = timedelta(hours=1)

Decision = Literal["crash", "end_cancel", "cancel", "restart"]


@dataclass(frozen=True, slots=True)
class Windows:
    """Seconds. silent: of a running run. pending: from a worker's claim to the first beat. cancelling: till it is over.

    settled: after a crash, before the restart, so that a process that was wrongly taken for dead has heard of it and ended.
    """

    silent_s: float
    settled_s: float
    pending_s: float
    cancelling_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """A run as the reaper sees it. unchanged_s: since its state, or its count of heartbeats, last changed, by the
    reaper's own steady clock: what other machines' clocks say plays no part. parent: the state of the run that asked
    for it, None for none. restarts_left: of a loop that crashed lately; 0 otherwise."""

    id: UUID
    name: str
    state: StateType
    unchanged_s: float
    parent: StateType | None = None
    restarts_left: int = 0


def decide(run: Seen, windows: Windows) -> tuple[Decision, str] | None:
    """What to do about a run, and why; None: nothing."""
    silent = f"no sign of life for {run.unchanged_s:.0f} s"
    if run.state == StateType.CRASHED and run.restarts_left > 0 and run.unchanged_s > windows.settled_s:
        return "restart", f"{RESTARTED}; {run.restarts_left - 1} more restarts are left"
    if run.state in (StateType.RUNNING, StateType.PENDING) and run.parent in (StateType.CANCELLED, StateType.FAILED):
        return "cancel", CALLER_ENDED
    if run.state == StateType.RUNNING and run.unchanged_s > windows.silent_s:
        return "crash", f"{silent}: its worker and its process are gone"
    if run.state == StateType.PENDING and run.unchanged_s > windows.pending_s:
        return "crash", f"{silent} since a worker claimed it: the worker is gone"
    if run.state == StateType.CANCELLING and run.unchanged_s > windows.cancelling_s:
        return "end_cancel", f"{silent} since it was to be cancelled: its worker is gone"
    return None


@dataclass(slots=True)
class Watch:
    """When each run last changed. An outage of the server is nobody's silence: `forget` starts all windows again."""

    last: dict[UUID, tuple[Any, float]] = field(default_factory=dict)

    def unchanged_s(self, run: UUID, what: Any, now: float) -> float:
        if run not in self.last or self.last[run][0] != what:
            self.last[run] = (what, now)
        return now - self.last[run][1]

    def forget(self) -> None:
        self.last.clear()


def look(client: SyncPrefectClient, watch: Watch, now: float) -> list[Seen]:
    active = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING, StateType.CRASHED)
    runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(active))),
            tags=FlowRunFilterTags(all_=[TAG]),
        ),
        limit=200,
    )
    return [_seen(client, run, watch, now) for run in runs if run.state is not None]


def _seen(client: SyncPrefectClient, run: FlowRun, watch: Watch, now: float) -> Seen:
    assert run.state is not None
    beats = _heartbeats(client, run.id) if run.state.type == StateType.RUNNING else 0
    return Seen(
        id=run.id,
        name=run.name,
        state=run.state.type,
        unchanged_s=watch.unchanged_s(run.id, (run.state.id, beats), now),
        parent=_parent_state(client, run),
        restarts_left=_restarts_left(client, run),
    )


def _heartbeats(client: SyncPrefectClient, run: UUID) -> int:
    """Their number and not their times: a sender's clock may be wrong."""
    every_time = EventOccurredFilter.model_validate({"since": "2000-01-01T00:00:00Z", "until": "2100-01-01T00:00:00Z"})
    found = client.read_events(
        EventFilter(
            occurred=every_time,
            event=EventNameFilter(name=[EVENT]),
            resource=EventResourceFilter(id=[f"prefect.flow-run.{run}"]),
        ),
        limit=1,
    )
    return found.total


def _parent_state(client: SyncPrefectClient, run: FlowRun) -> StateType | None:
    if run.parent_task_run_id is None or run.state is None or run.state.type == StateType.CRASHED:
        return None
    parent = client.read_task_run(run.parent_task_run_id).flow_run_id
    state = None if parent is None else client.read_flow_run(parent).state
    return None if state is None else state.type


def _restarts_left(client: SyncPrefectClient, run: FlowRun) -> int:
    """Of a loop that crashed lately. The restarts are counted in its history: one that never began was one as well."""
    ended = run.end_time
    if LOOP not in run.tags or run.state is None or run.state.type != StateType.CRASHED:
        return 0
    if ended is None or datetime.now(UTC) - ended > RESTART_WITHIN:
        return 0
    history = client.read_flow_run_states(run.id)
    restarts = sum((state.message or "").startswith(RESTARTED) for state in history)
    settings: Mapping[str, Any] = run.parameters.get("cfg", {}).get("tasks", {})
    allowed = int(settings.get("loop_restarts", TasksConfig().loop_restarts))
    return max(0, allowed - restarts)


STATES: Mapping[Decision, Any] = {
    "crash": Crashed,
    "end_cancel": Cancelled,
    "cancel": Cancelling,
    "restart": AwaitingRetry,
}


def act(client: SyncPrefectClient, run: Seen, decision: Decision, why: str) -> None:
    state: State[Any] = STATES[decision](message=why)
    client.set_flow_run_state(run.id, state, force=True)
    say(f"{run.name}: {state.name}: {why}")


def reap_once(client: SyncPrefectClient, watch: Watch, windows: Windows, now: float) -> Sequence[tuple[Seen, Decision]]:
    done: list[tuple[Seen, Decision]] = []
    for run in look(client, watch, now):
        decided = decide(run, windows)
        if decided is not None:
            act(client, run, *decided)
            done.append((run, decided[0]))
    return done


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.reaper", description=__doc__)
    parser.add_argument("--pending-s", type=float, default=120.0, help="from a worker's claim to the first heartbeat")
    parser.add_argument("--cancelling-s", type=float, default=90.0)
    args = parser.parse_args()
    windows = Windows(MISSED_BEATS * heartbeat_s(), 2 * heartbeat_s(), args.pending_s, args.cancelling_s)
    say(f"watching {os.environ.get('PREFECT_API_URL')}: a silence of {windows.silent_s:g} s ends a run")
    watch = Watch()
    while True:
        try:
            with get_client(sync_client=True) as client:
                reap_once(client, watch, windows, time.monotonic())
        except httpx.HTTPError as error:
            say(f"the server is away ({type(error).__name__}); all windows start again")
            watch.forget()
        time.sleep(heartbeat_s() / 2)


if __name__ == "__main__":
    main()
