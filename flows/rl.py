"""rl_training: the loop. What happens after what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from prefect import flow
from prefect.futures import PrefectFuture
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from flows.stages import Stages
from infra.config import RunConfig
from infra.console import bars, say
from infra.host import keep_freed_memory
from infra.launch import children_end_with_this, end_children_with_this_process
from infra.stages.prepare import prepare_run
from infra.stages.report import RunHistory
from infra.stages.summary import closing_lines, ui_commands
from infra.stages.track import close_run, tracking_uri
from k3core.types import PolicyVersion, Ref
from tasks.prepare import prepare
from tasks.report import report
from tasks.stage import discard_torn_results

# The control arms, the only tasks that run beside the loop, come one after the other: they have one core, it the other.
ONE_AT_A_TIME = cast(TaskRunner[PrefectFuture[Any]], ThreadPoolTaskRunner(max_workers=1))


@flow(
    name="rl_training",
    flow_run_name="{cfg.run}",
    task_runner=ONE_AT_A_TIME,
    validate_parameters=False,
    persist_result=False,
)
def rl_training(cfg: RunConfig) -> str:
    """Warm start, then `cfg.steps` iterations; evaluated before the first, every `evaluate.every` and after the last.

    The control arms run beside the loop. Returns the folder that holds the report.
    """
    end_children_with_this_process("prefect.server")
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
    inputs = prepare_run(cfg)  # here too, so that a config that does not fit its run is said before anything starts
    try:
        with bars():
            folder = rl_training(cfg)
    except BaseException as error:
        close_run(
            inputs, cfg.root, tracking_uri(cfg), cfg.tracking, "FAILED" if isinstance(error, Exception) else "KILLED"
        )
        raise
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
    evaluation = stages.evaluate(policy)
    tracked = stages.track((*made_by, published), evaluation)
    history.add(policy, (*made_by, published), evaluation, tracked)
    return policy
