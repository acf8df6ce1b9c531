"""rl_training: the loop. What happens after what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from prefect import State, flow
from prefect.client.schemas.objects import FlowRun
from prefect.events import emit_event
from prefect.flows import FlowStateHook
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run as this_run
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from pydantic_core import to_jsonable_python

from flows.heartbeat import beating
from flows.stages import Stages
from infra.config import RunConfig, from_tree
from infra.console import bars, say
from infra.host import keep_freed_memory
from infra.launch import children_end_with_this
from infra.stages.prepare import find_inputs, prepare_run
from infra.stages.report import RunHistory
from infra.stages.summary import closing_lines, ui_commands
from infra.stages.track import close_run, tracking_uri
from infra.store import Store
from infra.tracking import RunStatus
from k3core.types import PolicyVersion, Ref
from tasks.prepare import prepare
from tasks.report import report
from tasks.stage import discard_torn_results

# The control arms, the only tasks that run beside the loop, come one after the other: they have one core, it the other.
ONE_AT_A_TIME = cast(TaskRunner[PrefectFuture[Any]], ThreadPoolTaskRunner(max_workers=1))


def _name() -> str:
    return from_tree(this_run.parameters["cfg"]).run


def _closes_as(status: RunStatus) -> FlowStateHook[..., Any]:
    """A run that ends early does not stay RUNNING in MLflow, whichever process finds out."""

    def hook(flow: Any, flow_run: FlowRun, state: State[Any]) -> None:
        del flow, state
        cfg = from_tree(flow_run.parameters["cfg"])
        inputs = find_inputs(Store(cfg.root), cfg.run)
        if inputs is not None:
            close_run(inputs, cfg.root, tracking_uri(cfg), cfg.tracking, status)

    return hook


@flow(
    name="rl_training",
    flow_run_name=_name,
    task_runner=ONE_AT_A_TIME,
    validate_parameters=False,
    persist_result=False,
    on_failure=[_closes_as("FAILED")],
    on_crashed=[_closes_as("KILLED")],
    on_cancellation=[_closes_as("KILLED")],
)
def rl_training(cfg: RunConfig) -> str:
    """Warm start, then `cfg.steps` iterations; evaluated before the first, every `evaluate.every` and after the last.

    The control arms run beside the loop. Each stage runs in this process, or on the work pool that `cfg.pools` names.
    cfg: a run of the deployment gives it as the tree of settings that its form sent. Returns the report's folder.
    """
    cfg = from_tree(cfg)
    with beating():
        return train(cfg)


def train(cfg: RunConfig) -> str:
    inputs = prepare(cfg)
    stages = Stages(cfg, inputs)
    trained = stages.warm_start()
    history = RunHistory(trained)
    policy = release(stages, history, trained, None, ())
    optimizer: Ref | None = None
    with children_end_with_this():
        arms = {name: stages.control(policy, name) for name in cfg.control.arms}
        for _ in range(cfg.steps):
            policy, optimizer = rl_iteration(stages, history, policy, optimizer)
        history.controls = {name: arm.result() for name, arm in arms.items()}
    return report(inputs, cfg.root, tracking_uri(cfg), cfg.tracking, history, ui_commands(cfg))


def run_training(cfg: RunConfig) -> int:
    """The embedded default: the flow in this process, on a Prefect server that starts and ends with it."""
    keep_freed_memory()
    for path in discard_torn_results():
        say(f"{path.name}: half written when the last try ended; its task runs again")
    prepare_run(cfg)  # here too, so that a config that does not fit its run is said before anything starts
    with bars():
        folder = rl_training(cfg)
    say(closing_lines(json.loads((Path(folder) / "report.json").read_text()), folder, ui_commands(cfg)))
    return 0


def rl_iteration(
    stages: Stages, history: RunHistory, policy: PolicyVersion, optimizer: Ref | None
) -> tuple[PolicyVersion, Ref]:
    """One pass: rollouts of `policy`, graded; an update; the next version, published, evaluated, tracked."""
    rollouts, scores = stages.rollout_and_score(policy)
    trained = stages.update(policy, scores, optimizer)
    policy = release(stages, history, trained, policy, (rollouts, scores, trained))
    return policy, stages.output(trained, "optimizer")


def release(
    stages: Stages, history: RunHistory, trained: Ref, parent: PolicyVersion | None, made_by: tuple[Ref, ...]
) -> PolicyVersion:
    """Publish, evaluate when it is time, track."""
    published = stages.publish(trained, parent)
    policy = stages.policy(published)
    announce(stages, policy)
    evaluation = stages.evaluate(policy)
    tracked = stages.track((*made_by, published), evaluation)
    history.add(policy, (*made_by, published), evaluation, tracked)
    return policy


def announce(stages: Stages, policy: PolicyVersion) -> None:
    """The event that automations listen for; a label says whether this loop evaluates the version itself."""
    evaluated_by = "loop" if stages.is_evaluated(policy.step) or not stages.cfg.evaluate.between else "automation"
    emit_event(
        "k3.policy.published",
        resource={
            "prefect.resource.id": f"k3.policy.{policy.run}.{policy.step}",
            "k3.run": policy.run,
            "k3.step": str(policy.step),
            "k3.evaluated_by": evaluated_by,
        },
        related=[{"prefect.resource.id": f"prefect.flow-run.{this_run.id}", "prefect.resource.role": "flow-run"}],
        payload=to_jsonable_python({"inputs": stages.inputs, "root": stages.cfg.root, "policy": policy}),
    )
