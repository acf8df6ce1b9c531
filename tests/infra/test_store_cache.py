import errno
import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.cache import Cache
from infra.faults.proxy import FaultProxy
from infra.store import Store
from k3core.errors import IntegrityError


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def cached_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("??/*") if path.is_file())


def test_what_was_kept_comes_back_by_its_digest(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 100)
    assert cache.get(digest(b"bytes"), 5) is None
    cache.put(digest(b"bytes"), b"bytes")
    assert Cache(tmp_path, 100).get(digest(b"bytes"), 5) == b"bytes"


def test_bytes_of_another_digest_are_not_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected bytes with sha256"):
        Cache(tmp_path, 100).put(digest(b"a"), b"b")
    assert not cached_files(tmp_path)


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 30)
    for number, data in enumerate((b"a" * 10, b"b" * 10, b"c" * 10)):
        cache.put(digest(data), data)
        os.utime(cached_path(tmp_path, data), (number, number))
    assert cache.get(digest(b"a" * 10), 10) is not None
    cache.put(digest(b"d" * 10), b"d" * 10)
    assert [cache.get(digest(byte * 10), 10) is not None for byte in (b"a", b"b", b"c", b"d")] == [
        True,
        False,
        True,
        True,
    ]


def test_what_is_larger_than_the_cache_is_not_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10)
    cache.put(digest(b"a" * 10), b"a" * 10)
    cache.put(digest(b"b" * 11), b"b" * 11)
    assert len(cached_files(tmp_path)) == 1


@pytest.mark.parametrize("altered", [b"byteS", b"byte", b""])
def test_an_altered_file_counts_as_absent_and_is_removed(tmp_path: Path, altered: bytes) -> None:
    cache = Cache(tmp_path, 100)
    cache.put(digest(b"bytes"), b"bytes")
    cached_path(tmp_path, b"bytes").write_bytes(altered)
    assert cache.get(digest(b"bytes"), 5) is None
    assert not cached_files(tmp_path)


FILL = """
import hashlib, sys
from pathlib import Path
from infra.cache import Cache
cache, seed = Cache(Path(sys.argv[1]), 4000), int(sys.argv[2])
for number in range(60):
    data = bytes([(number * 7 + seed) % 50]) * 100
    digest = hashlib.sha256(data).hexdigest()
    assert cache.get(digest, 100) in (None, data)
    cache.put(digest, data)
"""


def test_processes_share_a_folder_within_its_bound(tmp_path: Path) -> None:
    fillers = [subprocess.Popen([sys.executable, "-c", FILL, str(tmp_path), str(seed)]) for seed in range(2)]
    assert [filler.wait(timeout=60) for filler in fillers] == [0, 0]
    files = cached_files(tmp_path)
    assert 3000 <= sum(file.stat().st_size for file in files) <= 4000 + 2 * 4000 // 16
    assert all(digest(file.read_bytes()) == file.name for file in files)


def test_threads_share_a_cache_within_its_bound(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1000)

    def work(seed: int) -> None:
        for number in range(40):
            data = bytes([number, seed]) * 50
            cache.put(digest(data), data)
            assert cache.get(digest(data), 100) in (None, data)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert sum(file.stat().st_size for file in cached_files(tmp_path)) <= 1000 + 4 * 1000 // 16


@pytest.mark.parametrize("text", ["many", "-1", "0"])
def test_a_bound_that_is_no_number_of_bytes_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("K3_CACHE", "/nowhere")
    monkeypatch.setenv("K3_CACHE_BYTES", text)
    with pytest.raises(ValueError, match="K3_CACHE_BYTES"):
        Cache.from_environment()


def cached_path(folder: Path, data: bytes) -> Path:
    return folder / digest(data)[:2] / digest(data)


def num_gets(proxy: FaultProxy) -> int:
    return sum(seen.method == "GET" for seen in proxy.requests)


def test_a_store_in_s3_fetches_what_it_has_read_once(
    s3_root: str, s3_proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K3_CACHE", str(tmp_path))
    ref = Store(s3_root).put("k", b"bytes")
    for _ in range(3):
        assert Store(s3_root).get(ref) == b"bytes"
    assert num_gets(s3_proxy) == 1
    store = Store(s3_root)
    store.put("k", b"other")
    assert store.read("k") == b"other", "what stands under a key is never cached"


def test_a_poisoned_cache_is_fetched_again(
    s3_root: str, s3_proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K3_CACHE", str(tmp_path))
    store = Store(s3_root)
    ref = store.put("k", b"bytes")
    store.get(ref)
    cached_path(tmp_path, b"bytes").write_bytes(b"BYTES")
    assert store.get(ref) == b"bytes"
    assert num_gets(s3_proxy) == 2
    assert cached_path(tmp_path, b"bytes").read_bytes() == b"bytes"


def test_wrong_bytes_never_enter_the_cache(s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_CACHE", str(tmp_path))
    store = Store(s3_root)
    ref = store.put("k", b"bytes")
    store.put("k", b"BYTES")
    with pytest.raises(IntegrityError):
        store.get(ref)
    assert not cached_files(tmp_path)


def test_a_store_on_the_disk_has_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_CACHE", str(tmp_path / "cache"))
    store = Store(str(tmp_path / "store"))
    store.get(store.put("k", b"bytes"))
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_costs_the_cache_its_file_and_the_reader_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path, 1 << 20)
    data = b"weights"

    def no_room(self: Path, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", no_room)
        cache.put(digest(data), data)
    assert cache.get(digest(data), len(data)) is None
    cache.put(digest(data), data)
    assert cache.get(digest(data), len(data)) == data
