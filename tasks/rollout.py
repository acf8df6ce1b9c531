"""A version works on the prompts of its step."""

from __future__ import annotations

from prefect import task

from infra.console import stage_bar
from infra.resident.stages import run_stage
from infra.stages.inputs import Inputs
from k3core.types import PolicyVersion, Ref
from tasks.stage import CACHE


@task(name="rollout", task_run_name="rollout-{policy.step}", cache_policy=CACHE, persist_result=True)
def rollout(inputs: Inputs, root: str, policy: PolicyVersion, attempt: int) -> Ref:
    """attempt: another draw of prompts, after a batch that had nothing to learn from."""
    with stage_bar(f"step {policy.step + 1}: rollout") as progress:
        return run_stage("rollout", progress, inputs=inputs, root=root, policy=policy, attempt=attempt)
