"""Track: what an iteration measured goes to MLflow, its version into the registry, and the champion is decided."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from infra import policies
from infra.config import RunConfig, TrackingConfig
from infra.config_rules import TRACKING_URI
from infra.parts import build_environment, eval_sampling, eval_suite, rubric_sha256
from infra.stages.context import Context, Inputs
from infra.stages.evaluate import find_evaluation, read_report
from infra.stages.graded import graded_episodes, judged_by
from infra.stages.publish import version_tags
from infra.stages.record import StageRecord, read_record
from infra.store import Store
from infra.tracking import EvaluatedOn, Evaluation, RunStatus, Traced, Tracker, select
from infra.tracking.conversation import conversation_of
from infra.version_chain import chain_of
from k3core.eval.compare import Comparison, allows_promotion, compare
from k3core.eval.suite import Suite
from k3core.types import PolicyVersion, Ref


@dataclass(frozen=True, slots=True)
class Tracked:
    """champion: (run, step) of the version with that alias now. decision: why it moved or stayed, for a person.
    proposal: why it should move, while a person has not approved it yet; else empty."""

    step: int
    metrics: Mapping[str, float]
    champion: tuple[str, int] | None
    decision: str
    proposal: str = ""


def tracking_uri(cfg: RunConfig) -> str:
    """The config's server, else the environment's, else an SQLite file below root."""
    named = cfg.tracking.mlflow_uri or os.environ.get(TRACKING_URI)
    return named or f"sqlite:///{Store(cfg.root).local_path('mlflow.db')}"


def open_tracker(inputs: Inputs, root: str, uri: str, tracking: TrackingConfig) -> Tracker:
    context = Context.open(inputs, root)
    cfg = context.cfg
    suite = eval_suite(cfg)
    environment = build_environment(cfg)
    params = {
        name: getattr(cfg, name) for name in ("seed", "model", "warm_start", "rollout", "train", "gspo", "reward")
    }
    digests = {
        suite.name: suite.sha256,
        "environment": environment.sha256,
        "rubric": rubric_sha256(suite),
        "tokenizer": inputs.tokenizer.sha256,
        "config": inputs.config.sha256,
    }
    tags = {"k3.root": root, **own_tags(tracking)}
    return Tracker.open(uri, tracking.experiment, cfg.run, params, tags, digests, model_name=tracking.model_name)


def own_tags(tracking: TrackingConfig) -> dict[str, str]:
    """The tags that a person, or a sweep, gave the run."""
    pairs = (tag.partition("=") for tag in tracking.tags)
    return {key: value for key, _, value in pairs}


def close_run(inputs: Inputs, root: str, uri: str, tracking: TrackingConfig, status: RunStatus) -> None:
    """A run that ends early does not stay RUNNING in MLflow; the next try reopens it."""
    open_tracker(inputs, root, uri, tracking).finish(status)


def track_step(
    inputs: Inputs,
    root: str,
    uri: str,
    tracking: TrackingConfig,
    records: Sequence[Ref],
    evaluation: Ref | None,
    confidence: float,
    approval: bool = False,
) -> Tracked:
    """All records of one policy step, publish the last of them, in one batch of metrics; a retry adds nothing.

    approval: a version that should become the champion waits for a person; `promote_step` makes it the champion then.
    """
    context = Context.open(inputs, root)
    stages = [read_record(context.store, ref) for ref in (*records, *([] if evaluation is None else [evaluation]))]
    published = next(record for record in stages if record.stage == "publish")
    policy, step = published.policy, published.step
    assert policy is not None
    suite = eval_suite(context.cfg)
    tracker = open_tracker(inputs, root, uri, tracking)
    tags = version_tags(inputs, root) | _origin_tags(context, policy, stages) | own_tags(tracking)
    registered = tracker.register(policy, tags, _how_it_was_made(context.cfg, policy, stages))
    metrics = {name: value for record in stages for name, value in record.metrics.items()}
    finished_ms = max(record.finished_ms for record in stages)
    tracker.log_step(step, metrics, finished_ms, EvaluatedOn(registered.model_id, suite.name, suite.sha256))
    tracker.note({f"k3.veto/{step}": record.notes["vetoes"] for record in stages if record.notes.get("vetoes")})
    decision = "not evaluated"
    if evaluation is not None:
        shown = _evaluation(context, policy, suite, stages[-1], evaluation, tracking.traces_per_evaluation)
        tracker.log_evaluation(registered, shown)
        promotes, decision = _decide(context, tracker, step, evaluation, confidence)
        if promotes and approval:
            return Tracked(step, metrics, tracker.champion(), f"{decision}; waits for approval", proposal=decision)
        if promotes:
            tracker.promote(step)
    return Tracked(step, metrics, tracker.champion(), decision)


def promote_step(inputs: Inputs, root: str, uri: str, tracking: TrackingConfig, step: int) -> tuple[str, int] | None:
    """The champion afterwards."""
    tracker = open_tracker(inputs, root, uri, tracking)
    tracker.promote(step)
    return tracker.champion()


def _how_it_was_made(cfg: RunConfig, policy: PolicyVersion, stages: Sequence[StageRecord]) -> dict[str, object]:
    """The parameters of the version as a model: what MLflow puts in columns when it compares models."""
    update = next((record for record in stages if record.stage == "update"), None)
    loss = "supervised" if update is None else "gspo"
    rate = cfg.warm_start.mixture_learning_rate if update is None else update.metrics["train/learning_rate"]
    return {
        "step": policy.step,
        "kind": policy.kind,
        "seed": cfg.seed,
        "mode": cfg.train.mode,
        "loss": loss,
        "learning_rate": rate,
    }


def _origin_tags(context: Context, policy: PolicyVersion, stages: Sequence[StageRecord]) -> dict[str, str]:
    """Which bytes the version is made of, and which engine and sampling its measurements are of."""
    chain = chain_of(context.store, policy)
    base = chain[0].weights_sha256
    if policy.kind == "adapter" and (below := policies.read_version(context.store, policy.run, 0)) is not None:
        base = below.weights_sha256
    tags = {
        "base_sha256": base,
        "delta_chain": " ".join(f"{manifest.step}:{manifest.weights_sha256[:12]}" for manifest in chain),
        "evaluation_sampling": json.dumps(asdict(eval_sampling(context.cfg))),
    }
    engines = [record.provenance["engine"] for record in stages if "engine" in record.provenance]
    return tags | ({"engine_build": json.dumps(engines[-1])} if engines else {})


def _evaluation(
    context: Context, policy: PolicyVersion, suite: Suite, record: StageRecord, ref: Ref, num_traces: int
) -> Evaluation:
    episodes = graded_episodes(context, suite, ref)
    tokenizer = context.tokenizer()
    judge, is_code = judged_by(context.cfg)
    return Evaluation(
        policy=policy,
        suite=suite.name,
        suite_sha256=suite.sha256,
        judge=judge,
        judge_is_code=is_code,
        started_ms=record.finished_ms - round(record.seconds * 1000),
        episodes=episodes,
        traces=tuple(
            Traced(role, episode, conversation_of(episode.trajectory, tokenizer))
            for role, episode in select(episodes, num_traces)
        ),
    )


def _decide(context: Context, tracker: Tracker, step: int, evaluation: Ref, confidence: float) -> tuple[bool, str]:
    """Promote when there is no champion, or when the paired interval over the same prompts lies above zero; and why."""
    champion = tracker.champion()
    if champion is None:
        return True, f"step {step} is the first champion"
    if champion == (context.cfg.run, step):
        return False, f"step {step} is the champion"
    name = "@".join(map(str, champion))
    earlier = find_evaluation(context.store, *champion)
    if earlier is None:
        return False, f"champion {name} stays: its evaluation is not in this store"
    before, after = read_report(context.store, earlier), read_report(context.store, evaluation)
    if before.suite_sha256 != after.suite_sha256 or before.sampling != after.sampling:
        return False, f"champion {name} stays: it was evaluated on another suite or with other sampling"
    result = compare(before, after, "reward", confidence)
    if allows_promotion(result):
        return True, f"step {step} replaces champion {name}: {_words(result)}"
    return False, f"champion {name} stays: {_words(result)}"


def _words(c: Comparison) -> str:
    return f"paired difference {c.difference:+.3f}, {c.confidence:.0%} interval [{c.ci_low:+.3f}, {c.ci_high:+.3f}]"
