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
from flows.chaos.run import why_not_up
from infra.postgres import data_folder


def test_every_kind_of_fault_comes_as_often_as_every_other() -> None:
    kinds = Counter(schedule(3 * len(FAULTS), Random(1)))
    assert set(kinds.values()) == {3}
    assert set(kinds) == set(FAULTS)
    assert len(set(schedule(len(FAULTS), Random(2)))) == len(FAULTS)


def test_servers_that_did_not_start_are_named_with_the_last_words_of_their_log(tmp_path: Path) -> None:
    (tmp_path / "supervisor.log").write_text("no port is free\n")
    assert why_not_up(tmp_path) == "the servers did not start: the supervisor ended\n  no port is free"
    log = tmp_path / "mlflow.log"
    log.write_text("one\ntwo\n")
    service = {"name": "mlflow", "reason": "ended with code 1, 3 times", "log": str(log)}
    (tmp_path / "state.json").write_text(json.dumps({"failed": "mlflow", "services": [service]}))
    line = f"the servers did not start: mlflow ended with code 1, 3 times: see {log}"
    assert why_not_up(tmp_path) == f"{line}\n  one\n  two"


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
