"""The episodes of an evaluation with their grades, criterion by criterion."""

from __future__ import annotations

from typing import Literal

from infra.config import RunConfig
from infra.parts import build_judge
from infra.records import decode
from infra.stages.context import Context
from infra.stages.evaluate import read_report, read_trajectories
from infra.stages.record import read_record
from infra.tracking import Graded
from k3core.eval.suite import Suite
from k3core.rewards.judge import RuleJudge, grade
from k3core.types import EvalReport, Prompt, Ref, Score, Trajectory

Ungraded = Literal["abstained", "infrastructure_error"] | None

SCORES = "scores"  # the output of an evaluation that keeps its verdicts, in the order of its trajectories


def graded_episodes(context: Context, suite: Suite, evaluation: Ref) -> tuple[Graded, ...]:
    """The grades are the report's. The verdicts are those that the evaluation kept, else those of rules, which say the
    same again; a model that judged is not asked twice, and its verdicts are then missing.
    """
    report = read_report(context.store, evaluation)
    trajectories = read_trajectories(context.store, evaluation)
    prompts = {prompt.id: prompt for prompt in suite.prompts}
    kept = read_record(context.store, evaluation).outputs.get(SCORES)
    if kept is not None:
        scores = decode(context.store.get(kept), tuple[Score, ...], kept.uri)
    else:
        scores = tuple(_again(context.cfg, prompts[t.prompt_id], t, report) for t in trajectories)
    return tuple(Graded(prompts[t.prompt_id], t, s) for t, s in zip(trajectories, scores, strict=True))


def judged_by(cfg: RunConfig) -> tuple[str, bool]:
    """The judge's id, and whether it is code rather than a model."""
    judge = build_judge(cfg)
    return judge.id, isinstance(judge, RuleJudge)


def _again(cfg: RunConfig, prompt: Prompt, trajectory: Trajectory, report: EvalReport) -> Score:
    name, sample = trajectory.prompt_id, trajectory.sample
    value = report.rewards[name][sample]
    judge = build_judge(cfg)
    if isinstance(judge, RuleJudge):
        score = grade(prompt, trajectory, judge, cfg.reward)
        if score.value == value:
            return score
    broken = trajectory.stop_reason == "infrastructure_error"
    reason: Ungraded = None if value is not None else "infrastructure_error" if broken else "abstained"
    return Score(value, report.fractions[name][sample], report.all_pass[name][sample], (), reason)
