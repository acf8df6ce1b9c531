"""Child processes: their progress, their faults, and that none outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from infra.launch import ChildFailed, children_end_with_this, run_job


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test writes the module `job_under_test` that the child runs."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "job_under_test.py"


def ignore(_done: int, _of: int) -> None:
    pass


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def wait_until_dead(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def test_the_job_arrives_and_its_progress_comes_back(module: Path) -> None:
    module.write_text(
        "import json, sys\njob = json.load(sys.stdin)\nprint('progress', job['done'], 9)\nprint('noise')\n"
    )
    seen: list[tuple[int, int]] = []
    run_job("job_under_test", {"done": 4}, 60, lambda done, of: seen.append((done, of)))
    assert seen == [(4, 9)]


def test_a_child_that_fails_is_an_error_with_its_last_words(module: Path) -> None:
    module.write_text("raise SystemExit('the disk is full')\n")
    with pytest.raises(ChildFailed, match="job_under_test ended with code 1: the disk is full"):
        run_job("job_under_test", {}, 60, ignore)


def test_a_child_that_takes_too_long_is_ended_and_the_message_names_the_setting(module: Path) -> None:
    module.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(ChildFailed, match=r"took longer than 0.5 s \(tasks.timeout_s\)"):
        run_job("job_under_test", {}, 0.5, ignore)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_no_child_outlives_its_parent_however_that_dies(module: Path, tmp_path: Path, sent: signal.Signals) -> None:
    module.write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent("""
                from infra.launch import run_job
                run_job("job_under_test", {}, 600, print)
            """),
        ]
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    child = int((tmp_path / "pid").read_text())
    assert alive(child)
    parent.send_signal(sent)
    parent.wait(timeout=30)
    assert wait_until_dead(child)


def test_an_exception_in_the_body_ends_the_children_and_starts_no_more(module: Path, tmp_path: Path) -> None:
    module.write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    script = f"""
import threading, time, pathlib
from infra.launch import ChildFailed, children_end_with_this, run_job
ends = []
def arm():
    for _ in range(2):
        try:
            run_job("job_under_test", {{}}, 600, print)
        except ChildFailed as error:
            ends.append(str(error))
thread = threading.Thread(target=arm)
pid = pathlib.Path({str(tmp_path / "pid")!r})
try:
    with children_end_with_this():
        thread.start()
        while not pid.exists() or not pid.read_text():
            time.sleep(0.05)
        raise RuntimeError("the loop failed")
except RuntimeError:
    thread.join(20)
assert not thread.is_alive()
assert "ended with code -9" in ends[0], ends
assert ends[1] == "job_under_test was not started: the run is ending", ends
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert wait_until_dead(int((tmp_path / "pid").read_text()))


def test_after_a_body_that_ended_early_the_next_one_starts_its_children(module: Path) -> None:
    module.write_text("print('progress', 1, 1)\n")
    with pytest.raises(OSError, match="first"), children_end_with_this():
        raise OSError("first")
    seen: list[tuple[int, int]] = []
    with children_end_with_this():
        run_job("job_under_test", {}, 60, lambda done, of: seen.append((done, of)))
    assert seen == [(1, 1)]
