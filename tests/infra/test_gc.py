"""What a run may delete, and that nothing alive ever needs it: crashes, races, and random histories."""

from __future__ import annotations

import multiprocessing
import os
import signal
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra import policies
from infra.gc import Keep, Plan, collect, live
from infra.ledger import Ledger
from infra.pins import pin, pinned_steps, unpin
from infra.pruned import Pruned, find_mark
from infra.serving import acked_base, read_served, serve, served_sha256
from infra.stages.record import StageRecord, stage_key, write_record
from infra.store import Store
from infra.version_chain import chain_of, find_steps
from k3core.checkpoint.tensors import RawTensor, Weights
from k3core.errors import IntegrityError
from k3core.sealed import canonical_json, seal
from k3core.types import PolicyVersion, Ref

RUN = "night"
NOW = datetime(2026, 3, 1, tzinfo=UTC)
FULL_EVERY = 4
LAST = Keep(last=1)
FORK = multiprocessing.get_context("fork")


def weights_at(step: int) -> Weights:
    values = np.arange(256, dtype=np.float32)
    values[: 4 * step] += step / 7
    return {"w": RawTensor("F32", (256,), values.tobytes()), "fixed": RawTensor("BF16", (2,), b"abcd")}


class Acknowledging:
    """An engine that holds what it should."""

    name = "e"

    def __init__(self, store: Store) -> None:
        self.store = store

    def load(self, version: PolicyVersion) -> str:
        return served_sha256(self.store, version)


def publish(store: Store, step: int, base: PolicyVersion | None) -> PolicyVersion:
    return policies.publish(store, RUN, step, weights_at(step), base, FULL_EVERY, 3, {})[0]


def release(store: Store, step: int) -> PolicyVersion:
    version = publish(store, step, acked_base(store, RUN, step))
    serve(store, version, [Acknowledging(store)], 10)
    return version


def update(store: Store, step: int) -> StageRecord:
    """What an update leaves: weights, optimizer, a record, an entry in the ledger; and the rollout that it was made of."""
    rollouts = {"trajectories": store.put(stage_key(RUN, step - 1, "trajectories.zst"), b"t%d" % step)}
    groups = {"groups": store.put(stage_key(RUN, step - 1, "groups.zst"), b"g%d" % step)}
    for stage, outputs in (("rollout", rollouts), ("score", groups)):
        write_record(store, StageRecord(stage, RUN, step - 1, outputs, {}, 0.0, 0, inputs={}), f"{stage}-0")
    outputs = {
        name: store.put(stage_key(RUN, step, f"{name}.safetensors"), b"%s of %d" % (name.encode(), step))
        for name in ("weights", "optimizer")
    }
    record = StageRecord("update", RUN, step, outputs, {}, 0.0, 0, inputs={})
    ref = write_record(store, record, "update-x")
    Ledger(store, RUN).record(step, f"batch {step}", {"record": asdict(ref)})
    return record


def history(store: Store, last: int) -> list[PolicyVersion]:
    """A run as the loop leaves it: updates, and versions each served before the next."""
    outputs = {"weights": store.put(stage_key(RUN, 0, "weights.safetensors"), b"warm")}
    write_record(store, StageRecord("warm_start", RUN, 0, outputs, {}, 0.0, 0, inputs={}))
    versions = []
    for step in range(last + 1):
        if step:
            update(store, step)
        versions.append(release(store, step))
    return versions


@pytest.fixture
def store() -> Store:
    return Store(f"memory://{uuid.uuid4().hex}")


def keys(store: Store) -> set[str]:
    return set(store.list_keys(f"{RUN}/"))


def payloads(store: Store) -> set[int]:
    return {int(key.split("/")[2]) for key in store.list_keys(f"{RUN}/policies/") if "/payload-" in key}


def collected(store: Store, keep: Keep = LAST, now: datetime = NOW) -> Plan:
    plan = live(store, RUN, keep, now)
    collect(store, plan, now)
    return plan


def assert_alive(store: Store, plan: Plan) -> None:
    for step in plan.live:
        version = policies.read_version(store, RUN, step)
        assert version is not None
        assert policies.load(store, version) == weights_at(step), step


def test_planning_deletes_nothing_and_says_why_each_version_stays(store: Store) -> None:
    history(store, 10)
    before = keys(store)
    plan = live(store, RUN, Keep(last=1, steps=frozenset({2})), NOW)
    assert keys(store) == before
    assert plan.live == {
        2: "to be kept",
        8: "not older than step 8, on which the served version stands",
        9: "not older than step 8, on which the served version stands",
        10: "served",
    }
    assert plan.dead == (0, 1, 3, 4, 5, 6, 7)
    assert plan.size_bytes == sum(item.size_bytes for item in plan.garbage) > 0


def test_what_live_deltas_stand_on_stays_though_it_is_dead_itself(store: Store) -> None:
    history(store, 10)
    plan = collected(store, Keep(last=1, steps=frozenset({2})))
    assert payloads(store) == {0, 1, 2, 8, 9, 10}
    assert_alive(store, plan)
    for step in (0, 1):
        assert step in plan.dead


def test_a_reader_of_a_dead_version_hears_when_and_why_it_went_and_what_to_use(store: Store) -> None:
    versions = history(store, 6)
    collected(store)
    expected = (
        r"000001/payload-\w+\.\w+: pruned by gc at 2026-03-01 00:00 UTC "
        r"\(no live version needs step \d\); use step 4$"
    )
    with pytest.raises(Pruned, match=expected.replace("000001", "00000[01]")):
        policies.load(store, versions[1])
    checks = policies.verify(store, RUN, range(7))
    assert [check.is_pruned for check in checks] == 4 * [True] + 3 * [False]
    assert [check.error is None for check in checks] == 4 * [False] + 3 * [True]


def test_a_missing_file_that_gc_did_not_take_is_no_pruned_one(store: Store) -> None:
    versions = history(store, 2)
    payload = chain_of(store, versions[0])[0].payload
    store.delete(f"{RUN}/policies/000000/{payload.uri.rpartition('/')[2]}")
    with pytest.raises(IntegrityError, match="missing; expected") as refused:
        policies.load(store, versions[0])
    assert not isinstance(refused.value, Pruned)


def test_manifests_records_ledger_and_pointers_stay(store: Store) -> None:
    history(store, 10)
    documents = {key for key in keys(store) if key.endswith(".json")}
    collected(store)
    assert documents <= keys(store)


def test_nothing_that_a_publisher_may_stand_on_goes(store: Store) -> None:
    """The pointer may move while a publisher encodes: all since the last whole version stays."""
    history(store, 6)
    plan = live(store, RUN, Keep(last=1), NOW)
    assert {4, 5, 6} <= plan.live.keys()


def test_without_a_pointer_the_newest_versions_chain_stays(store: Store) -> None:
    base = None
    for step in range(7):
        base = publish(store, step, base)
    assert set(live(store, RUN, Keep(last=1), NOW).live) == {4, 5, 6}


def test_what_went_when_less_was_kept_does_not_count_as_alive_when_more_is(store: Store) -> None:
    versions = history(store, 5)
    collected(store)
    plan = live(store, RUN, Keep(last=3, steps=frozenset({1})), NOW)
    assert set(plan.live) == {4, 5}
    assert {1, 3} <= set(plan.dead)
    assert not plan.garbage
    # Part of a chain that is gone keeps nothing else: step 3 needs 0 to 3.
    chain = chain_of(store, versions[3])
    store.put(f"{RUN}/policies/000003/{chain[-1].payload.uri.rpartition('/')[2]}", b"came back")
    assert [item.step for item in live(store, RUN, Keep(last=3), NOW).garbage] == [3]


def test_versions_that_engines_have_not_acknowledged_yet_stay(store: Store) -> None:
    history(store, 5)
    publish(store, 9, acked_base(store, RUN, 9))
    plan = collected(store)
    assert set(plan.live) == {4, 5, 9}
    assert_alive(store, plan)


def test_an_adapter_keeps_the_base_that_it_stands_on(store: Store) -> None:
    policies.publish(store, RUN, 0, weights_at(0), None, 9, 3, {})
    for step in range(1, 6):
        adapter = {"lora_B": RawTensor("U8", (1,), bytes([step]))}
        version, _ = policies.publish_adapter(store, RUN, step, adapter, {})
        serve(store, version, [Acknowledging(store)], 10)
    plan = collected(store)
    assert set(plan.live) == {0, 5}
    assert payloads(store) == {0, 5}


def test_the_trainers_files_of_finished_steps_go_and_those_of_the_last_stay(store: Store) -> None:
    history(store, 5)
    before = keys(store)
    collected(store, Keep(last=9))
    steps = {key for key in before - keys(store) if "/steps/" in key}
    assert steps == {f"{RUN}/steps/00000{s}/weights.safetensors" for s in range(5)} | {
        f"{RUN}/steps/00000{s}/optimizer.safetensors" for s in range(1, 5)
    }


def test_an_update_whose_version_is_not_served_keeps_its_weights(store: Store) -> None:
    history(store, 2)
    for step in (3, 4, 5):
        update(store, step)
    publish(store, 3, acked_base(store, RUN, 3))
    collected(store)
    left = {key.rpartition("/steps/")[2] for key in keys(store) if "weights.safetensors" in key}
    assert left == {"000003/weights.safetensors", "000004/weights.safetensors", "000005/weights.safetensors"}


def test_a_version_to_be_kept_keeps_what_goes_on_from_it(store: Store) -> None:
    history(store, 9)
    collected(store, Keep(last=1, steps=frozenset({3}), trajectories=False))
    left = {key.rpartition("/steps/")[2] for key in keys(store) if "optimizer" in key or "trajectories" in key}
    assert left == {"000003/optimizer.safetensors", "000003/trajectories.zst", "000009/optimizer.safetensors"}


def test_trajectories_go_only_when_asked_and_scored_groups_never(store: Store) -> None:
    history(store, 4)
    collected(store)
    assert sum("trajectories" in key for key in keys(store)) == 4
    collected(store, Keep(last=1, trajectories=False))
    assert sum("trajectories" in key for key in keys(store)) == 0
    assert sum("groups" in key and key.endswith(".zst") for key in keys(store)) == 4


def test_a_pinned_version_stays_until_it_is_unpinned(store: Store) -> None:
    versions = history(store, 9)
    pin(store, versions[2], "branch")
    pin(store, versions[2], "other")
    pin(store, versions[2], "branch")
    assert pinned_steps(store, RUN) == {2: ["branch", "other"]}
    assert_alive(store, collected(store))
    assert policies.load(store, versions[2]) == weights_at(2)
    assert store.size(f"{RUN}/steps/000002/optimizer.safetensors") is not None
    unpin(store, RUN, 2, "branch")
    unpin(store, RUN, 2, "other")
    collected(store)
    with pytest.raises(Pruned, match="gc took, or is taking, what step 2 needs"):
        pin(store, versions[2], "late")


def orphan(store: Store, step: int = 3) -> str:
    key = f"{RUN}/policies/{step:06d}/payload-0123456789abcdef.delta"
    store.put(key, b"of a try that died")
    return key


def test_a_payload_that_no_manifest_names_goes_once_it_was_known_for_long_enough(store: Store) -> None:
    history(store, 4)
    key = orphan(store)
    assert live(store, RUN, Keep(), NOW).suspects == (key,)
    collected(store, now=NOW)
    assert collected(store, now=NOW + timedelta(hours=23)).suspects == (key,)
    assert store.size(key) is not None
    collected(store, now=NOW + timedelta(hours=24))
    assert store.size(key) is None


def test_an_orphan_that_a_manifest_names_by_then_stays(store: Store) -> None:
    """A slow upload: gc saw its payload long before its manifest."""
    versions = history(store, 2)
    with pytest.raises(Stopped):
        publish(Holding(store), 3, versions[2])
    suspects = live(store, RUN, Keep(), NOW).suspects
    assert len(suspects) == 1
    collected(store, now=NOW)
    version = publish(store, 3, versions[2])
    serve(store, version, [Acknowledging(store)], 10)
    assert_alive(store, collected(store, now=NOW + timedelta(days=9)))
    assert store.size(suspects[0]) is not None


class Stopped(BaseException):
    """The process is gone: nothing catches it."""


class Holding(Store):
    """Stops before its first commit."""

    def __init__(self, of: Store) -> None:
        super().__init__(of.root)

    def commit(self, key: str, document: Mapping[str, Any]) -> Ref:
        del key, document
        raise Stopped


def test_a_try_does_not_write_where_gc_is_deleting(store: Store) -> None:
    """The payload of a dead try was judged; the next try of the same bytes takes a name of its own."""
    versions = history(store, 2)
    with pytest.raises(Stopped):
        publish(Holding(store), 3, versions[2])
    collected(store, now=NOW)
    collected(store, now=NOW + timedelta(days=2))
    version = publish(store, 3, versions[2])
    assert version.kind == "delta"
    assert policies.load(store, version) == weights_at(3)
    names = [key for key in store.list_keys(f"{RUN}/policies/000003/") if "/payload-" in key]
    assert len(names) == 1
    assert names[0].count("-") == 2


def test_all_checkpoints_before_the_latest_go_with_the_same_patience(store: Store) -> None:
    history(store, 2)
    folder = f"{RUN}/checkpoints/warm_start"
    for step in (25, 50, 75):
        for part in ("weights", "optimizer"):
            store.put(f"{folder}/{step:06d}-{part}.safetensors", b"x")
    store.put(f"{folder}/latest.json", canonical_json(seal({"step": 50})))
    collected(store, now=NOW)
    collected(store, now=NOW + timedelta(days=2))
    left = sorted(key.rpartition("/")[2] for key in keys(store) if key.startswith(folder) and "safetensors" in key)
    assert left == [f"0000{s}-{part}.safetensors" for s in (50, 75) for part in ("optimizer", "weights")]


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ({"last": 0}, "keep_last must be at least 1, found 0"),
        ({"orphan_hours": 0.5}, "orphan_hours must be at least 1, found 0.5"),
    ],
)
def test_settings_that_would_take_too_much_are_refused(keep: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Keep(**keep)


def test_a_step_to_keep_that_does_not_exist_is_refused(store: Store) -> None:
    history(store, 2)
    with pytest.raises(ValueError, match=r"night: step 7 is to be kept, but it is not published \(steps 0 to 2\)"):
        live(store, RUN, Keep(steps=frozenset({7})), NOW)
    with pytest.raises(ValueError, match="nothing is published"):
        live(store, "nosuch", Keep(), NOW)


def test_nothing_is_collected_on_the_word_of_an_altered_document(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    history(store, 6)
    for name in ("serving.json", "policies/000001/manifest.json", "ledger/000002.json"):
        path = tmp_path / RUN / name
        intact = path.read_bytes()
        path.write_bytes(intact.replace(b'"step":', b'"step": '))
        with pytest.raises(IntegrityError, match=name):
            live(store, RUN, Keep(), NOW)
        path.write_bytes(intact)
    live(store, RUN, Keep(), NOW)


def test_compaction_gives_a_delta_a_whole_copy_and_the_chain_before_it_may_go(store: Store) -> None:
    versions = history(store, 6)
    before = policies.read_version(store, RUN, 6)
    anchor = policies.compact(store, versions[6])
    assert anchor is not None
    assert policies.read_version(store, RUN, 6) == before == versions[6]
    assert policies.compact(store, versions[6]) == anchor
    assert policies.compact(store, versions[4]) is None
    assert len(chain_of(store, versions[6])) == 1
    plan = collected(store)
    assert set(plan.live) == {6}
    assert payloads(store) == set()
    assert policies.load(store, versions[6]) == weights_at(6)
    # What comes after stands on the copy, and is a delta all the same.
    version = release(store, 7)
    assert (version.kind, version.parent) == ("delta", 6)
    assert policies.load(store, version) == weights_at(7)
    assert [check.error for check in policies.verify(store, RUN, [6, 7])] == [None, None]


def test_verify_rebuilds_a_compacted_version_both_ways(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    versions = history(store, 3)
    policies.compact(store, versions[2])
    folder = tmp_path / RUN / "policies" / "000002"
    for pattern in ("anchor-*", "payload-*"):
        (path,) = folder.glob(pattern)
        intact = path.read_bytes()
        path.write_bytes(intact[:-1])
        (check,) = policies.verify(store, RUN, [2])
        assert check.error is not None
        assert path.name in check.error
        path.write_bytes(intact)
    assert policies.verify(store, RUN, [2])[0].error is None


def test_an_anchor_of_other_weights_is_refused(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    versions = history(store, 3)
    for step in (1, 2):
        policies.compact(store, versions[step])
    folder = tmp_path / RUN / "policies"
    document = (folder / "000001" / "anchor.json").read_bytes()
    (folder / "000002" / "anchor.json").write_bytes(document)
    with pytest.raises(IntegrityError, match=r"000002/anchor\.json: expected step 2"):
        policies.load(store, versions[2])


class Between(Store):
    """Runs something between two operations of whoever uses it: before its first call of `operation`."""

    def __init__(self, of: Store, operation: str, then: Callable[[], object]) -> None:
        super().__init__(of.root)
        self.operation, self.then = operation, then

    def _pass(self, operation: str) -> None:
        if operation == self.operation:
            self.operation = ""
            self.then()

    def put(self, key: str, data: bytes) -> Ref:
        self._pass("put")
        return super().put(key, data)

    def commit(self, key: str, document: Mapping[str, Any]) -> Ref:
        self._pass("commit")
        return super().commit(key, document)

    def delete(self, key: str) -> None:
        self._pass("delete")
        super().delete(key)


def late(store: Store) -> tuple[PolicyVersion, Plan]:
    """A publisher that chose step 1 as its base before the pointer went on to 9; and what gc would do now."""
    versions = history(store, 9)
    return versions[1], live(store, RUN, Keep(last=1), NOW)


@pytest.mark.parametrize("at", ["put", "commit"])
def test_a_version_whose_chain_went_while_it_was_encoded_gets_a_whole_copy(store: Store, at: str) -> None:
    base, _ = late(store)
    slow = Between(store, at, lambda: collected(store))
    version = policies.publish(slow, RUN, 10, weights_at(10), base, 99, 3, {})[0]
    assert (version.kind, version.parent) == ("delta", 1)
    assert policies.load(store, version) == weights_at(10)
    assert policies.verify(store, RUN, [10])[0].error is None


def test_a_version_whose_base_is_gone_already_is_published_whole(store: Store) -> None:
    base, plan = late(store)
    collect(store, plan, NOW)
    version = policies.publish(store, RUN, 10, weights_at(10), base, 99, 3, {})[0]
    assert version.kind == "base"


def test_a_version_that_appears_after_the_marks_keeps_its_chain(store: Store) -> None:
    base, plan = late(store)
    committed: list[PolicyVersion] = []

    def publish_now() -> None:
        # Its own look at the marks is kept from it, as if it had died right after its manifest.
        quiet = Blind(store)
        committed.append(policies.publish(quiet, RUN, 10, weights_at(10), base, 99, 3, {})[0])

    marking = Between(store, "commit", publish_now)
    collect(marking, plan, NOW)
    assert committed[0].kind == "delta"
    assert {0, 1, 10} <= payloads(store)
    assert policies.load(store, committed[0]) == weights_at(10)


class Blind(Store):
    """Sees no marks."""

    def __init__(self, of: Store) -> None:
        super().__init__(of.root)

    def read(self, key: str) -> bytes | None:
        return None if "/pruned/" in key else super().read(key)


def test_a_publisher_that_died_before_it_saw_the_mark_is_mended_by_its_retry(store: Store) -> None:
    base, plan = late(store)
    late_version: list[PolicyVersion] = []
    deleting = Between(
        store,
        "delete",
        lambda: late_version.append(policies.publish(Blind(store), RUN, 10, weights_at(10), base, 99, 3, {})[0]),
    )
    collect(deleting, plan, NOW)
    with pytest.raises(Pruned):
        policies.load(store, late_version[0])
    again = policies.publish(store, RUN, 10, weights_at(10), None, 99, 3, {})[0]
    assert again == late_version[0]
    assert policies.load(store, again) == weights_at(10)


def test_a_reader_that_began_before_a_compaction_and_a_collection_still_gets_the_version(store: Store) -> None:
    versions = history(store, 6)

    def meanwhile() -> None:
        policies.compact(store, versions[6])
        collected(store)

    reading = Reading(store, meanwhile)
    assert policies.load(reading, versions[6]) == weights_at(6)


class Reading(Store):
    """Something happens once the chain is known, before the first payload is read."""

    def __init__(self, of: Store, then: Callable[[], object]) -> None:
        super().__init__(of.root)
        self.then: Callable[[], object] | None = then

    def get(self, ref: Ref) -> bytes:
        if "/payload-" in ref.uri and self.then is not None:
            then, self.then = self.then, None
            then()
        return super().get(ref)


class Crashing(Store):
    """Dies at its n-th write, before or after carrying it out."""

    def __init__(self, of: Store, at: int, is_after: bool) -> None:
        super().__init__(of.root)
        self.left, self.is_after = at, is_after

    def _do(self, operation: Callable[[], Any]) -> Any:
        self.left -= 1
        if self.left == 0 and not self.is_after:
            raise Stopped
        result = operation()
        if self.left == 0:
            raise Stopped
        return result

    def put(self, key: str, data: bytes) -> Ref:
        return self._do(lambda: Store.put(self, key, data))

    def commit(self, key: str, document: Mapping[str, Any]) -> Ref:
        return self._do(lambda: Store.commit(self, key, document))

    def delete(self, key: str) -> None:
        self._do(lambda: Store.delete(self, key))


@pytest.mark.parametrize("is_after", [False, True])
def test_a_crash_at_any_write_leaves_every_live_version_whole_and_the_next_run_ends_the_work(is_after: bool) -> None:
    crashes = 0
    while True:
        store = Store(f"memory://{uuid.uuid4().hex}")
        history(store, 4)
        orphan(store)
        plan = live(store, RUN, Keep(last=1), NOW)
        try:
            collect(Crashing(store, crashes + 1, is_after), plan, NOW)
        except Stopped:
            crashes += 1
            assert_alive(store, live(store, RUN, Keep(last=1), NOW))
            assert_alive(store, collected(store))
            assert payloads(store) == {3, 4}, "3: the orphan"
        else:
            break
    assert crashes == 2 * len(plan.garbage) + 1, "a mark and a delete for each, and the orphan is noted"


def _collect_and_die(root: str, nth: int) -> None:
    left = [nth]
    real = os.unlink

    def unlink(*args: Any, **kwargs: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*args, **kwargs)

    os.unlink = unlink
    collected(Store(root))
    os._exit(0)


def test_kill_9_at_random_deletes_leaves_every_live_version_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for round_ in range(4):
        store = Store(str(tmp_path / str(round_)))
        history(store, 5)
        child = FORK.Process(target=_collect_and_die, args=(store.root, int(rng.integers(1, 20))))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        assert_alive(store, live(store, RUN, Keep(last=1), NOW))
        assert_alive(store, collected(store))
        assert payloads(store) == {4, 5}


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 3)),
        st.tuples(st.just("serve"), st.integers(0, 9)),
        st.tuples(st.just("gc"), st.integers(1, 3)),
        st.tuples(st.just("crash in gc"), st.integers(1, 12)),
        st.tuples(st.just("compact"), st.integers(0, 9)),
        st.tuples(st.just("pin"), st.integers(0, 9)),
    ),
    max_size=14,
)


@settings(max_examples=25)
@given(OPERATIONS)
def test_after_any_history_every_live_version_is_bit_for_bit_what_was_published(
    operations: list[tuple[str, int]],
) -> None:
    store = Store(f"memory://{uuid.uuid4().hex}")
    release(store, 0)
    newest, keep = 0, Keep(last=1)
    for name, number in operations:
        steps = find_steps(store, RUN)
        version = policies.read_version(store, RUN, steps[number % len(steps)])
        assert version is not None
        if name == "publish":
            newest += number
            publish(store, newest, acked_base(store, RUN, newest))
        elif name == "serve":
            served = read_served(store, RUN)
            assert served is not None
            if version.step >= served.version.step:
                serve(store, version, [Acknowledging(store)], 10)
        elif name == "gc":
            keep = Keep(last=number)
            collected(store, keep)
        elif name == "crash in gc":
            with suppress(Stopped):
                collect(Crashing(store, number, bool(number % 2)), live(store, RUN, keep, NOW), NOW)
        elif name == "compact":
            with suppress(Pruned):
                policies.compact(store, version)
        else:
            try:
                pin(store, version, "branch")
            except Pruned:
                unpin(store, RUN, version.step, "branch")
        plan = live(store, RUN, keep, NOW)
        assert_alive(store, plan)
        newest_served = read_served(store, RUN)
        assert newest_served is not None
        assert {newest, newest_served.version.step} <= plan.live.keys()
    served = read_served(store, RUN)
    assert served is not None
    assert policies.load(store, served.version) == weights_at(served.version.step)


def test_a_run_is_served_compacted_and_collected_on_every_kind_of_store(root: str) -> None:
    store = Store(root)
    versions = history(store, 5)
    policies.compact(store, versions[5])
    plan = collected(store)
    assert set(plan.live) == {5}
    assert payloads(store) == set()
    assert_alive(store, plan)
    with pytest.raises(Pruned, match="pruned by gc at"):
        policies.load(store, versions[1])
    assert policies.load(store, release(store, 6)) == weights_at(6)
    assert not collected(store).garbage


def test_equal_bytes_under_two_keys_have_a_mark_each(store: Store) -> None:
    data = b"the same"
    release(store, 0)
    refs = [store.put(f"{RUN}/steps/00000{s}/weights.safetensors", data) for s in (1, 2)]
    for step, ref in enumerate(refs, start=1):
        record = StageRecord("update", RUN, step, {"weights": ref}, {}, 0.0, 0, inputs={})
        Ledger(store, RUN).record(step, "b", {"record": asdict(write_record(store, record, "update-x"))})
        release(store, step)
    release(store, 3)
    last = StageRecord("update", RUN, 3, {}, {}, 0.0, 0, inputs={})
    Ledger(store, RUN).record(3, "b", {"record": asdict(write_record(store, last, "update-x"))})
    collected(store)
    found = [find_mark(store, RUN, refs[0].sha256, f"{RUN}/steps/00000{s}/weights.safetensors") for s in (1, 2)]
    assert [mark is not None and mark.key[-26:-20] for mark in found] == ["000001", "000002"]
