"""Policy versions in a store: published once, whole, and only after they were read back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from infra.store import AlreadyCommitted, Store
from k3core.checkpoint.chain import Manifest, Parent, read_manifest, reconstruct, restore
from k3core.checkpoint.delta import TensorEntry, encode_delta
from k3core.checkpoint.tensors import RawTensor, Weights, same_layout, to_safetensors, weights_sha256
from k3core.errors import IntegrityError
from k3core.sealed import canonical_json
from k3core.types import PolicyKind, PolicyVersion, Ref


@dataclass(frozen=True, slots=True)
class PublishStats:
    """bytes_full: the version as one safetensors file. changed_fraction: of elements; None unless it is a delta."""

    kind: PolicyKind
    bytes_payload: int
    bytes_full: int
    changed_fraction: float | None


@dataclass(frozen=True, slots=True)
class VersionCheck:
    """A version that was rebuilt from the store. `error` is None when every byte is what it must be."""

    step: int
    kind: PolicyKind | None
    error: str | None


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
    """A delta against `parent`; a base without one, at each step divisible by `full_every`, and for another layout.

    The parent is read from the store, and what was written is applied to it before the manifest says that the version
    exists. Published once: another try with equal weights returns the first version, tags included.
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
    content = _whole("base", weights)
    if parent is not None and step % full_every != 0:
        base = load(store, parent)
        if same_layout(base, weights):
            payload, entries = encode_delta(base, weights, level)
            link = Parent(parent.step, parent.weights)
            content = _Content("delta", payload, entries, link, base, content.full_size_bytes)
    return _write(store, run, step, weights, content, tags)


def publish_adapter(
    store: Store, run: str, step: int, adapter: Weights, tags: Mapping[str, str]
) -> tuple[PolicyVersion, PublishStats]:
    """An adapter is always whole. Otherwise as `publish`."""
    if (published := _published(store, run, step, adapter)) is not None:
        return published
    return _write(store, run, step, adapter, _whole("adapter", adapter), tags)


def load(store: Store, version: PolicyVersion) -> dict[str, RawTensor]:
    """Raises IntegrityError naming the file that is missing or not what it must be."""
    manifest = read_manifest(version.weights, store.get)
    found = _version(manifest, version.weights)
    if found != version:
        raise IntegrityError(f"{version.weights.uri}: expected {version}, found {found}")
    return reconstruct(manifest, store.get)


def read_version(store: Store, run: str, step: int) -> PolicyVersion | None:
    """By key, never by a listing. None when it is not published; IntegrityError when its manifest was altered."""
    found = _find(store, run, step)
    return None if found is None else _version(*found)


def verify(store: Store, run: str, steps: Iterable[int]) -> list[VersionCheck]:
    """Rebuilds each version; a version that is missing or broken is a result, the others are still checked."""
    checks: list[VersionCheck] = []
    for step in steps:
        kind: PolicyKind | None = None
        error: str | None = None
        try:
            version = read_version(store, run, step)
            if version is None:
                error = f"{store.uri(_key(run, step, 'manifest.json'))}: missing"
            else:
                kind = version.kind
                load(store, version)
        except IntegrityError as refusal:
            error = str(refusal)
        checks.append(VersionCheck(step, kind, error))
    return checks


def stats(store: Store, run: str, steps: Iterable[int]) -> dict[int, PublishStats]:
    """By step, for those that are published."""
    found = ((step, _find(store, run, step)) for step in steps)
    return {step: _stats(one[0]) for step, one in found if one is not None}


@dataclass(frozen=True, slots=True)
class _Content:
    """What a version's payload says. `base` is what a delta applies to, as the store has it; else empty."""

    kind: PolicyKind
    payload: bytes
    entries: tuple[TensorEntry, ...]
    parent: Parent | None
    base: Weights
    full_size_bytes: int


def _whole(kind: PolicyKind, weights: Weights) -> _Content:
    payload = to_safetensors(weights)
    return _Content(kind, payload, (), None, {}, len(payload))


def _published(store: Store, run: str, step: int, weights: Weights) -> tuple[PolicyVersion, PublishStats] | None:
    found = _find(store, run, step)
    if found is None:
        return None
    manifest, ref = found
    ours = weights_sha256(weights)
    if manifest.weights_sha256 != ours:
        raise AlreadyCommitted(f"{ref.uri}: published with weights {manifest.weights_sha256}, not {ours}")
    return _version(manifest, ref), _stats(manifest)


def _write(
    store: Store, run: str, step: int, weights: Weights, content: _Content, tags: Mapping[str, str]
) -> tuple[PolicyVersion, PublishStats]:
    # The name holds the digest, so that a slower or a broken try cannot overwrite what a manifest refers to.
    name = f"payload-{hashlib.sha256(content.payload).hexdigest()[:16]}"
    suffix = "delta" if content.kind == "delta" else "safetensors"
    manifest = Manifest(
        run=run,
        step=step,
        kind=content.kind,
        parent=content.parent,
        payload=store.put(_key(run, step, f"{name}.{suffix}"), content.payload),
        full_size_bytes=content.full_size_bytes,
        weights_sha256=weights_sha256(weights),
        entries=content.entries,
        tags=dict(tags),
    )
    restore(manifest, content.base, store.get)
    ref = store.commit(_key(run, step, "manifest.json"), manifest.to_json())
    return _version(manifest, ref), _stats(manifest)


def _find(store: Store, run: str, step: int) -> tuple[Manifest, Ref] | None:
    key = _key(run, step, "manifest.json")
    document = store.read_manifest(key)
    if document is None:
        return None
    ref = store.ref(key, canonical_json(document))
    manifest = Manifest.from_json(document, ref.uri)
    if (manifest.run, manifest.step) != (run, step):
        raise IntegrityError(
            f"{ref.uri}: expected step {step} of run {run!r}, found step {manifest.step} of run {manifest.run!r}"
        )
    return manifest, ref


def _version(manifest: Manifest, ref: Ref) -> PolicyVersion:
    return PolicyVersion(
        run=manifest.run,
        step=manifest.step,
        kind=manifest.kind,
        weights=ref,
        weights_sha256=manifest.weights_sha256,
        parent=None if manifest.parent is None else manifest.parent.step,
    )


def _stats(manifest: Manifest) -> PublishStats:
    changed = sum(entry.num_changed for entry in manifest.entries)
    elements = sum(entry.num_elements for entry in manifest.entries)
    return PublishStats(
        kind=manifest.kind,
        bytes_payload=manifest.payload.size_bytes,
        bytes_full=manifest.full_size_bytes,
        changed_fraction=changed / max(elements, 1) if manifest.kind == "delta" else None,
    )


def _key(run: str, step: int, name: str) -> str:
    return f"{run}/policies/{step:06d}/{name}"
