"""New weights become a policy version."""

from __future__ import annotations

from prefect import task

from infra.stages.context import Inputs
from infra.stages.publish import publish_step
from k3core.types import PolicyVersion, Ref
from tasks.stage import CACHE


@task(name="publish", cache_policy=CACHE, persist_result=True)
def publish(inputs: Inputs, root: str, trained: Ref, parent: PolicyVersion | None) -> Ref:
    """The manifest is written last, so a try that dies leaves no version."""
    return publish_step(inputs, root, trained, parent)
