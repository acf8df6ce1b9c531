"""The judge grades every trajectory."""

from __future__ import annotations

from prefect import task

from infra.stages.context import Inputs
from infra.stages.score import score_step
from k3core.types import Ref
from tasks.stage import CACHE


@task(name="score", cache_policy=CACHE, persist_result=True)
def score(inputs: Inputs, root: str, rollout: Ref, attempt: int) -> Ref:
    return score_step(inputs, root, rollout, attempt)
