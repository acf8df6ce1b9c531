"""One small flow for each stage, deployed to work pools (infra/prefect.yaml). The loop starts them by name."""

from __future__ import annotations

from prefect import flow

from flows.heartbeat import beating
from infra.launch import children_end_with_this
from infra.stages.inputs import Inputs
from infra.task_settings import Patience
from k3core.types import PolicyVersion, Ref
from tasks.control import control
from tasks.evaluate import evaluate
from tasks.publish import publish
from tasks.rollout import rollout
from tasks.score import score
from tasks.stage import configured
from tasks.update import update
from tasks.warm_start import warm_start

ONCE = Patience(retries=2, retry_delay_s=1.0, timeout_s=3600.0)


@flow(name="warm_start", persist_result=True)
def warm_start_flow(inputs: Inputs, root: str, patience: Patience = ONCE) -> Ref:
    with beating():
        return configured(warm_start, patience)(inputs, root)


@flow(name="rollout", persist_result=True)
def rollout_flow(inputs: Inputs, root: str, policy: PolicyVersion, attempt: int = 0, patience: Patience = ONCE) -> Ref:
    with beating():
        return configured(rollout, patience)(inputs, root, policy, attempt)


@flow(name="score", persist_result=True)
def score_flow(inputs: Inputs, root: str, rollout: Ref, attempt: int = 0, patience: Patience = ONCE) -> Ref:
    with beating():
        return configured(score, patience)(inputs, root, rollout, attempt)


@flow(name="update", persist_result=True)
def update_flow(
    inputs: Inputs,
    root: str,
    policy: PolicyVersion,
    score: Ref,
    optimizer: Ref | None = None,
    patience: Patience = ONCE,
) -> Ref:
    with beating():
        return configured(update, patience)(inputs, root, policy, score, optimizer)


@flow(name="publish", persist_result=True)
def publish_flow(
    inputs: Inputs,
    root: str,
    trained: Ref,
    parent: PolicyVersion | None = None,
    engines: tuple[str, ...] = (),
    patience: Patience = ONCE,
) -> Ref:
    with beating():
        return configured(publish, patience)(inputs, root, trained, parent, engines)


@flow(name="evaluate", persist_result=True)
def evaluate_flow(inputs: Inputs, root: str, policy: PolicyVersion, patience: Patience = ONCE) -> Ref:
    with beating():
        return configured(evaluate, patience)(inputs, root, policy)


@flow(name="control", persist_result=True)
def control_flow(
    inputs: Inputs,
    root: str,
    policy: PolicyVersion,
    label: str,
    sequences: int,
    timeout_s: float,
    patience: Patience = ONCE,
) -> Ref:
    with beating(), children_end_with_this():
        return configured(control, patience)(inputs, root, policy, label, sequences, timeout_s)
