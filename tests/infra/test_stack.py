"""What the local stack is made of, without starting it: places, ports, secrets, order, environments."""

from __future__ import annotations

import http.server
import json
import os
import pwd
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import postgres, stack, work_pools
from infra.checks import all_of, ask_prefect, http_answers, port_accepts, worker_beats
from infra.services import OneShot, Service, check_order
from infra.stack import artifacts, environment, load, prepare, programs, worker_environment
from k3core.errors import RunError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / ".k3"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_secrets_are_made_once_and_for_their_owner_alone(folder: Path) -> None:
    first = prepare(folder).secrets
    assert prepare(folder).secrets == first == load(folder).secrets
    assert len(set(first.values())) == len(stack.SECRETS)
    assert min(map(len, first.values())) >= 20
    for name in ("secrets.env", "pgpass", "s3.json"):
        assert mode(folder / name) == 0o600
    for name in ("s3", "prefect"):
        assert mode(folder / name) == 0o700


def test_no_secret_stands_in_a_command_an_address_or_the_ports_file(folder: Path) -> None:
    made = prepare(folder)
    visible = [str([list(each.argv), getattr(each, "url", None), str(each.cwd)]) for each in programs(made)]
    visible.append((folder / "ports.json").read_text())
    for secret in made.secrets.values():
        assert not [text for text in visible if secret in text]


def test_the_database_password_stands_in_no_environment(folder: Path) -> None:
    made = prepare(folder)
    for each in programs(made):
        assert made.secrets["POSTGRES_PASSWORD"] not in str(dict(each.env))


def test_a_secrets_file_that_lost_a_line_is_refused(folder: Path) -> None:
    prepare(folder)
    path = folder / "secrets.env"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("POSTGRES")))
    with pytest.raises(ValueError, match="no POSTGRES_PASSWORD in it"):
        prepare(folder)


def test_ports_stay_but_for_one_that_somebody_else_has_taken(folder: Path) -> None:
    first = dict(prepare(folder).ports)
    assert len(set(first.values())) == len(first)
    assert all(port + 10_000 < 65_536 for port in first.values())
    with socket.create_server(("127.0.0.1", first["prefect"])):
        second = dict(prepare(folder).ports)
    assert {name for name in first if first[name] != second[name]} == {"prefect"}
    assert json.loads((folder / "ports.json").read_text()) == second


def test_every_program_comes_after_what_it_uses(folder: Path) -> None:
    listed = programs(prepare(folder))
    check_order(listed)
    after = {each.name: set(each.after) for each in listed}
    assert after["prefect"] == {"databases"}
    assert after["deploy"] == {"pools"}
    assert [each.name for each in listed if isinstance(each, OneShot)] == [
        "initdb",
        "databases",
        "bucket",
        "pools",
        "deploy",
    ]
    workers = {each.name: each.pool for each in listed if isinstance(each, Service) and each.pool}
    assert workers == {
        "cpu-1": "cpu",
        "engine": "gpu-rollout",
        "gpu-rollout-1": "gpu-rollout",
        "trainer": "gpu-train",
        "gpu-train-1": "gpu-train",
    }


def test_what_the_shell_says_about_other_servers_does_not_reach_ours(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PREFECT_API_KEY", "MLFLOW_TRACKING_URI", "AWS_PROFILE", "PGHOST"):
        monkeypatch.setenv(name, "elsewhere")
    monkeypatch.setenv("http_proxy", "http://proxy:1")
    monkeypatch.setenv("no_proxy", "example.org")
    for each in programs(prepare(folder)):
        assert "elsewhere" not in each.env.values()
        if "http_proxy" in each.env:
            assert each.env["no_proxy"] == "example.org,127.0.0.1,localhost"


def test_a_client_gets_addresses_and_s3_keys_but_neither_database_nor_node(folder: Path) -> None:
    made = prepare(folder)
    client = environment(folder)
    assert client["PREFECT_API_URL"] == f"http://127.0.0.1:{made.ports['prefect']}/api"
    assert client["MLFLOW_TRACKING_URI"] == f"http://127.0.0.1:{made.ports['mlflow']}"
    assert client["AWS_ENDPOINT_URL_S3"] == f"http://127.0.0.1:{made.ports['s3']}"
    assert client["K3_ROOT"] == "s3://k3rl/runs"
    assert made.secrets["S3_SECRET_KEY"] in client.values()
    assert made.secrets["RESIDENT_TOKEN"] not in client.values()
    assert environment(folder, for_worker=True)["K3_RESIDENT_TOKEN"] == made.secrets["RESIDENT_TOKEN"]


def test_a_folder_without_servers_has_no_environment(folder: Path) -> None:
    with pytest.raises(RunError, match="no servers were ever started from this folder; `k3 up` starts them"):
        environment(folder)


@pytest.mark.parametrize("name", ["a#b", "a,b"])
def test_a_folder_that_a_server_could_not_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="the path must not hold a # or a comma; choose another --dir"):
        prepare(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_the_place_of_the_artifacts_stays_where_files_are(tmp_path: Path) -> None:
    assert artifacts(tmp_path, has_boto3=True) == "s3://k3rl/mlflow"
    assert artifacts(tmp_path, has_boto3=False) == str(tmp_path / "mlflow")
    assert artifacts(tmp_path, has_boto3=True) == str(tmp_path / "mlflow")


def test_a_worker_elsewhere_names_what_its_shell_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "K3_ROOT", "K3_RESIDENT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("K3_ROOT", "s3://a/b")
    with pytest.raises(ValueError, match="PREFECT_API_URL, MLFLOW_TRACKING_URI, K3_RESIDENT_TOKEN: not set; `k3 env"):
        worker_environment(folder, "10.0.0.7")
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "K3_RESIDENT_TOKEN"):
        monkeypatch.setenv(name, "http://there/api")
    given = worker_environment(folder, "10.0.0.7")
    assert given["K3_ENGINE_URL"].startswith("http://10.0.0.7:")
    engine, worker = stack.pool_programs("gpu-rollout", "gpu-rollout-b", given)
    assert engine.argv[-4:] == ["--host", "10.0.0.7", "--port", given["K3_ENGINE_URL"].rpartition(":")[2]]
    assert list(worker.argv)[7:13] == ["--pool", "gpu-rollout", "--name", "gpu-rollout-b", "--limit", "1"]


def test_the_unprivileged_user_needs_a_way_through_every_folder() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        inner = Path(top, "a", "b")
        inner.mkdir(parents=True)
        assert not postgres.can_enter(inner, "nobody")
        Path(top).chmod(0o711)
        assert postgres.can_enter(inner, "nobody")
        assert postgres.can_enter(inner / "not" / "yet", "nobody")
        Path(top, "a").chmod(0o700)
        assert not postgres.can_enter(inner, "nobody")
        assert postgres.can_enter(inner, pwd.getpwuid(os.geteuid()).pw_name)


def test_data_of_a_postgresql_that_is_gone_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "REACHABLE", folder.with_name("reachable"))
    data = prepare(folder).postgres.data
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("9\n")
    with pytest.raises(RunError, match="was made by PostgreSQL 9, which is not on this machine"):
        prepare(folder)


@pytest.fixture
def outside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Databases that a stack of the folder made where root keeps them, beside a reachable folder."""
    data = folder.with_name("reachable") / "postgres"
    monkeypatch.setattr(postgres, "data_folder", lambda _folder: data)
    major = postgres._major_of(prepare(folder).postgres.bin)
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text(f"{major}\n")
    return data


def test_a_folder_that_was_removed_by_hand_and_made_again_does_not_meet_the_old_databases(
    folder: Path, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(folder)
    assert outside.exists()  # of this very folder: it stays
    for number in (1, 2):
        shutil.rmtree(folder)
        prepare(folder)
        kept = outside.with_name(f"postgres.{number}")
        assert not outside.exists()
        assert (kept / "PG_VERSION").exists()
        assert capsys.readouterr().out == f"{outside}: of an earlier {folder} that is gone; kept as {kept}\n"
        shutil.copytree(kept, outside)


def test_databases_that_a_server_still_runs_on_are_not_set_aside(
    folder: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder)
    (outside / "postmaster.pid").write_text("4711\n")
    monkeypatch.setattr(postgres, "_is_postgres", lambda pid: pid == 4711)
    with pytest.raises(RunError, match="PostgreSQL 4711 still runs on it, for a folder that is gone: end that process"):
        prepare(folder)
    assert outside.exists()


def test_databases_whose_password_is_gone_are_refused(folder: Path, outside: Path) -> None:
    (folder / "secrets.env").unlink()
    with pytest.raises(
        ValueError, match=r"secrets.env: is gone, and .*/reachable/postgres cannot be opened without it"
    ):
        prepare(folder)
    assert outside.exists()


def test_the_database_keeps_what_was_committed_whatever_its_files_say() -> None:
    words = postgres.command(postgres.Place(Path("/bin"), Path("/data"), None), 5)
    for setting in ("fsync=on", "full_page_writes=on", "synchronous_commit=on", "listen_addresses=127.0.0.1"):
        assert words[words.index(setting) - 1] == "-c"


def test_a_database_is_ready_when_it_asks_who_is_there() -> None:
    answers = [b"E", b"R"]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    assert connection.recv(100).endswith(b"user\0k3\0database\0postgres\0\0")
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        check = postgres.accepts(listener.getsockname()[1])
        assert [check(0.0), check(0.0)] == [False, True]
        thread.join()
    assert not check(0.0)


class Prefect(http.server.BaseHTTPRequestHandler):
    """Enough of Prefect's API for work pools and workers."""

    pools: dict[str, int]
    beat: float

    def do_GET(self) -> None:
        self.answer(200, {"status": "fine"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/workers/filter"):
            moment = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(self.beat))
            self.answer(200, [{"name": "w", "last_heartbeat_time": moment}, {"name": "x", "last_heartbeat_time": None}])
        elif body["name"] in self.pools:
            self.answer(409, {"detail": "there is one"})
        else:
            self.pools[body["name"]] = body["concurrency_limit"]
            self.answer(201, {})

    def answer(self, status: int, body: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there: loopback must not be asked through it
    Prefect.pools = {"cpu": 3}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Prefect) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()


def test_pools_are_created_and_those_that_exist_keep_their_limit(api: str) -> None:
    work_pools.create_pools(api)
    work_pools.create_pools(api)
    assert Prefect.pools == {"cpu": 3, "gpu-rollout": 1, "gpu-train": 1}


def test_a_worker_counts_once_the_server_has_heard_from_its_process(api: str) -> None:
    Prefect.beat = 1000.0
    assert worker_beats(api, "cpu", "w")(999.0)
    assert not worker_beats(api, "cpu", "w")(1100.0)  # the beat is of the process before
    assert not worker_beats(api, "cpu", "x")(0.0)
    assert not worker_beats(api, "cpu", "unknown")(0.0)


def test_an_http_check_wants_status_200_and_the_word(api: str) -> None:
    assert http_answers(f"{api}/health")(0.0)
    assert all_of(http_answers(f"{api}/health", b'"fine"'), port_accepts("127.0.0.1", int(api.split(":")[2][:-4])))(0.0)
    assert not http_answers(f"{api}/health", b"other")(0.0)
    assert not http_answers("http://127.0.0.1:9/")(0.0)
    assert ask_prefect(api, "/health") == {"status": "fine"}
