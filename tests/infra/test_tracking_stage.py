"""The track stage on the records of a run: what of them reaches MLflow, and what a retry adds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlflow.tracking import MlflowClient

from infra.config import RunConfig, load
from infra.parts import eval_sampling, eval_suite
from infra.policies import publish
from infra.records import encode
from infra.stages.context import Context, Inputs
from infra.stages.evaluate import read_report
from infra.stages.graded import SCORES, graded_episodes
from infra.stages.prepare import prepare_run
from infra.stages.record import StageRecord, read_record, stage_key, write_record
from infra.stages.track import Tracked, track_step, tracking_uri
from infra.store import Store
from k3core.chat import generation_stub, render_messages, render_turn
from k3core.checkpoint.tensors import from_torch
from k3core.rewards.judge import RuleJudge, grade
from k3core.tokenizer import Tokenizer
from k3core.types import EvalReport, Message, PolicyVersion, Prompt, Ref, Score, ToolCall, Trajectory

MEMO = "file nda.md\nclause 1\nvalue 5\nverdict ok\nfallback 10\n"
FINISH = Message("assistant", "", tool_calls=(ToolCall("finish", {}),))


@dataclass(frozen=True, slots=True)
class Run:
    cfg: RunConfig
    inputs: Inputs
    store: Store
    records: tuple[Ref, ...]
    evaluation: Ref

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri(self.cfg), tracking_uri(self.cfg))

    def track(self) -> Tracked:
        cfg = self.cfg
        return track_step(
            self.inputs, cfg.root, tracking_uri(cfg), cfg.tracking, self.records, self.evaluation, confidence=0.95
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Step 1 of a run, a delta: an update that refused a minibatch, its publication, its evaluation."""
    root: Path = tmp_path_factory.mktemp("track")
    cfg = load("smoke", [f"root={root}", 'tracking.tags=["k3.sweep=s"]', "tracking.traces_per_evaluation=2"])
    inputs, store = prepare_run(cfg), Store(str(root))
    parent: PolicyVersion | None = None
    for step in range(2):
        weights = from_torch({"w": torch.full((64, 64), 1.0 + step)})
        parent, _ = publish(store, cfg.run, step, weights, parent, full_every=10, level=3, tags={})
    assert parent is not None
    update = record("update", {"train/learning_rate": 5e-4}, notes={"vetoes": "minibatch 0: the loss is nan"})
    published = record("publish", {"publish/seconds": 1.0}, policy=parent)
    records = tuple(write_record(store, one) for one in (update, published))
    return Run(cfg, inputs, store, records, evaluation(cfg, inputs, store))


def record(stage: str, metrics: dict[str, float], **fields: Any) -> StageRecord:
    values: dict[str, Any] = {"outputs": {}, **fields}
    return StageRecord(stage, "smoke", 1, metrics=metrics, seconds=2.0, finished_ms=1_700_000_002_000, **values)


def evaluation(cfg: RunConfig, inputs: Inputs, store: Store) -> Ref:
    """Sample 0 of each prompt delivers a memo, sample 1 broke."""
    tokenizer, suite = Context.open(inputs, cfg.root).tokenizer(), eval_suite(cfg)
    trajectories = [episode(tokenizer, prompt, sample, cfg) for prompt in suite.prompts for sample in range(2)]
    scores: dict[str, list[Score]] = {prompt.id: [] for prompt in suite.prompts}
    prompts = {prompt.id: prompt for prompt in suite.prompts}
    for t in trajectories:
        scores[t.prompt_id].append(grade(prompts[t.prompt_id], t, RuleJudge(), cfg.reward))
    report = EvalReport(
        run=cfg.run, step=1, label="policy", suite_sha256=suite.sha256, sampling=eval_sampling(cfg),
        rewards={key: tuple(s.value for s in members) for key, members in scores.items()},
        fractions={key: tuple(s.fraction for s in members) for key, members in scores.items()},
        all_pass={key: tuple(s.all_pass for s in members) for key, members in scores.items()},
        criteria_pass_rate={"file": 0.5}, stop_reasons={"finished": 1}, mean_turns=1.0,
    )  # fmt: skip
    outputs = {
        "report": store.put(stage_key(cfg.run, 1, "evaluate.zst"), encode(report)),
        "trajectories": store.put(stage_key(cfg.run, 1, "evaluate-trajectories.zst"), encode(tuple(trajectories))),
    }
    metrics = {"eval/reward": 0.1, "eval/reward_stderr": 0.01, "eval_criterion/file": 0.5}
    made = replace(record("evaluate", metrics, outputs=outputs), provenance={"engine": {"class": "K3Engine"}})
    return write_record(store, made)


def episode(tokenizer: Tokenizer, prompt: Prompt, sample: int, cfg: RunConfig) -> Trajectory:
    context = [*render_messages(prompt.messages, tokenizer), *generation_stub(tokenizer, False)]
    sampled = render_turn(FINISH, tokenizer, False) if sample == 0 else []
    tokens = np.array([*context, *sampled], dtype=np.int32)
    mask = np.arange(len(tokens)) >= len(context)
    return Trajectory(
        prompt_id=prompt.id, sample=sample, seed=sample, tokens_T=tokens, loss_mask_T=mask,
        rollout_logprobs_T=np.where(mask, -0.5, 0.0).astype(np.float32),
        routed_experts_TLk=np.zeros((len(tokens), 0, 0), dtype=np.uint8),
        policy_step_T=np.where(mask, 1, -1).astype(np.int32), sampling=eval_sampling(cfg),
        stop_reason="finished" if sample == 0 else "infrastructure_error", num_turns=1 - sample, num_tool_calls=0,
        deliverables={"memo.md": MEMO} if sample == 0 else {}, error=None if sample == 0 else "disk full",
    )  # fmt: skip


@pytest.fixture(scope="module")
def tracked(run: Run) -> Tracked:
    return run.track()


def test_a_version_says_what_it_is_made_of_and_how(run: Run, tracked: Tracked) -> None:
    assert tracked.decision == "step 1 is the first champion"
    (model,) = run.client.search_logged_models(["1"])
    assert model.params == {
        "step": "1", "kind": "delta", "seed": "0", "mode": "full", "loss": "gspo", "learning_rate": "0.0005",
    }  # fmt: skip
    base, delta = (model.tags["delta_chain"].split(" ")[n] for n in (0, 1))
    assert (base[:2], delta[:2]) == ("0:", "1:")
    assert model.tags["base_sha256"].startswith(base[2:])
    assert model.tags["k3.weights_sha256"].startswith(delta[2:])
    assert model.tags["engine_build"] == '{"class": "K3Engine"}'
    assert model.tags["k3.sweep"] == run.client.search_runs(["1"])[0].data.tags["k3.sweep"] == "s"
    for name in ("rubric_sha256", "environment_sha256", "tokenizer_sha256", "config_sha256", "evaluation_sampling"):
        assert model.tags[name]
    suite = eval_suite(run.cfg)
    assert {(m.dataset_name, m.dataset_digest) for m in model.metrics} == {(suite.name, suite.sha256[:36])}


def test_a_refused_minibatch_is_told_with_its_reason(run: Run, tracked: Tracked) -> None:
    del tracked
    assert run.client.search_runs(["1"])[0].data.tags["k3.veto/1"] == "minibatch 0: the loss is nan"


def test_the_chosen_episodes_are_traces_with_the_verdicts_of_the_rules(run: Run, tracked: Tracked) -> None:
    del tracked
    traces = run.client.search_traces(locations=["1"])
    assert {trace.info.tags["k3.selected_as"] for trace in traces} == {"best", "worst"}
    for trace in traces:
        assert trace.info.request_time == 1_700_000_000_000
        names = [span.name for span in trace.data.spans]
        assert names[:3] == ["episode", "turn 1", "finish"]
        assert names[3:] == [
            f"verdict: {a.name}" for a in trace.info.assessments if a.name not in ("reward", "all_pass")
        ]


def test_a_retry_adds_nothing(run: Run, tracked: Tracked) -> None:
    again = run.track()
    assert again == replace(tracked, decision="step 1 is the champion")
    assert len(run.client.search_logged_models(["1"])) == 1
    assert len(run.client.search_model_versions("name = 'policy'")) == 1
    assert len(run.client.search_traces(locations=["1"])) == 2


def test_verdicts_that_the_evaluation_kept_are_taken_as_they_are(run: Run) -> None:
    context, suite = Context.open(run.inputs, run.cfg.root), eval_suite(run.cfg)
    by_rules = graded_episodes(context, suite, run.evaluation)
    kept = tuple(replace(episode.score, value=0.75) for episode in by_rules)
    old = write_record(run.store, record("evaluate", {}, outputs=outputs_with(run, kept)), "evaluate-kept")
    assert tuple(episode.score for episode in graded_episodes(context, suite, old)) == kept


def outputs_with(run: Run, scores: tuple[Score, ...]) -> dict[str, Ref]:
    outputs = dict(read_record(run.store, run.evaluation).outputs)
    return outputs | {SCORES: run.store.put(stage_key("smoke", 1, "evaluate-scores.zst"), encode(scores))}


def test_a_grade_that_the_rules_do_not_give_again_keeps_its_number_and_has_no_verdicts(run: Run) -> None:
    """Another judge gave it: what the rules say now is not why."""
    context, suite = Context.open(run.inputs, run.cfg.root), eval_suite(run.cfg)
    report = read_report(run.store, run.evaluation)
    first = suite.prompts[0].id
    altered = replace(report, rewards={**report.rewards, first: (0.125, None)})
    outputs = dict(read_record(run.store, run.evaluation).outputs)
    outputs["report"] = run.store.put(stage_key("smoke", 1, "altered.zst"), encode(altered))
    ref = write_record(run.store, record("evaluate", {}, outputs=outputs), "evaluate-altered")
    score, broken = (episode.score for episode in graded_episodes(context, suite, ref)[:2])
    assert (score.value, score.criteria, score.reason) == (0.125, (), None)
    assert (broken.value, broken.reason) == (None, "infrastructure_error")
