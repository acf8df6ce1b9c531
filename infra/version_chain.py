"""Which stored files rebuild a version: its manifest, the manifests that it follows, and anchors.

An anchor is a whole copy of a version that was published as a delta. It changes nothing about the version, whose
identity stays its first manifest; a chain that meets an anchor ends there.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager

from infra.pruned import Pruned, find_mark
from infra.store import Store
from k3core.checkpoint.chain import Manifest, read_manifest
from k3core.errors import IntegrityError
from k3core.sealed import canonical_json
from k3core.types import PolicyVersion, Ref

LOOK_AHEAD = 32  # a gap of missing versions that is shorter is looked across
ANCHORS = "anchors_manifest_sha256"  # the tag by which an anchor names the manifest that it stands for


def policy_key(run: str, step: int, name: str) -> str:
    return f"{run}/policies/{step:06d}/{name}"


def payload_key(store: Store, run: str, payload: Ref) -> str:
    """The key of a payload that `run` refers to: below another run when it was adopted from there.

    Below `run` itself when the reference names a place outside this store, of which the run is a copy then.
    """
    inside = store.uri("x").removesuffix("x")
    if payload.uri.startswith(inside):
        return payload.uri.removeprefix(inside)
    step, name = payload.uri.split("/")[-2:]
    return f"{run}/policies/{step}/{name}"


def find_manifest(store: Store, run: str, step: int) -> tuple[Manifest, Ref] | None:
    """By key, never by a listing. None when the step is not published; IntegrityError when its manifest was altered."""
    return _find(store, run, step, "manifest.json")


def find_steps(store: Store, run: str, at_least: int = -1) -> list[int]:
    """The steps that are published, by their manifests' keys: from the run's first to one after which LOOK_AHEAD steps
    are missing, and no less far than `at_least`. A manifest that was altered counts: it is there."""
    pinned = store.read_manifest(f"{run}/run.json") or {}
    first = max(0, int(pinned["from"]["step"]) - 1) if pinned.get("from") else 0  # a run that redoes another's step
    steps: list[int] = []
    step = first
    while step <= max(steps[-1] if steps else first, at_least) + LOOK_AHEAD:
        if store.read(policy_key(run, step, "manifest.json")) is not None:
            steps.append(step)
        step += 1
    return steps


def find_anchor(store: Store, manifest: Manifest, ref: Ref) -> Manifest | None:
    """Raises IntegrityError for an anchor of other weights, or of another manifest than the one under `ref`."""
    found = _find(store, manifest.run, manifest.step, "anchor.json")
    if found is None:
        return None
    anchor, anchor_ref = found
    expected = (manifest.weights_sha256, ref.sha256)
    if anchor.kind == "delta" or (anchor.weights_sha256, anchor.tags.get(ANCHORS)) != expected:
        raise IntegrityError(
            f"{anchor_ref.uri}: expected a whole copy of weights {expected[0]} of manifest {expected[1]}, "
            f"found {anchor.kind} {anchor.weights_sha256} of {anchor.tags.get(ANCHORS)}"
        )
    return anchor


def as_version(manifest: Manifest, ref: Ref) -> PolicyVersion:
    return PolicyVersion(
        run=manifest.run,
        step=manifest.step,
        kind=manifest.kind,
        weights=ref,
        weights_sha256=manifest.weights_sha256,
        parent=None if manifest.parent is None else manifest.parent.step,
    )


def chain_of(store: Store, version: PolicyVersion, held: Container[str] = ()) -> tuple[Manifest, ...]:
    """What has to be read for `version`, oldest first: a whole version or an anchor, then the deltas after it.

    held: digests of weights that the caller has; the chain then starts with the first delta after them, and is empty
    when `version` itself is held. Raises IntegrityError naming the file that is missing or not what it must be.
    """
    manifest, ref = read_manifest(version.weights, store.get), version.weights
    if (found := as_version(manifest, ref)) != version:
        raise IntegrityError(f"{ref.uri}: expected {version}, found {found}")
    links: list[Manifest] = []
    while manifest.weights_sha256 not in held:
        parent = manifest.parent
        older = None if parent is None else _read_parent(store, manifest)
        if older is None or older.weights_sha256 not in held:
            anchor = find_anchor(store, manifest, ref)
            if anchor is not None or older is None:
                links.append(anchor or manifest)
                break
        links.append(manifest)
        assert parent is not None
        manifest, ref = older, parent.manifest
    return tuple(reversed(links))


def read_payload(store: Store, run: str, ref: Ref) -> bytes:
    """Raises Pruned for a payload that was collected, IntegrityError for one that is missing or altered."""
    with explained(store, run, ref):
        return store.get(ref)


@contextmanager
def explained(store: Store, run: str, ref: Ref) -> Iterator[None]:
    """An IntegrityError of the body becomes Pruned when gc took the payload."""
    try:
        yield
    except IntegrityError as error:
        key = payload_key(store, run, ref)
        found = find_mark(store, key.partition("/policies/")[0], ref.sha256, key)
        if found is None or store.size(key) is not None:
            raise
        raise Pruned(f"{ref.uri}: {found.sentence()}") from error


def _read_parent(store: Store, manifest: Manifest) -> Manifest:
    assert manifest.parent is not None
    step, ref = manifest.parent.step, manifest.parent.manifest
    older = read_manifest(ref, store.get)
    if (older.run, older.step) != (manifest.run, step) or older.kind == "adapter":
        raise IntegrityError(
            f"{ref.uri}: expected step {step} of run {manifest.run!r} as a parent, "
            f"found {older.kind} of step {older.step} of run {older.run!r}"
        )
    return older


def _find(store: Store, run: str, step: int, name: str) -> tuple[Manifest, Ref] | None:
    key = policy_key(run, step, name)
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
