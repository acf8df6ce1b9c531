"""What demonstrations alone would have done."""

from __future__ import annotations

from prefect import task

from infra.console import stage_bar
from infra.resident.stages import run_stage
from infra.stages.inputs import Inputs
from k3core.types import PolicyVersion, Ref
from tasks.stage import CACHE


@task(name="control", task_run_name="{label}", cache_policy=CACHE, persist_result=True)
def control(inputs: Inputs, root: str, policy: PolicyVersion, label: str, sequences: int, timeout_s: float) -> Ref:
    """timeout_s ends the arm's process; Prefect cannot interrupt the thread that waits for it."""
    with stage_bar(f"{label} arm") as progress:
        return run_stage(
            "control",
            progress,
            inputs=inputs,
            root=root,
            policy=policy,
            label=label,
            sequences=sequences,
            timeout_s=timeout_s,
        )
