"""Metrics, registry and champion in MLflow; the iteration's table in Prefect."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_link_artifact, create_table_artifact

from infra.config import TrackingConfig
from infra.stages.context import Inputs
from infra.stages.track import Tracked, track_step
from k3core.types import Ref
from tasks.stage import CACHE


@task(name="track", cache_policy=CACHE, persist_result=True)
def track(
    inputs: Inputs,
    root: str,
    uri: str,
    tracking: TrackingConfig,
    records: tuple[Ref, ...],
    confidence: float,
    transcript: str,
) -> Tracked:
    """transcript: where a person can read this step's episodes."""
    tracked = track_step(inputs, root, uri, tracking, records, confidence)
    table = [{"metric": name, "value": value} for name, value in sorted(tracked.metrics.items())]
    create_table_artifact(table=table, key="iteration", description=tracked.decision)
    create_link_artifact(link=transcript, link_text="transcripts of this step", key="transcripts")
    return tracked
