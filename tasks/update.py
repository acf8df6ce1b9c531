"""One policy step from scored groups."""

from __future__ import annotations

from prefect import task

from infra.console import stage_bar
from infra.resident.stages import run_stage
from infra.stages.inputs import Inputs
from k3core.types import PolicyVersion, Ref
from tasks.stage import CACHE


@task(name="update", task_run_name="update-{policy.step}", cache_policy=CACHE, persist_result=True)
def update(inputs: Inputs, root: str, policy: PolicyVersion, score: Ref, optimizer: Ref | None) -> Ref:
    """The ledger keeps a retry, or another run of the same task, from applying the step twice."""
    with stage_bar(f"step {policy.step + 1}: update") as progress:
        return run_stage("update", progress, inputs=inputs, root=root, policy=policy, score=score, optimizer=optimizer)
