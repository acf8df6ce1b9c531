"""The checkpoint that a run starts from: whether its folder still holds it, and its weights, read once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from infra.config import RunConfig
from infra.init_checkpoint import absence, folder_of
from infra.init_identity import (
    Contents,
    Head,
    changed_contents,
    changed_heads,
    contents_of,
    heads_sha256,
    to_document,
)
from infra.init_weights import run_tensors
from infra.stages.context import Context, Inputs, Progress
from infra.stages.record import stage_key
from infra.store import AlreadyCommitted, Store
from k3core.checkpoint.hf import Checkpoint, open_checkpoint
from k3core.sealed import parse_canonical, seal, unseal
from k3core.types import Ref

Use = Callable[[Iterator[tuple[str, Tensor]]], None]


@dataclass(frozen=True, slots=True)
class Read:
    """contents: the digests of what was read. described: for the record, as JSON values."""

    contents: Ref
    described: Mapping[str, Any]


def changes_since(store: Store, cfg: RunConfig, inputs: Inputs) -> list[str]:
    """A line for each file that is no longer what the run started from; none where the folder has gone altogether:
    what was read of it is in the store."""
    init = cfg.warm_start.init
    if init is None or inputs.init is None or not folder_of(init).is_dir():
        return []
    folder = folder_of(init)
    changed = list(changed_heads(folder, _pinned_heads(store, inputs.init)))
    contents = _find_contents(store, cfg.run)
    if changed or contents is None:
        return changed
    return list(changed_contents(folder, contents[0]))


def read_init(context: Context, use: Use, progress: Progress) -> Read:
    """Hands every tensor of the run's model to `use`, and pins what was read.

    A run reads its checkpoint once; where a try ended before it could go on from that, the next one reads it again, and
    must find the same. Raises ValueError naming the files that are not what the run started from.
    """
    checkpoint = _open(context)
    digests: dict[str, str] = {}
    use(run_tensors(checkpoint, context.cfg.model, digests, progress))
    contents = contents_of(checkpoint, digests)
    key = _contents_key(context.cfg.run)
    try:
        context.store.commit(key, seal({"files": to_document(contents)}))
    except AlreadyCommitted:
        _refuse_others(context, contents)
    return find_read(context)


def find_read(context: Context) -> Read:
    """Of what was read before."""
    store, run, inputs = context.store, context.cfg.run, context.inputs
    found = _find_contents(store, run)
    assert found is not None, "whoever trained on what was read pinned it first"
    assert inputs.init is not None, "a run with warm_start.init is pinned with its checkpoint"
    heads = _pinned_heads(store, inputs.init)
    described = {
        "folder": context.cfg.warm_start.init,
        "heads_sha256": heads_sha256(heads),
        "files": {name: one.sha256 for name, one in found[0].items()},
    }
    return Read(found[1], described)


def _open(context: Context) -> Checkpoint:
    init = context.cfg.warm_start.init
    assert init is not None, "a run from scratch has no checkpoint to read"
    assert context.inputs.init is not None, "a run with warm_start.init is pinned with its checkpoint"
    if (problem := absence(init)) is not None:
        raise ValueError(str(problem))
    heads = _pinned_heads(context.store, context.inputs.init)
    if changed := list(changed_heads(folder_of(init), heads)):
        raise ValueError(_refusal(context.cfg.run, changed))
    return open_checkpoint(folder_of(init))


def _refuse_others(context: Context, contents: Mapping[str, Contents]) -> None:
    found = _find_contents(context.store, context.cfg.run)
    assert found is not None, "it was committed"
    folder = folder_of(str(context.cfg.warm_start.init))
    before = {name: one.sha256 for name, one in found[0].items()}
    changed = [f"{folder / name}: other tensors" for name, one in contents.items() if before.get(name) != one.sha256]
    if changed:
        raise ValueError(_refusal(context.cfg.run, changed))


def _refusal(run: str, changed: list[str]) -> str:
    return "; ".join(changed) + f": run {run!r} started from what was there before; put it back, or start a new run"


def _pinned_heads(store: Store, init: Ref) -> dict[str, Head]:
    return {name: Head(**head) for name, head in json.loads(store.get(init)).items()}


def _contents_key(run: str) -> str:
    return stage_key(run, 0, "init.json")


def _find_contents(store: Store, run: str) -> tuple[dict[str, Contents], Ref] | None:
    data = store.read(_contents_key(run))
    if data is None:
        return None
    file = store.uri(_contents_key(run))
    document = unseal(parse_canonical(data, file), file)
    return {name: Contents(**one) for name, one in document["files"].items()}, store.ref(_contents_key(run), data)
