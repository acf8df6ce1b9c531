import dataclasses
import hashlib
import json
from typing import Any

import numpy as np
import pytest

from k3core.checkpoint.chain import Manifest, Parent, reconstruct, restore, result_digests
from k3core.checkpoint.delta import encode_delta
from k3core.checkpoint.tensors import RawTensor, Weights, tensor_digest, to_safetensors, weights_sha256
from k3core.errors import IntegrityError
from k3core.sealed import canonical_json, seal, unseal
from k3core.types import Ref


class Files:
    """A store as the chain sees it: bytes by reference, handed out unchecked so that only the chain's checks count."""

    def __init__(self) -> None:
        self.by_uri: dict[str, bytes] = {}

    def put(self, uri: str, data: bytes) -> Ref:
        self.by_uri[uri] = data
        return Ref(uri, hashlib.sha256(data).hexdigest(), len(data))

    def read(self, ref: Ref) -> bytes:
        if ref.uri not in self.by_uri:
            raise IntegrityError(f"{ref.uri}: missing")
        return self.by_uri[ref.uri]


def weights_at(step: int) -> Weights:
    values = np.arange(64, dtype=np.float32)
    values[: 3 * step] += step / 7
    return {"w": RawTensor("F32", (8, 8), values.tobytes()), "fixed": RawTensor("U8", (3,), b"abc")}


def whole(files: Files, step: int, weights: Weights | None = None) -> Manifest:
    weights = weights_at(step) if weights is None else weights
    data = to_safetensors(weights)
    payload = files.put(f"mem://{step}/payload.safetensors", data)
    return Manifest("r", step, "base", None, payload, len(data), weights_sha256(weights), (), {"note": "full"})


def delta(files: Files, step: int, parent: Manifest) -> Manifest:
    data, entries = encode_delta(weights_at(parent.step), weights_at(step))
    return Manifest(
        run="r",
        step=step,
        kind="delta",
        parent=Parent(parent.step, committed(files, parent)),
        payload=files.put(f"mem://{step}/payload.delta", data),
        full_size_bytes=len(to_safetensors(weights_at(step))),
        weights_sha256=weights_sha256(weights_at(step)),
        entries=entries,
        tags={},
    )


def committed(files: Files, manifest: Manifest) -> Ref:
    return files.put(f"mem://{manifest.step}/manifest.json", canonical_json(manifest.to_json()))


def chain(files: Files, length: int) -> list[Manifest]:
    links = [whole(files, 0)]
    for step in range(1, length):
        links.append(delta(files, step, links[-1]))
    return links


def test_every_version_of_a_chain_returns() -> None:
    files = Files()
    for link in chain(files, 5):
        assert reconstruct(link, files.read) == weights_at(link.step)


def test_only_the_links_back_to_the_nearest_full_are_read() -> None:
    files = Files()
    chain(files, 3)
    full = whole(files, 3)
    last = delta(files, 4, full)
    for step in range(3):
        files.by_uri = {uri: data for uri, data in files.by_uri.items() if not uri.startswith(f"mem://{step}/")}
    assert reconstruct(last, files.read) == weights_at(4)


def test_a_manifest_returns_through_json() -> None:
    for manifest in chain(Files(), 2):
        document = json.loads(canonical_json(manifest.to_json()))
        assert Manifest.from_json(document, "m.json") == manifest


@pytest.mark.parametrize("uri", ["mem://0/payload.safetensors", "mem://0/manifest.json", "mem://1/payload.delta"])
def test_a_missing_link_is_refused_by_name(uri: str) -> None:
    files = Files()
    last = chain(files, 4)[-1]
    del files.by_uri[uri]
    with pytest.raises(IntegrityError, match=f"^{uri}"):
        reconstruct(last, files.read)


def test_a_flipped_bit_in_any_file_of_the_chain_is_refused_by_name() -> None:
    files = Files()
    last = chain(files, 3)[-1]
    intact = dict(files.by_uri)
    for uri, data in intact.items():
        for position in range(len(data)):
            altered = bytearray(data)
            altered[position] ^= 1 << position % 8
            files.by_uri = {**intact, uri: bytes(altered)}
            with pytest.raises(IntegrityError, match=f"^{uri}"):
                reconstruct(last, files.read)


def test_any_file_of_the_chain_cut_at_any_length_is_refused_by_name() -> None:
    files = Files()
    last = chain(files, 2)[-1]
    intact = dict(files.by_uri)
    for uri, data in intact.items():
        for length in range(len(data)):
            files.by_uri = {**intact, uri: data[:length]}
            with pytest.raises(IntegrityError, match=f"^{uri}"):
                reconstruct(last, files.read)


def test_a_delta_on_another_version_than_its_parent_is_refused() -> None:
    files = Files()
    _, first, second, third = chain(files, 4)
    one = restore(first, weights_at(0), files.read)
    with pytest.raises(IntegrityError, match=r"^mem://3/payload\.delta: tensor 'w': base"):
        restore(third, one, files.read)
    assert restore(third, restore(second, one, files.read), files.read) == weights_at(3)


def test_manifests_in_each_others_place_are_refused() -> None:
    files = Files()
    _, first, _, third = chain(files, 4)
    assert third.parent is not None
    swapped = dataclasses.replace(third, parent=Parent(2, committed(files, first)))
    with pytest.raises(IntegrityError, match=r"^mem://1/manifest\.json: expected step 2 .* found delta of step 1"):
        reconstruct(swapped, files.read)


def test_another_sound_manifest_in_the_parents_place_is_refused() -> None:
    files = Files()
    base, last = chain(files, 2)
    committed(files, dataclasses.replace(base, tags={"note": "another"}))
    with pytest.raises(IntegrityError, match=r"^mem://0/manifest\.json: expected sha256"):
        reconstruct(last, files.read)


def test_a_parent_of_another_run_is_refused() -> None:
    files = Files()
    base = dataclasses.replace(whole(files, 0), run="other")
    with pytest.raises(IntegrityError, match="of run 'r' as a parent, found base of step 0 of run 'other'"):
        reconstruct(delta(files, 1, base), files.read)


def test_a_base_with_other_weights_than_its_manifest_says_is_refused() -> None:
    files = Files()
    base = whole(files, 0)
    files.put(base.payload.uri, to_safetensors(weights_at(1)))
    with pytest.raises(IntegrityError, match=f"^{base.payload.uri}: expected weights with sha256"):
        reconstruct(base, files.read)


def test_the_digests_of_a_delta_spare_hashing_the_parent_of_the_next() -> None:
    first = chain(Files(), 2)[1]
    known = result_digests(first)
    assert known == {name: tensor_digest(name, tensor) for name, tensor in weights_at(1).items()}
    assert encode_delta(weights_at(1), weights_at(2), parent_digests=known) == encode_delta(
        weights_at(1), weights_at(2)
    )


def documents() -> list[dict[str, Any]]:
    return [unseal(manifest.to_json(), "m.json") for manifest in chain(Files(), 2)]


def altered_documents() -> list[Any]:
    base, delta_ = documents()
    return [
        pytest.param({**base, "extra": 1}, "extra", id="unknown key"),
        pytest.param({**base, "payload": {**base["payload"], "extra": 1}}, "payload.extra", id="unknown key inside"),
        pytest.param({k: v for k, v in base.items() if k != "tags"}, "tags", id="missing key"),
        pytest.param(
            {**delta_, "entries": [{k: v for k, v in delta_["entries"][0].items() if k != "offset"}]},
            r"entries\.0\.offset",
            id="missing key inside",
        ),
        pytest.param({**base, "step": "1"}, "step", id="another type"),
        pytest.param({**base, "kind": "patch"}, "kind", id="unknown kind"),
        pytest.param({**base, "kind": "delta"}, "a delta needs a parent", id="delta without parent"),
        pytest.param({**delta_, "kind": "base"}, "a base has no parent", id="base with parent"),
        pytest.param({**delta_, "step": 0}, "step 0 cannot follow step 0", id="its own parent"),
        pytest.param({**base, "entries": delta_["entries"]}, "a base has no entries", id="base with entries"),
        pytest.param({**base, "schema": 3}, "expected manifest schema 2, found 3", id="newer schema"),
        pytest.param({**base, "schema": 1}, "schema 2, found 1: publish the version again", id="older schema"),
        pytest.param({k: v for k, v in base.items() if k != "schema"}, "found None", id="no schema"),
    ]


@pytest.mark.parametrize(("document", "found"), altered_documents())
def test_a_document_that_is_no_manifest_is_refused_by_name(document: dict[str, Any], found: str) -> None:
    with pytest.raises(IntegrityError, match=rf"^some/manifest\.json: .*{found}"):
        Manifest.from_json(seal(document), "some/manifest.json")


def test_a_manifest_that_was_edited_without_its_digest_is_refused() -> None:
    document = whole(Files(), 4).to_json()
    for key in document.keys() - {"self_sha256"}:
        with pytest.raises(IntegrityError, match=r"^m\.json: expected content with sha256"):
            Manifest.from_json({**document, key: "edited"}, "m.json")
    with pytest.raises(IntegrityError, match=r"^m\.json: expected content with sha256 None"):
        Manifest.from_json({k: v for k, v in document.items() if k != "self_sha256"}, "m.json")
