"""What a run that redoes another's step leaves in MLflow: its metrics, and which run it came from."""

from __future__ import annotations

from collections.abc import Sequence

from infra.config import TrackingConfig
from infra.stages.context import Context, Inputs
from infra.stages.record import read_record
from infra.stages.track import open_tracker
from k3core.types import Ref

FROM_TAG = "k3.from"


def track_redo(
    inputs: Inputs, root: str, uri: str, tracking: TrackingConfig, origin: str, records: Sequence[Ref]
) -> None:
    """origin: RUN@STEP. records: of scores that no version was made of, whose metrics nothing else tracks."""
    context = Context.open(inputs, root)
    tracker = open_tracker(inputs, root, uri, tracking)
    for record in (read_record(context.store, ref) for ref in records):
        tracker.log_step(record.step + 1, record.metrics, record.finished_ms)
    tracker.client.set_tag(tracker.run_id, FROM_TAG, origin)
    tracker.finish("FINISHED")
