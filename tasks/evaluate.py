"""A version on the frozen suite."""

from __future__ import annotations

from prefect import task

from infra.console import stage_bar
from infra.resident.stages import run_stage
from infra.stages.inputs import Inputs
from k3core.types import PolicyVersion, Ref
from tasks.stage import CACHE


@task(name="evaluate", task_run_name="evaluate-{policy.step}", cache_policy=CACHE, persist_result=True)
def evaluate(inputs: Inputs, root: str, policy: PolicyVersion) -> Ref:
    with stage_bar(f"evaluate step {policy.step}") as progress:
        return run_stage("evaluate", progress, inputs=inputs, root=root, policy=policy)
