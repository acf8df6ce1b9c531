"""Evaluate: a version, or plain weights, on the frozen suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from infra.parts import build_judge, eval_sampling, eval_suite
from infra.provenance import engine_build, judge_version, prompts_and_rubric
from infra.records import decode, encode
from infra.stages.context import Context, Inputs, Progress, no_progress
from infra.stages.record import read_record, stage_key
from infra.stages.rollout import run_episodes
from infra.store import Store
from k3core.eval.compare import mean_and_stderr
from k3core.eval.suite import Suite
from k3core.rewards.judge import grade
from k3core.rollout.episodes import EpisodeSpec, trajectory_seed
from k3core.types import EvalReport, PolicyVersion, Ref, Score, Trajectory


def evaluate_step(inputs: Inputs, root: str, policy: PolicyVersion, progress: Progress = no_progress) -> Ref:
    """Record with outputs `report` and `trajectories`."""
    return evaluate_in(Context.open(inputs, root), policy, "evaluate", "policy", "evaluate", progress)


def evaluate_in(
    context: Context,
    policy: PolicyVersion,
    stage: str,
    label: str,
    name: str,
    progress: Progress = no_progress,
    start: PolicyVersion | None = None,
) -> Ref:
    """The same under another stage's name and clock, for the control arms. start: the version that an arm went on from.

    Seeds name prompt and sample only: every version draws with the same random numbers, which steadies comparisons.
    """
    read = {
        "policy": policy.weights,
        "tokenizer": context.inputs.tokenizer,
        "start": None if start is None else start.weights,
    }
    if (done := context.done(policy.step, name, read)) is not None:
        return done
    suite, store, run = eval_suite(context.cfg), context.store, context.cfg.run
    specs = [
        EpisodeSpec(prompt, sample, trajectory_seed("eval", prompt.id, sample))
        for prompt in suite.prompts
        for sample in range(context.cfg.evaluate.samples)
    ]
    sampling = eval_sampling(context.cfg)
    trajectories = run_episodes(context, policy, specs, sampling, progress)
    scores = _graded(context, suite, trajectories)
    report = _report(context, policy, label, suite, trajectories, scores)
    outputs = {
        "report": store.put(stage_key(run, policy.step, f"{name}.zst"), encode(report)),
        "trajectories": store.put(stage_key(run, policy.step, f"{name}-trajectories.zst"), encode(trajectories)),
        "scores": store.put(stage_key(run, policy.step, f"{name}-scores.zst"), encode(scores)),
    }
    return context.record(
        stage,
        policy.step,
        outputs,
        eval_metrics(report),
        policy=policy,
        name=name,
        inputs=read,
        provenance={
            "label": label,
            "policy": f"{policy.run}@{policy.step}",
            "suite": {"name": suite.name, "sha256": suite.sha256, "samples": context.cfg.evaluate.samples},
            "sampling": asdict(sampling),
            "reward": asdict(context.cfg.reward),
            "judges": [judge_version(build_judge(context.cfg))],
            "engine": engine_build(context.pool.engine_at(policy, context.tokenizer())),
            **prompts_and_rubric(suite.prompts),
        },
    )


def read_report(store: Store, record: Ref) -> EvalReport:
    ref = read_record(store, record).outputs["report"]
    return decode(store.get(ref), EvalReport, ref.uri)


def read_trajectories(store: Store, record: Ref) -> tuple[Trajectory, ...]:
    ref = read_record(store, record).outputs["trajectories"]
    return decode(store.get(ref), tuple[Trajectory, ...], ref.uri)


def find_evaluation(store: Store, run: str, step: int) -> Ref | None:
    """The record of a step's evaluation, by key; None when it was not evaluated."""
    key = stage_key(run, step, "evaluate.json")
    data = store.read(key)
    return None if data is None else store.ref(key, data)


def eval_metrics(report: EvalReport) -> dict[str, float]:
    """Means over prompts and standard errors between prompts; nothing where nothing was graded."""
    metrics: dict[str, float] = {}
    if any(value is not None for values in report.rewards.values() for value in values):
        metrics["eval/reward"], metrics["eval/reward_stderr"] = mean_and_stderr(report, "reward")
        metrics["eval/fraction"], _ = mean_and_stderr(report, "fraction")
        metrics["eval/all_pass"], metrics["eval/all_pass_stderr"] = mean_and_stderr(report, "all_pass")
    return metrics | {f"eval_criterion/{name}": rate for name, rate in report.criteria_pass_rate.items()}


def _graded(context: Context, suite: Suite, trajectories: Sequence[Trajectory]) -> tuple[Score, ...]:
    judge, reward = build_judge(context.cfg), context.cfg.reward
    prompts = {prompt.id: prompt for prompt in suite.prompts}
    return tuple(grade(prompts[trajectory.prompt_id], trajectory, judge, reward) for trajectory in trajectories)


def _report(
    context: Context,
    policy: PolicyVersion,
    label: str,
    suite: Suite,
    trajectories: Sequence[Trajectory],
    graded: Sequence[Score],
) -> EvalReport:
    scores: dict[str, list[Score]] = {prompt.id: [] for prompt in suite.prompts}
    for trajectory, score in zip(trajectories, graded, strict=True):
        scores[trajectory.prompt_id].append(score)
    verdicts: dict[str, list[bool]] = {}
    for score in (score for members in scores.values() for score in members if score.value is not None):
        for criterion in score.criteria:
            verdicts.setdefault(criterion.title, []).append(criterion.verdict == "pass")
    return EvalReport(
        run=context.cfg.run,
        step=policy.step,
        label=label,
        suite_sha256=suite.sha256,
        sampling=eval_sampling(context.cfg),
        rewards={key: tuple(s.value for s in members) for key, members in scores.items()},
        fractions={key: tuple(s.fraction for s in members) for key, members in scores.items()},
        all_pass={key: tuple(s.all_pass for s in members) for key, members in scores.items()},
        criteria_pass_rate={name: float(np.mean(passed)) for name, passed in verdicts.items()},
        stop_reasons=dict(Counter(t.stop_reason for t in trajectories)),
        mean_turns=float(np.mean([t.num_turns for t in trajectories])),
    )
