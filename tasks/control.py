"""What demonstrations alone would have done."""

from __future__ import annotations

from prefect import task

from infra.console import stage_bar
from infra.stages.context import Inputs
from infra.stages.control import control_arm
from k3core.types import PolicyVersion, Ref
from tasks.stage import CACHE


@task(name="control", task_run_name="{label}", cache_policy=CACHE, persist_result=True)
def control(inputs: Inputs, root: str, policy: PolicyVersion, label: str, sequences: int, timeout_s: float) -> Ref:
    """timeout_s ends the arm's process; Prefect cannot interrupt the thread that waits for it."""
    with stage_bar(f"{label} arm") as progress:
        return control_arm(inputs, root, policy, label, sequences, timeout_s, progress)
