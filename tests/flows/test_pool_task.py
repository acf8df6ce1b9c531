"""A stage on a work pool, with a scripted server: which flow run is waited for, and what its end means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled, Completed, Crashed, Failed, Running, State

import tasks.pool
from infra.task_settings import Patience
from k3core.errors import RunError
from k3core.types import Ref
from tasks.pool import CALLER_ENDED, StageLost, run_on_pool

RESULT = Ref("file:///result", "0" * 64, 1)
PATIENCE = Patience(0, 0.0, 10.0)


class Server:
    """Answers idempotent submissions: `runs[n]` are the states that the flow run of attempt n goes through."""

    def __init__(self, *runs: list[State[Any] | Exception]) -> None:
        self.runs = list(runs)
        self.ids: dict[UUID, int] = {}
        self.keys: list[str] = []
        self.cancelled: list[int] = []

    def submit(self, _name: str, *, idempotency_key: str, **_: Any) -> FlowRun:
        number = int(idempotency_key.rpartition("/")[2])
        self.keys.append(idempotency_key)
        run_id = uuid4()
        self.ids[run_id] = number
        return self._next(run_id)

    def read_flow_run(self, run_id: UUID) -> FlowRun:
        return self._next(run_id)

    def set_flow_run_state(self, run_id: UUID, _state: State[Any]) -> None:
        self.cancelled.append(self.ids[run_id])

    def _next(self, run_id: UUID) -> FlowRun:
        states = self.runs[self.ids[run_id]]
        state = states.pop(0) if len(states) > 1 else states[0]
        if isinstance(state, Exception):
            raise state
        return FlowRun(id=run_id, flow_id=uuid4(), name="stage", state=state)


def call(server: Server, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> Ref:
    @contextmanager
    def client(**_: Any) -> Iterator[Server]:
        yield server

    monkeypatch.setattr(tasks.pool, "get_client", client)
    monkeypatch.setattr(tasks.pool, "run_deployment", server.submit)
    monkeypatch.setattr(tasks.pool, "POLL_S", 0.0)
    return run_on_pool.fn("a", "update", "gpu-train", arguments, PATIENCE)


def test_equal_arguments_wait_for_one_flow_run_and_others_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server([Running(), Completed(data=RESULT)])
    assert call(server, monkeypatch, step=1) == RESULT
    assert call(server, monkeypatch, step=1) == RESULT
    assert call(server, monkeypatch, step=2) == RESULT
    assert server.keys[0] == server.keys[1] != server.keys[2]


def test_what_an_earlier_caller_left_crashed_is_tried_anew_and_not_taken_for_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server([Crashed()], [Cancelled(message=CALLER_ENDED)], [Running(), Completed(data=RESULT)])
    assert call(server, monkeypatch) == RESULT
    assert [key.rpartition("/")[2] for key in server.keys] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (Crashed(message="SIGKILL"), StageLost),
        (Failed(name="TimedOut"), StageLost),
        (Cancelled(message=CALLER_ENDED), StageLost),
        (Failed(message="ValueError: a setting"), RunError),
        (Cancelled(message="a person"), RunError),
    ],
)
def test_a_lost_stage_is_worth_another_try_and_a_failed_or_cancelled_one_is_not(
    monkeypatch: pytest.MonkeyPatch, end: State[Any], expected: type[Exception]
) -> None:
    with pytest.raises(expected, match="update/gpu-train"):
        call(Server([Running(), end]), monkeypatch)


def test_a_caller_that_ends_cancels_its_stage_and_a_server_that_is_away_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server([Running(), TimeoutError("the caller's own")])
    with pytest.raises(TimeoutError):
        call(server, monkeypatch)
    assert server.cancelled == [0]
    away = Server([Running(), httpx.ConnectError("refused")])
    with pytest.raises(httpx.ConnectError):
        call(away, monkeypatch)
    assert away.cancelled == []
