"""What `k3 rescore` and `k3 retrain` do besides the stages of a run."""

from __future__ import annotations

from prefect import task

from infra.config import TrackingConfig
from infra.stages.adopt import adopt_policy
from infra.stages.inputs import Inputs
from infra.stages.redo import track_redo
from k3core.types import PolicyVersion, Ref
from tasks.stage import CACHE


@task(name="adopt", task_run_name="adopt-{version.step}", cache_policy=CACHE, persist_result=True)
def adopt(inputs: Inputs, root: str, version: PolicyVersion) -> Ref:
    return adopt_policy(inputs, root, version)


@task(name="track_redo", cache_policy=CACHE, persist_result=True)
def track_origin(
    inputs: Inputs, root: str, uri: str, tracking: TrackingConfig, origin: str, records: tuple[Ref, ...]
) -> None:
    track_redo(inputs, root, uri, tracking, origin, records)
