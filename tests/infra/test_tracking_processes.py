"""Eight processes on a database that does not exist yet: what a person gets who starts eight runs at once."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

PROCESSES, STEPS = 8, 3

# The children are forked from a server that has imported MLflow once; they wait for each other before they begin.
SCRIPT = """
import multiprocessing, sys
from infra.tracking import EvaluatedOn, Tracker
from k3core.types import PolicyVersion, Ref

def work(uri, runs, barrier):
    barrier.wait()
    for run in runs:
        for step in range(3):
            tracker = Tracker.open(uri, "k3rl", run, {"seed": 0}, {"k3.root": "r"}, {"suite": "d" * 64})
            manifest = Ref(f"s3://b/{run}/{step}", "c" * 64, 1)
            policy = PolicyVersion(run, step, "base", manifest, "a" * 64, None)
            registered = tracker.register(policy, {}, {"step": step})
            on = EvaluatedOn(registered.model_id, "suite", "d" * 64)
            tracker.log_step(step, {"eval/reward": 0.5, "train/seconds": 1.0}, 1000 + step, on)
            tracker.champion()
        tracker.finish("FINISHED")

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["infra.tracking"])
    barrier = context.Barrier(8)
    jobs = [context.Process(target=work, args=(sys.argv[1], [f"run-{n}", "together"], barrier)) for n in range(8)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    print(*[job.exitcode for job in jobs])
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[MlflowClient, subprocess.CompletedProcess[str]]:
    """Every process tracks a run of its own, and then one that all of them track together."""
    folder: Path = tmp_path_factory.mktemp("eight")
    (folder / "eight.py").write_text(SCRIPT)
    uri = f"sqlite:///{folder}/fresh/mlflow.db"
    done = subprocess.run([sys.executable, "eight.py", uri], cwd=folder, capture_output=True, text=True, timeout=300)
    return MlflowClient(uri, uri), done


def test_eight_processes_on_a_fresh_database_end_well_and_in_silence(
    finished: tuple[MlflowClient, subprocess.CompletedProcess[str]],
) -> None:
    _, done = finished
    assert done.stdout.split() == ["0"] * PROCESSES, done.stdout + done.stderr
    assert [
        line for line in done.stderr.splitlines() if "Warning" not in line and "configure_mappers" not in line
    ] == []


def test_eight_processes_create_everything_once(
    finished: tuple[MlflowClient, subprocess.CompletedProcess[str]],
) -> None:
    client, _ = finished
    (experiment,) = [found for found in client.search_experiments() if found.name == "k3rl"]
    runs = client.search_runs([experiment.experiment_id])
    names = sorted([f"run-{n}" for n in range(PROCESSES)] + ["together"])
    assert sorted(run.data.tags["k3.run"] for run in runs) == names
    assert {run.info.status for run in runs} == {"FINISHED"}
    expected = Counter({(name, str(step)): 1 for name in names for step in range(STEPS)})
    models = client.search_logged_models([experiment.experiment_id])
    assert Counter((model.tags["k3.run"], model.tags["k3.step"]) for model in models) == expected
    versions = client.search_model_versions("name = 'policy'", max_results=1000)
    assert Counter((version.tags["k3.run"], version.tags["k3.step"]) for version in versions) == expected
    (together,) = [run for run in runs if run.data.tags["k3.run"] == "together"]
    history = client.get_metric_history(together.info.run_id, "eval/reward")
    assert [(metric.step, metric.value) for metric in history] == [(step, 0.5) for step in range(STEPS)]
    assert len(together.outputs.model_outputs) == STEPS
