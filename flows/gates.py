"""Where a run waits for a person: before a promotion, and when engine and trainer drift apart."""

from __future__ import annotations

import contextvars
import os
import threading
from uuid import UUID

from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event
from prefect.flow_runs import pause_flow_run, resume_flow_run
from prefect.input import RunInput
from prefect.runtime import flow_run
from pydantic import Field

from infra.config_rules import API_URL
from infra.console import say
from infra.stages.record import StageRecord
from k3core.errors import RunError

DRIFT = "k3.drift.breached"
ANSWER_ARRIVES_S = 600


class DriftTooLarge(RunError):
    """Engine and trainer disagree about the same weights by more than the run allows."""


class Verdict(RunInput):
    """What the person answers in the form that resumes the run."""

    go_on: bool = Field(default=True, description="false: the champion stays, or, after a breach, the run ends")


def somebody_can_answer() -> bool:
    """On a server of its own the run shows in a UI; a server that lives and dies with the run has nobody at it."""
    return bool(os.environ.get(API_URL)) and not os.environ.get("K3_EMBEDDED_SERVER")


def check_drift(record: StageRecord, max_drift: float | None, timeout_s: float) -> None:
    """Above the bound: waits for a person where one can answer, and raises DriftTooLarge otherwise or when told to."""
    found = record.metrics.get("drift/numeric/abs_max")
    if max_drift is None or found is None or found <= max_drift:
        return
    reason = (
        f"step {record.step}: engine and trainer differ by {found:.2e} nat for one token, more than gates.max_drift"
        f" {max_drift:.2e}: look for an op whose result depends on the batch, or for weights that differ"
    )
    emit_event(
        DRIFT,
        resource={"prefect.resource.id": f"k3.run.{record.run}", "k3.run": record.run, "k3.step": str(record.step)},
        related=[{"prefect.resource.id": f"prefect.flow-run.{flow_run.id}", "prefect.resource.role": "flow-run"}],
        payload={"reason": reason, "drift_abs_max": found, "max_drift": max_drift},
    )
    create_markdown_artifact(reason, key="drift", description=reason)
    if not somebody_can_answer() or not ask(f"drift-{record.step}", reason, timeout_s):
        raise DriftTooLarge(reason)


def ask(key: str, question: str, timeout_s: float) -> bool:
    """Pauses the flow run until a person resumes it; False for a no, and when nobody answers in time."""
    say(f"waiting for a person: {question}")

    def say_no() -> None:
        say(f"nobody answered in {timeout_s:g} s: {question}")
        resume_flow_run(UUID(flow_run.id), run_input={"go_on": False})

    # Prefect fails a run whose pause timed out, and then the run cannot go on: the answer that nobody gave is ours.
    timer = threading.Timer(timeout_s, contextvars.copy_context().run, args=(say_no,))
    timer.daemon = True
    timer.start()
    try:
        answer = pause_flow_run(
            wait_for_input=Verdict.with_initial_data(description=question),
            timeout=int(timeout_s) + ANSWER_ARRIVES_S,
            poll_interval=2,
            key=key,
        )
    finally:
        timer.cancel()
    return answer is not None and answer.go_on
