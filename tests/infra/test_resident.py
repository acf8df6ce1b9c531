"""A resident and its caller, over a real connection."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import uvicorn

from infra.fence import Cancelled, fenced, pass_fence
from infra.resident.client import TOKEN, Resident, ResidentLost
from infra.resident.server import app
from infra.resident.stages import Progress, Stage, run_stage
from infra.store import Store
from k3core.errors import IntegrityError, RunError
from k3core.types import Ref

STAGE_MODULE = "stages_of_a_test"
released = threading.Event()
begun = threading.Event()


def steady(root: str, note: Ref, progress: Progress) -> Ref:
    progress(1, 2)
    progress(2, 2)
    return Store(root).put("result", note.sha256.encode())


def endless(root: str, progress: Progress) -> Ref:
    """Works until it is released, then writes: what a cancelled stage must not get to."""
    del progress
    begun.set()
    released.wait(20)
    return Store(root).put("late", b"too late")


def broken(kind: str) -> Ref:
    raise {"integrity": IntegrityError, "setting": ValueError, "diagnosis": RunError, "bug": KeyError}[kind]("why")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def resident(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resident]:
    module = ModuleType(STAGE_MODULE)
    for function in (steady, endless, broken):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, STAGE_MODULE, module)
    monkeypatch.setenv(TOKEN, "a-secret")
    released.clear()
    begun.clear()
    stages = {name: Stage("engine", STAGE_MODULE, name) for name in ("steady", "endless", "broken")}
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app("engine", stages), port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield Resident(f"http://127.0.0.1:{port}", start_s=10.0)
    released.set()
    server.should_exit = True
    thread.join(10)


def no_progress(done: int, of: int) -> None:
    del done, of


def test_a_stage_runs_at_the_resident_and_its_progress_arrives_here(resident: Resident, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    note = Ref("file:///note", "0" * 64, 3)
    arguments = {"root": str(tmp_path), "note": note}
    ref = resident.run_stage("steady", arguments, lambda done, of: seen.append((done, of)))
    assert Store(str(tmp_path)).get(ref) == note.sha256.encode()
    assert seen == [(1, 2), (2, 2)]
    assert resident.health()["finished"] == 1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("integrity", IntegrityError), ("setting", ValueError), ("diagnosis", RunError), ("bug", RuntimeError)],
)
def test_a_stage_s_error_keeps_the_class_that_decides_on_retries(
    resident: Resident, kind: str, expected: type[Exception]
) -> None:
    with pytest.raises(expected, match="why"):
        resident.run_stage("broken", {"kind": kind}, no_progress)


def test_a_caller_that_goes_away_cancels_its_stage_and_nothing_is_written_after_that(
    resident: Resident, tmp_path: Path
) -> None:
    code = (
        "from infra.resident.client import Resident\n"
        f"Resident({resident.url!r}).run_stage('endless', {{'root': {str(tmp_path)!r}}}, lambda d, o: None)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], env=os.environ)
    assert begun.wait(30)
    caller.kill()
    caller.wait()
    time.sleep(1.5)  # it says every second that it lives, and then finds nobody
    released.set()
    deadline = time.monotonic() + 10
    while resident.health()["running"] is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert resident.health()["cancelled"] == 1
    assert not (tmp_path / "late").exists()


def test_a_wrong_token_is_refused_and_named(resident: Resident) -> None:
    app_token = os.environ[TOKEN]
    code = (
        "from infra.resident.client import Resident\n"
        f"Resident({resident.url!r}).run_stage('broken', {{'kind': 'bug'}}, lambda d, o: None)"
    )
    wrong = {**os.environ, TOKEN: app_token + "x"}
    done = subprocess.run([sys.executable, "-c", code], env=wrong, capture_output=True, text=True)
    assert done.returncode != 0
    assert "401" in done.stderr
    assert TOKEN in done.stderr
    assert app_token not in done.stderr


def test_a_resident_that_is_not_there_is_lost_and_not_waited_for_for_ever() -> None:
    with pytest.raises(ResidentLost, match="nobody answers"):
        Resident(f"http://127.0.0.1:{free_port()}", start_s=0.6).run_stage("steady", {}, no_progress)


def test_a_resident_that_dies_in_the_middle_of_a_call_is_lost_and_gives_no_result(tmp_path: Path) -> None:
    port = free_port()
    code = f"""
import sys, types, threading, time, uvicorn
from infra.resident.server import app
from infra.resident.stages import Stage
from k3core.types import Ref
module = types.ModuleType("doomed")
def wait(root: str) -> Ref:
    open(root + "/begun", "w").close()
    time.sleep(60)
module.wait = wait
wait.__globals__["Ref"] = Ref
sys.modules["doomed"] = module
uvicorn.run(app("engine", {{"wait": Stage("engine", "doomed", "wait")}}), port={port}, log_level="error")
"""
    server = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, TOKEN: "t"})

    def kill_when_begun() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.05)
        server.kill()

    threading.Thread(target=kill_when_begun, daemon=True).start()
    os.environ[TOKEN] = "t"
    try:
        with pytest.raises(ResidentLost):
            Resident(f"http://127.0.0.1:{port}", start_s=30.0).run_stage("wait", {"root": str(tmp_path)}, no_progress)
    finally:
        del os.environ[TOKEN]
        server.kill()


def test_without_an_address_a_stage_runs_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("K3_ENGINE_URL", raising=False)
    with pytest.raises(TypeError, match="inputs"):  # the stage's own function was called, without its arguments
        run_stage("rollout", no_progress)


def test_behind_a_raised_fence_nothing_passes() -> None:
    cancelled = threading.Event()
    pass_fence()
    with fenced(cancelled):
        pass_fence()
        cancelled.set()
        with pytest.raises(Cancelled):
            pass_fence()
    pass_fence()
