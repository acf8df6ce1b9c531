"""A store in S3 when the network and the server fail: real server, faults injected between it and the store."""

import http.client
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import pytest

from infra.faults.proxy import FaultProxy
from infra.faults.rules import Fault, Rule
from infra.fence import Cancelled, fenced
from infra.store import AlreadyCommitted, Conflict, Store, StoreDenied, StoreOptions, StoreUnavailable
from k3core.errors import IntegrityError, RunError
from k3core.types import Ref

QUICK = StoreOptions(
    part_bytes=5 << 20,
    parallelism=2,
    tries=4,
    pause_s=0.01,
    max_pause_s=0.02,
    read_timeout_s=20.0,
)
ANSWER_FAULTS: list[Fault] = ["truncate", "truncate_silently", "corrupt"]
REQUEST_FAULTS: list[Fault] = ["cut_request", "corrupt_request"]
FAULTS: list[Fault] = ["slow_down", "internal_error", "throttle", "reset", "lose_answer"]


def rule(fault: Fault, method: str = ".*", key: str = "", **fields: object) -> Rule:
    return Rule(fault, method, key, delay_s=2.0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [*FAULTS, *REQUEST_FAULTS])
def test_a_write_is_done_whatever_fails_a_few_times(s3_root: str, s3_proxy: FaultProxy, fault: Fault) -> None:
    store = Store(s3_root, QUICK)
    for key, write in {
        "put": lambda: store.put("put", b"bytes"),
        "commit": lambda: store.commit("commit", {"step": 1}),
        "swap": lambda: store.swap("swap", {"step": 1}, None),
    }.items():
        s3_proxy.inject(rule(fault, "PUT", f"/{key}", limit=2))
        write()
    assert s3_proxy.counts[fault] >= 3
    s3_proxy.inject()
    assert store.read("put") == b"bytes"
    assert store.read_manifest("commit") == {"step": 1}
    pointer = store.read_pointer("swap")
    assert pointer is not None
    assert pointer[0] == {"step": 1}
    s3_proxy.inject(rule(fault, "DELETE", limit=2))
    store.delete("put")
    assert store.size("put") is None


@pytest.mark.parametrize("fault", [*FAULTS, *ANSWER_FAULTS])
def test_a_read_is_exact_whatever_fails_a_few_times(s3_root: str, s3_proxy: FaultProxy, fault: Fault) -> None:
    store = Store(s3_root, QUICK)
    ref = store.put("k", bytes(range(256)))
    store.commit("m.json", {"step": 1, "what": "x" * 100})
    version = store.swap("latest", {"step": 1}, None)
    for read, expected in (
        (lambda: store.get(ref), bytes(range(256))),
        (lambda: store.read("k"), bytes(range(256))),
        (lambda: store.read_manifest("m.json"), {"step": 1, "what": "x" * 100}),
        (lambda: store.read_pointer("latest"), ({"step": 1}, version)),
    ):
        s3_proxy.inject(rule(fault, "GET", limit=2))
        assert read() == expected
    assert s3_proxy.counts[fault] >= 7
    if fault != "corrupt":  # a listing has no digest; it decides nothing
        s3_proxy.inject(rule(fault, limit=2))
        assert sorted(store.list_keys()) == ["k", "latest", "m.json"]
    if fault not in ANSWER_FAULTS:
        s3_proxy.inject(rule(fault, "HEAD", limit=2))
        assert store.size("k") == 256


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("slow_down", r"SlowDown \(HTTP 503\)"),
        ("internal_error", r"InternalError \(HTTP 500\)"),
        ("throttle", r"TooManyRequests \(HTTP 429\)"),
        ("reset", "ConnectionClosedError|ConnectionError"),
        ("truncate", "IncompleteRead|ResponseStreamingError|BodyCut"),
        ("truncate_silently", "truncated answer: 128 bytes of the range 0-255"),
    ],
)
def test_what_fails_at_every_try_ends_by_uri_reason_and_number_of_tries(
    s3_root: str, s3_proxy: FaultProxy, fault: Fault, words: str
) -> None:
    store = Store(s3_root, QUICK)
    ref = store.put("k", bytes(range(256)))
    s3_proxy.inject(rule(fault, "GET"))
    with pytest.raises(
        StoreUnavailable, match=rf"^{ref.uri}: {s3_proxy.url} failed 4 tries in .* ({words})$"
    ) as raised:
        store.get(ref)
    assert isinstance(raised.value, OSError)
    assert s3_proxy.counts[fault] == 4


def test_what_takes_longer_than_the_time_out_is_tried_again(s3_root: str, s3_proxy: FaultProxy) -> None:
    store = Store(s3_root, StoreOptions(pause_s=0.01, read_timeout_s=1.0, tries=3))
    s3_proxy.inject(rule("delay", "PUT", limit=1))
    ref = store.commit("m.json", {"step": 1})
    s3_proxy.inject(rule("delay", "GET", limit=1))
    assert store.get(ref) == b'{"step":1}'
    s3_proxy.inject(rule("delay", "HEAD"))
    with pytest.raises(StoreUnavailable, match=f"^{ref.uri}: {s3_proxy.url} failed 3 tries in .* ReadTimeoutError"):
        store.size("m.json")


def test_a_server_that_is_not_there_is_unavailable(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(StoreUnavailable, match=r"http://127\.0\.0\.1:9 failed 4 tries"):
        Store(s3_root, QUICK).read("k")


def test_a_write_that_fails_at_every_try_leaves_nothing(s3_root: str, s3_proxy: FaultProxy) -> None:
    store = Store(s3_root, QUICK)
    for fault in ("slow_down", "reset", "cut_request"):
        s3_proxy.inject(rule(fault, "PUT"))
        for write in (
            lambda: store.put("k", b"x" * 1000),
            lambda: store.commit("k", {}),
            lambda: store.swap("k", {}, None),
        ):
            with pytest.raises(StoreUnavailable):
                write()
        s3_proxy.inject()
        assert store.read("k") is None


def test_a_commit_whose_answer_was_lost_is_no_lost_race(s3_root: str, s3_proxy: FaultProxy) -> None:
    store = Store(s3_root, QUICK)
    s3_proxy.inject(rule("lose_answer", "PUT", limit=1))
    ref = store.commit("m.json", {"step": 1})
    assert [seen.status for seen in s3_proxy.requests if seen.method == "PUT"] == [0, 412]
    assert store.get(ref) == b'{"step":1}'
    s3_proxy.inject(rule("lose_answer", "PUT", limit=1))
    with pytest.raises(AlreadyCommitted):
        store.commit("m.json", {"step": 2})


def test_a_swap_whose_answer_was_lost_is_won(s3_root: str, s3_proxy: FaultProxy) -> None:
    store = Store(s3_root, QUICK)
    for step in (1, 2):
        before = store.read_pointer("latest")
        s3_proxy.inject(rule("lose_answer", "PUT", limit=1))
        version = store.swap("latest", {"step": step}, None if before is None else before[1])
        assert store.read_pointer("latest") == ({"step": step}, version)


def test_a_swap_whose_answer_was_lost_is_won_even_when_the_next_one_came_first(
    s3_root: str, s3_proxy: FaultProxy
) -> None:
    patient = StoreOptions(pause_s=0.5, max_pause_s=0.5)
    s3_proxy.inject(rule("lose_answer", "PUT", limit=1))
    versions: list[str] = []
    first = threading.Thread(target=lambda: versions.append(Store(s3_root, patient).swap("latest", {"step": 1}, None)))
    first.start()
    store = Store(s3_root, QUICK)
    while (found := store.read_pointer("latest")) is None:
        time.sleep(0.01)
    second = store.swap("latest", {"step": 2}, found[1])
    first.join()
    assert len(versions) == 1
    assert versions[0] != second
    with pytest.raises(Conflict):
        store.swap("latest", {"step": 3}, versions[0])
    assert store.read_pointer("latest") == ({"step": 2}, second)


def test_a_lost_race_stays_lost_when_the_server_is_busy(s3_root: str, s3_proxy: FaultProxy) -> None:
    store = Store(s3_root, QUICK)
    store.commit("m.json", {"step": 1})
    version = store.swap("latest", {"step": 1}, None)
    s3_proxy.inject(rule("slow_down", limit=2))
    with pytest.raises(AlreadyCommitted):
        store.commit("m.json", {"step": 2})
    s3_proxy.inject(rule("slow_down", limit=2))
    with pytest.raises(Conflict):
        store.swap("latest", {"step": 2}, None)
    assert store.read_pointer("latest") == ({"step": 1}, version)


def test_an_old_pointer_decides_nothing(s3_root: str, s3_proxy: FaultProxy) -> None:
    store = Store(s3_root, QUICK)
    first = store.swap("latest", {"step": 1}, None)
    s3_proxy.inject(rule("stale", "GET", "latest"))
    assert store.read_pointer("latest") == ({"step": 1}, first)
    Store(s3_root).swap("latest", {"step": 2}, first)
    assert store.read_pointer("latest") == ({"step": 1}, first), "the proxy serves the old one"
    with pytest.raises(Conflict):
        store.swap("latest", {"step": 3}, first)
    s3_proxy.inject()
    found = store.read_pointer("latest")
    assert found is not None
    assert found[0] == {"step": 2}


def test_an_old_absence_decides_nothing(s3_root: str, s3_proxy: FaultProxy) -> None:
    store = Store(s3_root, QUICK)
    s3_proxy.inject(rule("stale", "GET", r"m\.json"))
    assert store.read_manifest("m.json") is None
    Store(s3_root).commit("m.json", {"step": 1})
    assert store.read_manifest("m.json") is None, "the proxy serves the old absence"
    with pytest.raises(StoreUnavailable, match="for those who write and not for those who read"):
        store.commit("m.json", {"step": 2})
    s3_proxy.inject()
    assert store.read_manifest("m.json") == {"step": 1}


def test_an_old_copy_of_an_object_is_read_again_until_it_is_the_new_one(s3_root: str, s3_proxy: FaultProxy) -> None:
    store = Store(s3_root, QUICK)
    for new in (b"two", b"other size"):
        old = store.put("k", b"one")
        s3_proxy.inject(rule("stale", "GET", limit=2))
        store.get(old)
        ref = store.put("k", new)
        with suppress(IntegrityError):
            store.get(old)  # of the same size: served from before
        assert store.get(ref) == new


def test_bytes_that_are_stored_wrong_are_told_at_the_first_read(s3_root: str, s3_proxy: FaultProxy) -> None:
    store = Store(s3_root, QUICK)
    ref = store.put("k", b"abd")
    with pytest.raises(IntegrityError, match=f"^{ref.uri}: expected sha256 0000"):
        store.get(Ref(ref.uri, "0" * 64, 3))
    assert sum(seen.method == "GET" for seen in s3_proxy.requests) == 1


BAD_CREDENTIALS = {
    "wrong secret": {"AWS_SECRET_ACCESS_KEY": "another-secret-that-is-never-shown"},
    "unknown key": {"AWS_ACCESS_KEY_ID": "nobody"},
    "none": {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None},
    "half of them": {"AWS_SECRET_ACCESS_KEY": None},
}


@pytest.mark.parametrize("bad", BAD_CREDENTIALS)
def test_lost_credentials_are_told_at_once_in_one_line_without_the_secret(
    s3_root: str, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    secrets = {os.environ["AWS_SECRET_ACCESS_KEY"], "another-secret-that-is-never-shown"}
    for name, value in BAD_CREDENTIALS[bad].items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    store = Store(s3_root, QUICK)
    uses: list[Callable[[], object]] = [
        lambda: store.put("k", b""),
        lambda: store.read("k"),
        lambda: store.size("k"),
        lambda: store.commit("m.json", {}),
        lambda: store.swap("latest", {}, None),
    ]
    for use in uses:
        s3_proxy.clear()
        with pytest.raises(StoreDenied) as raised:
            use()
        assert isinstance(raised.value, RunError)
        message = str(raised.value)
        assert "\n" not in message
        for word in (s3_proxy.url, "'k3-tests'", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL_S3"):
            assert word in message
        told = "".join(traceback.format_exception(raised.value))
        assert not [secret for secret in secrets if secret in told]
        assert len(s3_proxy.requests) <= 1


def test_credentials_that_are_lost_in_the_middle_are_told_at_once(s3_root: str, s3_proxy: FaultProxy) -> None:
    store = Store(s3_root, QUICK)
    store.put("k", b"")
    s3_proxy.inject(rule("forbid"))
    with pytest.raises(StoreDenied, match=r"no access to bucket 'k3-tests' at .*: AccessDenied \(HTTP 403\)"):
        store.put("k", b"")
    assert s3_proxy.counts["forbid"] == 1


def test_an_address_is_shown_without_its_password(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://me:hidden@127.0.0.1:9")
    with pytest.raises(StoreUnavailable) as raised:
        Store(s3_root, StoreOptions(tries=1)).read("k")
    assert "http://127.0.0.1:9" in str(raised.value)
    assert "hidden" not in str(raised.value)


@pytest.mark.usefixtures("s3_root")
def test_a_bucket_that_does_not_exist_is_not_an_empty_one() -> None:
    with pytest.raises(StoreDenied, match=r"no access to bucket 'no-such-bucket' at .*: NoSuchBucket"):
        Store("s3://no-such-bucket/root").read_manifest("m.json")


READER = """
import sys
from infra.store import Store
store = Store(sys.argv[1])
print(list(store.list_keys()), store.read_manifest("v7.json"), store.size("v7.json"), flush=True)
sys.stdin.readline()
print(store.read_manifest("v7.json"), store.size("v7.json"), flush=True)
"""


def test_a_process_that_listed_before_sees_by_key_what_another_one_stores(s3_root: str) -> None:
    Store(s3_root).commit("v6.json", {"step": 6})
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, s3_root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None
    assert reader.stdout.readline().strip() == "['v6.json'] None None"
    ref = Store(s3_root).commit("v7.json", {"step": 7})
    told, _ = reader.communicate("look again\n", timeout=60)
    assert told.strip() == f"{{'step': 7}} {ref.size_bytes}"
    assert reader.returncode == 0


FORKER = """
import os, sys
from infra.store import Store
store = Store(sys.argv[1])
store.put("parent", b"")
child = os.fork()
if child == 0:
    store.put("child", b"")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
store.put("parent again", b"")
"""


def test_a_store_may_be_used_on_both_sides_of_a_fork(s3_root: str) -> None:
    subprocess.run([sys.executable, "-c", FORKER, s3_root], check=True, timeout=60)
    assert sorted(Store(s3_root).list_keys()) == ["child", "parent", "parent again"]


def test_large_bytes_go_in_parts_and_come_out_in_parts(s3_root: str, s3_proxy: FaultProxy) -> None:
    store = Store(s3_root, QUICK)
    data = os.urandom(12 << 20)
    ref = store.put("k", data)
    assert sum(bool(re.search(r"partNumber=\d", seen.target)) for seen in s3_proxy.requests) == 3
    s3_proxy.clear()
    assert store.get(ref) == data
    assert [seen.method for seen in s3_proxy.requests] == ["GET"] * 3
    assert store.get_range(ref, (5 << 20) - 3, (5 << 20) + 3) == data[(5 << 20) - 3 : (5 << 20) + 3]


def test_large_bytes_are_exact_whatever_fails_a_few_times(s3_root: str, s3_proxy: FaultProxy) -> None:
    store = Store(s3_root, StoreOptions(part_bytes=5 << 20, parallelism=3, tries=6, pause_s=0.01, max_pause_s=0.02))
    data = os.urandom(11 << 20)
    s3_proxy.inject(
        *(rule(fault, "PUT", probability=0.5, seed=3, limit=1) for fault in (*REQUEST_FAULTS, "reset", "lose_answer")),
        rule("lose_answer", "POST", "uploadId", limit=1),
    )
    ref = store.put("k", data)
    s3_proxy.inject(
        *(rule(fault, "GET", probability=0.5, seed=4, limit=1) for fault in (*ANSWER_FAULTS, "reset", "slow_down"))
    )
    assert store.get(ref) == data
    assert sum(s3_proxy.counts.values()) >= 6


def test_a_put_of_large_bytes_that_fails_leaves_no_parts_behind(s3_root: str, s3_proxy: FaultProxy) -> None:
    store = Store(s3_root, QUICK)
    s3_proxy.inject(rule("slow_down", "PUT", "partNumber=2"))
    with pytest.raises(StoreUnavailable):
        store.put("k", bytes(6 << 20))
    assert store.size("k") is None
    bucket, _, prefix = s3_root.removeprefix("s3://").partition("/")
    assert store._backend._s3.uploads(f"{bucket}/{prefix}/k") == []  # type: ignore[attr-defined]


def test_nothing_is_written_behind_a_raised_fence(s3_root: str, s3_proxy: FaultProxy) -> None:
    store, cancelled = Store(s3_root, QUICK), threading.Event()
    cancelled.set()
    with fenced(cancelled):
        for write in (
            lambda: store.put("k", b""),
            lambda: store.commit("k", {}),
            lambda: store.swap("k", {}, None),
            lambda: store.delete("k"),
        ):
            with pytest.raises(Cancelled):
                write()
    assert not s3_proxy.requests


def test_a_write_that_is_tried_again_stops_at_a_fence(s3_root: str, s3_proxy: FaultProxy) -> None:
    store, cancelled = Store(s3_root, StoreOptions(pause_s=0.3)), threading.Event()
    s3_proxy.inject(rule("slow_down", "PUT"))
    threading.Timer(0.1, cancelled.set).start()
    with fenced(cancelled), pytest.raises(Cancelled):
        store.put("k", b"")
    assert s3_proxy.counts["slow_down"] == 1


def test_a_request_that_no_credentials_would_help_ends_the_run(s3_root: str, s3_proxy: FaultProxy) -> None:
    with pytest.raises(RunError, match="refuses the request") as raised:
        Store(s3_root, QUICK).put("x" * 2000, b"")
    assert not isinstance(raised.value, StoreDenied)
    assert len(s3_proxy.requests) <= 1


def test_an_endpoint_that_is_no_address_is_told(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "seaweed:8333")
    with pytest.raises(StoreDenied, match="AWS_ENDPOINT_URL_S3"):
        Store(s3_root, QUICK).read("k")


def test_the_proxy_is_really_in_between(s3_root: str, s3_proxy: FaultProxy) -> None:
    Store(s3_root).put("k", b"")
    connection = http.client.HTTPConnection(s3_proxy.url.removeprefix("http://"))
    connection.request("GET", "/__faults")
    assert b'"PUT": 1' in connection.getresponse().read()
    connection.close()
