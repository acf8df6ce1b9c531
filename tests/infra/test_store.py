import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.store import AlreadyCommitted, Conflict, Store
from infra.store.memory import MemoryBackend
from k3core.errors import IntegrityError, RunError
from k3core.sealed import canonical_json
from k3core.types import Ref


def test_what_was_put_is_read_under_an_absolute_uri_by_any_store_of_the_scheme(root: str) -> None:
    ref = Store(root).put("run/steps/000001/x.bin", b"\x00bytes")
    assert "://" in ref.uri
    assert ref.uri.endswith("/run/steps/000001/x.bin")
    assert ref.size_bytes == 6
    assert Store(root + "/elsewhere").get(ref) == b"\x00bytes"


def test_putting_again_is_idempotent_and_the_last_bytes_stay(root: str) -> None:
    store = Store(root)
    first = store.put("k", b"one")
    assert store.put("k", b"one") == first == store.ref("k", b"one")
    second = store.put("k", b"two")
    assert store.get(second) == b"two"
    with pytest.raises(IntegrityError):
        store.get(first)


def test_an_empty_object_is_one(root: str) -> None:
    store = Store(root)
    assert store.get(store.put("empty", b"")) == b""


def test_a_missing_object_is_refused_by_uri(root: str) -> None:
    store = Store(root)
    ref = store.ref("run/none", b"expected")
    with pytest.raises(IntegrityError, match=f"^{ref.uri}: missing"):
        store.get(ref)


def test_bytes_of_another_size_or_digest_are_refused_by_uri(root: str) -> None:
    store = Store(root)
    ref = store.put("k", b"abc")
    with pytest.raises(IntegrityError, match=f"^{ref.uri}: expected 4 bytes, found 3"):
        store.get(Ref(ref.uri, ref.sha256, 4))
    with pytest.raises(IntegrityError, match=f"^{ref.uri}: expected sha256 0000"):
        store.get(Ref(ref.uri, "0" * 64, 3))


def test_a_document_is_read_by_key_and_by_reference(root: str) -> None:
    store = Store(root)
    assert store.read_manifest("run/m.json") is None
    document = {"b": [1, 2.5, None, "ü"], "a": {"nested": True}}
    ref = store.commit("run/m.json", document)
    assert store.read_manifest("run/m.json") == document
    assert store.get(ref) == b'{"a":{"nested":true},"b":[1,2.5,null,"\\u00fc"]}'


def test_bytes_are_read_by_key(root: str) -> None:
    store = Store(root)
    assert store.read("run/k") is None
    store.put("run/k", b"now")
    assert Store(root).read("run/k") == b"now"


def test_only_a_store_on_the_disk_has_local_paths(root: str) -> None:
    store = Store(root)
    store.put("run/k", b"x")
    path = store.local_path("run/k")
    assert (path is None) == (store.protocol != "file")
    assert path is None or path.read_bytes() == b"x"


def test_the_first_document_stays(root: str) -> None:
    store = Store(root)
    ref = store.commit("m.json", {"a": 1, "b": 2})
    assert Store(root).commit("m.json", {"b": 2, "a": 1}) == ref
    with pytest.raises(AlreadyCommitted, match=ref.uri):
        Store(root).commit("m.json", {"a": 2})
    assert store.read_manifest("m.json") == {"a": 1, "b": 2}


RACER = """
import sys
from infra.store import AlreadyCommitted, Store
store, number = Store(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
for key in sys.stdin:
    try:
        store.commit(key.strip(), {"winner": number})
        print("won", flush=True)
    except AlreadyCommitted:
        print("lost", flush=True)
"""


def test_two_processes_that_commit_at_once_have_one_winner(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]

    def hear(racer: "subprocess.Popen[str]") -> str:
        assert racer.stdout is not None
        return racer.stdout.readline().strip()

    assert [hear(racer) for racer in racers] == ["ready", "ready"]
    for round_ in range(50):
        key = f"run/m{round_}.json"
        for racer in racers:
            assert racer.stdin is not None
            print(key, file=racer.stdin, flush=True)
        outcomes = [hear(racer) for racer in racers]
        assert sorted(outcomes) == ["lost", "won"]
        assert Store(str(tmp_path)).read_manifest(key) == {"winner": outcomes.index("won")}
    for racer in racers:
        racer.communicate(timeout=60)
        assert racer.returncode == 0
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_reader_that_listed_before_sees_a_new_document(root: str) -> None:
    reader, writer = Store(root), Store(root)
    writer.commit("run/m1.json", {"step": 1})
    assert reader.read_manifest("run/m1.json") == {"step": 1}
    assert reader.read_manifest("run/m2.json") is None
    assert list(reader.list_keys("run/")) == ["run/m1.json"]
    writer.commit("run/m2.json", {"step": 2})
    assert reader.read_manifest("run/m2.json") == {"step": 2}


def test_every_altered_byte_of_a_document_is_seen_unless_it_is_a_document_again(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.commit("m.json", {"step": 1, "run": "r"})
    path = tmp_path / "m.json"
    intact = path.read_bytes()
    for altered in [
        *(intact[:length] for length in range(len(intact))),
        intact + b"\n",
        intact.replace(b":", b": "),
        b"[]",
        b"\xff" + intact,
        b'{"step":1,"run":"r"}',
        b'{"run":"r","run":"r","step":1}',
        b'{"run":"r","step":NaN}',
    ]:
        path.write_bytes(altered)
        with pytest.raises(IntegrityError, match=rf"^file://{path}: expected a JSON"):
            store.read_manifest("m.json")


@pytest.mark.parametrize("document", [{"x": float("nan")}, {"x": float("inf")}, {"x": b"bytes"}])
def test_what_json_cannot_say_is_refused_and_nothing_is_written(tmp_path: Path, document: dict[str, object]) -> None:
    store = Store(str(tmp_path))
    with pytest.raises(ValueError, match="JSON"):
        store.commit("m.json", document)
    assert store.read_manifest("m.json") is None


@pytest.mark.parametrize("key", ["", "/abs", "a//b", "a/", "../up", "a/../b", "./a"])
def test_a_key_that_leaves_the_store_is_refused(tmp_path: Path, key: str) -> None:
    store = Store(str(tmp_path))
    for use in (lambda: store.put(key, b""), lambda: store.commit(key, {}), lambda: store.read_manifest(key)):
        with pytest.raises(ValueError, match="store key"):
            use()


def test_unknown_schemes_and_references_of_another_scheme_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="store 'http://x': expected a path or one of file://, memory://, s3://"):
        Store("http://x")
    with pytest.raises(ValueError, match="expected s3://bucket"):
        Store("s3://")
    with pytest.raises(ValueError, match="memory:///x: a file:// store cannot read it"):
        Store(str(tmp_path)).get(Ref("memory:///x", "", 0))


def test_a_local_write_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def noted(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            calls.append(name)
            real(*args)

        return call

    for name in ("fsync", "replace", "link"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    store = Store(str(tmp_path))
    store.put("k", b"x")
    store.commit("m.json", {})
    assert calls == ["fsync", "replace", "fsync", "fsync", "link", "fsync"]


def race(number: int, compete: Callable[[int], None]) -> None:
    barrier = threading.Barrier(number)

    def run(index: int) -> None:
        barrier.wait()
        compete(index)

    with ThreadPoolExecutor(number) as pool:
        list(pool.map(run, range(number)))


def test_sixteen_commits_at_once_have_exactly_one_winner(root: str) -> None:
    won, lost = [], []

    def commit(index: int) -> None:
        try:
            Store(root).commit("m.json", {"winner": index})
            won.append(index)
        except AlreadyCommitted:
            lost.append(index)

    race(16, commit)
    assert (len(won), len(lost)) == (1, 15)
    assert Store(root).read_manifest("m.json") == {"winner": won[0]}


def test_sixteen_swaps_at_once_have_exactly_one_winner(root: str) -> None:
    store = Store(root)
    version: str | None = None
    for step in range(2):
        won: list[tuple[int, str]] = []
        lost: list[int] = []

        def swap(
            index: int, step: int = step, expected: str | None = version, won: list = won, lost: list = lost
        ) -> None:
            try:
                won.append((index, Store(root).swap("latest", {"step": step, "by": index}, expected)))
            except Conflict:
                lost.append(index)

        race(16, swap)
        assert (len(won), len(lost)) == (1, 15)
        index, version = won[0]
        assert store.read_pointer("latest") == ({"step": step, "by": index}, version)


def test_a_pointer_moves_from_the_version_that_was_read(root: str) -> None:
    store = Store(root)
    assert store.read_pointer("run/latest") is None
    first = store.swap("run/latest", {"step": 1}, None)
    assert Store(root).read_pointer("run/latest") == ({"step": 1}, first)
    second = Store(root).swap("run/latest", {"step": 2}, first)
    assert store.read_pointer("run/latest") == ({"step": 2}, second)


@pytest.mark.parametrize("expected", [None, "elsewhere"])
def test_a_swap_from_another_version_changes_nothing(root: str, expected: str | None) -> None:
    store = Store(root)
    version = store.swap("latest", {"step": 1}, None)
    with pytest.raises(Conflict, match=store.uri("latest")):
        store.swap("latest", {"step": 2}, expected)
    assert store.read_pointer("latest") == ({"step": 1}, version)
    with pytest.raises(Conflict):
        store.swap("unset", {"step": 2}, "elsewhere")
    assert store.read_pointer("unset") is None


def test_a_version_never_comes_back_with_its_document(root: str) -> None:
    store = Store(root)
    seen: list[str | None] = [None]
    for step in (1, 2, 1, 1):
        seen.append(store.swap("latest", {"step": step}, seen[-1]))
    store.delete("latest")
    seen.append(store.swap("latest", {"step": 1}, None))
    assert len(set(seen)) == 6


COUNTER = """
import sys
from infra.store import Conflict, Store
store = Store(sys.argv[1])
for _ in range(20):
    while True:
        document, version = store.read_pointer("counter") or ({"count": 0}, None)
        try:
            store.swap("counter", {"count": document["count"] + 1}, version)
            break
        except Conflict:
            pass
"""


def test_processes_that_count_by_swaps_lose_none(tmp_path: Path) -> None:
    counters = [subprocess.Popen([sys.executable, "-c", COUNTER, str(tmp_path)]) for _ in range(3)]
    assert [counter.wait(timeout=60) for counter in counters] == [0, 0, 0]
    found = Store(str(tmp_path)).read_pointer("counter")
    assert found is not None
    assert found[0] == {"count": 60}
    assert [path.name for path in tmp_path.iterdir()] == ["counter"]


def test_a_document_that_is_no_pointer_is_refused_as_one(root: str) -> None:
    store = Store(root)
    store.commit("m.json", {"step": 1})
    with pytest.raises(IntegrityError, match=f"^{store.uri('m.json')}: expected a pointer"):
        store.read_pointer("m.json")


def test_what_is_deleted_is_gone_and_need_not_have_been_there(root: str) -> None:
    store = Store(root)
    ref = store.put("run/k", b"bytes")
    assert store.size("run/k") == 5
    for _ in range(2):
        store.delete("run/k")
        assert store.size("run/k") is None
        assert store.read("run/k") is None
        with pytest.raises(IntegrityError, match="missing"):
            store.get(ref)
    store.delete("never/was")
    assert store.get(store.put("run/k", b"again")) == b"again"


def test_a_folder_is_no_object(root: str) -> None:
    store = Store(root)
    ref = store.put("run/k", b"bytes")
    assert store.read("run") is None
    assert store.size("run") is None
    assert store.read_manifest("run/k/below") is None
    with pytest.raises(IntegrityError, match="missing"):
        store.get(Ref(store.uri("run"), ref.sha256, ref.size_bytes))


def test_keys_are_listed_by_prefix(root: str) -> None:
    store = Store(root)
    keys = ["a/1", "a/2 b", "a/3/x", "ab", "b/.hidden"]
    for key in keys:
        store.put(key, b"")
    store.swap("b/latest", {}, None)
    assert sorted(store.list_keys()) == [*keys, "b/latest"]
    assert sorted(store.list_keys("a/")) == keys[:3]
    assert sorted(store.list_keys("a")) == keys[:4]
    assert list(store.list_keys("none/")) == []
    for prefix in ("/a", "../a"):
        with pytest.raises(ValueError, match="store prefix"):
            next(store.list_keys(prefix))


def test_a_range_is_read_alone(root: str) -> None:
    store = Store(root)
    ref = store.put("k", bytes(range(100)))
    assert store.get_range(ref, 10, 20) == bytes(range(10, 20))
    assert store.get_range(ref, 0, 100) == bytes(range(100))
    assert store.get_range(ref, 50, 50) == b""
    for start, stop in [(-1, 5), (5, 4), (90, 101)]:
        with pytest.raises(ValueError, match="expected a range within 100 bytes"):
            store.get_range(ref, start, stop)


def test_a_range_that_is_not_there_is_refused(root: str) -> None:
    store = Store(root)
    ref = store.put("k", b"abc")
    longer = Ref(ref.uri, ref.sha256, 9)
    with pytest.raises(IntegrityError, match=f"^{ref.uri}: expected 9 bytes, found 3"):
        store.get_range(longer, 1, 5)
    with pytest.raises(IntegrityError, match=f"^{ref.uri}: expected 9 bytes, found "):
        store.get_range(longer, 5, 9)
    store.delete("k")
    with pytest.raises(IntegrityError, match=f"^{ref.uri}: missing"):
        store.get_range(ref, 0, 1)


def test_a_file_goes_in_and_comes_out(root: str, tmp_path: Path) -> None:
    store, source, target = Store(root), tmp_path / "source", tmp_path / "new" / "target"
    for data in (b"", b"\x00" + bytes(range(256)) * 1000):
        source.write_bytes(data)
        ref = store.put_file(f"run/{len(data)}", source)
        assert ref == store.ref(f"run/{len(data)}", data)
        assert store.get(ref) == data
        store.get_file(ref, target)
        assert target.read_bytes() == data
    assert sorted(path.name for path in target.parent.iterdir()) == ["target"]


def test_the_first_file_under_a_key_stays_unless_it_is_to_be_replaced(root: str, tmp_path: Path) -> None:
    store, one, two = Store(root), tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"one")
    two.write_bytes(b"two")
    ref = store.put_file("k", one)
    assert Store(root).put_file("k", one) == ref
    with pytest.raises(AlreadyCommitted, match=f"{ref.uri}: other content than {two}"):
        store.put_file("k", two)
    assert store.get(ref) == b"one"
    assert store.get(store.put_file("k", two, replace=True)) == b"two"


def test_sixteen_files_at_once_under_one_key_have_exactly_one_winner(root: str, tmp_path: Path) -> None:
    won, lost = [], []
    for index in range(16):
        (tmp_path / str(index)).write_bytes(b"%d" % index)

    def put(index: int) -> None:
        try:
            won.append((index, Store(root).put_file("k", tmp_path / str(index))))
        except AlreadyCommitted:
            lost.append(index)

    race(16, put)
    assert (len(won), len(lost)) == (1, 15)
    assert Store(root).get(won[0][1]) == b"%d" % won[0][0]


def test_a_file_that_is_missing_or_of_other_bytes_leaves_the_target_alone(root: str, tmp_path: Path) -> None:
    store, target = Store(root), tmp_path / "target"
    target.write_bytes(b"mine")
    ref = store.put("k", b"abc")
    for wrong, words in [
        (Ref(ref.uri, ref.sha256, 4), "expected 4 bytes, found 3"),
        (Ref(ref.uri, "0" * 64, 3), "expected sha256 0000"),
        (store.ref("none", b"abc"), "missing; expected 3 bytes"),
    ]:
        with pytest.raises(IntegrityError, match=f"^{wrong.uri}: {words}"):
            store.get_file(wrong, target)
        assert target.read_bytes() == b"mine"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".target")]


def test_what_a_killed_writer_left_is_no_object_and_can_be_removed(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put("run/k", b"whole")
    left = tmp_path / "run" / f".k.{'0' * 32}.tmp"
    left.write_bytes(b"hal")
    assert list(store.list_keys()) == ["run/k"]
    store.abort_uploads("run/k")
    assert not left.exists()
    assert store.read("run/k") == b"whole"


def test_a_store_travels_to_another_process(root: str) -> None:
    store = Store(root)
    twin = pickle.loads(pickle.dumps(store))
    assert twin.uri("k") == store.uri("k")
    assert twin.read("k") is None


def test_a_place_that_honours_conditions_passes_the_check_and_keeps_nothing_of_it(root: str) -> None:
    Store(root).check_conditions()
    assert list(Store(root).list_keys()) == []


class Careless(MemoryBackend):
    """Overwrites whatever the condition."""

    def create(self, path: str, data: bytes) -> bool:
        self.write(path, data)
        return True


def test_a_place_that_ignores_conditions_is_refused() -> None:
    store = Store(f"memory://{uuid.uuid4().hex}")
    store._backend = Careless()
    with pytest.raises(RunError, match="ignores If-None-Match"):
        store.check_conditions()
    assert list(store.list_keys()) == []


KEYS = st.sampled_from(["a", "b/1", "b/2", "b1"])
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "delete", "put_file", "commit", "swap"]), KEYS, st.binary(max_size=3)),
    max_size=12,
)


@pytest.mark.parametrize("scheme", ["file", "memory"])
@given(operations=OPERATIONS)
@settings(max_examples=40)
def test_any_order_of_operations_is_what_a_dictionary_would_hold(
    scheme: str, operations: list[tuple[str, str, bytes]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        store = Store(f"memory://{uuid.uuid4().hex}" if scheme == "memory" else f"{folder}/store")
        model: dict[str, tuple[str, bytes]] = {}
        for operation, key, data in operations:
            kind, held = model.get(key, ("", b""))
            if operation == "put":
                store.put(key, data)
                model[key] = ("bytes", data)
            elif operation == "delete":
                store.delete(key)
                model.pop(key, None)
            elif operation == "put_file":
                source.write_bytes(data)
                if key in model and held != data:
                    with pytest.raises(AlreadyCommitted):
                        store.put_file(key, source)
                else:
                    store.put_file(key, source)
                    model[key] = ("bytes", data)
            elif operation == "commit":
                document = {"data": data.hex()}
                if key in model and held != canonical_json(document):
                    with pytest.raises(AlreadyCommitted):
                        store.commit(key, document)
                else:
                    store.commit(key, document)
                    model[key] = ("bytes", canonical_json(document))
            elif kind in ("", "pointer"):
                found = store.read_pointer(key)
                store.swap(key, {"data": data.hex()}, None if found is None else found[1])
                model[key] = ("pointer", store.read(key) or b"")
                assert json.loads(model[key][1])["document"] == {"data": data.hex()}
            assert sorted(store.list_keys()) == sorted(model)
            assert all(store.read(each) == stored for each, (_, stored) in model.items())
            assert store.size(key) == (len(model[key][1]) if key in model else None)
