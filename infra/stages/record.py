"""Stage record: what one run of a stage made, measured and cost. Stages hand each other its Ref, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter

from infra.store import Store
from k3core.errors import IntegrityError
from k3core.sealed import canonical_json, parse_canonical
from k3core.types import PolicyVersion, Ref


@dataclass(frozen=True, slots=True)
class StageRecord:
    """outputs: name -> bytes. metrics: by their tracked names; values that are not finite are kept as words.

    finished_ms dates the metrics, so that tracking the same record again adds nothing. policy: what publish made.
    """

    stage: str
    run: str
    step: int
    outputs: Mapping[str, Ref]
    metrics: Mapping[str, float]
    seconds: float
    finished_ms: int
    policy: PolicyVersion | None = None
    notes: Mapping[str, str] = field(default_factory=dict)


_ADAPTER = TypeAdapter(StageRecord)


def stage_key(run: str, step: int, name: str) -> str:
    return f"{run}/steps/{step:06d}/{name}"


def write_record(store: Store, record: StageRecord, name: str | None = None) -> Ref:
    document: dict[str, Any] = asdict(record)
    document["metrics"] = {key: repr(float(value)) for key, value in record.metrics.items()}  # JSON has no NaN
    document["seconds"] = repr(record.seconds)
    return store.put(stage_key(record.run, record.step, f"{name or record.stage}.json"), canonical_json(document))


def read_record(store: Store, ref: Ref) -> StageRecord:
    """Raises IntegrityError naming the file when the record is missing or altered."""
    document = parse_canonical(store.get(ref), ref.uri)
    try:
        return _ADAPTER.validate_python(document)
    except ValueError as error:
        raise IntegrityError(f"{ref.uri}: not a stage record: {error}") from error
