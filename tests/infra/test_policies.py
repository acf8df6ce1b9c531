import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from infra.policies import Held, PublishStats, load, publish, publish_adapter, read_version, stats, verify
from infra.store import AlreadyCommitted, Store
from k3core.checkpoint.tensors import RawTensor, Weights, from_torch, to_safetensors, weights_sha256
from k3core.errors import IntegrityError
from k3core.types import PolicyVersion, Ref

RUN = "night"


def weights_at(step: int, size: int = 256) -> Weights:
    values = np.arange(size, dtype=np.float32)
    values[: 4 * step] += step / 7
    return {"w": RawTensor("F32", (size,), values.tobytes()), "fixed": RawTensor("BF16", (2,), b"abcd")}


def published(store: Store, last_step: int, full_every: int = 4) -> list[PolicyVersion]:
    versions: list[PolicyVersion] = []
    for step in range(last_step + 1):
        parent = versions[-1] if versions else None
        versions.append(publish(store, RUN, step, weights_at(step), parent, full_every, 3, {"step": str(step)})[0])
    return versions


@pytest.fixture
def memory() -> Store:
    return Store(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def disk(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "root"))


def files(root: Path) -> dict[str, Path]:
    """By step and suffix, as in "000001.delta"."""
    return {path.parent.name + path.suffix: path for path in sorted(root.rglob("*.*")) if path.is_file()}


def test_a_run_is_a_full_then_deltas_then_a_full(memory: Store) -> None:
    versions = published(memory, 9)
    assert [version.kind for version in versions] == ["base", *3 * ["delta"], "base", *3 * ["delta"], "base", "delta"]
    assert [version.parent for version in versions] == [None, 0, 1, 2, None, 4, 5, 6, None, 8]
    for version in versions:
        assert load(memory, version) == weights_at(version.step)
        assert version.weights_sha256 == weights_sha256(weights_at(version.step))
        assert read_version(memory, RUN, version.step) == version


def test_a_version_lies_under_its_run_and_step_and_a_full_is_a_safetensors_file(disk: Store, tmp_path: Path) -> None:
    published(disk, 1)
    found = files(tmp_path)
    assert found.keys() == {"000000.safetensors", "000000.json", "000001.delta", "000001.json"}
    assert found["000001.json"] == tmp_path / "root" / RUN / "policies/000001/manifest.json"
    loaded = safetensors.torch.load_file(str(found["000000.safetensors"]))
    assert from_torch(loaded) == weights_at(0)


def test_another_store_of_the_scheme_loads_a_version(disk: Store, tmp_path: Path) -> None:
    version = published(disk, 2)[-1]
    assert load(Store(str(tmp_path / "elsewhere")), version) == weights_at(2)


def test_a_step_that_was_not_published_is_none(memory: Store) -> None:
    assert read_version(memory, RUN, 0) is None


def payloads_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    real = Store.get

    def get(store: Store, ref: Ref) -> bytes:
        if "/payload-" in ref.uri:
            read.append(ref.uri.split("/")[-2])
        return real(store, ref)

    monkeypatch.setattr(Store, "get", get)
    return read


def test_from_held_weights_only_the_deltas_after_them_are_read(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = published(memory, 6)
    read = payloads_read(monkeypatch)
    for at, to, expected in ((1, 3, ["000002", "000003"]), (3, 3, []), (3, 5, ["000004", "000005"]), (4, 6, 2)):
        held = Held(versions[at].weights_sha256, weights_at(at))
        read.clear()
        assert load(memory, versions[to], held) == weights_at(to)
        assert (len(read) if isinstance(expected, int) else read) == expected


def test_held_weights_that_are_not_what_their_digest_says_are_refused(memory: Store) -> None:
    versions = published(memory, 2)
    with pytest.raises(IntegrityError, match="000002/payload-"):
        load(memory, versions[2], Held(versions[1].weights_sha256, weights_at(0)))


def test_another_layout_is_published_in_full(memory: Store) -> None:
    parent = published(memory, 0)[0]
    version, _ = publish(memory, RUN, 1, weights_at(1, size=300), parent, 4, 3, {})
    assert (version.kind, version.parent) == ("base", None)
    assert load(memory, version) == weights_at(1, size=300)


def test_an_adapter_is_always_whole(memory: Store) -> None:
    for step in range(3):
        version, published_stats = publish_adapter(memory, RUN, step, weights_at(step), {})
        assert (version.kind, version.parent, published_stats.changed_fraction) == ("adapter", None, None)
        assert load(memory, version) == weights_at(step)


def test_statistics_tell_what_a_version_cost(memory: Store) -> None:
    full = len(to_safetensors(weights_at(0)))
    base, base_stats = publish(memory, RUN, 0, weights_at(0), None, 4, 3, {})
    _, delta_stats = publish(memory, RUN, 1, weights_at(1), base, 4, 3, {})
    assert base_stats == PublishStats("base", full, full, None)
    assert delta_stats == PublishStats("delta", delta_stats.bytes_payload, full, 4 / 258)
    assert 0 < delta_stats.bytes_payload < full / 4
    assert stats(memory, RUN, range(3)) == {0: base_stats, 1: delta_stats}


def test_weights_that_did_not_change_say_so(memory: Store) -> None:
    base = published(memory, 0)[0]
    version, published_stats = publish(memory, RUN, 1, weights_at(0), base, 4, 3, {})
    assert (published_stats.changed_fraction, published_stats.bytes_payload) == (0.0, 0)
    assert load(memory, version) == weights_at(0)


@pytest.mark.parametrize("step", [0, 1])
def test_a_retry_returns_the_same_version_and_writes_nothing(disk: Store, tmp_path: Path, step: int) -> None:
    base = publish(disk, RUN, 0, weights_at(0), None, 4, 3, {"try": "1"})[0]
    parent = base if step else None
    first = publish(disk, RUN, step, weights_at(step), parent, 4, 3, {"try": "1"})
    before = {path: path.stat().st_mtime_ns for path in files(tmp_path).values()}
    assert publish(disk, RUN, step, weights_at(step), parent, 4, 3, {"try": "2"}) == first
    assert {path: path.stat().st_mtime_ns for path in files(tmp_path).values()} == before


def test_other_weights_for_a_published_step_are_refused(memory: Store) -> None:
    version = published(memory, 1)[1]
    with pytest.raises(AlreadyCommitted, match=r"000001/manifest\.json: published with weights"):
        publish(memory, RUN, 1, weights_at(5), None, 4, 3, {})
    assert load(memory, version) == weights_at(1)


class SlowerTry(Store):
    """Another process publishes other weights for the step between this one's look and its first write."""

    def put(self, key: str, data: bytes) -> Ref:
        other = Store(self._root)
        if read_version(other, RUN, 1) is None:
            publish(other, RUN, 1, weights_at(9), read_version(other, RUN, 0), 4, 3, {})
        return super().put(key, data)


def test_a_slower_try_with_other_weights_leaves_the_published_version_whole(disk: Store) -> None:
    base = published(disk, 0)[0]
    with pytest.raises(AlreadyCommitted):
        publish(SlowerTry(disk._root), RUN, 1, weights_at(1), base, 4, 3, {})
    version = read_version(disk, RUN, 1)
    assert version is not None
    assert load(disk, version) == weights_at(9)


class TornWrites(Store):
    """A disk that loses a bit of each payload."""

    def put(self, key: str, data: bytes) -> Ref:
        super().put(key, data[:-1] + bytes([data[-1] ^ 1]))
        return self.ref(key, data)


class WrongBytes(Store):
    """An encoder that is wrong: what it wrote is stored faithfully."""

    def put(self, key: str, data: bytes) -> Ref:
        return super().put(key, data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("broken", [TornWrites, WrongBytes])
@pytest.mark.parametrize("step", [0, 1])
def test_a_version_that_does_not_reconstruct_is_never_published(disk: Store, broken: type[Store], step: int) -> None:
    parent = published(disk, 0)[0] if step else None
    with pytest.raises(IntegrityError, match=f"00000{step}/payload-"):
        publish(broken(disk._root), RUN, step, weights_at(step), parent, 4, 3, {})
    assert read_version(disk, RUN, step) is None
    assert load(disk, publish(disk, RUN, step, weights_at(step), parent, 4, 3, {})[0]) == weights_at(step)


def test_a_delta_on_a_broken_parent_is_never_published(disk: Store, tmp_path: Path) -> None:
    parent = published(disk, 1)[1]
    payload = files(tmp_path)["000000.safetensors"]
    payload.write_bytes(payload.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=f"^file://{payload}: expected"):
        publish(disk, RUN, 2, weights_at(2), parent, 4, 3, {})
    assert read_version(disk, RUN, 2) is None


@pytest.mark.parametrize(
    "change", [{"run": "other"}, {"step": 5}, {"kind": "adapter"}], ids=["another run", "later step", "adapter"]
)
def test_a_parent_that_cannot_be_one_is_refused(memory: Store, change: dict[str, Any]) -> None:
    parent = dataclasses.replace(published(memory, 0)[0], **change)
    with pytest.raises(ValueError, match="step 1 of run 'night' cannot follow"):
        publish(memory, RUN, 1, weights_at(1), parent, 4, 3, {})


def test_a_version_that_names_other_weights_than_its_manifest_is_refused(memory: Store) -> None:
    version = published(memory, 0)[0]
    for change in ({"step": 1}, {"weights_sha256": "0" * 64}, {"kind": "adapter"}, {"run": "other"}):
        with pytest.raises(IntegrityError, match=f"^{version.weights.uri}: expected"):
            load(memory, dataclasses.replace(version, **change))


def test_full_every_below_one_is_refused(memory: Store) -> None:
    with pytest.raises(ValueError, match="full_every must be at least 1, found 0"):
        publish(memory, RUN, 0, weights_at(0), None, 0, 3, {})


def test_a_flipped_bit_in_any_file_of_a_run_is_refused_by_name(disk: Store, tmp_path: Path) -> None:
    version = published(disk, 2)[2]
    for path in files(tmp_path).values():
        intact = path.read_bytes()
        for position in range(0, len(intact), 3):
            altered = bytearray(intact)
            altered[position] ^= 1 << position % 8
            path.write_bytes(altered)
            with pytest.raises(IntegrityError, match=f"^file://{path}: "):
                load(disk, version)
        path.write_bytes(intact)
    assert load(disk, version) == weights_at(2)


def test_a_flipped_bit_in_a_manifest_is_refused_by_key_too(disk: Store, tmp_path: Path) -> None:
    published(disk, 1)
    path = files(tmp_path)["000001.json"]
    intact = path.read_bytes()
    for position in range(len(intact)):
        altered = bytearray(intact)
        altered[position] ^= 1 << position % 8
        path.write_bytes(altered)
        with pytest.raises(IntegrityError, match=f"^file://{path}: "):
            read_version(disk, RUN, 1)


def test_a_manifest_under_another_step_is_refused(disk: Store, tmp_path: Path) -> None:
    published(disk, 2)
    found = files(tmp_path)
    found["000002.json"].write_bytes(found["000001.json"].read_bytes())
    with pytest.raises(IntegrityError, match="expected step 2 of run 'night', found step 1"):
        read_version(disk, RUN, 2)


def test_verify_tells_of_each_version_what_is_wrong(disk: Store, tmp_path: Path) -> None:
    published(disk, 5)
    payload = files(tmp_path)["000002.delta"]
    payload.write_bytes(payload.read_bytes()[:-1])
    checks = verify(disk, RUN, range(7))
    assert [check.kind for check in checks] == ["base", "delta", "delta", "delta", "base", "delta", None]
    assert [check.error is None for check in checks] == [True, True, False, False, True, True, False]
    assert all(check.error.startswith(f"file://{payload}: expected") for check in checks[2:4] if check.error)
    assert checks[6].error == f"{disk.uri(f'{RUN}/policies/000006/manifest.json')}: missing"


class Crash(BaseException):
    """The process is gone: nothing catches it."""


class CrashingStore(Store):
    """Dies at its n-th operation, before or after carrying it out."""

    def __init__(self, root: str, at: int, is_after: bool) -> None:
        super().__init__(root)
        self.left = at
        self.is_after = is_after

    def _do(self, operation: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left == 0 and not self.is_after:
            raise Crash
        result = operation()
        if self.left == 0:
            raise Crash
        return result

    def put(self, key: str, data: bytes) -> Ref:
        return self._do(lambda: Store.put(self, key, data))

    def get(self, ref: Ref) -> bytes:
        return self._do(lambda: Store.get(self, ref))

    def commit(self, key: str, document: Mapping[str, Any]) -> Ref:
        return self._do(lambda: Store.commit(self, key, document))

    def read_manifest(self, key: str) -> dict[str, Any] | None:
        return self._do(lambda: Store.read_manifest(self, key))

    def read(self, key: str) -> bytes | None:
        return self._do(lambda: Store.read(self, key))


def survived(root: str, step: int, parent: PolicyVersion | None) -> None:
    """After a crash: readers see nothing or all of the step, its parent still loads, and a retry completes."""
    store = Store(root)
    found = read_version(store, RUN, step)
    if found is not None:
        assert load(store, found) == weights_at(step)
    if parent is not None:
        assert load(store, parent) == weights_at(parent.step)
    again = publish(store, RUN, step, weights_at(step), parent, 4, 3, {})[0]
    assert found in (None, again)
    assert load(store, again) == weights_at(step)
    assert read_version(store, RUN, step) == again


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("step", [0, 2])
def test_a_crash_at_any_operation_leaves_the_old_state_or_the_new_version(step: int, is_after: bool) -> None:
    crashes = 0
    while True:
        root = f"memory://{uuid.uuid4().hex}"
        parent = published(Store(root), step - 1)[-1] if step else None
        try:
            publish(CrashingStore(root, crashes + 1, is_after), RUN, step, weights_at(step), parent, 4, 3, {})
        except Crash:
            crashes += 1
            survived(root, step, parent)
        else:
            break
    # look, mark?, put, read back, commit, marks of what it needs; and manifests, anchors and payloads of two parents
    assert crashes == (7 if step == 0 else 15)


@pytest.fixture
def dying_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int | None], None]]:
    """Call it with n: the n-th change to the disk and all later ones fail, as after a kill. None: no more deaths."""
    left: list[int | None] = [None]

    def dies(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] is not None:
                left[0] -= 1
                if left[0] <= 0:
                    raise Crash
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "link", "mkdir", "unlink"):
        monkeypatch.setattr(os, name, dies(getattr(os, name)))

    def arm(at: int | None) -> None:
        left[0] = at

    yield arm
    left[0] = None


@pytest.mark.parametrize("step", [0, 1])
def test_a_kill_at_any_change_to_the_disk_leaves_the_old_state_or_the_new_version(
    tmp_path: Path, dying_disk: Callable[[int | None], None], step: int
) -> None:
    deaths = 0
    while True:
        root = str(tmp_path / str(deaths))
        parent = published(Store(root), 0)[0] if step else None
        dying_disk(deaths + 1)
        try:
            publish(Store(root), RUN, step, weights_at(step), parent, 4, 3, {})
        except Crash:
            deaths += 1
            dying_disk(None)
            survived(root, step, parent)
        else:
            break
    assert deaths >= 8, "fsync, rename, unlink and fsync of the folder for the payload, the same for the manifest"
