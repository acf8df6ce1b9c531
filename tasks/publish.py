"""New weights become a policy version."""

from __future__ import annotations

from prefect import task

from infra.console import stage_bar
from infra.resident.stages import run_stage
from infra.stages.inputs import Inputs
from k3core.types import PolicyVersion, Ref
from tasks.stage import CACHE


@task(name="publish", cache_policy=CACHE, persist_result=True)
def publish(
    inputs: Inputs, root: str, trained: Ref, parent: PolicyVersion | None, engines: tuple[str, ...] = ()
) -> Ref:
    """The manifest is written last, so a try that dies leaves no version. engines: the URLs that must acknowledge it."""
    with stage_bar("publish") as progress:
        return run_stage("publish", progress, inputs=inputs, root=root, trained=trained, parent=parent, engines=engines)
