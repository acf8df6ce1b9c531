"""Large files to and from a real S3 server: in parts, taken up again after a kill, exact in the end."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from infra.faults.proxy import FaultProxy
from infra.faults.rules import Rule
from infra.store import AlreadyCommitted, Store, StoreOptions, StoreUnavailable
from infra.store.s3_requests import S3Requests
from infra.store.s3_upload import UploadState
from infra.store.transfer_state import read_state, write_state
from k3core.errors import IntegrityError, RunError
from k3core.types import Ref

PART = 5 << 20
QUICK = StoreOptions(part_bytes=PART, parallelism=2, tries=4, pause_s=0.01, max_pause_s=0.02, read_timeout_s=30.0)
NUM_PARTS = 4

TRANSFER = """
import sys
from pathlib import Path
from infra.store import Store, StoreOptions
from k3core.types import Ref
verb, root, path, *ref = sys.argv[1:]
store = Store(root, StoreOptions(part_bytes=5 << 20, parallelism=1, read_timeout_s=600))
if verb == "put":
    store.put_file("k", Path(path))
else:
    store.get_file(Ref(ref[0], ref[1], int(ref[2])), Path(path))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three whole parts and a short one."""
    path = tmp_path / "source"
    path.write_bytes(os.urandom((NUM_PARTS - 1) * PART + 12345))
    return path


def parts_sent(proxy: FaultProxy) -> list[int]:
    """Numbers of the parts that the server took."""
    found = (re.search(r"partNumber=(\d+)", seen.target) for seen in proxy.requests if seen.status == 200)
    return sorted(int(match.group(1)) for match in found if match)


def num_pieces(proxy: FaultProxy) -> int:
    return sum(seen.method == "GET" and seen.status == 206 for seen in proxy.requests)


def unfinished(root: str) -> list[str]:
    return S3Requests(QUICK).uploads(f"{root.removeprefix('s3://')}/k")


def kill_when(is_due: Callable[[], bool], *arguments: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", TRANSFER, *arguments])
    try:
        while not is_due():
            assert child.poll() is None
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def kill_after_two_parts(root: str, source: Path, proxy: FaultProxy) -> None:
    proxy.inject(Rule("delay", "PUT", "partNumber", skip=2, delay_s=60.0))
    kill_when(lambda: len(parts_sent(proxy)) == 2 and proxy.counts["delay"] == 1, "put", root, str(source))
    proxy.clear()


def test_an_upload_that_was_killed_sends_only_what_the_server_lacks(
    s3_root: str, s3_proxy: FaultProxy, source: Path
) -> None:
    kill_after_two_parts(s3_root, source, s3_proxy)
    store = Store(s3_root, QUICK)
    assert store.size("k") is None
    ref = store.put_file("k", source)
    assert parts_sent(s3_proxy) == [3, 4]
    assert store.get(ref) == source.read_bytes()
    assert ref == store.ref("k", source.read_bytes())
    assert sorted(path.name for path in source.parent.iterdir()) == ["source"]
    assert unfinished(s3_root) == []


def test_parts_are_recognised_by_their_bytes_when_the_file_was_touched(
    s3_root: str, s3_proxy: FaultProxy, source: Path
) -> None:
    kill_after_two_parts(s3_root, source, s3_proxy)
    os.utime(source, (1, 1))
    ref = Store(s3_root, QUICK).put_file("k", source)
    assert parts_sent(s3_proxy) == [3, 4]
    assert Store(s3_root, QUICK).get(ref) == source.read_bytes()


def test_an_upload_of_other_bytes_begins_anew(s3_root: str, s3_proxy: FaultProxy, source: Path) -> None:
    kill_after_two_parts(s3_root, source, s3_proxy)
    source.write_bytes(source.read_bytes()[:-1] + b"?")
    ref = Store(s3_root, QUICK).put_file("k", source)
    assert parts_sent(s3_proxy) == [1, 2, 3, 4]
    assert Store(s3_root, QUICK).get(ref) == source.read_bytes()
    assert unfinished(s3_root) == []


def test_a_part_that_the_server_has_otherwise_is_sent_again(s3_root: str, s3_proxy: FaultProxy, source: Path) -> None:
    kill_after_two_parts(s3_root, source, s3_proxy)
    (state_file,) = source.parent.glob(".source.*.upload.json")
    state = json.loads(state_file.read_bytes())
    path, s3 = f"{s3_root.removeprefix('s3://')}/k", S3Requests(QUICK)
    upload_id = s3.begin_upload(path, state["sha256"])
    first = s3.upload_part(path, upload_id, 1, source.read_bytes()[:PART])
    s3.upload_part(path, upload_id, 2, bytes(PART))
    state_file.write_text(json.dumps({**state, "upload_id": upload_id, "etags": {"1": first, "2": "another"}}))
    s3_proxy.clear()
    ref = Store(s3_root, QUICK).put_file("k", source)
    assert parts_sent(s3_proxy) == [2, 3, 4]
    assert Store(s3_root, QUICK).get(ref) == source.read_bytes()


def test_a_state_that_is_none_costs_only_work(s3_root: str, s3_proxy: FaultProxy, source: Path) -> None:
    kill_after_two_parts(s3_root, source, s3_proxy)
    (state,) = source.parent.glob(".source.*.upload.json")
    state.write_bytes(b'{"upload_id": "x"}')
    assert Store(s3_root, QUICK).get(Store(s3_root, QUICK).put_file("k", source)) == source.read_bytes()
    assert parts_sent(s3_proxy) == [1, 2, 3, 4]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"upload_id": "x"}'])
def test_a_file_that_holds_no_state_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state").write_bytes(content)
    assert read_state(tmp_path / "state", UploadState) is None
    state = UploadState("uri", "digest", 1, 2, 3, "id", {"1": "etag"})
    write_state(tmp_path / "state", state)
    assert UploadState(**(read_state(tmp_path / "state", UploadState) or {})) == state


def test_unfinished_uploads_can_be_removed_and_begin_anew(s3_root: str, s3_proxy: FaultProxy, source: Path) -> None:
    kill_after_two_parts(s3_root, source, s3_proxy)
    store = Store(s3_root, QUICK)
    store.abort_uploads("k")
    assert unfinished(s3_root) == []
    assert store.get(store.put_file("k", source)) == source.read_bytes()
    assert parts_sent(s3_proxy) == [1, 2, 3, 4]


def test_an_upload_that_is_removed_under_way_fails_and_begins_anew_when_retried(
    s3_root: str, s3_proxy: FaultProxy, source: Path
) -> None:
    store = Store(s3_root, QUICK)
    s3_proxy.inject(Rule("delay", "PUT", "partNumber=4", delay_s=1.0, limit=1))
    threading.Timer(0.5, store.abort_uploads, ["k"]).start()
    with pytest.raises(StoreUnavailable, match="the server forgot the upload"):
        store.put_file("k", source)
    assert store.get(store.put_file("k", source)) == source.read_bytes()


def test_the_state_may_be_kept_elsewhere(s3_root: str, s3_proxy: FaultProxy, source: Path, tmp_path: Path) -> None:
    s3_proxy.inject(Rule("slow_down", "PUT", "partNumber=4"))
    with pytest.raises(StoreUnavailable):
        Store(s3_root, QUICK).put_file("k", source, state_folder=tmp_path / "state")
    (state,) = (tmp_path / "state").iterdir()
    assert json.loads(state.read_bytes())["etags"].keys() == {"1", "2", "3"}
    s3_proxy.clear()
    Store(s3_root, QUICK).put_file("k", source, state_folder=tmp_path / "state")
    assert parts_sent(s3_proxy) == [4]


@pytest.mark.parametrize("replace", [False, True])
def test_a_completion_whose_answer_was_lost_is_done(
    s3_root: str, s3_proxy: FaultProxy, source: Path, replace: bool
) -> None:
    s3_proxy.inject(Rule("lose_answer", "POST", "uploadId", limit=1))
    store = Store(s3_root, QUICK)
    ref = store.put_file("k", source, replace=replace)
    assert s3_proxy.counts["lose_answer"] == 1
    assert store.get(ref) == source.read_bytes()
    assert sorted(path.name for path in source.parent.iterdir()) == ["source"]


def test_a_file_that_is_there_is_not_sent_again(s3_root: str, s3_proxy: FaultProxy, source: Path) -> None:
    ref = Store(s3_root, QUICK).put_file("k", source)
    s3_proxy.clear()
    assert Store(s3_root, QUICK).put_file("k", source) == ref
    assert [seen.method for seen in s3_proxy.requests] == ["HEAD"]


def test_large_files_at_once_under_one_key_have_exactly_one_winner(
    s3_root: str, s3_proxy: FaultProxy, tmp_path: Path
) -> None:
    # All pass the look at the key before the first is done.
    s3_proxy.inject(Rule("delay", "POST", "uploadId", delay_s=0.5))
    won, lost = [], []
    for index in range(4):
        (tmp_path / str(index)).write_bytes(bytes([index]) * (PART + 1))
    barrier = threading.Barrier(4)

    def put(index: int) -> None:
        barrier.wait()
        try:
            won.append((index, Store(s3_root, QUICK).put_file("k", tmp_path / str(index))))
        except AlreadyCommitted:
            lost.append(index)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put, range(4)))
    assert (len(won), len(lost)) == (1, 3)
    assert Store(s3_root, QUICK).get(won[0][1]) == bytes([won[0][0]]) * (PART + 1)
    assert unfinished(s3_root) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


def test_an_upload_that_another_replaced_at_the_moment_of_its_end_is_no_winner(
    s3_root: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete_upload = S3Requests.complete_upload
    other = tmp_path / "other"
    other.write_bytes(bytes(PART + 1))

    def replaced(self: S3Requests, *arguments: Any, **options: Any) -> bool:
        monkeypatch.setattr(S3Requests, "complete_upload", complete_upload)
        is_first = complete_upload(self, *arguments, **options)
        Store(s3_root, QUICK).put_file("k", other, replace=True)
        return is_first

    monkeypatch.setattr(S3Requests, "complete_upload", replaced)
    with pytest.raises(AlreadyCommitted):
        Store(s3_root, QUICK).put_file("k", source)


def test_a_file_that_changes_while_it_is_sent_is_not_stored(s3_root: str, s3_proxy: FaultProxy, source: Path) -> None:
    s3_proxy.inject(Rule("delay", "PUT", "partNumber=1", delay_s=0.5, limit=1))
    threading.Timer(0.4, lambda: source.write_bytes(bytes(NUM_PARTS * PART))).start()
    with pytest.raises(RunError, match=f"{source}: changed while it was being stored"):
        Store(s3_root, QUICK).put_file("k", source)
    assert Store(s3_root).size("k") is None


def test_a_transfer_is_exact_whatever_fails_a_few_times(s3_root: str, s3_proxy: FaultProxy, source: Path) -> None:
    store = Store(s3_root, StoreOptions(part_bytes=PART, parallelism=3, tries=6, pause_s=0.01, max_pause_s=0.02))
    s3_proxy.inject(
        *(Rule(fault, "PUT|POST", probability=0.5, seed=1, limit=1) for fault in ("cut_request", "corrupt_request")),
        *(Rule(fault, probability=0.5, seed=2, limit=1) for fault in ("reset", "slow_down", "internal_error")),
    )
    ref = store.put_file("k", source)
    s3_proxy.inject(
        *(Rule(fault, "GET", probability=0.5, seed=1, limit=1) for fault in ("truncate", "truncate_silently")),
        *(Rule(fault, "GET", probability=0.5, seed=2, limit=1) for fault in ("corrupt", "reset", "throttle")),
    )
    target = source.with_name("target")
    store.get_file(ref, target)
    assert target.read_bytes() == source.read_bytes()
    assert sum(s3_proxy.counts.values()) >= 8
    assert sorted(path.name for path in source.parent.iterdir()) == ["source", "target"]


def test_a_download_that_was_killed_fetches_only_what_is_missing(
    s3_root: str, s3_proxy: FaultProxy, source: Path, tmp_path: Path
) -> None:
    ref = Store(s3_root, QUICK).put_file("k", source)
    target = tmp_path / "target"
    s3_proxy.inject(Rule("delay", "GET", "/k", skip=2, delay_s=60.0))
    s3_proxy.requests.clear()
    kill_when(
        lambda: num_pieces(s3_proxy) == 2 and s3_proxy.counts["delay"] == 1,
        *("get", s3_root, str(target), ref.uri, ref.sha256, str(ref.size_bytes)),
    )
    assert not target.exists()
    s3_proxy.clear()
    Store(s3_root, QUICK).get_file(ref, target)
    assert num_pieces(s3_proxy) == 2
    assert target.read_bytes() == source.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_a_download_of_what_was_replaced_meanwhile_begins_anew(
    s3_root: str, s3_proxy: FaultProxy, tmp_path: Path
) -> None:
    store, target = Store(s3_root, QUICK), tmp_path / "target"
    ref = store.put("k", bytes(ref_bytes := 2 * PART))
    s3_proxy.inject(Rule("slow_down", "GET", "/k", skip=1))
    with pytest.raises(StoreUnavailable):
        store.get_file(ref, target)
    s3_proxy.inject()
    store.put("k", b"\x01" * ref_bytes)
    store.put("k", bytes(ref_bytes))
    store.get_file(ref, target)
    assert target.read_bytes() == bytes(ref_bytes)


def test_a_large_file_of_other_bytes_leaves_the_target_alone(s3_root: str, source: Path, tmp_path: Path) -> None:
    store, target = Store(s3_root, QUICK), tmp_path / "target"
    target.write_bytes(b"mine")
    ref = store.put_file("k", source)
    for wrong in (Ref(ref.uri, "0" * 64, ref.size_bytes), Ref(ref.uri, ref.sha256, ref.size_bytes + 1)):
        with pytest.raises(IntegrityError, match=f"^{ref.uri}: expected "):
            store.get_file(wrong, target)
        with pytest.raises(IntegrityError, match=f"^{ref.uri}: expected "):
            store.get(wrong)
    assert target.read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
