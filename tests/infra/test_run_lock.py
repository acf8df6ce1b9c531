"""One training process a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.run_lock import hold_run

HOLDER = """
import pathlib, sys
from infra.run_lock import hold_run
hold_run(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))
print("held", flush=True)
sys.stdin.read()
"""


def holder(root: str, run: str, home: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, root, run, str(home)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("stored", ["on a disk", "elsewhere"])
def test_the_second_is_told_who_has_the_run_until_that_one_is_gone(tmp_path: Path, stored: str) -> None:
    root = str(tmp_path / "runs") if stored == "on a disk" else f"memory://{tmp_path}"
    first = holder(root, "demo", tmp_path / "home")
    with pytest.raises(
        ValueError, match=rf"run 'demo' in {root} is going on in process {first.pid} on .* since"
    ) as told:
        hold_run(root, "demo", tmp_path / "home")
    assert "\n" not in str(told.value)
    assert "run=NAME" in str(told.value)
    hold_run(root, "another", tmp_path / "home")
    first.kill()
    first.communicate()
    hold_run(root, "demo", tmp_path / "home")


def test_who_has_the_run_may_ask_again(tmp_path: Path) -> None:
    hold_run(str(tmp_path), "demo", tmp_path)
    hold_run(str(tmp_path), "demo", tmp_path)
    assert str(os.getpid()) in (tmp_path / "demo" / ".lock").read_text()
