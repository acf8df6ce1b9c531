"""Report: the run's records become report.json, report.html and the curve."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from infra import policies
from infra.report import ReportData, Transcript, plot_curve, write_report
from infra.stages.context import Context, Inputs
from infra.stages.evaluate import read_report, read_trajectories
from infra.stages.record import StageRecord, read_record
from infra.stages.track import Tracked
from k3core.eval.compare import mean_and_stderr, prompt_differences
from k3core.types import EvalReport, PolicyVersion, Ref, Trajectory

CURVE = "curve.png"


@dataclass(slots=True)
class RunHistory:
    """References to all that a run made, in order."""

    warm_start: Ref
    versions: list[PolicyVersion] = field(default_factory=list)
    stages: list[Ref] = field(default_factory=list)
    evaluations: list[Ref] = field(default_factory=list)
    controls: dict[str, Ref] = field(default_factory=dict)
    tracked: dict[int, Tracked] = field(default_factory=dict)

    def add(self, version: PolicyVersion, stages: Sequence[Ref], evaluation: Ref | None, tracked: Tracked) -> None:
        self.versions.append(version)
        self.stages += stages
        self.tracked[version.step] = tracked
        if evaluation is not None:
            self.evaluations.append(evaluation)


def report_run(inputs: Inputs, root: str, history: RunHistory, commands: dict[str, str]) -> tuple[dict[str, Any], Path]:
    """The summary, and the folder that holds report.json, report.html and curve.png (a copy when root is remote)."""
    context = Context.open(inputs, root)
    data = report_data(context, history, commands)
    folder = context.store.local_path(context.cfg.run)
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix=f"{context.cfg.run}-report-"))
    files = write_report(data, folder)
    plot_curve(data, folder / CURVE)
    if context.store.local_path(context.cfg.run) is None:
        for path in (*files, folder / CURVE):
            context.store.put(f"{context.cfg.run}/{path.name}", path.read_bytes())
    return dict(data.summary), folder


def report_data(context: Context, history: RunHistory, commands: dict[str, str]) -> ReportData:
    store, cfg = context.store, context.cfg
    reports = [read_report(store, ref) for ref in history.evaluations]
    last_step = history.versions[-1].step
    # An arm starts at step 0's weights and ends after as many sequences as RL saw: on the curves it ends beside it.
    arms = {name: replace(read_report(store, ref), step=last_step) for name, ref in history.controls.items()}
    metrics = {step: tracked.metrics for step, tracked in history.tracked.items()}
    records = [read_record(store, ref) for ref in (history.warm_start, *history.stages, *history.evaluations)]
    seconds = seconds_by_stage([*records, *(read_record(store, ref) for ref in history.controls.values())])
    before, after = reports[0], reports[-1]
    sizes = policies.stats(store, cfg.run, [version.step for version in history.versions])
    deltas = [size.bytes_payload for size in sizes.values() if size.kind == "delta"]
    reward_after, stderr = mean_and_stderr(after, "reward")
    first = metrics.get(1, {})
    summary: dict[str, Any] = {
        "seed": cfg.seed,
        "updates": last_step,
        "prompts_eval": len(after.rewards),
        "samples_per_prompt": cfg.evaluate.samples,
        "reward_before": mean_and_stderr(before, "reward")[0],
        "reward_after": reward_after,
        "reward_stderr": stderr,
        "all_pass_before": mean_and_stderr(before, "all_pass")[0],
        "all_pass_after": mean_and_stderr(after, "all_pass")[0],
        "control_reward_after": _reward(arms.get("control")),
        "expert_only_reward_after": _reward(arms.get("expert_only")),
        "drift_k3_step0": first.get("drift/numeric/k3_rollout_trainer"),
        "drift_max_abs_step0": first.get("drift/numeric/abs_max"),
        "bytes_full": next(iter(sizes.values())).bytes_full,
        "bytes_delta_mean": float(np.mean(deltas)) if deltas else 0.0,
        "versions": len(history.versions),
        "seconds_setup_excluded": _wall_seconds(records),
        "seconds_by_stage": seconds,
        "weights_sha256": history.versions[-1].weights_sha256,
    }
    best = _most_improved(before, after)
    return ReportData(
        title=f"{cfg.run}: {last_step} updates, seed {cfg.seed}",
        summary=summary,
        evals=reports,
        control=[arms["control"]] if "control" in arms else [],
        expert_only=[arms["expert_only"]] if "expert_only" in arms else [],
        history=metrics,
        before=_transcript(context, history.evaluations[0], before, best, worst=True),
        after=_transcript(context, history.evaluations[-1], after, best, worst=False),
        commands=commands,
    )


def seconds_by_stage(records: Sequence[StageRecord]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for record in records:
        totals[record.stage] = totals.get(record.stage, 0.0) + record.seconds
    return totals


def _wall_seconds(records: Sequence[StageRecord]) -> float:
    """From the beginning of the first stage to the end of the last; a pause between two tries counts."""
    begin = min(record.finished_ms / 1000 - record.seconds for record in records)
    return max(record.finished_ms / 1000 for record in records) - begin


def _reward(report: EvalReport | None) -> float | None:
    return None if report is None else mean_and_stderr(report, "reward")[0]


def _most_improved(before: EvalReport, after: EvalReport) -> str:
    """The prompt whose mean reward rose most: what a reader learns from, not a random pick; the page says so."""
    differences = prompt_differences(before, after, "reward")
    return max(differences, key=lambda prompt_id: (differences[prompt_id], prompt_id))


def _transcript(context: Context, record: Ref, report: EvalReport, prompt_id: str, *, worst: bool) -> Transcript:
    rewards = report.rewards[prompt_id]
    graded = [sample for sample, reward in enumerate(rewards) if reward is not None]
    pick = (min if worst else max)(graded, key=lambda sample: rewards[sample] or 0.0)
    trajectory = next(
        t for t in read_trajectories(context.store, record) if (t.prompt_id, t.sample) == (prompt_id, pick)
    )
    return Transcript(prompt_id, report.step, transcript_text(context, trajectory), rewards[pick])


def transcript_text(context: Context, trajectory: Trajectory) -> str:
    """Every token of the episode as text, control tokens by name."""
    return context.tokenizer().decode(trajectory.tokens_T.tolist())
