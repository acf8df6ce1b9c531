"""The whole loop as a person runs it: `k3 train` in a process of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from infra import policies
from infra.ledger import Ledger
from infra.stages.evaluate import find_evaluation, read_trajectories
from infra.store import Store

STEPS = 2
SUMMARY_KEYS = {
    "seed", "updates", "prompts_eval", "samples_per_prompt", "reward_before", "reward_after", "reward_stderr",
    "all_pass_before", "all_pass_after", "control_reward_after", "expert_only_reward_after", "drift_k3_step0",
    "drift_max_abs_step0", "bytes_full", "bytes_delta_mean", "versions", "seconds_setup_excluded", "seconds_by_stage",
    "weights_sha256",
}  # fmt: skip


def command(root: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "flows.cli", "train", "smoke", f"root={root}", f"steps={STEPS}", *overrides]


def environment(root: Path, api: str) -> dict[str, str]:
    storage = {"PREFECT_LOCAL_STORAGE_PATH": str(root / ".prefect" / "results" / "smoke")}
    return {**os.environ, **storage, "PREFECT_API_URL": api, "PREFECT_HOME": str(root / ".prefect")}


def train(root: Path, api: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(root, *overrides), env=environment(root, api), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, prefect_api: str) -> Iterator[tuple[Path, str, str]]:
    """A run that nobody disturbed: its root, what it printed, and the server."""
    root = tmp_path_factory.mktemp("finished")
    return root, train(root, prefect_api).stdout, prefect_api


def summary(root: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((root / "smoke" / "report.json").read_text())
    return loaded


def mlflow_client(root: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{root}/mlflow.db", registry_uri=f"sqlite:///{root}/mlflow.db")


def metric_history(root: Path, name: str) -> list[tuple[int, float]]:
    client = mlflow_client(root)
    experiment = client.get_experiment_by_name("k3rl")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


def test_a_run_prints_before_and_after_and_the_commands_that_open_the_uis(finished: tuple[Path, str, str]) -> None:
    root, printed, api = finished
    assert "reward" in printed
    assert "->" in printed
    assert f"{root}/smoke/report.html" in printed
    commands = {
        line.split(":")[0]: line.split(": ", 1)[1].strip() for line in printed.splitlines() if " # then" in line
    }
    assert commands.keys() == {"MLflow"}
    assert f"Prefect:  {api.removesuffix('/api')}/runs" in printed
    assert f"ui --backend-store-uri sqlite:///{root}/mlflow.db" in commands["MLflow"]
    for line in commands.values():
        program = next(word for word in line.split() if word.endswith(("/prefect", "/mlflow")))
        assert os.access(program, os.X_OK), program


def test_the_report_has_exactly_the_promised_keys_and_a_page_and_a_curve(finished: tuple[Path, str, str]) -> None:
    root = finished[0]
    report = summary(root)
    assert report.keys() == SUMMARY_KEYS
    assert report["updates"] == STEPS
    assert report["versions"] == STEPS + 1
    assert (root / "smoke" / "report.html").stat().st_size > 10_000
    assert (root / "smoke" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_trainer_equals_engine_to_the_bit_before_the_first_update(finished: tuple[Path, str, str]) -> None:
    assert summary(finished[0])["drift_max_abs_step0"] == 0


def test_every_version_reconstructs_and_the_ledger_has_each_step_once(finished: tuple[Path, str, str]) -> None:
    root = finished[0]
    store = Store(str(root))
    checks = policies.verify(store, "smoke", range(STEPS + 1))
    assert [check.error for check in checks] == [None] * (STEPS + 1)
    assert [check.kind for check in checks] == ["base", "delta", "base"]
    entries = Ledger(store, "smoke").entries(STEPS + 5)
    assert [entry["step"] for entry in entries] == [1, 2]
    last = policies.read_version(store, "smoke", STEPS)
    assert last is not None
    assert entries[-1]["result"]["weights_sha256"] == last.weights_sha256 == summary(root)["weights_sha256"]


def test_every_version_stands_in_mlflow_with_its_identity(finished: tuple[Path, str, str]) -> None:
    client = mlflow_client(finished[0])
    versions = client.search_model_versions("name = 'policy'")
    assert sorted(int(version.tags["k3.step"]) for version in versions) == [0, 1, 2]
    for version in versions:
        assert {"k3.run", "k3.parent", "k3.kind", "k3.weights_sha256"} <= version.tags.keys()
        assert {"environment_sha256", "rubric_sha256", "tokenizer_sha256", "engine"} <= version.tags.keys()
    assert client.get_model_version_by_alias("policy", "candidate").tags["k3.step"] == "2"
    assert client.get_model_version_by_alias("policy", "champion").tags["k3.step"] in {"0", "1", "2"}
    assert [step for step, _ in metric_history(finished[0], "eval/reward")] == [0, 1, 2]
    assert [step for step, _ in metric_history(finished[0], "gspo/loss")] == [1, 2]


def test_the_agent_never_sees_the_rubric(finished: tuple[Path, str, str]) -> None:
    root = finished[0]
    store = Store(str(root))
    record = find_evaluation(store, "smoke", STEPS)
    assert record is not None
    assert all(len(t.tokens_T) > 0 for t in read_trajectories(store, record))
    transcripts = (root / "smoke" / "steps" / f"{STEPS:06d}" / "transcripts.txt").read_text()
    assert "PASS if" not in transcripts
    assert "task.json" not in transcripts


def test_the_same_command_again_repeats_no_side_effect(finished: tuple[Path, str, str]) -> None:
    root, _, api = finished
    run = root / "smoke"

    def files() -> dict[str, int]:
        made = [path for path in run.rglob("*") if path.is_file() and path.parent != run]
        return {str(path): path.stat().st_mtime_ns for path in made}

    before, reward = files(), metric_history(root, "rollout/reward")
    train(root, api)
    assert files() == before
    assert metric_history(root, "rollout/reward") == reward
    assert len(mlflow_client(root).search_model_versions("name = 'policy'")) == STEPS + 1


def test_a_changed_config_under_the_same_name_is_refused_key_by_key(finished: tuple[Path, str, str]) -> None:
    root, _, api = finished
    done = subprocess.run(
        command(root, "gspo.clip_low=0.02", "rollout.group_size=2"),
        env=environment(root, api), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert "gspo.clip_low = 0.01 (now 0.02)" in done.stderr
    assert "rollout.group_size = 4 (now 2)" in done.stderr


def test_more_steps_continue_a_finished_run(finished: tuple[Path, str, str]) -> None:
    """`steps` is the loop's business only: the versions that exist stay, the others follow."""
    root, _, api = finished
    before = summary(root)["weights_sha256"]
    train(root, api, "steps=3")
    assert summary(root)["updates"] == 3
    second = policies.read_version(Store(str(root)), "smoke", 2)
    assert second is not None
    assert second.weights_sha256 == before


def test_a_run_that_stopped_after_each_step_saw_the_same_batches_and_made_the_same_versions(
    finished: tuple[Path, str, str], tmp_path: Path
) -> None:
    root, _, api = finished
    for steps in range(1, STEPS + 1):
        train(tmp_path, api, f"steps={steps}", "control.enabled=false")
    straight, stopped = Store(str(root)), Store(str(tmp_path))
    for step in range(STEPS + 1):
        ours, theirs = (policies.read_version(store, "smoke", step) for store in (stopped, straight))
        assert ours is not None
        assert theirs is not None
        assert ours.weights_sha256 == theirs.weights_sha256
    batches = [
        [entry["batch_sha256"] for entry in Ledger(store, "smoke").entries(STEPS)] for store in (stopped, straight)
    ]
    assert batches[0] == batches[1]
    assert len(batches[0]) == STEPS


def train_killing(root: Path, api: str, rng: random.Random, kills_left: int) -> int:
    """The same command until it ends, killed with -9 at random moments while there are kills left; how many it took."""
    kills = 0
    while True:
        process = subprocess.Popen(
            command(root), env=environment(root, api), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            # The first seconds are imports: the moments lie in the work behind them.
            output, _ = process.communicate(timeout=rng.uniform(5.5, 9.0) if kills < kills_left else 300)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            continue
        assert process.returncode == 0, output[-3000:]
        return kills


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_runs_killed_ten_times_end_with_the_same_weights(finished: tuple[Path, str, str], tmp_path: Path) -> None:
    """Where a fast machine ends a run before its tenth kill, the other kills hit another run."""
    undisturbed, _, api = finished
    rng = random.Random(0)
    second = policies.read_version(Store(str(undisturbed)), "smoke", STEPS)
    assert second is not None
    kills = 0
    while kills < 10:
        root = tmp_path / f"after-{kills}-kills"
        taken = train_killing(root, api, rng, 10 - kills)
        assert taken > 0, "the machine is so fast that no kill hits: shorten the moments above"
        kills += taken
        assert summary(root)["weights_sha256"] == second.weights_sha256
        store = Store(str(root))
        assert [entry["step"] for entry in Ledger(store, "smoke").entries(STEPS + 5)] == [1, 2]
        assert [check.error for check in policies.verify(store, "smoke", range(STEPS + 1))] == [None] * (STEPS + 1)
        assert [step for step, _ in metric_history(root, "gspo/loss")] == [1, 2]
        assert len(mlflow_client(root).search_model_versions("name = 'policy'")) == STEPS + 1
