"""The whole local stack once: up, killed, recovered, down. Half of its time is Prefect's and MLflow's imports."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import s3fs
from mlflow import MlflowClient

from flows.cli import main
from infra.checks import ask_prefect
from infra.descendants import MARK
from infra.stack import environment, load
from infra.supervisor import is_supervised, is_up, read_state

WAIT_S = 300.0


def k3(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flows.cli", *args], capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Of a stack that is up. Where PostgreSQL's user can reach it; a folder of pytest is closed to him."""
    top = Path(tempfile.mkdtemp(prefix="k3-", dir="/tmp"))
    top.chmod(0o711)
    folder = top / ".k3"
    try:
        started = k3("up", "--dir", str(folder))
        assert started.returncode == 0, started.stderr
        assert f'eval "$(k3 env --dir {folder})"' in started.stdout
        yield folder
    finally:
        k3("down", "--dir", str(folder))
        shutil.rmtree(top)


def services(folder: Path) -> dict[str, dict[str, Any]]:
    state = read_state(folder)
    assert state is not None
    return {each["name"]: each for each in state["services"]}


def processes(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK, "").startswith(f"{folder}#"):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_a_second_up_starts_nothing_that_is_healthy(folder: Path) -> None:
    before = services(folder)
    again = k3("up", "--dir", str(folder))
    assert again.returncode == 0
    assert again.stdout.startswith(f"already up in {folder}\n")
    assert {name: each["pid"] for name, each in services(folder).items()} == {
        name: each["pid"] for name, each in before.items()
    }


def test_no_secret_is_seen_from_outside(folder: Path) -> None:
    seen = [
        folder / "state.json",
        folder / "ports.json",
        *(folder / "logs").iterdir(),
        *(folder / "prefect").rglob("*"),
    ]
    texts = [path.read_bytes() for path in seen if path.is_file()]
    for process in psutil.process_iter():
        try:
            texts.append(" ".join(process.cmdline()).encode())
        except psutil.Error:
            continue
    for name, secret in load(folder).secrets.items():
        assert not [text for text in texts if secret.encode() in text], name


def test_status_shows_every_service_and_env_what_a_shell_needs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--dir", str(folder)]) == 0
    shown = capsys.readouterr().out
    for name in ("postgres", "s3", "prefect", "mlflow", "reaper", "cpu-1", "gpu-rollout-1", "gpu-train-1", "engine"):
        assert f"\n{name} " in shown
    assert main(["env", "--dir", str(folder)]) == 0
    assert "export PREFECT_API_URL=http://127.0.0.1:" in capsys.readouterr().out


def test_killed_servers_come_back_with_their_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = environment(folder)
    for name, value in client.items():
        monkeypatch.setenv(name, value)
    api = client["PREFECT_API_URL"]
    blob = os.urandom(1 << 20)
    s3fs.S3FileSystem(skip_instance_cache=True).pipe("k3rl/runs/blob", blob)
    run = MlflowClient().create_run("0")
    MlflowClient().log_metric(run.info.run_id, "a", 1.5)
    MlflowClient().log_text(run.info.run_id, "hello", "x.txt")
    ask_prefect(api, "/variables/", {"name": "kept", "value": "yes"})

    servers = ("postgres", "s3", "prefect", "mlflow", "cpu-1")
    for name in servers:
        os.kill(services(folder)[name]["pid"], signal.SIGKILL)
    wait_for(lambda: all(services(folder)[name]["restarts"] >= 1 for name in servers))
    wait_for(lambda: is_up(read_state(folder) or {"services": [{"state": "waiting"}]}))

    assert s3fs.S3FileSystem(skip_instance_cache=True).cat("k3rl/runs/blob") == blob
    again = MlflowClient().get_run(run.info.run_id)
    assert again.data.metrics == {"a": 1.5}
    with tempfile.TemporaryDirectory() as target:
        assert Path(MlflowClient().download_artifacts(run.info.run_id, "x.txt", target)).read_text() == "hello"
    assert [each["value"] for each in ask_prefect(api, "/variables/filter", {})] == ["yes"]
    limits = {each["name"]: each["concurrency_limit"] for each in ask_prefect(api, "/work_pools/filter", {})}
    assert limits == {"cpu": 8, "gpu-rollout": 1, "gpu-train": 1}


def test_down_leaves_the_data_but_no_process_and_delete_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert processes(folder)
    assert main(["down", "--dir", str(folder)]) == 0
    assert processes(folder) == []
    assert not is_supervised(folder)
    assert "stopped: postgres, s3, prefect, mlflow" in capsys.readouterr().out
    assert (folder / "postgres" / "PG_VERSION").exists()
    assert main(["status", "--dir", str(folder)]) == 1
    assert main(["down", "--dir", str(folder), "--delete", "--yes"]) == 0
    assert not folder.exists()


def test_a_start_that_fails_names_its_log_and_stops_everything() -> None:
    top = Path(tempfile.mkdtemp(prefix="k3-", dir="/tmp"))
    top.chmod(0o711)
    try:
        (top / "s3").mkdir()
        (top / "s3" / "filerldb2").write_text("not a database")  # `weed` gives up
        failed = k3("up", "--dir", str(top))
        assert failed.returncode == 1
        assert failed.stderr.splitlines()[-1].startswith("k3: s3 ended with code ")
        assert failed.stderr.splitlines()[-1].endswith(f"see {top}/logs/s3.log. Everything is stopped.")
        assert processes(top) == []
    finally:
        shutil.rmtree(top)


def test_deleting_needs_a_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    (tmp_path / "ports.json").write_text("{}")
    assert main(["down", "--dir", str(tmp_path), "--delete"]) == 1
    assert capsys.readouterr().out.endswith("\nnothing is removed\n")
    assert (tmp_path / "ports.json").exists()


def test_deleting_a_folder_of_somebody_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("")
    assert main(["down", "--dir", str(tmp_path), "--delete", "--yes"]) == 1
    assert "no servers were ever started from this folder; nothing is removed" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


def test_an_unknown_pool_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "gpu"]) == 2
    assert capsys.readouterr().err.startswith("k3 worker: Invalid value for POOL: expected one of cpu, gpu-rollout, ")
