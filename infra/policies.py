"""Policy versions in a store: published once, whole, and only after they were read back."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from infra.pruned import Pruned, find_mark, key_sha256
from infra.store import AlreadyCommitted, Store
from infra.version_chain import (
    ANCHORS,
    as_version,
    chain_of,
    find_anchor,
    find_manifest,
    payload_key,
    policy_key,
    read_payload,
)
from k3core.checkpoint.chain import Manifest, Parent, restore, result_digests
from k3core.checkpoint.delta import DeltaEntry, encode_delta
from k3core.checkpoint.tensors import (
    RawTensor,
    Weights,
    combine_digests,
    same_layout,
    to_safetensors,
    weights_sha256,
)
from k3core.errors import IntegrityError
from k3core.types import PolicyKind, PolicyVersion, Ref

NUM_THREADS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class PublishStats:
    """bytes_full: the version as one safetensors file. changed_fraction: of elements; None unless it is a delta."""

    kind: PolicyKind
    bytes_payload: int
    bytes_full: int
    changed_fraction: float | None


@dataclass(frozen=True, slots=True)
class VersionCheck:
    """A version that was rebuilt from the store. `error` is None when every byte is what it must be.

    is_pruned: its bytes were collected on purpose; the error says when.
    """

    step: int
    kind: PolicyKind | None
    error: str | None
    is_pruned: bool = False


def publish(
    store: Store,
    run: str,
    step: int,
    weights: Weights,
    parent: PolicyVersion | None,
    full_every: int,
    level: int,
    tags: Mapping[str, str],
) -> tuple[PolicyVersion, PublishStats]:
    """A delta against `parent`, or a base: without a parent, at each step divisible by `full_every`, for another
    layout, and where the delta would stand `full_every` steps or more above its base, however few links that are.

    parent: what every engine is known to hold (`serving.acked_base`), which may be older than the newest version.
    It is read from the store, and what was written is applied to it before the manifest says that the version exists.
    Published once: another try with equal weights returns the first version, tags included.
    Raises AlreadyCommitted when the step was published with other weights, IntegrityError when what was written, or
    the parent, does not read back.
    """
    if full_every < 1:
        raise ValueError(f"full_every must be at least 1, found {full_every}")
    if parent is not None and (parent.run != run or parent.step >= step or parent.kind == "adapter"):
        raise ValueError(
            f"step {step} of run {run!r} cannot follow {parent.kind} {parent.step} of run {parent.run!r}: "
            "its parent is an earlier base or delta of the same run"
        )
    if (published := _published(store, run, step, weights)) is not None:
        return published
    content = None if parent is None else _delta(store, step, weights, parent, full_every, level)
    return _write(store, run, step, weights, content or _whole("base", weights), tags)


def publish_adapter(
    store: Store, run: str, step: int, adapter: Weights, tags: Mapping[str, str]
) -> tuple[PolicyVersion, PublishStats]:
    """An adapter is always whole. Otherwise as `publish`."""
    if (published := _published(store, run, step, adapter)) is not None:
        return published
    return _write(store, run, step, adapter, _whole("adapter", adapter), tags)


@dataclass(frozen=True, slots=True)
class Held:
    """Weights of an earlier version that the caller has, under the digest that they were checked against."""

    weights_sha256: str
    weights: Weights


def load(store: Store, version: PolicyVersion, held: Held | None = None) -> dict[str, RawTensor]:
    """From the nearest whole copy, or from what is held, through the deltas after it, every link verified.

    Raises IntegrityError naming the file that is missing or not what it must be; Pruned when gc took a file that only
    versions which nobody keeps needed.
    """
    chain = chain_of(store, version, () if held is None else {held.weights_sha256})
    try:
        return _restored(store, version.run, chain, {} if held is None else held.weights)
    except Pruned:
        # Whoever compacts and collects while a version is read leaves an anchor behind.
        again = chain_of(store, version)
        if again == chain:
            raise
        return _restored(store, version.run, again, {})


def is_marked(store: Store, run: str, chain: Iterable[Manifest]) -> bool:
    """Whether gc has said of a file that `run` needs that it will delete it."""
    for link in chain:
        key = payload_key(store, run, link.payload)
        owner = key.partition("/policies/")[0]
        if find_mark(store, owner, link.payload.sha256, key) is not None:
            return True
    return False


def read_version(store: Store, run: str, step: int) -> PolicyVersion | None:
    """By key, never by a listing. None when it is not published; IntegrityError when its manifest was altered."""
    found = find_manifest(store, run, step)
    return None if found is None else as_version(*found)


def compact(store: Store, version: PolicyVersion) -> Ref | None:
    """A whole copy beside a delta, so that nothing before it is needed for it; its manifest's reference.

    None for what is whole already. The version stays what it was, manifest and identity. The copy is read back before
    its anchor is committed, and the first anchor of a version stays.
    """
    if version.kind != "delta":
        return None
    chain_of(store, version)  # the version is what it says
    manifest, ref = _require(store, version)
    if find_anchor(store, manifest, ref) is None:
        _write_anchor(store, manifest, ref, load(store, version))
    found = store.read(key := policy_key(version.run, version.step, "anchor.json"))
    assert found is not None, "nothing deletes an anchor"
    return store.ref(key, found)


def verify(store: Store, run: str, steps: Iterable[int]) -> list[VersionCheck]:
    """Rebuilds each version; a version that is missing or broken is a result, the others are still checked.

    Where an anchor stands, the version is rebuilt both ways: from the copy, and from its delta while that is there.
    """
    checks: list[VersionCheck] = []
    for step in steps:
        kind: PolicyKind | None = None
        error: str | None = None
        is_pruned = False
        try:
            found = find_manifest(store, run, step)
            if found is None:
                error = f"{store.uri(policy_key(run, step, 'manifest.json'))}: missing"
            else:
                kind = found[0].kind
                _check(store, *found)
        except Pruned as refusal:
            error, is_pruned = str(refusal), True
        except IntegrityError as refusal:
            error = str(refusal)
        checks.append(VersionCheck(step, kind, error, is_pruned))
    return checks


def stats(store: Store, run: str, steps: Iterable[int]) -> dict[int, PublishStats]:
    """By step, for those that are published."""
    found = ((step, find_manifest(store, run, step)) for step in steps)
    return {step: _stats(one[0]) for step, one in found if one is not None}


@dataclass(frozen=True, slots=True)
class _Content:
    """What a version's payload says. `below`: the chain that a delta applies to; `base`: what it gives. Else empty."""

    kind: PolicyKind
    payload: bytes
    weights_sha256: str
    full_size_bytes: int
    entries: tuple[DeltaEntry, ...] = ()
    parent: Parent | None = None
    below: tuple[Manifest, ...] = ()
    base: Weights = field(default_factory=dict)


def _whole(kind: PolicyKind, weights: Weights) -> _Content:
    payload = to_safetensors(weights)
    return _Content(kind, payload, weights_sha256(weights), len(payload))


def _delta(
    store: Store, step: int, weights: Weights, parent: PolicyVersion, full_every: int, level: int
) -> _Content | None:
    """None when the version has to be whole."""
    below = chain_of(store, parent)
    if step % full_every == 0 or step - below[0].step >= full_every:
        return None
    try:
        base = _restored(store, parent.run, below, {})
    except Pruned:  # collected since the caller chose it: a whole version needs no parent
        return None
    if not same_layout(base, weights):
        return None
    known = result_digests(below[-1]) or None  # of what was just verified
    payload, entries = encode_delta(base, weights, level, num_threads=NUM_THREADS, parent_digests=known)
    results = {tensor.name: tensor.result_digest for entry in entries for tensor in entry.tensors}
    return _Content(
        kind="delta",
        payload=payload,
        weights_sha256=combine_digests(results),
        full_size_bytes=len(to_safetensors(weights)),
        entries=entries,
        parent=Parent(parent.step, parent.weights),
        below=below,
        base=base,
    )


def _published(store: Store, run: str, step: int, weights: Weights) -> tuple[PolicyVersion, PublishStats] | None:
    found = find_manifest(store, run, step)
    if found is None:
        return None
    manifest, ref = found
    ours = weights_sha256(weights)
    if manifest.weights_sha256 != ours:
        raise AlreadyCommitted(f"{ref.uri}: published with weights {manifest.weights_sha256}, not {ours}")
    version = as_version(manifest, ref)
    _outlive_collection(store, manifest, ref, chain_of(store, version), weights)
    return version, _stats(manifest)


def _write(
    store: Store, run: str, step: int, weights: Weights, content: _Content, tags: Mapping[str, str]
) -> tuple[PolicyVersion, PublishStats]:
    # The name holds the digest, so that a slower or a broken try cannot overwrite what a manifest refers to.
    name = f"payload-{hashlib.sha256(content.payload).hexdigest()[:16]}"
    suffix = "delta" if content.kind == "delta" else "safetensors"
    key = policy_key(run, step, f"{name}.{suffix}")
    if find_mark(store, run, key_sha256(key), key) is not None:  # gc may be deleting what an earlier try left there
        key = policy_key(run, step, f"{name}-{uuid.uuid4().hex[:8]}.{suffix}")
    manifest = Manifest(
        run=run,
        step=step,
        kind=content.kind,
        parent=content.parent,
        payload=store.put(key, content.payload),
        full_size_bytes=content.full_size_bytes,
        weights_sha256=content.weights_sha256,
        entries=content.entries,
        tags=dict(tags),
    )
    restore(manifest, content.base, store.get, NUM_THREADS)
    ref = store.commit(policy_key(run, step, "manifest.json"), manifest.to_json())
    _outlive_collection(store, manifest, ref, (*content.below, manifest), weights)
    return as_version(manifest, ref), _stats(manifest)


def _outlive_collection(
    store: Store, manifest: Manifest, ref: Ref, chain: tuple[Manifest, ...], weights: Weights
) -> None:
    """A version whose chain is being collected gets a whole copy of its own.

    gc marks what it will delete before it looks for versions that need it; a version is committed before this looks
    for marks. Whichever comes second sees the other, so that no version that was published loses its chain.
    """
    own = payload_key(store, manifest.run, manifest.payload)
    is_orphaned = find_mark(store, manifest.run, key_sha256(own), own) is not None
    if is_orphaned or is_marked(store, manifest.run, chain):
        _write_anchor(store, manifest, ref, weights)


def _write_anchor(store: Store, manifest: Manifest, ref: Ref, weights: Weights) -> None:
    payload = to_safetensors(weights)
    # A name of its own each time: it can be no object that gc has judged already.
    name = f"anchor-{hashlib.sha256(payload).hexdigest()[:16]}-{uuid.uuid4().hex[:8]}.safetensors"
    anchor = Manifest(
        run=manifest.run,
        step=manifest.step,
        kind="adapter" if manifest.kind == "adapter" else "base",
        parent=None,
        payload=store.put(policy_key(manifest.run, manifest.step, name), payload),
        full_size_bytes=len(payload),
        weights_sha256=manifest.weights_sha256,
        entries=(),
        tags={ANCHORS: ref.sha256},
    )
    restore(anchor, {}, store.get, NUM_THREADS)
    with suppress(AlreadyCommitted):  # another process was faster, with the same weights under another name
        store.commit(policy_key(manifest.run, manifest.step, "anchor.json"), anchor.to_json())


def _require(store: Store, version: PolicyVersion) -> tuple[Manifest, Ref]:
    found = find_manifest(store, version.run, version.step)
    assert found is not None, "nothing deletes a manifest"
    return found


def _restored(store: Store, run: str, chain: Iterable[Manifest], held: Weights) -> dict[str, RawTensor]:
    weights = dict(held)
    for link in chain:
        weights = restore(link, weights, lambda ref: read_payload(store, run, ref), NUM_THREADS)
    return weights


def _check(store: Store, manifest: Manifest, ref: Ref) -> None:
    """Raises Pruned only when neither way is left."""
    load(store, as_version(manifest, ref))
    if find_anchor(store, manifest, ref) is None:
        return
    parent = None if manifest.parent is None else read_version(store, manifest.run, manifest.parent.step)
    with suppress(Pruned):
        base = {} if parent is None else load(store, parent)
        restore(manifest, base, lambda payload: read_payload(store, manifest.run, payload), NUM_THREADS)


def _stats(manifest: Manifest) -> PublishStats:
    changed = sum(entry.num_changed for entry in manifest.entries)
    elements = sum(entry.num_elements for entry in manifest.entries)
    return PublishStats(
        kind=manifest.kind,
        bytes_payload=manifest.payload.size_bytes,
        bytes_full=manifest.full_size_bytes,
        changed_fraction=changed / max(elements, 1) if manifest.kind == "delta" else None,
    )
