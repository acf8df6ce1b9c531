"""Flow runs whose process was killed, which the embedded server would show as Running for ever."""

from __future__ import annotations

from typing import Any

from prefect import State
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterName,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Crashed

from infra.store import Store

UNFINISHED = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING]


def crash_abandoned(root: str, run: str) -> None:
    """For the process that has the run's lock, before its flow starts: whatever worked on the run is gone."""
    place = Store(root).uri(run)
    filters = FlowRunFilter(
        name=FlowRunFilterName(any_=[run]), state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED))
    )
    with get_client(sync_client=True) as client:
        for flow_run in client.read_flow_runs(flow_run_filter=filters):
            if _place(flow_run) == place:
                _crash(client, flow_run)


def _place(flow_run: FlowRun) -> str | None:
    settings = flow_run.parameters.get("cfg")
    return Store(settings["root"]).uri(settings["run"]) if isinstance(settings, dict) else None


def _crash(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    state: State[Any] = Crashed(message="Its process was killed.")
    tasks = client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id])),
        task_run_filter=TaskRunFilter(
            state=TaskRunFilterState(type=TaskRunFilterStateType(any_=UNFINISHED)),
        ),
    )
    for task in tasks:
        client.set_task_run_state(task.id, state, force=True)
    client.set_flow_run_state(flow_run.id, state, force=True)
