"""Versions of a policy: what a manifest says, and weights rebuilt from a full version and the deltas after it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from k3core.checkpoint.delta import DeltaEntry, apply_delta
from k3core.checkpoint.tensors import RawTensor, Weights, combine_digests, from_safetensors, weights_sha256
from k3core.errors import IntegrityError
from k3core.sealed import canonical_json, parse_canonical, seal, unseal
from k3core.types import PolicyKind, Ref

SCHEMA = 2

ReadBytes = Callable[[Ref], bytes]
"""Raises IntegrityError naming the uri when it is missing."""


@dataclass(frozen=True, slots=True)
class Parent:
    """The version that a delta applies to; `manifest` pins its very bytes."""

    step: int
    manifest: Ref


@dataclass(frozen=True, slots=True)
class Manifest:
    """One published version. A delta has a parent and entries; a base or an adapter is whole and has neither.

    full_size_bytes: the size of all its weights as one safetensors file.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    run: str
    step: int
    kind: PolicyKind
    parent: Parent | None
    payload: Ref
    full_size_bytes: int
    weights_sha256: str
    entries: tuple[DeltaEntry, ...]
    tags: Mapping[str, str]

    def __post_init__(self) -> None:
        if (self.kind == "delta") != (self.parent is not None):
            raise ValueError(f"a {self.kind} {'has no' if self.parent else 'needs a'} parent")
        if self.parent is not None and self.parent.step >= self.step:
            raise ValueError(f"step {self.step} cannot follow step {self.parent.step}")
        if self.kind != "delta" and self.entries:
            raise ValueError(f"a {self.kind} has no entries")

    def to_json(self) -> dict[str, Any]:
        """A sealed document for `Store.commit`."""
        return seal({"schema": SCHEMA, **_MANIFEST.dump_python(self, mode="json")})

    @staticmethod
    def from_json(document: Mapping[str, Any], file: str) -> Manifest:
        """Raises IntegrityError naming `file` for an altered document, another schema, unknown or missing keys."""
        content = unseal(document, file)
        schema = content.pop("schema", None)
        if schema != SCHEMA:
            raise IntegrityError(
                f"{file}: expected manifest schema {SCHEMA}, found {schema}: "
                "publish the version again with this release, or read it with the release that wrote it"
            )
        try:
            # Through JSON, since only there does strict mode take a list for a tuple.
            return _MANIFEST.validate_json(canonical_json(content))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise IntegrityError(f"{file}: expected a manifest, found {key or 'content'}: {first['msg']}") from error


_MANIFEST = TypeAdapter(Manifest)


def read_manifest(ref: Ref, read: ReadBytes) -> Manifest:
    data = read(ref)
    found = hashlib.sha256(data).hexdigest()
    if found != ref.sha256:
        raise IntegrityError(f"{ref.uri}: expected sha256 {ref.sha256}, found {found}")
    return Manifest.from_json(parse_canonical(data, ref.uri), ref.uri)


def reconstruct(manifest: Manifest, read: ReadBytes, num_threads: int = 1) -> dict[str, RawTensor]:
    """The version's weights: back to the nearest full, then forward, every link verified.

    Raises IntegrityError naming the file that is missing or not what it must be.
    """
    links = [manifest]
    while (parent := links[-1].parent) is not None:
        older = read_manifest(parent.manifest, read)
        if (older.run, older.step) != (manifest.run, parent.step) or older.kind == "adapter":
            raise IntegrityError(
                f"{parent.manifest.uri}: expected step {parent.step} of run {manifest.run!r} as a parent, "
                f"found {older.kind} of step {older.step} of run {older.run!r}"
            )
        links.append(older)
    weights: dict[str, RawTensor] = {}
    for link in reversed(links):
        weights = restore(link, weights, read, num_threads)
    return weights


def restore(manifest: Manifest, parent: Weights, read: ReadBytes, num_threads: int = 1) -> dict[str, RawTensor]:
    """One link: a delta applied to its parent's weights, or a whole version, which ignores them."""
    payload = read(manifest.payload)
    if manifest.kind == "delta":
        weights = apply_delta(parent, manifest.entries, payload, manifest.payload.uri, num_threads=num_threads)
        # Each result was just held against its entry's digest; hashing all weights again would tell nothing new.
        found = combine_digests(result_digests(manifest))
    else:
        weights = from_safetensors(payload, manifest.payload.uri)
        found = weights_sha256(weights)
    if found != manifest.weights_sha256:
        raise IntegrityError(
            f"{manifest.payload.uri}: expected weights with sha256 {manifest.weights_sha256}, found {found}"
        )
    return weights


def result_digests(manifest: Manifest) -> dict[str, str]:
    """Of a delta: the `tensor_digest` of each tensor of the version. `encode_delta` takes them as its parent's."""
    return {tensor.name: tensor.result_digest for entry in manifest.entries for tensor in entry.tensors}
