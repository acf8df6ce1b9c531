"""`k3 train` as a first-time user runs it, without a server of his own: many at once, and what survives kill -9."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, temporary_settings

from infra.embedded import find
from infra.flock import is_locked
from infra.run_lock import hold_run
from tasks.stage import discard_torn_results

RUNS = 8
# The smallest run that ends: the policy must write enough for some trajectory of a group to earn more than another.
TINY = (
    "smoke", "steps=1", "warm_start.steps=40", "rollout.prompts_per_step=4", "evaluate.prompts=2",
    "evaluate.samples=1", "control.enabled=false", "tasks.timeout_s=600",
)  # fmt: skip
MAPPED = """
import os, pathlib
from infra.embedded import join
server = join(pathlib.Path(os.environ["PREFECT_HOME"]))
server.wait_until_ready()
os.environ["PREFECT_API_URL"] = server.api_url
from prefect import flow, task

@task
def double(number):
    return 2 * number

@flow
def hundred_tasks():
    return sum(future.result() for future in double.map(range(100)))

assert hundred_tasks() == 9900
"""
# What the environment of a first-time user does not have, and that of other tests may.
OWN_SERVER = ("PREFECT_API_URL", "PREFECT_HOME", "PREFECT_LOCAL_STORAGE_PATH", "PREFECT_PROFILE", "K3_EMBEDDED_SERVER")


def environment(**more: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name not in OWN_SERVER}, **more}


def start(*arguments: str, output: Path, **more: str) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen([sys.executable, *arguments], env=environment(**more), stdout=file, stderr=file)


def train(root: Path, run: str, *overrides: str, output: Path) -> subprocess.Popen[bytes]:
    command = ("-m", "flows.cli", "train", *TINY, f"root={root}", f"run={run}", *overrides)
    return start(*command, output=output)


def until(holds: Callable[[], object], timeout_s: float = 300) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def left_behind(root: Path) -> list[str]:
    """Processes that have the folder in their command line: keeper, server, runs."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(root) in argument for argument in process.cmdline()):
                found.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
    return found


def states(root: Path) -> dict[str, list[str]]:
    """Of the flow runs by name, and of all task runs, as the database has them."""
    with sqlite3.connect(root / ".prefect" / "prefect.db") as database:
        flow_runs = database.execute("SELECT name, state_type FROM flow_run").fetchall()
        task_runs = database.execute("SELECT state_type FROM task_run").fetchall()
    found: dict[str, list[str]] = {"tasks": sorted({state for (state,) in task_runs})}
    for name, state in flow_runs:
        found.setdefault(name, []).append(state)
    return found


def pid_of(root: Path, who: str) -> int | None:
    """Of the server or of its keeper; None while there is no keeper."""
    state = root / ".prefect" / "server" / "server.json"
    try:
        return int(json.loads(state.read_text())[who])
    except FileNotFoundError:
        return None


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder where nothing ran yet, and in the end nothing runs any more."""
    root = tmp_path / "runs"
    yield root
    assert until(lambda: not left_behind(root), 30), left_behind(root)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_eight_first_runs_at_once_in_one_folder_and_a_hundred_mapped_tasks_all_complete(
    root: Path, tmp_path: Path
) -> None:
    names = [f"run{number}" for number in range(RUNS)]
    outputs = [tmp_path / name for name in (*names, "mapped")]
    processes = [
        train(root, name, f"seed={seed}", output=output)
        for seed, (name, output) in enumerate(zip(names, outputs, strict=False))
    ]
    processes.append(start("-c", MAPPED, output=outputs[-1], PREFECT_HOME=str(root / ".prefect")))
    codes = [process.wait(timeout=1100) for process in processes]
    printed = {output.name: output.read_text() for output in outputs}
    printed["server"] = (root / ".prefect" / "server" / "server.log").read_text()
    assert codes == [0] * (RUNS + 1), printed
    for name, text in printed.items():
        assert "locked" not in text, name
        assert "Traceback" not in text, name
    assert until(lambda: find(root / ".prefect") is None, 60)
    found = states(root)
    assert found.pop("tasks") == ["COMPLETED"]
    assert {name: found.get(name) for name in names} == {name: ["COMPLETED"] for name in names}
    assert len(found) == RUNS + 1


@pytest.mark.slow
def test_a_run_survives_kill_9_of_its_server_and_of_the_servers_keeper(root: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    process = train(root, "tough", "steps=2", output=output)
    for moment, who in (("tough: into", "server"), ("step   0/2", "server"), ("step   1/2", "keeper")):
        assert until(lambda moment=moment: moment in output.read_text() or process.poll() is not None)
        pid = pid_of(root, who)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert until(lambda pid=pid, who=who: pid_of(root, who) not in (pid, None), 60)
    assert process.wait(timeout=300) == 0, output.read_text()
    log = (root / ".prefect" / "server" / "server.log").read_text()
    assert log.count("ended with code -9 and is started again") == 2
    assert "Traceback" not in output.read_text()
    assert until(lambda: find(root / ".prefect") is None, 60)
    assert states(root)["tough"] == ["COMPLETED"]
    printed = output.read_text()
    assert printed.startswith("Prefect: http://127.0.0.1:")
    (later,) = [line for line in printed.splitlines() if line.startswith("Prefect:  ") and "server start" in line]
    settings, program = later.split()[1], later.split()[3]
    assert Path(settings.removeprefix("PREFECT_HOME=")).resolve() == root / ".prefect"
    assert os.access(program, os.X_OK)


@pytest.mark.slow
def test_kill_9_of_a_run_leaves_no_process_and_the_same_command_continues_it(root: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    process = train(
        root, "killed", "control.enabled=true", "control.expert_only=false", "control.sequences=128", output=output
    )
    assert until(lambda: "step   0/1" in output.read_text() or process.poll() is not None)
    process.kill()
    assert process.wait() == -signal.SIGKILL, output.read_text()
    assert until(lambda: not left_behind(root), 20), left_behind(root)
    assert not is_locked(root / "killed" / ".lock")
    again = train(
        root, "killed", "control.enabled=true", "control.expert_only=false", "control.sequences=128", output=output
    )
    assert again.wait(timeout=300) == 0, output.read_text()
    assert "step   1/1" in output.read_text()
    assert until(lambda: find(root / ".prefect") is None, 60)
    assert sorted(states(root)["killed"]) == ["COMPLETED", "CRASHED"]


def test_a_run_that_was_triggered_twice_is_refused_in_one_line_while_it_goes_on(root: Path, tmp_path: Path) -> None:
    hold_run(str(root), "twice", root / ".prefect")
    output = tmp_path / "output"
    assert train(root, "twice", output=output).wait(timeout=60) == 2
    (line,) = output.read_text().splitlines()
    assert line.startswith(f"run 'twice' in {root} is going on in process {os.getpid()} on ")
    assert not (root / ".prefect").exists()


@pytest.mark.parametrize("where", ["environment", "profile"])
def test_the_users_own_server_wins_and_nothing_is_started(tmp_path: Path, where: str) -> None:
    home, url = tmp_path / "runs" / ".prefect", "http://127.0.0.1:9/api"
    home.mkdir(parents=True)
    if where == "profile":
        (home / "profiles.toml").write_text(f'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "{url}"\n')
    own = {"PREFECT_API_URL": url} if where == "environment" else {}
    code = f"""
from flows.cli import _embed_prefect
_embed_prefect({str(tmp_path / "runs")!r}, "demo")
from prefect.settings import get_current_settings
print(get_current_settings().api.url, get_current_settings().results.local_storage_path)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(**own), capture_output=True, text=True)
    assert done.stdout.split() == [url, str(home / "results" / "demo")], done.stderr
    assert not (home / "server").exists()


def test_half_written_results_are_discarded_unless_they_are_being_written(tmp_path: Path) -> None:
    whole, torn, growing = tmp_path / "whole", tmp_path / "torn", tmp_path / "growing"
    whole.write_text('{"metadata": {}, "result": "x"}')
    torn.write_text('{"metadata": {}, "res')
    growing.write_text('{"metadata": {}')
    writer = threading.Timer(0.2, growing.write_text, ['{"metadata": {}, "result": "y"}'])
    writer.start()
    with temporary_settings({PREFECT_LOCAL_STORAGE_PATH: tmp_path}):
        assert discard_torn_results() == [torn]
    writer.join()
    assert sorted(tmp_path.iterdir()) == [growing, whole]
