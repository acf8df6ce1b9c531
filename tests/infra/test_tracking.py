from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.tracking import METRICS, Tracker, flatten
from k3core.types import PolicyVersion, Ref

TAGS = {"environment_sha256": "e" * 64, "rubric_sha256": "f" * 64, "engine": "embedded fp32"}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for the module: creating its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/db/mlflow.db"


def open_tracker(uri: str, run_name: str, **changes: object) -> Tracker:
    params: dict[str, object] = {"rl": {"seed": 0, "lr": 5e-4}, "name": "tiny"}
    return Tracker.open(
        uri, "k3-tests", run_name, params | changes, {"mlflow.note.content": "a test"}, {"eval suite": "d" * 64},
        model_name=f"model-{run_name}",
    )  # fmt: skip


def version(run: str, step: int, weights: str = "a") -> PolicyVersion:
    manifest = Ref(f"s3://bucket/{run}/steps/{step:06d}/policy/manifest.json", "c" * 64, 100)
    return PolicyVersion(run, step, "delta", manifest, weights * 64, None if step == 0 else step - 1)


def history(tracker: Tracker, metric: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in tracker.client.get_metric_history(tracker.run_id, metric)]


def test_a_retried_step_adds_no_history(uri: str) -> None:
    tracker = open_tracker(uri, "retry")
    metrics = {"rollout/reward": 0.25, "stop/finished": 1.0, "eval_criterion/C-001": 0.5}
    tracker.log_step(1, metrics, timestamp_ms=1_000)
    tracker.log_step(1, metrics, timestamp_ms=1_000)
    tracker.log_step(1, metrics | {"gspo/loss": -0.5}, timestamp_ms=1_000)
    assert history(tracker, "rollout/reward") == [(1, 0.25)]
    assert history(tracker, "eval_criterion/C-001") == [(1, 0.5)]
    assert history(tracker, "gspo/loss") == [(1, -0.5)]


def test_a_metric_that_is_not_listed_is_refused_before_anything_is_logged(uri: str) -> None:
    tracker = open_tracker(uri, "unlisted")
    for name in ("rollout/rewrad", "stop/bored", "eval_criterion/"):
        with pytest.raises(ValueError, match=name):
            tracker.log_step(1, {"rollout/reward": 1.0, name: 1.0}, timestamp_ms=1_000)
    assert history(tracker, "rollout/reward") == []


def test_a_nan_is_named_in_an_event_and_the_policy_of_that_step_can_still_be_registered(uri: str) -> None:
    tracker = open_tracker(uri, "nan")
    for _ in range(2):
        tracker.log_step(
            2, {"gspo/loss": math.nan, "train/grad_norm": math.inf, "rollout/reward": 0.5}, timestamp_ms=2_000
        )
    tracker.log_step(2, {"drift/numeric/k3_rollout_trainer": -math.inf}, timestamp_ms=2_001)
    assert tracker.register(version("nan", 2), TAGS).number == "1"

    run = tracker.client.get_run(tracker.run_id)
    assert (
        run.data.tags["k3.nonfinite/2"] == "drift/numeric/k3_rollout_trainer=-inf, gspo/loss=nan, train/grad_norm=inf"
    )
    assert run.data.metrics["tracking/nonfinite"] == 3
    assert run.data.metrics["rollout/reward"] == 0.5
    assert history(tracker, "gspo/loss") == history(tracker, "train/grad_norm") == []


def test_registering_twice_gives_one_version_with_the_alias_candidate(uri: str) -> None:
    tracker = open_tracker(uri, "register")
    assert tracker.register(version("register", 0), TAGS).number == "1"
    second = tracker.register(version("register", 1), TAGS)
    assert second.number == "2"
    assert tracker.register(version("register", 1), TAGS) == second

    aliases = tracker.client.get_registered_model("model-register").aliases
    assert {alias: str(number) for alias, number in aliases.items()} == {"candidate": "2"}
    registered = tracker.client.get_model_version("model-register", "2")
    assert len(tracker.client.search_model_versions("name = 'model-register'")) == 2
    assert registered.run_id == tracker.run_id
    assert registered.source == "s3://bucket/register/steps/000001/policy/manifest.json"
    assert registered.tags == {
        **TAGS,
        "k3.run": "register",
        "k3.step": "1",
        "k3.parent": "0",
        "k3.kind": "delta",
        "k3.weights_uri": "s3://bucket/register/steps/000001/policy/manifest.json",
        "k3.weights_sha256": "a" * 64,
        "k3.manifest_sha256": "c" * 64,
        "k3.model_id": second.model_id,
    }


def test_other_weights_under_a_registered_step_are_refused(uri: str) -> None:
    tracker = open_tracker(uri, "other-weights")
    tracker.register(version("other-weights", 1, "a"), TAGS)
    with pytest.raises(ValueError, match="with other weights"):
        tracker.register(version("other-weights", 1, "b"), TAGS)


def test_the_champion_moves_only_when_promoted(uri: str) -> None:
    tracker = open_tracker(uri, "champion")
    assert tracker.champion() is None
    for step in (0, 1, 2):
        tracker.register(version("champion", step), TAGS)
    tracker.promote(0)
    assert tracker.champion() == ("champion", 0)
    tracker.promote(2)
    assert tracker.champion() == ("champion", 2)
    with pytest.raises(ValueError, match="no registered policy of step 9"):
        tracker.promote(9)


def test_a_champion_is_named_with_its_run_so_that_two_runs_of_one_model_agree_on_it(uri: str) -> None:
    first = Tracker.open(uri, "k3-tests", "shared-1", {}, {}, {}, model_name="shared")
    second = Tracker.open(uri, "k3-tests", "shared-2", {}, {}, {}, model_name="shared")
    first.register(version("shared-1", 4), TAGS)
    first.promote(4)
    assert first.champion() == second.champion() == (first.run_name, 4)


def test_resuming_goes_on_in_the_same_run(uri: str) -> None:
    first = open_tracker(uri, "resume")
    first.log_step(1, {"rollout/reward": 0.1}, timestamp_ms=1_000)
    first.finish("FAILED")
    again = open_tracker(uri, "resume", name="tiny-longer", updates=40)
    again.log_step(2, {"rollout/reward": 0.2}, timestamp_ms=2_000)

    assert again.run_id == first.run_id
    assert history(again, "rollout/reward") == [(1, 0.1), (2, 0.2)]
    run = again.client.get_run(again.run_id)
    assert run.info.status == "RUNNING"
    assert run.data.params == {"rl.seed": "0", "rl.lr": "0.0005", "name": "tiny", "updates": "40"}
    assert run.data.tags["k3.resumed_with/name"] == "tiny-longer"
    assert [(i.dataset.name, i.dataset.digest, i.tags[0].value) for i in run.inputs.dataset_inputs] == [
        ("eval suite", "d" * 36, "d" * 64)
    ]
    again.finish("FINISHED")
    assert again.client.get_run(again.run_id).info.status == "FINISHED"


def test_a_run_that_two_machines_created_at_once_stays_once(uri: str) -> None:
    """No lock reaches another machine: it finds nothing either, and creates the run a moment later."""
    tracker = open_tracker(uri, "twins")
    twin = tracker.client.create_run(tracker.experiment_id, run_name="twins", tags={"k3.run": "twins"})
    assert open_tracker(uri, "twins").run_id == tracker.run_id
    assert tracker.client.get_run(twin.info.run_id).info.lifecycle_stage == "deleted"


def test_a_run_of_the_same_name_from_another_day_is_nobodys_twin(uri: str) -> None:
    tracker = open_tracker(uri, "yesterday")
    later_ms = tracker.client.get_run(tracker.run_id).info.start_time + 86_400_000
    other = tracker.client.create_run(tracker.experiment_id, start_time=later_ms, tags={"k3.run": "yesterday"})
    assert open_tracker(uri, "yesterday").run_id == tracker.run_id
    assert tracker.client.get_run(other.info.run_id).info.lifecycle_stage == "active"


def test_what_a_person_compares_first_is_logged_first(uri: str) -> None:
    tracker = open_tracker(uri, "order")
    tracker.log_step(0, {"publish/bytes_full": 1.0, "eval_criterion/a": 0.5, "eval/reward": 0.5}, timestamp_ms=1_000)
    assert list(tracker.client.get_run(tracker.run_id).data.metrics)[:2] == ["eval/reward", "eval_criterion/a"]


def test_two_run_names_are_two_runs(uri: str) -> None:
    assert open_tracker(uri, "one").run_id != open_tracker(uri, "two").run_id


def test_a_name_that_would_break_a_search_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="run name"):
        open_tracker(uri, "it's")


def test_the_report_is_uploaded_beside_the_database_and_not_below_the_current_directory(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = open_tracker(uri, "report")
    (tmp_path / "report.html").write_text("<p>done</p>")
    tracker.log_report(tmp_path / "report.html")
    assert [file.path for file in tracker.client.list_artifacts(tracker.run_id, "report")] == ["report/report.html"]
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_parameters_are_flattened_and_cut_to_the_limits() -> None:
    @dataclass(frozen=True)
    class Gspo:
        clip: tuple[float, float]

    assert flatten({"rl": {"gspo": Gspo((0.01, 0.015)), "judge": None}, "empty": {}, "long": "x" * 9000}) == {
        "rl.gspo.clip": "(0.01, 0.015)",
        "rl.judge": "None",
        "empty": "{}",
        "long": "x" * 6000,
    }


def test_a_criterion_id_that_mlflow_would_refuse_is_still_logged(uri: str) -> None:
    tracker = open_tracker(uri, "criterion")
    tracker.log_step(1, {"eval_criterion/cites § 4?": 0.5}, timestamp_ms=1_000)
    assert history(tracker, "eval_criterion/cites - 4-") == [(1, 0.5)]


def test_every_metric_is_area_slash_what_with_a_meaning() -> None:
    for name, meaning in METRICS.items():
        is_of_a_kind = name.startswith(("drift/numeric/", "drift/stale/"))
        assert name.count("/") == 1 + is_of_a_kind, name
        assert "\n" not in meaning
        assert len(meaning) > 10
