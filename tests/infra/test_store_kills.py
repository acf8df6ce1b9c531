"""kill -9 at random points of what a store writes: readers see nothing or everything, and a retry completes."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from infra.store import Store, StoreOptions, s3_upload, transfer_state
from k3core.types import Ref

BYTES = (5 << 20) + 1000
OPTIONS = StoreOptions(part_bytes=5 << 20)

# Round by round: bytes, a file, then the document that refers to both, then the pointer to it.
WRITER = f"""
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from infra.store import Store, StoreOptions, s3_upload
root, source = sys.argv[1], Path(sys.argv[2])
store = Store(root, StoreOptions(part_bytes=5 << 20))
version = None
print("ready", flush=True)
for number in count():
    source.write_bytes(bytes([number % 256]) * {BYTES})
    refs = [store.put(f"{{number}}/bytes", bytes([number % 256]) * 100_000), store.put_file(f"{{number}}/file", source)]
    document = {{"refs": [[ref.uri, ref.sha256, ref.size_bytes] for ref in refs]}}
    store.commit(f"{{number}}/manifest.json", document)
    version = store.swap("latest", {{"number": number}}, version)
    print("round", flush=True)
"""


@pytest.fixture(params=["path", "s3"])
def durable_root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue("s3_root")) if request.param == "s3" else str(tmp_path / "store")


def test_a_writer_killed_anywhere_leaves_whole_things_only(durable_root: str, tmp_path: Path) -> None:
    random_point = random.Random(0)
    num_committed = 0
    for kill in range(4):
        root, source = f"{durable_root}/{kill}", tmp_path / f"source{kill}"
        writer = subprocess.Popen([sys.executable, "-c", WRITER, root, str(source)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        if kill % 2:
            assert writer.stdout.readline() == "round\n"
        time.sleep(random_point.uniform(0.0, 0.5))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        store = Store(root, OPTIONS)
        committed = last_committed(store)
        num_committed += committed + 1
        pointer = store.read_pointer("latest")
        assert (-1 if pointer is None else pointer[0]["number"]) in (committed - 1, committed)
        begun = committed + 1
        assert store.size(f"{begun}/bytes") in (None, 100_000)
        assert store.size(f"{begun}/file") in (None, BYTES)
        assert {key.split("/")[0] for key in store.list_keys()} <= {"latest", *map(str, range(begun + 1))}
        complete(store, begun, source)
    assert num_committed >= 2


def test_a_try_killed_after_its_upload_was_done_leaves_no_file_to_the_next(
    s3_root: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(BYTES))

    @contextmanager
    def left_behind(path: Path) -> Iterator[None]:
        path.touch()
        yield

    with monkeypatch.context() as patched:
        patched.setattr(s3_upload, "locked", left_behind)
        Store(str(s3_root), OPTIONS).put_file("file", source)
    assert list(tmp_path.glob(".source*.lock"))
    Store(str(s3_root), OPTIONS).put_file("file", source)
    assert not list(tmp_path.glob(".source*"))


def test_a_try_killed_while_it_noted_its_last_part_leaves_no_file_to_the_next(
    s3_root: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(BYTES))
    calls = count(1)

    def killed(written: Path, file: Path) -> None:
        if next(calls) == 3:  # the upload itself, the first part, the last one
            raise KeyboardInterrupt
        written.rename(file)

    with monkeypatch.context() as patched:
        patched.setattr(transfer_state.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            Store(str(s3_root), OPTIONS).put_file("file", source)
    assert list(tmp_path.glob(".source*.new"))
    Store(str(s3_root), OPTIONS).put_file("file", source)
    assert not list(tmp_path.glob(".source*"))


def last_committed(store: Store) -> int:
    for number in count():
        manifest = store.read_manifest(f"{number}/manifest.json")
        if manifest is None:
            return number - 1
        for uri, sha256, size_bytes in manifest["refs"]:
            assert set(store.get(Ref(uri, sha256, size_bytes))) == {number % 256}
    raise AssertionError


def complete(store: Store, number: int, source: Path) -> None:
    """What the writer was at when it was killed, by another process."""
    data = bytes([number % 256]) * BYTES
    source.write_bytes(data)
    store.put(f"{number}/bytes", data[:100_000])
    assert store.get(store.put_file(f"{number}/file", source)) == data
    assert not list(source.parent.glob(f".{source.name}*"))
