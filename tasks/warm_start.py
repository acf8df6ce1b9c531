"""Supervised steps before the first update."""

from __future__ import annotations

from prefect import task

from infra.console import stage_bar
from infra.resident.stages import run_stage
from infra.stages.inputs import Inputs
from k3core.types import Ref
from tasks.stage import CACHE


@task(name="warm_start", cache_policy=CACHE, persist_result=True)
def warm_start(inputs: Inputs, root: str) -> Ref:
    with stage_bar("warm start") as progress:
        return run_stage("warm_start", progress, inputs=inputs, root=root)
