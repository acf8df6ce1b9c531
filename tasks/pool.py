"""A stage on a work pool: its own flow run, started, waited for and, where it was lost, started again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import httpx
from prefect import task
from prefect.cache_policies import INPUTS
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.states import Cancelling
from pydantic_core import to_json, to_jsonable_python

from infra.task_settings import Patience
from k3core.errors import RunError
from k3core.types import PolicyVersion, Ref

POLL_S = 1.0
CALLER_ENDED = "the run that asked for it ended"


class StageLost(Exception):
    """The stage's process died, was cut off or took too long. Another try may find a living node."""


# Not by the pool's name: a stage that moved to another pool need not run again.
@task(name="stage_on_pool", task_run_name="{stage}", cache_policy=INPUTS - "pool" - "patience", persist_result=True)
def run_on_pool(run: str, stage: str, pool: str, arguments: Mapping[str, Any], patience: Patience) -> Ref:
    """The result of the deployment `{stage}/{pool}`, run with these arguments.

    Two callers with equal arguments wait for one and the same flow run, so a run that is taken up again finds what its
    predecessor had started, and a run that was triggered twice does nothing twice. Raises StageLost, which is worth
    another try, and RunError for a stage that failed by itself or that a person cancelled.
    """
    name = f"{stage}/{pool}"
    parameters = {**arguments, "patience": patience}
    identity = hashlib.sha256(to_json([run, stage, dict(arguments)])).hexdigest()[:32]
    with get_client(sync_client=True) as client:
        for attempt in count():
            flow_run = run_deployment(
                name,
                parameters=to_jsonable_python(parameters),
                flow_run_name=_label(run, stage, arguments),
                idempotency_key=f"{identity}/{attempt}",
                timeout=0,
                tags=[run],
            )
            assert isinstance(flow_run, FlowRun)
            is_of_an_earlier_caller = flow_run.state is not None and flow_run.state.is_final()
            with _cancelled_with_this(client, flow_run):
                flow_run = _wait(client, flow_run)
            state = flow_run.state
            assert state is not None
            if state.type == StateType.COMPLETED:
                result: Ref = state.result()  # type: ignore[call-overload,assignment,unused-ignore]
                return result
            if is_of_an_earlier_caller:
                continue
            message = f"{name} ({flow_run.name}): {state.name}: {state.message or 'no message'}"
            if state.type == StateType.CRASHED or state.name == "TimedOut" or state.message == CALLER_ENDED:
                raise StageLost(message)
            raise RunError(message)
    raise AssertionError("unreachable")


def _label(run: str, stage: str, arguments: Mapping[str, Any]) -> str:
    policy = arguments.get("policy")
    return f"{run} {stage}" + (f" {policy.step}" if isinstance(policy, PolicyVersion) else "")


def _wait(client: SyncPrefectClient, flow_run: FlowRun) -> FlowRun:
    while flow_run.state is None or not flow_run.state.is_final():
        time.sleep(POLL_S)
        flow_run = client.read_flow_run(flow_run.id)
    return flow_run


@contextmanager
def _cancelled_with_this(client: SyncPrefectClient, flow_run: FlowRun) -> Iterator[None]:
    """Whatever ends the caller cancels the stage as well. A server that is away ends nobody: the next try waits on."""
    try:
        yield
    except httpx.HTTPError:
        raise
    except BaseException:
        client.set_flow_run_state(flow_run.id, Cancelling(message=CALLER_ENDED))
        raise
