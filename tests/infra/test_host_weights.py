"""One apply for all processes of a host; nothing that a kill or a spoilt file leaves behind is ever given out."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors

from infra import policies
from infra.host_weights import FOLDER, HostWeights, load_shared
from infra.store import Store
from k3core.checkpoint.tensors import RawTensor, Weights, from_safetensors, to_safetensors
from k3core.errors import IntegrityError
from k3core.types import PolicyVersion

RUN = "night"
FORK = multiprocessing.get_context("fork")


def weights_at(step: int) -> Weights:
    values = np.arange(3000, dtype=np.float32)
    values[: 4 * step] += step / 7
    return {"w": RawTensor("F32", (3000,), values.tobytes()), "fixed": RawTensor("BF16", (2,), b"abcd")}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "root"))


@pytest.fixture
def versions(store: Store) -> list[PolicyVersion]:
    """0 base, 1 to 4 deltas, 5 base, 6 and 7 deltas."""
    found: list[PolicyVersion] = []
    for step in range(8):
        found.append(policies.publish(store, RUN, step, weights_at(step), found[-1] if found else None, 5, 3, {})[0])
    return found


@pytest.fixture
def host(store: Store, tmp_path: Path) -> HostWeights:
    return HostWeights(tmp_path / "host", store)


def held(path: Path) -> Weights:
    return from_safetensors(path.read_bytes())


def made(host: HostWeights) -> tuple[int, int]:
    return host.num_deltas, host.num_rebuilt


def test_a_fresh_host_rebuilds_once_and_then_applies_a_delta_a_version(
    host: HostWeights, versions: list[PolicyVersion]
) -> None:
    for step in range(4):
        assert held(host.at(versions[step])) == weights_at(step)
    assert made(host) == (3, 1)
    assert host.at(versions[3]) == host.at(versions[3])
    assert made(host) == (3, 1)


def test_a_host_that_missed_versions_applies_the_deltas_that_it_lacks(
    host: HostWeights, versions: list[PolicyVersion]
) -> None:
    host.at(versions[1])
    assert held(host.at(versions[4])) == weights_at(4)
    assert made(host) == (1, 1)
    assert held(host.at(versions[7])) == weights_at(7), "a whole version between: nothing to stand on"
    assert made(host) == (1, 2)


def test_the_file_can_be_mapped_by_any_reader(host: HostWeights, versions: list[PolicyVersion]) -> None:
    with safetensors.safe_open(str(host.at(versions[2])), "np") as file:
        assert set(file.keys()) == {"w", "fixed"}
        assert file.get_tensor("w").tobytes() == weights_at(2)["w"].data


def test_the_last_two_versions_stay(host: HostWeights, versions: list[PolicyVersion]) -> None:
    paths = [host.at(version) for version in versions[:5]]
    assert [path.exists() for path in paths] == [False, False, False, True, True]
    folder = paths[-1].parent
    assert len(list(folder.glob("*.safetensors"))) == len(list(folder.glob("*.stamp"))) == 2


def test_adapters_do_not_push_out_the_base_that_they_stand_on(host: HostWeights, store: Store) -> None:
    base = policies.publish(store, RUN, 0, weights_at(0), None, 9, 3, {})[0]
    path = host.at(base)
    for step in range(1, 5):
        adapter = policies.publish_adapter(store, RUN, step, {"lora_B": RawTensor("U8", (1,), bytes([step]))}, {})[0]
        assert held(host.at(adapter))["lora_B"].data == bytes([step])
    assert host.at(base) == path
    assert made(host) == (0, 5)


def _at(host: HostWeights, version: PolicyVersion, start: object, results: object) -> None:
    start.wait(30)  # type: ignore[attr-defined]
    path = host.at(version)
    results.put((made(host), held(path) == weights_at(version.step)))  # type: ignore[attr-defined]


def test_eight_processes_make_one_apply(host: HostWeights, versions: list[PolicyVersion]) -> None:
    host.at(versions[1])
    start, results = FORK.Event(), FORK.Queue()
    fresh = HostWeights(host.folder, host.store)
    children = [FORK.Process(target=_at, args=(fresh, versions[2], start, results)) for _ in range(8)]
    for child in children:
        child.start()
    start.set()
    found = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join(30)
    assert all(is_right for _, is_right in found)
    assert sum(deltas for (deltas, _), _ in found) == 1
    assert sum(rebuilt for (_, rebuilt), _ in found) == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda _: b"",
        lambda _: b"not safetensors at all",
    ],
    ids=["torn", "flipped bit", "empty", "other"],
)
def test_a_spoilt_file_is_found_and_made_again(
    host: HostWeights, versions: list[PolicyVersion], spoil: Callable[[bytes], bytes]
) -> None:
    path = host.at(versions[2])
    path.write_bytes(spoil(path.read_bytes()))
    assert held(HostWeights(host.folder, host.store).at(versions[2])) == weights_at(2)
    # Spoilt again, as what the next version would stand on.
    path.write_bytes(spoil(path.read_bytes()))
    assert held(HostWeights(host.folder, host.store).at(versions[3])) == weights_at(3)


def test_bits_that_rot_behind_an_unchanged_stamp_never_reach_the_next_version(
    host: HostWeights, versions: list[PolicyVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = host.at(versions[2])
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    monkeypatch.setattr("infra.host_weights._is_whole", lambda found, _: found.exists())
    assert held(host.at(versions[3])) == weights_at(3)
    assert made(host) == (0, 2)


def test_a_file_under_the_right_name_with_another_versions_weights_is_replaced(
    host: HostWeights, versions: list[PolicyVersion]
) -> None:
    path = host.at(versions[2])
    path.write_bytes(to_safetensors(weights_at(1)))
    assert held(host.at(versions[2])) == weights_at(2)


def test_a_host_starts_from_the_engines_own_file_when_it_is_the_version(
    host: HostWeights, versions: list[PolicyVersion], tmp_path: Path
) -> None:
    own = tmp_path / "model.safetensors"
    own.write_bytes(to_safetensors(weights_at(2)))
    host.seed(versions[2], own)
    assert held(host.at(versions[3])) == weights_at(3)
    assert made(host) == (1, 0)


def test_a_file_with_other_weights_is_no_seed(host: HostWeights, versions: list[PolicyVersion], tmp_path: Path) -> None:
    """As when the trainer's weights went through a format that is not exact."""
    own = tmp_path / "model.safetensors"
    own.write_bytes(to_safetensors({**weights_at(2), "fixed": RawTensor("BF16", (2,), b"abcX")}))
    with pytest.raises(IntegrityError, match=r"model\.safetensors: expected weights .* of step 2, found"):
        host.seed(versions[2], own)
    assert held(host.at(versions[2])) == weights_at(2)


def test_a_broken_store_is_reported_and_leaves_no_file(
    host: HostWeights, versions: list[PolicyVersion], store: Store
) -> None:
    (payload,) = Path(store.resolve(versions[1].weights)).parent.glob("*.delta")
    payload.write_bytes(payload.read_bytes()[:-1])
    host.at(versions[0])
    with pytest.raises(IntegrityError, match="000001/payload-"):
        host.at(versions[1])
    assert not [path for path in host.folder.rglob("*") if "000001" in path.name]


def _die_at(host: HostWeights, version: PolicyVersion, nth: int) -> None:
    """Killed with -9 at the n-th change to the disk, before or after it."""
    left = [nth]

    def dies(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in ("fsync", "replace", "unlink", "utime"):
        setattr(os, name, dies(getattr(os, name)))
    host.at(version)
    os._exit(0)


def test_a_kill_at_any_change_to_the_disk_leaves_a_host_that_gives_the_right_bytes(
    store: Store, versions: list[PolicyVersion], tmp_path: Path
) -> None:
    kills = 0
    while True:
        host = HostWeights(tmp_path / f"killed-{kills}", store)
        for step in (0, 1):
            host.at(versions[step])
        child = FORK.Process(target=_die_at, args=(host, versions[2], kills + 1))
        child.start()
        child.join(60)
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        kills += 1
        after = HostWeights(host.folder, store)
        assert held(after.at(versions[2])) == weights_at(2)
        assert held(after.at(versions[3])) == weights_at(3)
        assert not list(host.folder.rglob("*.tmp"))
    assert kills >= 10, "fsync, rename for file and stamp, the clock of the stamp, two unlinks: before and after each"


def test_stages_load_through_the_hosts_folder_when_the_environment_names_one(
    store: Store, versions: list[PolicyVersion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    assert load_shared(store, versions[3]) == weights_at(3)
    assert not (tmp_path / "shared").exists()
    monkeypatch.setenv(FOLDER, str(tmp_path / "shared"))
    assert load_shared(store, versions[3]) == weights_at(3)
    assert len(list((tmp_path / "shared" / RUN).glob("*.safetensors"))) == 1
