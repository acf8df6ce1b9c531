"""What must hold after any fault, checked in the store and on the machine, past the servers that were disturbed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import zstandard
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import StateType

from flows.chaos.world import World
from flows.reaper import TAG
from infra import policies
from infra.ledger import Ledger
from infra.lineage import ancestry
from infra.stages.record import read_record
from infra.store import Store
from k3core.checkpoint.tensors import from_safetensors
from k3core.errors import IntegrityError
from k3core.types import Ref

ACTIVE = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
QUIET_S = 90.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run made, step by step: equal for equal configs, whatever happened on the way."""

    weights_sha256: tuple[str, ...]
    batches_sha256: tuple[str, ...]
    optimizer_steps: float


def outcome(store: Store, run: str, steps: int) -> Outcome:
    """Raises ValueError naming the version or the ledger entry that is not there."""
    versions = [policies.read_version(store, run, step) for step in range(steps + 1)]
    entries = [Ledger(store, run).get(step) for step in range(1, steps + 1)]
    for step, version in enumerate(versions):
        if version is None or (step > 0 and entries[step - 1] is None):
            raise ValueError(f"run {run!r}: step {step} is not published, or not in the ledger")
    last = Ref(**entries[-1]["result"]["record"]) if entries[-1] else None
    assert last is not None
    optimizer = read_record(store, last).outputs["optimizer"]
    state = from_safetensors(store.get(optimizer), optimizer.uri)
    counts = {name: tensor for name, tensor in state.items() if name.startswith("step.")}
    return Outcome(
        tuple(version.weights_sha256 for version in versions if version is not None),
        tuple(entry["batch_sha256"] for entry in entries if entry is not None),
        max(_scalar(bytes(tensor.data), tensor.dtype) for tensor in counts.values()),
    )


def _scalar(data: bytes, dtype: str) -> float:
    return float(np.frombuffer(data, {"F32": "<f4", "F64": "<f8", "I64": "<i8"}[dtype])[0])


def broken_versions(store: Store, run: str, steps: int) -> Iterator[str]:
    """Versions that do not rebuild bit for bit, and references in their ancestry that are missing or altered."""
    for check in policies.verify(store, run, range(steps + 1)):
        if check.error is not None:
            yield f"version {check.step}: {check.error}"
    for node in ancestry(store, run, steps).problems:
        yield f"lineage: {node}"


def torn_objects(store: Store, run: str) -> Iterator[str]:
    """Every object of the run, referred to or not, must be whole: a listing is fine for looking."""
    for key in store.list_keys(run):
        data = store.read(key)
        if data is None:
            continue  # it went while we looked
        try:
            if key.endswith(".json"):
                json.loads(data)
            elif key.endswith(".zst"):
                zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
            elif key.endswith(".safetensors"):
                from_safetensors(data, key)
        except (ValueError, IntegrityError, zstandard.ZstdError) as error:
            yield f"{key}: {error}"


def leaks(world: World, client: SyncPrefectClient) -> list[str]:
    """Slots and processes of flow runs that are still taken after QUIET_S without any work to do."""
    deadline = time.monotonic() + QUIET_S
    while True:
        runs = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=ACTIVE)), tags=FlowRunFilterTags(all_=[TAG])
            )
        )
        processes = list(world.flow_processes())
        found = [f"flow run {run.name} still {run.state_name}" for run in runs]
        found += [f"process {process.pid} of flow run {run} still runs" for run, process in processes]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(1.0)
