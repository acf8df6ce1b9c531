"""What the reaper decides, and what its decisions do on a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events import emit_event
from prefect.states import Crashed, Pending, Running, Scheduled

from flows.heartbeat import EVENT
from flows.reaper import RESTARTED, Decision, Seen, Watch, Windows, decide, reap_once

WINDOWS = Windows(silent_s=30.0, settled_s=20.0, pending_s=120.0, cancelling_s=90.0)
RUN = Seen(id=uuid4(), name="a", state=StateType.RUNNING, unchanged_s=0.0)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (replace(RUN, unchanged_s=29.0), None),
        (replace(RUN, unchanged_s=31.0), "crash"),
        (replace(RUN, state=StateType.PENDING, unchanged_s=31.0), None),
        (replace(RUN, state=StateType.PENDING, unchanged_s=121.0), "crash"),
        (replace(RUN, state=StateType.CANCELLING, unchanged_s=31.0), None),
        (replace(RUN, state=StateType.CANCELLING, unchanged_s=91.0), "end_cancel"),
        (replace(RUN, parent=StateType.CANCELLED), "cancel"),
        (replace(RUN, parent=StateType.FAILED), "cancel"),
        (replace(RUN, parent=StateType.CRASHED), None),  # it will be taken up again, and finds this one
        (replace(RUN, state=StateType.CRASHED, unchanged_s=60.0), None),
        (replace(RUN, state=StateType.CRASHED, unchanged_s=60.0, restarts_left=1), "restart"),
        (replace(RUN, state=StateType.CRASHED, unchanged_s=10.0, restarts_left=1), None),
    ],
)
def test_a_run_is_ended_only_after_the_window_of_its_state(run: Seen, expected: Decision | None) -> None:
    decided = decide(run, WINDOWS)
    assert (decided and decided[0]) == expected


def test_an_outage_of_the_server_is_nobody_s_silence() -> None:
    watch = Watch()
    assert watch.unchanged_s(RUN.id, ("state", 3), now=0.0) == 0.0
    assert watch.unchanged_s(RUN.id, ("state", 3), now=25.0) == 25.0
    assert watch.unchanged_s(RUN.id, ("state", 4), now=26.0) == 0.0  # a heartbeat arrived
    watch.forget()
    assert watch.unchanged_s(RUN.id, ("state", 4), now=500.0) == 0.0


@pytest.fixture
def client(prefect_api: str) -> Iterator[SyncPrefectClient]:
    del prefect_api
    with get_client(sync_client=True) as client:
        yield client


def deployed(client: SyncPrefectClient, pool: str, tags: list[str]) -> UUID:
    """A deployment on a pool with one slot."""
    client.create_work_pool(WorkPoolCreate(name=pool, type="process", concurrency_limit=1))
    flow_id = client.create_flow_from_name("stage")
    return client.create_deployment(flow_id=flow_id, name=pool, work_pool_name=pool, tags=tags, entrypoint="a.py:a")


def started(client: SyncPrefectClient, deployment: UUID, **parameters: Any) -> UUID:
    run = client.create_flow_run_from_deployment(deployment, parameters=parameters)
    for state in (Pending(), Running()):
        client.set_flow_run_state(run.id, state)
    return run.id


def state(client: SyncPrefectClient, run: UUID) -> tuple[StateType, str]:
    found = client.read_flow_run(run).state
    assert found is not None
    return found.type, found.message or ""


def claimable(client: SyncPrefectClient, pool: str) -> int:
    """How many runs the pool's server would hand to a worker now."""
    response = client._client.post(f"/work_pools/{pool}/get_scheduled_flow_runs", json={})
    return len(response.json())


def test_a_run_without_a_process_becomes_crashed_and_its_slot_goes_to_the_next(client: SyncPrefectClient) -> None:
    deployment = deployed(client, "slots", ["k3rl", "stage"])
    zombie = started(client, deployment)
    waiting = client.create_flow_run_from_deployment(deployment, state=Scheduled())
    assert claimable(client, "slots") == 0

    watch = Watch()
    reap_once(client, watch, WINDOWS, now=0.0)
    assert state(client, zombie)[0] == StateType.RUNNING
    reap_once(client, watch, WINDOWS, now=31.0)
    kind, message = state(client, zombie)
    assert kind == StateType.CRASHED
    assert "no sign of life for 31 s" in message
    assert claimable(client, "slots") == 1
    assert client.read_flow_run(waiting.id).state is not None


def test_a_run_that_gives_signs_of_life_is_left_alone_whatever_its_clock_says(client: SyncPrefectClient) -> None:
    deployment = deployed(client, "alive", ["k3rl", "stage"])
    run = started(client, deployment)
    watch = Watch()
    reap_once(client, watch, WINDOWS, now=0.0)
    for beat, years in enumerate((0, 40, -40)):
        resource = {"prefect.resource.id": f"prefect.flow-run.{run}"}
        from prefect.types._datetime import DateTime, now

        occurred: DateTime = now("UTC").replace(year=now("UTC").year + years)  # type: ignore[assignment]
        emit_event(event=EVENT, resource=resource, occurred=occurred)
        deadline = time.monotonic() + 20
        while watch.last[run][1] != 25.0 * (beat + 1) and time.monotonic() < deadline:
            reap_once(client, watch, WINDOWS, now=25.0 * (beat + 1))  # the event arrives when it arrives
            time.sleep(0.2)
        assert state(client, run)[0] == StateType.RUNNING
    reap_once(client, watch, WINDOWS, now=25.0 * 3 + 31.0)
    assert state(client, run)[0] == StateType.CRASHED


def test_a_crashed_loop_is_taken_up_again_so_often_and_no_more(client: SyncPrefectClient) -> None:
    deployment = deployed(client, "loops-pool", ["k3rl", "loop"])
    run = started(client, deployment, cfg={"tasks": {"loop_restarts": 2}})
    watch, clock = Watch(), 0.0
    for left in (1, 0):
        client.set_flow_run_state(run, Crashed(message="killed"), force=True)
        reap_once(client, watch, WINDOWS, now=clock)
        clock += 21.0
        reap_once(client, watch, WINDOWS, now=clock)
        kind, message = state(client, run)
        assert kind == StateType.SCHEDULED
        assert message.startswith(f"{RESTARTED}; {left} more")
    client.set_flow_run_state(run, Crashed(message="killed"), force=True)
    reap_once(client, watch, WINDOWS, now=clock)
    reap_once(client, watch, WINDOWS, now=clock + 21.0)
    assert state(client, run)[0] == StateType.CRASHED
