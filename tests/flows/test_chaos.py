"""A small chaos test on the whole stack: `make chaos` is the long one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from flows.chaos.faults import FAULTS, schedule
from infra.postgres import data_folder


def test_every_kind_of_fault_comes_as_often_as_every_other() -> None:
    kinds = Counter(schedule(3 * len(FAULTS), Random(1)))
    assert set(kinds.values()) == {3}
    assert set(kinds) == set(FAULTS)
    assert len(set(schedule(len(FAULTS), Random(2)))) == len(FAULTS)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_run_under_random_faults_ends_with_the_very_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Nothing is lost, done twice, half written or left behind: `k3 chaos` ends with 1 if it is, and says what."""
    out = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "flows.cli", "chaos", "smoke", "steps=2", "evaluate.every=2"]
    folder = tmp_path / "k3"
    command += ["--faults", "5", "--per-run", "5", "--seed", "7", "--dir", str(folder), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2300)
    if (data := data_folder(folder)).parent != folder:  # no pytest cleans up there
        shutil.rmtree(data.parent, ignore_errors=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (trial,) = json.loads(out.read_text())["trials"]
    assert trial["ends"][-1] == "Completed"
    assert len(trial["faults"]) >= 3, "the run was over before the faults came"
