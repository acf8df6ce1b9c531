"""A run that waits for a person, on a real server."""

from __future__ import annotations

import threading
import time
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.flow_runs import resume_flow_run

from flows.gates import ask


def find(name: str, state: str) -> FlowRun:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with get_client(sync_client=True) as client:
            runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])))
        if runs and runs[0].state_name == state:
            return runs[0]
        time.sleep(0.3)
    raise AssertionError(f"{name} was never {state}")


@pytest.mark.parametrize("says", [True, False])
def test_a_person_s_answer_in_the_form_decides(prefect_api: str, says: bool) -> None:
    del prefect_api
    answers: list[bool] = []

    @flow(name="asks", flow_run_name=f"asks-{says}")
    def asks() -> None:
        answers.append(ask("promote-1", "step 1 replaces champion 0", timeout_s=60))

    def answer() -> None:
        run = find(f"asks-{says}", "Paused")
        resume_flow_run(UUID(str(run.id)), run_input={"go_on": says})

    person = threading.Thread(target=answer)
    person.start()
    asks()
    person.join()
    assert answers == [says]
    assert find(f"asks-{says}", "Completed")


def test_nobody_s_answer_is_a_no_and_the_run_goes_on(prefect_api: str) -> None:
    del prefect_api
    answers: list[bool] = []

    @flow(name="asks", flow_run_name="asks-nobody")
    def asks() -> None:
        answers.append(ask("promote-1", "step 1 replaces champion 0", timeout_s=3))

    asks()
    assert answers == [False]
    assert find("asks-nobody", "Completed")
