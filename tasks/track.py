"""Metrics, registry and champion in MLflow; the iteration's table in Prefect."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from infra.config import TrackingConfig
from infra.stages.context import Inputs
from infra.stages.track import Tracked, promote_step, track_step
from infra.stages.transcripts import write_transcripts
from k3core.types import Ref
from tasks.stage import CACHE


@task(name="track", cache_policy=CACHE, persist_result=True)
def track(
    inputs: Inputs,
    root: str,
    uri: str,
    tracking: TrackingConfig,
    records: tuple[Ref, ...],
    evaluation: Ref | None,
    confidence: float,
    approval: bool = False,
) -> Tracked:
    tracked = track_step(inputs, root, uri, tracking, records, evaluation, confidence, approval)
    table = [{"metric": name, "value": value} for name, value in sorted(tracked.metrics.items())]
    create_table_artifact(table=table, key="iteration", description=f"step {tracked.step}: {tracked.decision}")
    if evaluation is not None:
        transcripts = write_transcripts(inputs, root, evaluation)
        create_link_artifact(link=transcripts, link_text=f"transcripts of step {tracked.step}", key="transcripts")
    return tracked


@task(name="promote", cache_policy=NO_CACHE)
def promote(inputs: Inputs, root: str, uri: str, tracking: TrackingConfig, step: int) -> tuple[str, int] | None:
    """A person has approved. Repeating it changes nothing."""
    return promote_step(inputs, root, uri, tracking, step)
