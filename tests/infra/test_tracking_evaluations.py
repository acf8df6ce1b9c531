"""Policy versions, their evaluations and traces, in a database of this machine and on a server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from mlflow.entities import LoggedModel, SpanType, Trace

from infra.tracking import EvaluatedOn, Evaluation, Graded, Registered, Traced, Tracker
from infra.tracking.conversation import Called, Conversation, Turn
from infra.tracking.traces import TIMING
from k3core.types import (
    CriterionResult,
    Message,
    PolicyVersion,
    Prompt,
    Ref,
    SamplingParams,
    Score,
    ToolCall,
    Trajectory,
)

SUITE = "d" * 64
TAGS = {"rubric_sha256": "f" * 64, "base_sha256": "b" * 64}
PARAMS = {"step": 2, "learning_rate": 5e-4, "loss": "gspo", "seed": 0, "kind": "delta"}
METRICS = {"eval/reward": 0.25, "eval_criterion/file": 0.5, "train/grad_norm": 1.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mlflow-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
    try:
        _wait_until_healthy(f"http://127.0.0.1:{port}", process, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="module", params=["database", "server"])
def uri(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "database":
        return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    url: str = request.getfixturevalue("server")
    return url


def open_tracker(uri: str, run: str) -> Tracker:
    return Tracker.open(uri, "k3-tests", run, {}, {"k3.sweep": "s"}, {"suite": SUITE}, model_name=f"model-{run}")


def version(run: str, step: int = 2, uri: str = "s3://bucket/m.json") -> PolicyVersion:
    return PolicyVersion(run, step, "delta", Ref(uri, "c" * 64, 100), "a" * 64, None)


def models(tracker: Tracker) -> list[LoggedModel]:
    found = tracker.client.search_logged_models([tracker.experiment_id], f"source_run_id = '{tracker.run_id}'")
    return list(found)


def traces(tracker: Tracker) -> list[Trace]:
    where = f"request_metadata.`mlflow.sourceRun` = '{tracker.run_id}'"
    return list(tracker.client.search_traces(locations=[tracker.experiment_id], filter_string=where))


def evaluation(run: str) -> Evaluation:
    """One graded episode of two turns, and one that broke before its first."""
    trajectory = Trajectory(
        prompt_id="contracts/0", sample=1, seed=2**64 - 1, tokens_T=np.arange(9), loss_mask_T=np.arange(9) > 4,
        rollout_logprobs_T=np.zeros(9), routed_experts_TLk=np.zeros((9, 0, 0)), policy_step_T=np.zeros(9),
        sampling=SamplingParams(), stop_reason="finished", num_turns=2, num_tool_calls=2,
        deliverables={"memo.md": "§ 4: “ok”"},
    )  # fmt: skip
    criteria = (
        CriterionResult("C1", "file", "pass", "as asked"),
        CriterionResult("C2", "value", "fail", "45, not 40"),
        CriterionResult("C3", "tone", "abstained", "no judge"),
    )
    prompt = Prompt("contracts/0", "contracts", (), {})
    graded = Graded(prompt, trajectory, Score(0.5, 0.5, False, criteria))
    lost = replace(trajectory, sample=0, stop_reason="infrastructure_error", error="disk full", deliverables={})
    broken = Graded(prompt, lost, Score(None, None, None, (), "infrastructure_error"))
    huge = ToolCall("grep", {"pattern": "a", "limit": 10**30})
    spoilt = ToolCall("", None, "the index is missing")
    turns = (
        Turn(
            "…",
            Message("assistant", "Hm.", tool_calls=(huge, spoilt)),
            (Called(huge, "error: too large"), Called(spoilt, None)),
            4,
            3,
            -0.5,
        ),
        Turn("<|close|>?", None, (), 8, 2, -1.5),
    )
    opening = (Message("user", "Review."),)
    shown = (
        Traced("best", graded, Conversation(opening, turns)),
        Traced("infrastructure error", broken, Conversation(opening, ())),
    )
    policy = version(run)
    return Evaluation(policy, "suite", SUITE, "rule/1", True, 1_700_000_000_000, (broken, graded), shown)


def track(tracker: Tracker) -> Registered:
    """What one tracked step does to MLflow."""
    registered = tracker.register(version(tracker.run_name), TAGS, PARAMS)
    tracker.log_step(2, METRICS, 2_000, EvaluatedOn(registered.model_id, "suite", SUITE))
    tracker.log_evaluation(registered, evaluation(tracker.run_name))
    return registered


def test_a_version_is_a_model_with_its_metrics_on_the_evaluation_data_set(uri: str) -> None:
    tracker = open_tracker(uri, "model")
    registered = track(tracker)
    (model,) = models(tracker)
    assert (model.model_id, model.name, model.model_type) == (registered.model_id, "model-000002", "policy")
    assert model.status.name == "READY"
    assert model.params == {key: str(value) for key, value in PARAMS.items()}
    assert model.tags.items() >= {**TAGS, "k3.weights_uri": "s3://bucket/m.json", "k3.weights_sha256": "a" * 64}.items()
    measured = {(m.key, m.value, m.step, m.dataset_name, m.dataset_digest, m.run_id) for m in model.metrics}
    assert measured == {
        ("eval/reward", 0.25, 2, "suite", "d" * 36, tracker.run_id),
        ("eval_criterion/file", 0.5, 2, "suite", "d" * 36, tracker.run_id),
    }
    run = tracker.client.get_run(tracker.run_id)
    assert run.data.metrics == METRICS
    assert [(output.model_id, output.step) for output in run.outputs.model_outputs] == [(model.model_id, 2)]
    number = tracker.client.get_model_version("model-model", registered.number)
    assert number.tags["k3.model_id"] == model.model_id
    assert '"model-model"' in tracker.client.get_logged_model(model.model_id).tags["mlflow.modelVersions"]


def test_tracking_the_same_step_again_adds_nothing(uri: str) -> None:
    tracker = open_tracker(uri, "again")
    first = track(tracker)
    before = state(tracker)
    assert track(open_tracker(uri, "again")) == first
    assert state(tracker) == before


def state(tracker: Tracker) -> object:
    """All that there is of the run, but for clocks."""
    run = tracker.client.get_run(tracker.run_id)
    (table,) = tracker.client.list_artifacts(tracker.run_id, "evaluations")
    return (
        run.data.tags, run.data.metrics, run.outputs.to_dictionary(), table.path, table.file_size,
        [(len(model.metrics), model.tags, model.params) for model in models(tracker)],
        [v.version for v in tracker.client.search_model_versions(f"name = '{tracker.model_name}'")],
        [(m.step, m.value) for m in tracker.client.get_metric_history(tracker.run_id, "eval/reward")],
        sorted((t.info.trace_id, len(t.data.spans), len(t.info.assessments)) for t in traces(tracker)),
    )  # fmt: skip


def test_what_two_machines_created_at_once_stays_once(uri: str) -> None:
    """No lock reaches another machine: it finds nothing either, and creates the same a moment later."""
    tracker = open_tracker(uri, "twins")
    registered = track(tracker)
    (model,) = models(tracker)
    twin = tracker.client.create_logged_model(
        tracker.experiment_id, "twin", tracker.run_id, tags=dict(model.tags), params=dict(model.params)
    )
    number = tracker.client.get_model_version("model-twins", registered.number)
    tracker.client.create_model_version("model-twins", number.source, tracker.run_id, dict(number.tags))
    assert track(tracker) == registered
    assert [m.model_id for m in models(tracker)] == [model.model_id] != [twin.model_id]
    assert [v.version for v in tracker.client.search_model_versions("name = 'model-twins'")] == [number.version]
    assert tracker.client.get_registered_model("model-twins").aliases == {"candidate": number.version}


def test_weights_on_this_machine_can_be_registered_with_a_server_too(uri: str) -> None:
    tracker = open_tracker(uri, "local-path")
    local = version("local-path", uri="file:///runs/local-path/policies/000002/manifest.json")
    registered = tracker.register(local, TAGS, PARAMS)
    number = tracker.client.get_model_version("model-local-path", registered.number)
    assert number.source == (f"models:/{registered.model_id}" if uri.startswith("http") else local.weights.uri)
    assert number.tags["k3.weights_uri"] == local.weights.uri
    assert tracker.register(local, TAGS, PARAMS) == registered


def test_the_table_is_one_that_mlflow_reads(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)  # load_table asks it, whatever its client's own is
    tracker = open_tracker(uri, "table")
    track(tracker)
    table = tracker.client.load_table(tracker.experiment_id, "evaluations/step-000002.json", [tracker.run_id])
    assert list(table["episode"]) == ["contracts/0#0", "contracts/0#1"]
    assert [table["file"][1], table["reward"][1]] == ["pass", 0.5]
    assert table[["file", "reward"]].isna().all(axis=1).tolist() == [True, False]
    assert set(table["trace"]) == {trace.info.trace_id for trace in traces(tracker)}


def test_an_episode_is_a_trace_of_turns_calls_and_verdicts(uri: str) -> None:
    tracker = open_tracker(uri, "trace")
    registered = track(tracker)
    found = {trace.info.tags["k3.selected_as"]: trace for trace in traces(tracker)}
    trace = found["best"]
    root, *children = sorted(trace.data.spans, key=lambda span: span.start_time_ns)
    assert [(span.name, span.span_type, span.status.status_code.value) for span in children] == [
        ("turn 1", SpanType.CHAT_MODEL, "OK"),
        ("grep", SpanType.TOOL, "ERROR"),
        ("(no tool)", SpanType.TOOL, "ERROR"),
        ("turn 2", SpanType.CHAT_MODEL, "ERROR"),
        ("verdict: file", SpanType.EVALUATOR, "OK"),
        ("verdict: value", SpanType.EVALUATOR, "OK"),
        ("verdict: tone", SpanType.EVALUATOR, "OK"),
    ]
    assert {span.parent_id for span in children} == {root.span_id}
    assert root.get_attribute("k3.seed") == str(2**64 - 1)
    assert root.get_attribute("k3.weights_sha256") == "a" * 64
    assert root.outputs["deliverables"] == {"memo.md": "§ 4: “ok”"}
    assert children[0].get_attribute("k3.mean_logprob") == -0.5
    assert children[1].inputs == {"pattern": "a", "limit": str(10**30)}
    assert children[1].outputs == "error: too large"
    assert children[2].inputs == {"unreadable": "the index is missing"}
    assert trace.info.token_usage == {"input_tokens": 12, "output_tokens": 5, "total_tokens": 17}
    assert trace.info.tags["k3.trace"] == "trace/2/contracts/0/1"
    assert trace.info.request_metadata["mlflow.modelId"] == registered.model_id
    by_model = tracker.client.search_traces(locations=[tracker.experiment_id], model_id=registered.model_id)
    assert {t.info.trace_id for t in by_model} == {t.info.trace_id for t in found.values()}


def test_no_duration_is_made_up(uri: str) -> None:
    tracker = open_tracker(uri, "clock")
    track(tracker)
    for trace in traces(tracker):
        assert trace.info.request_time == 1_700_000_000_000
        assert not trace.info.execution_duration
        assert all(span.start_time_ns == span.end_time_ns for span in trace.data.spans)
        assert trace.data.spans[0].get_attribute("k3.timing") == TIMING


def test_a_missing_verdict_is_an_error_among_the_assessments_and_never_a_value(uri: str) -> None:
    tracker = open_tracker(uri, "verdicts")
    track(tracker)
    found = {trace.info.tags["k3.selected_as"]: trace.info for trace in traces(tracker)}
    said = {a.name: (a.feedback.value, a.error and a.error.error_code) for a in found["best"].assessments}
    assert said == {
        "reward": (0.5, None),
        "all_pass": (False, None),
        "file": (True, None),
        "value": (False, None),
        "tone": (None, "ABSTAINED"),
    }
    broken = found["infrastructure error"]
    assert broken.state.value == "ERROR"
    assert [(a.name, a.feedback.value, a.error.error_code) for a in broken.assessments] == [
        ("reward", None, "INFRASTRUCTURE_ERROR")
    ]
