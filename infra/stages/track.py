"""Track: what an iteration measured goes to MLflow, its version into the registry, and the champion is decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra.config import RunConfig, TrackingConfig
from infra.parts import build_environment, eval_suite, rubric_sha256
from infra.stages.context import Context, Inputs
from infra.stages.evaluate import find_evaluation, read_report
from infra.stages.publish import version_tags
from infra.stages.record import read_record
from infra.store import Store
from infra.tracking import RunStatus, Tracker
from k3core.eval.compare import Comparison, allows_promotion, compare
from k3core.types import Ref


@dataclass(frozen=True, slots=True)
class Tracked:
    """champion: (run, step) of the version with that alias now. decision: why it moved or stayed, for a person."""

    step: int
    metrics: Mapping[str, float]
    champion: tuple[str, int] | None
    decision: str


def tracking_uri(cfg: RunConfig) -> str:
    return cfg.tracking.mlflow_uri or f"sqlite:///{Store(cfg.root).local_path('mlflow.db')}"


def open_tracker(inputs: Inputs, root: str, uri: str, tracking: TrackingConfig) -> Tracker:
    context = Context.open(inputs, root)
    cfg = context.cfg
    suite = eval_suite(cfg)
    environment = build_environment(cfg)
    params = {
        name: getattr(cfg, name) for name in ("seed", "model", "warm_start", "rollout", "train", "gspo", "reward")
    }
    digests = {
        "eval_suite": suite.sha256,
        "environment": environment.sha256,
        "rubric": rubric_sha256(suite),
        "tokenizer": inputs.tokenizer.sha256,
        "config": inputs.config.sha256,
    }
    return Tracker.open(
        uri, tracking.experiment, cfg.run, params, {"k3.root": root}, digests, model_name=tracking.model_name
    )


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
) -> Tracked:
    """All records of one policy step, publish the last of them, in one batch of metrics; a retry adds nothing."""
    context = Context.open(inputs, root)
    stages = [read_record(context.store, ref) for ref in (*records, *([] if evaluation is None else [evaluation]))]
    published = next(record for record in stages if record.stage == "publish")
    assert published.policy is not None
    tracker = open_tracker(inputs, root, uri, tracking)
    metrics = {name: value for record in stages for name, value in record.metrics.items()}
    tracker.log_step(published.step, metrics, max(record.finished_ms for record in stages))
    tracker.register(published.policy, version_tags(inputs, root))
    decision = "not evaluated"
    if evaluation is not None:
        decision = _decide(context, tracker, published.step, evaluation, confidence)
    return Tracked(published.step, metrics, tracker.champion(), decision)


def _decide(context: Context, tracker: Tracker, step: int, evaluation: Ref, confidence: float) -> str:
    """Promote when there is no champion, or when the paired interval over the same prompts lies above zero."""
    champion = tracker.champion()
    if champion is None:
        tracker.promote(step)
        return f"step {step} is the first champion"
    if champion == (context.cfg.run, step):
        return f"step {step} is the champion"
    name = "@".join(map(str, champion))
    earlier = find_evaluation(context.store, *champion)
    if earlier is None:
        return f"champion {name} stays: its evaluation is not in this store"
    before, after = read_report(context.store, earlier), read_report(context.store, evaluation)
    if before.suite_sha256 != after.suite_sha256 or before.sampling != after.sampling:
        return f"champion {name} stays: it was evaluated on another suite or with other sampling"
    result = compare(before, after, "reward", confidence)
    if allows_promotion(result):
        tracker.promote(step)
        return f"step {step} replaces champion {name}: {_words(result)}"
    return f"champion {name} stays: {_words(result)}"


def _words(c: Comparison) -> str:
    return f"paired difference {c.difference:+.3f}, {c.confidence:.0%} interval [{c.ci_low:+.3f}, {c.ci_high:+.3f}]"
