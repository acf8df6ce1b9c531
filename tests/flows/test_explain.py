"""`k3 explain`, `k3 rescore` and `k3 retrain` as a person uses them, on one small run that the real stages made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from flows.cli import main
from flows.redo import run_rescore, run_retrain
from flows.stages import NothingToLearn
from infra import policies
from infra.branch import find_origin
from infra.config import load
from infra.pool import _pools
from infra.stages.prepare import prepare_run
from infra.stages.publish import publish_step
from infra.stages.record import find_record, read_record
from infra.stages.rollout import rollout_step
from infra.stages.score import score_step
from infra.stages.update import update_step
from infra.stages.warm_start import warm_start
from infra.store import Store
from k3core.types import PolicyVersion, Ref

STEPS = 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Versions 0 to 2 of run `smoke`, without Prefect and without evaluations. No test changes it."""
    root = str(tmp_path_factory.mktemp("runs"))
    settings = [f"root={root}", "warm_start.steps=50", "warm_start.checkpoint_every=50"]
    _pools.clear()
    store, inputs = Store(root), prepare_run(load("smoke", settings))
    policy = published(store, publish_step(inputs, root, warm_start(inputs, root), None))
    optimizer: Ref | None = None
    for _ in range(STEPS):
        scores = score_step(inputs, root, rollout_step(inputs, root, policy, 0), 0)
        trained = update_step(inputs, root, policy, scores, optimizer)
        optimizer = read_record(store, trained).outputs["optimizer"]
        policy = published(store, publish_step(inputs, root, trained, policy))
    return root


def published(store: Store, record: Ref) -> PolicyVersion:
    version = read_record(store, record).policy
    assert version is not None
    return version


def version(root: str, run: str, step: int) -> PolicyVersion:
    found = policies.read_version(Store(root), run, step)
    assert found is not None
    return found


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout and stderr of a command."""

    def run(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(args))
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def test_the_tree_reads_from_the_version_down_to_the_warm_start(root: str, printed: Any) -> None:
    code, out, err = printed("explain", "smoke", "--root", root)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    order = ["smoke@2  base", "update  clipped", "scores  reward", "rollouts  8 prompts x 4", "by smoke@1"]
    order += ["smoke@1  delta on smoke@0", "smoke@0  base", "warm start  50 supervised steps", "config of smoke: "]
    at = [next(n for n, line in enumerate(lines) if words in line) for words in order]
    assert at == sorted(at)
    assert lines[-1].endswith(": all are what they must be")


def test_versions_beyond_the_depth_are_a_line_each(root: str, printed: Any) -> None:
    _, out, _ = printed("explain", "smoke@2", "--depth", "1", "--root", root)
    assert sum("rollouts  8 prompts" in line for line in out.splitlines()) == 1
    rows = [line.split() for line in out.splitlines() if line.strip().startswith("smoke@")]
    assert [row[0] for row in rows] == ["smoke@2", "smoke@1", "smoke@0"]
    assert rows[1][1] == "delta"
    assert rows[2][2:4] == ["warm", "start"]
    assert rows[1][-1] == version(root, "smoke", 1).weights_sha256[:8]


def test_json_parses_and_leads_from_the_version_to_every_file(root: str, printed: Any) -> None:
    code, out, err = printed("explain", "smoke@2", "--json", "--root", root)
    assert (code, err) == (0, "")
    found = json.loads(out)
    nodes = {node["id"]: node for node in found["nodes"]}
    reached, waiting = set(), [found["root"]]
    while waiting:
        at = waiting.pop()
        if at not in reached:
            reached.add(at)
            waiting += [*nodes[at]["made_of"].values(), *nodes[at]["made"].values()]
    assert reached == nodes.keys()
    files = {path.as_uri() for path in Path(root, "smoke", "steps").rglob("*") if path.is_file()}
    assert files <= {node["ref"]["uri"] for node in nodes.values() if node["ref"]}


def test_what_is_missing_is_named_with_exit_code_1(root: str, printed: Any) -> None:
    (payload,) = Path(root, "smoke/policies/000001").glob("payload-*")
    data = payload.read_bytes()
    payload.unlink()
    try:
        code, out, _ = printed("explain", "smoke@2", "--root", root)
        assert code == 1
        assert f"missing: {payload.as_uri()}: missing; expected {len(data)} bytes (payload of smoke@1)" in out
        assert "payload  0" not in out
        code, out, err = printed("explain", "smoke@2", "--json", "--root", root)
        assert code == 1
        assert payload.as_uri() in err
        assert json.loads(out)["nodes"]
        code, out, _ = printed("explain", "smoke@2", "--no-check", "--root", root)
        assert code == 0
        assert "files not read (--check reads them)" in out
    finally:
        payload.write_bytes(data)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["explain", "smoke@9"], "run 'smoke' has no version 9: it has versions up to 2"),
        (["explain", "nosuch"], "{root}: run 'nosuch' has no version here"),
        (["rescore", "reward.all_pass_weight=0.5"], "k3 rescore: Invalid value for RUN@STEP: name a version."),
        (["retrain", "smoke@1", "smoke@2"], "k3 retrain: Invalid value for RUN@STEP: one version at a time, got 2."),
        (["retrain", "smoke@x"], "k3 retrain: Invalid value for RUN@STEP: expected RUN@STEP or RUN, got 'smoke@x'."),
    ],
)
def test_what_makes_no_sense_is_one_line(args: list[str], line: str, root: str, printed: Any) -> None:
    code, out, err = printed(*args, "--root", root)
    assert (code, out) == (2, "")
    assert err.startswith(line.format(root=root))
    assert err.count("\n") == 1


@pytest.mark.usefixtures("prefect_api")
def test_rescoring_with_the_same_rubric_changes_nothing(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_rescore(root, [("smoke", 1), ("smoke", 2)], [], "same") == 0
    out = capsys.readouterr().out
    assert out.count("0 of 32 episodes have another grade, 0 of them another verdict") == STEPS
    store = Store(root)
    for step in (1, 2):
        old = read_record(store, find_origin(store, root, "smoke", step).score)
        new = find_record(store, f"same/steps/{step - 1:06d}/score-0.json")
        assert new is not None
        assert new[0].outputs["groups"].sha256 == old.outputs["groups"].sha256


@pytest.mark.usefixtures("prefect_api")
def test_another_reward_is_shown_episode_by_episode_and_explained(root: str, printed: Any, capsys: Any) -> None:
    assert run_rescore(root, [("smoke", 2)], ["reward.all_pass_weight=0.9"], None) == 0
    out = capsys.readouterr().out
    assert "smoke-rescore-1" in out
    assert "rollout/reward" in out
    assert " 0.133 -> 0.017" in out
    assert "k3 retrain smoke@2 reward.all_pass_weight=0.9" in out
    code, out, _ = printed("explain", "smoke-rescore-1", "--root", root)
    assert code == 0
    assert out.startswith("score smoke-rescore-1@1")
    assert "by smoke@1" in out


@pytest.mark.usefixtures("prefect_api")
def test_retraining_with_the_same_settings_gives_the_same_weights_and_links_back(root: str, capsys: Any) -> None:
    assert run_retrain(root, "smoke", None, [], None) == 0
    out = capsys.readouterr().out
    new = version(root, "smoke-retrain-1", 2)
    assert new.weights_sha256 == version(root, "smoke", 2).weights_sha256
    assert f"smoke-retrain-1@2: weights sha256 {new.weights_sha256}, {new.weights.uri}" in out
    assert "k3 compare smoke@2 smoke-retrain-1@2" in out
    store = Store(root)
    pinned = store.read_manifest("smoke-retrain-1/run.json")
    assert pinned is not None
    origin = find_origin(store, root, "smoke", 2)
    assert (pinned["from"]["run"], pinned["from"]["step"]) == ("smoke", 2)
    assert Ref(**pinned["from"]["record"]) == origin.update
    client = MlflowClient(tracking_uri=f"sqlite:///{root}/mlflow.db")
    (run,) = client.search_runs(["1"], "tags.`k3.run` = 'smoke-retrain-1'")
    assert run.data.tags["k3.from"] == "smoke@2"
    assert run.info.status == "FINISHED"


@pytest.mark.usefixtures("prefect_api")
def test_retraining_with_another_loss_shows_both_and_leaves_the_old_run_alone(root: str, capsys: Any) -> None:
    files = {path: path.read_bytes() for path in Path(root, "smoke").rglob("*.json") if path.name != "pins.json"}
    settings = ["gspo.clip_low=0.0001", "gspo.clip_high=0.0001", "train.learning_rate=2e-3"]
    assert run_retrain(root, "smoke", 1, settings, "hot") == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["train/learning_rate"] == ["0.0005", "0.002", "+0.0015"]
    assert float(rows["gspo/clip_fraction"][1]) > float(rows["gspo/clip_fraction"][0])
    assert rows["weights"][-1] == "other"
    assert version(root, "hot", 1).weights_sha256 != version(root, "smoke", 1).weights_sha256
    assert {path: path.read_bytes() for path in files} == files


@pytest.mark.usefixtures("prefect_api")
def test_rewards_without_variance_end_a_retraining_with_a_diagnosis(root: str) -> None:
    """No episode of so weak a policy passes everything."""
    with pytest.raises(NothingToLearn, match=r"smoke@2: with these rewards no group .* change reward\.\*"):
        run_retrain(root, "smoke", 2, ["reward.all_pass_weight=1.0"], "flat")
    assert policies.read_version(Store(root), "flat", 2) is None
