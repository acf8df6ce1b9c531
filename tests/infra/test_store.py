import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from infra.store import AlreadyCommitted, Store
from k3core.errors import IntegrityError
from k3core.types import Ref


class S3Handler(BaseHTTPRequestHandler):
    """The part of S3 that a store needs, with SeaweedFS's answer to the loser of a conditional write.

    That answer has no <Condition>, so that s3fs reports it as any invalid argument.
    """

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    lock: threading.Lock

    def answer(self, status: int, body: bytes = b"", length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", '"0"')
        self.end_headers()
        self.wfile.write(body)

    def error(self, status: int, code: str, message: str) -> None:
        self.answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())

    def body(self) -> bytes:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return data
        chunks = b""
        while data:
            size, rest = data.split(b"\r\n", 1)
            length = int(size.split(b";")[0], 16)
            if length == 0:
                break
            chunks, data = chunks + rest[:length], rest[length + 2 :]
        return chunks

    def do_HEAD(self) -> None:
        found = self.objects.get(self.path)
        if found is None:
            self.answer(404)
        else:
            self.answer(200, length=len(found))

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if "list-type=2" in query:
            keys = "".join(
                f"<Contents><Key>{name.removeprefix(path + '/')}</Key><Size>{len(data)}</Size>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for name, data in self.objects.items()
            )
            self.answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{keys}</ListBucketResult>".encode())
            return
        found = self.objects.get(path)
        if found is None:
            self.error(404, "NoSuchKey", "not here")
        else:
            self.answer(200, found)

    def do_PUT(self) -> None:
        data = self.body()
        with self.lock:
            if self.headers.get("If-None-Match") == "*" and self.path in self.objects:
                self.error(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
                return
            self.objects[self.path] = data
        self.answer(200)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def s3_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    handler = type("Handler", (S3Handler,), {"objects": {}, "lock": threading.Lock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    for key, value in {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(key, value)
    yield "s3://bucket/prefix"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(params=["path", "file", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("s3_root"))
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/store"
    return str(tmp_path / "a store") if request.param == "path" else f"file://{tmp_path}/store"


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


def test_threads_that_commit_at_once_have_one_winner(root: str) -> None:
    store = Store(root)
    for round_ in range(5):
        key = f"m{round_}.json"
        outcomes: list[int | None] = []
        barrier = threading.Barrier(8)

        def commit(number: int, key: str = key, barrier: threading.Barrier = barrier, out: list = outcomes) -> None:
            barrier.wait()
            try:
                store.commit(key, {"winner": number})
                out.append(number)
            except AlreadyCommitted:
                out.append(None)

        threads = [threading.Thread(target=commit, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [number for number in outcomes if number is not None]
        assert len(outcomes) == 8
        assert store.read_manifest(key) == {"winner": winner}


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
    for round_ in range(100):
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
    assert [path.rsplit("/", 1)[1] for path in reader._fs.ls(f"{reader._root}/run", detail=False)] == ["m1.json"]
    writer.commit("run/m2.json", {"step": 2})
    assert reader.read_manifest("run/m2.json") == {"step": 2}


def test_s3_stores_share_no_cache(s3_root: str) -> None:
    first, second = Store(s3_root), Store(s3_root)
    assert first._fs is not second._fs
    assert not first._fs.dircache.use_listings_cache


def test_a_refused_write_to_s3_is_no_lost_race(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(S3Handler, "do_PUT", lambda self: (self.body(), self.error(403, "AccessDenied", "no")))
    with pytest.raises(PermissionError):
        Store(s3_root).commit("m.json", {})


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
