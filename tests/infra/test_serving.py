"""Acknowledged by all, or not served: injected failures of worker k of n, retries, late joiners, refusals."""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from infra import policies
from infra.serving import (
    NotServed,
    ResidentEngine,
    ServedPolicyError,
    acked_base,
    compact_served,
    missing_acks,
    read_served,
    resident_sha256,
    serve,
    served_sha256,
)
from infra.store import Store
from k3core.checkpoint.tensors import RawTensor, Weights, from_torch
from k3core.errors import IntegrityError
from k3core.types import PolicyVersion

RUN = "night"
FULL_EVERY = 5


def weights_at(step: int) -> Weights:
    values = np.arange(400, dtype=np.float32)
    values[: 4 * step] += step / 7
    return {"w": RawTensor("F32", (400,), values.tobytes()), "fixed": RawTensor("BF16", (2,), b"abcd")}


class Memory:
    """What an engine proper holds. `spoil` is applied to what arrives, as a broken sync would."""

    def __init__(self) -> None:
        self.weights: dict[str, RawTensor] = {}
        self.installed: list[int] = []
        self.spoil: Callable[[Weights], Weights] = dict

    def install(self, version: PolicyVersion, weights: Weights) -> None:
        self.weights = dict(self.spoil(weights))
        self.installed.append(version.step)

    def resident(self) -> Weights:
        return self.weights


class Engine:
    """A ServingEngine of its own memory that can be told to fail. `asked` counts the calls."""

    def __init__(self, store: Store, name: str) -> None:
        self.name = name
        self.memory = Memory()
        self.engine = ResidentEngine(name, store, self.memory.install, self.memory.resident)
        self.asked: list[int] = []
        self.fault: Callable[[], None] = lambda: None

    def load(self, version: PolicyVersion) -> str:
        self.asked.append(version.step)
        self.fault()
        return self.engine.load(version)


@pytest.fixture
def store() -> Store:
    return Store(f"memory://{uuid.uuid4().hex}")


def fleet(store: Store, count: int = 3) -> list[Engine]:
    return [Engine(store, f"http://node-{k}:8000") for k in range(count)]


def publish(store: Store, step: int) -> PolicyVersion:
    """Against what all engines acknowledged, as the stage does."""
    base = acked_base(store, RUN, step)
    return policies.publish(store, RUN, step, weights_at(step), base, FULL_EVERY, 3, {})[0]


def raises(error: Exception) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


def test_the_pointer_moves_once_all_engines_hold_the_version(store: Store) -> None:
    engines = fleet(store)
    for step in range(3):
        version = publish(store, step)
        served = serve(store, version, engines, 10)
        assert served.version == version
        assert [ack.engine for ack in served.acks] == [engine.name for engine in engines]
        assert {ack.sha256 for ack in served.acks} == {version.weights_sha256}
        assert read_served(store, RUN) == served
    assert [engine.asked for engine in engines] == 3 * [[0, 1, 2]]
    assert all(engine.memory.weights == weights_at(2) for engine in engines)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_failed_apply_on_worker_k_leaves_the_base_and_the_next_version_reaches_every_engine(
    store: Store, k: int
) -> None:
    engines = fleet(store)
    serve(store, publish(store, 0), engines, 10)
    first = publish(store, 1)
    engines[k].fault = raises(ConnectionError("it went away"))
    with pytest.raises(
        NotServed, match=rf"1 of 3 engines failed: engine http://node-{k}:8000: ConnectionError: it went"
    ):
        serve(store, first, engines, 10)
    assert read_served(store, RUN).version.step == 0  # type: ignore[union-attr]
    assert missing_acks(store, first, [engine.name for engine in engines]) == [engines[k].name]
    # The publisher goes on without it: its next delta stands on what all hold, and nothing is lost.
    second = publish(store, 2)
    assert (second.kind, second.parent) == ("delta", 0)
    engines[k].fault = lambda: None
    serve(store, second, engines, 10)
    assert all(engine.memory.weights == weights_at(2) for engine in engines)
    assert engines[k].memory.installed == [0, 2]
    assert publish(store, 3).parent == 2


def test_a_retry_asks_only_the_engines_whose_acknowledgement_is_missing(store: Store) -> None:
    engines = fleet(store)
    serve(store, publish(store, 0), engines, 10)
    version = publish(store, 1)
    engines[1].fault = raises(OSError("disk full"))
    with pytest.raises(NotServed) as refused:
        serve(store, version, engines, 10)
    assert [failure.engine for failure in refused.value.failures] == [engines[1].name]
    engines[1].fault = lambda: None
    served = serve(store, version, engines, 10)
    assert [engine.asked for engine in engines] == [[0, 1], [0, 1, 1], [0, 1]]
    assert len(served.acks) == 3
    assert serve(store, version, engines, 10) == served
    assert [engine.asked for engine in engines] == [[0, 1], [0, 1, 1], [0, 1]]


def test_an_engine_that_does_not_answer_in_time_fails_and_its_late_acknowledgement_counts(store: Store) -> None:
    engines = fleet(store, 2)
    version = publish(store, 0)
    released = threading.Event()
    engines[0].fault = lambda: released.wait(20) and None
    with pytest.raises(NotServed, match=r"node-0:8000: TimeoutError: no acknowledgement within 0\.05 s"):
        serve(store, version, engines, 0.05)
    assert read_served(store, RUN) is None
    released.set()
    serve(store, version, engines, 20)
    assert read_served(store, RUN).version == version  # type: ignore[union-attr]


def test_an_engine_that_holds_other_bytes_is_a_diagnosis_and_not_worth_a_retry(store: Store) -> None:
    engines = fleet(store)
    serve(store, publish(store, 0), engines, 10)
    version = publish(store, 1)
    engines[2].memory.spoil = lambda weights: {**weights, "fixed": RawTensor("BF16", (2,), b"abcX")}
    engines[0].fault = raises(OSError("and this one is down"))
    with pytest.raises(ServedPolicyError, match=r"2 of 3 engines failed: engine http://node-2:8000: .*other weights"):
        serve(store, version, engines, 10)
    assert read_served(store, RUN).version.step == 0  # type: ignore[union-attr]
    assert acked_base(store, RUN, 2).step == 0  # type: ignore[union-attr]


def test_an_engine_that_applied_a_delta_to_spoilt_bytes_rebuilds_instead(store: Store) -> None:
    """XOR fits any base of the right length: the digests of the base refuse it, and the store has the whole."""
    engine = fleet(store, 1)[0]
    serve(store, publish(store, 0), [engine], 10)
    engine.memory.weights["w"] = RawTensor("F32", (400,), bytes(1600))
    serve(store, publish(store, 1), [engine], 10)
    assert engine.memory.weights == weights_at(1)


def test_with_its_parent_resident_a_version_costs_one_delta(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fleet(store, 1)[0]
    for step in range(3):
        serve(store, publish(store, step), [engine], 10)
    read: list[str] = []
    real = Store.get
    monkeypatch.setattr(Store, "get", lambda self, ref: read.append(ref.uri) or real(self, ref))
    version = publish(store, 3)
    read.clear()
    engine.load(version)
    payloads = [uri.split("/")[-2:] for uri in read if "payload-" in uri]
    assert [step for step, _ in payloads] == ["000003"]
    assert engine.memory.weights == weights_at(3)


def test_a_late_joiner_takes_the_newest_whole_version_and_the_deltas_after_it(store: Store) -> None:
    engines = fleet(store)
    for step in range(8):
        serve(store, publish(store, step), engines[:2], 10)
    served = read_served(store, RUN)
    assert served is not None
    again = serve(store, served.version, engines, 10)
    assert engines[2].memory.weights == weights_at(7)
    assert engines[2].memory.installed == [7]
    assert [engine.asked[-1:] for engine in engines] == [[7], [7], [7]]
    assert [len(engine.asked) for engine in engines] == [8, 8, 1]
    assert [ack.engine for ack in again.acks] == [engine.name for engine in engines]
    assert read_served(store, RUN) == again


def test_the_same_version_again_is_no_work(store: Store) -> None:
    engine = fleet(store, 1)[0]
    version = publish(store, 0)
    assert engine.load(version) == engine.load(version) == version.weights_sha256
    assert engine.memory.installed == [0]


def test_an_older_version_is_refused_by_an_engine_and_by_serve(store: Store) -> None:
    engines = fleet(store, 1)
    versions = [publish(store, 0)]
    serve(store, versions[0], engines, 10)
    versions.append(publish(store, 1))
    serve(store, versions[1], engines, 10)
    with pytest.raises(ValueError, match=r"^holds step 1 of run 'night' and does not go back to step 0"):
        engines[0].load(versions[0])
    with pytest.raises(ValueError, match=r"^step 0 of run 'night': every engine holds step 1 already"):
        serve(store, versions[0], engines, 10)
    assert engines[0].memory.installed == [0, 1]


def test_a_version_that_is_not_published_is_refused_by_an_engine_and_by_serve(store: Store) -> None:
    engines = fleet(store, 1)
    version = publish(store, 0)
    for unknown in (dataclasses.replace(version, step=4), dataclasses.replace(version, weights_sha256="0" * 64)):
        with pytest.raises(ValueError, match="unknown; publish step"):
            engines[0].engine.load(unknown)
        with pytest.raises(ValueError, match="is not published as this version"):
            serve(store, unknown, engines, 10)
    with pytest.raises(ServedPolicyError, match="is not served"):
        # An engine whose own view of the store lacks the version: nothing that another try mends.
        serve(store, version, [Engine(Store(f"memory://{uuid.uuid4().hex}"), "elsewhere")], 10)


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_engines_need_names_of_their_own(store: Store, names: list[str]) -> None:
    with pytest.raises(ValueError, match="expected engines of different names"):
        serve(store, publish(store, 0), [Engine(store, name) for name in names], 10)


def test_two_publishers_of_one_run_leave_the_newer_version_under_the_pointer(store: Store) -> None:
    """The slower one finds the pointer ahead of it, whoever swaps first."""
    engines = fleet(store, 2)
    serve(store, publish(store, 0), engines, 10)
    versions = [publish(store, step) for step in (1, 2)]
    refusals: list[str] = []

    def run(version: PolicyVersion, engine: Engine) -> None:
        try:
            serve(store, version, [engine], 20)
        except ValueError as error:
            refusals.append(str(error))

    threads = [threading.Thread(target=run, args=pair) for pair in zip(versions, engines, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_served(store, RUN).version == versions[1]  # type: ignore[union-attr]
    assert len(refusals) <= 1, "the older one alone may have come too late"
    assert all("step 1 of run 'night': every engine holds step 2 already" in refusal for refusal in refusals)


def test_an_altered_pointer_is_refused(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    serve(store, publish(store, 0), fleet(store, 1), 10)
    path = tmp_path / RUN / "serving.json"
    path.write_bytes(path.read_bytes().replace(b'"step":0', b'"step":1'))
    with pytest.raises(IntegrityError, match=r"serving\.json"):
        acked_base(store, RUN, 9)


def lora(value: float, lora_B: float) -> dict[str, torch.Tensor]:
    return {
        "q.weight": torch.full((4, 4), value),
        "q.lora_A": torch.ones(2, 4),
        "q.lora_B": torch.full((4, 2), lora_B),
    }


def published_adapter(store: Store) -> list[PolicyVersion]:
    base = {"q.weight": lora(1.0, 0.0)["q.weight"]}
    version, _ = policies.publish(store, RUN, 0, from_torch(base), None, 9, 3, {})
    adapter = {name: tensor for name, tensor in lora(1.0, 0.5).items() if "lora" in name}
    return [version, policies.publish_adapter(store, RUN, 1, from_torch(adapter), {})[0]]


def test_an_adapters_identity_covers_the_base_below_it(store: Store) -> None:
    version = published_adapter(store)[1]
    expected = served_sha256(store, version)
    assert resident_sha256(version, from_torch(lora(1.0, 0.5))) == expected
    assert resident_sha256(version, from_torch(lora(1.0, 0.0))) != expected, "the frozen base, without its adapter"
    assert resident_sha256(version, from_torch(lora(2.0, 0.5))) != expected, "the adapter, on another base"


def test_a_base_is_served_only_where_no_adapter_changes_it(store: Store) -> None:
    version = published_adapter(store)[0]
    expected = served_sha256(store, version)
    assert resident_sha256(version, from_torch(lora(1.0, 0.0))) == expected
    assert resident_sha256(version, from_torch(lora(1.0, 0.5))) != expected


def test_no_delta_stands_on_an_adapter_or_on_what_comes_after_it(store: Store) -> None:
    base, adapter = published_adapter(store)
    one = [ResidentLike(store, base), ResidentLike(store, adapter)]
    serve(store, base, one[:1], 10)
    assert acked_base(store, RUN, 1) == base
    assert acked_base(store, RUN, 0) is None
    serve(store, adapter, one[1:], 10)
    assert acked_base(store, RUN, 2) is None


class ResidentLike:
    """Acknowledges with what the version should be."""

    def __init__(self, store: Store, version: PolicyVersion) -> None:
        self.name = "e"
        self.answer = served_sha256(store, version)

    def load(self, version: PolicyVersion) -> str:
        del version
        return self.answer


def test_when_acknowledgements_lag_a_chain_still_ends_below_full_every(store: Store) -> None:
    """Deltas that all stand on step 1 may pass over a whole version that nobody acknowledged."""
    engine = fleet(store, 1)[0]
    for step in range(2):
        serve(store, publish(store, step), [engine], 10)
    kinds = {step: publish(store, step) for step in range(2, 9)}
    assert {step: version.kind for step, version in kinds.items()} == {
        2: "delta", 3: "delta", 4: "delta", 5: "base", 6: "base", 7: "base", 8: "base",
    }  # fmt: skip
    assert {version.parent for version in kinds.values()} == {1, None}


def test_the_served_version_gets_a_whole_copy_once_its_chain_is_long(store: Store) -> None:
    engine = fleet(store, 1)[0]
    for step in range(4):
        serve(store, publish(store, step), [engine], 10)
    assert compact_served(store, RUN, 5) is None
    assert compact_served(store, RUN, 4) == 3
    assert compact_served(store, RUN, 4) is None
    assert compact_served(store, "other", 4) is None
    with pytest.raises(ValueError, match="full_anchor_every must be at least 2, found 1"):
        compact_served(store, RUN, 1)
