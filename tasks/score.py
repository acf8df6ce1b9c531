"""The judge grades every trajectory."""

from __future__ import annotations

from prefect import task

from infra.console import stage_bar
from infra.resident.stages import run_stage
from infra.stages.inputs import Inputs
from k3core.types import Ref
from tasks.stage import CACHE


@task(name="score", cache_policy=CACHE, persist_result=True)
def score(inputs: Inputs, root: str, rollout: Ref, attempt: int) -> Ref:
    with stage_bar("score") as progress:
        return run_stage("score", progress, inputs=inputs, root=root, rollout=rollout, attempt=attempt)
