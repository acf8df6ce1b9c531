"""Stage record: what one run of a stage made, measured and cost. Stages hand each other its Ref, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from infra.store import Store
from k3core.errors import IntegrityError
from k3core.sealed import canonical_json, parse_canonical, seal, unseal
from k3core.types import PolicyVersion, Ref


@dataclass(frozen=True, slots=True)
class StageRecord:
    """outputs: name -> bytes. metrics: by their tracked names; values that are not finite are kept as words.

    finished_ms dates the metrics, so that tracking the same record again adds nothing. policy: what publish made.
    inputs: name -> bytes that the stage read; None in a record that was written before records said so.
    provenance: JSON values that inputs do not hold: settings in force, digests of code, rubric and prompts.
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
    inputs: Mapping[str, Ref] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)


_ADAPTER = TypeAdapter(StageRecord)


def stage_key(run: str, step: int, name: str) -> str:
    return f"{run}/steps/{step:06d}/{name}"


def write_record(store: Store, record: StageRecord, name: str | None = None) -> Ref:
    """A stage that is done again, and made the same bytes of the same inputs, keeps its first record.

    Later records refer to that one by digest, and only its clock would be another.
    """
    key = stage_key(record.run, record.step, f"{name or record.stage}.json")
    if record.inputs is not None and (first := find_record(store, key)) is not None and _same_work(first[0], record):
        return first[1]
    document: dict[str, Any] = asdict(record)
    document["metrics"] = {key: repr(float(value)) for key, value in record.metrics.items()}  # JSON has no NaN
    document["seconds"] = repr(record.seconds)
    return store.put(key, canonical_json(seal(document)))


def read_record(store: Store, ref: Ref) -> StageRecord:
    """Raises IntegrityError naming the file when the record is missing or altered."""
    return parse_record(store.get(ref), ref.uri)


def find_record(store: Store, key: str) -> tuple[StageRecord, Ref] | None:
    """By key, for the records that nothing refers to; their seal tells when one was altered (IntegrityError)."""
    data = store.read(key)
    return None if data is None else (parse_record(data, store.uri(key)), store.ref(key, data))


def parse_record(data: bytes, file: str) -> StageRecord:
    document = parse_canonical(data, file)
    if "inputs" in document:  # records had neither inputs nor a seal before
        document = unseal(document, file)
    try:
        return _ADAPTER.validate_python(document)
    except ValueError as error:
        raise IntegrityError(f"{file}: not a stage record: {error}") from error


def _same_work(a: StageRecord, b: StageRecord) -> bool:
    """Equal but for the clock and what was measured."""
    clockless = [replace(record, metrics={}, seconds=0.0, finished_ms=0) for record in (a, b)]
    return canonical_json(asdict(clockless[0])) == canonical_json(asdict(clockless[1]))
