"""The report at the end of a run: one JSON file for programs and one self-contained page for people."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from infra import figures
from infra.figures import Curve, Line
from infra.transcript import ChatMessage, messages_of
from k3core.eval.compare import Comparison, EvalMetric, compare, mean_and_stderr
from k3core.types import EvalReport

SUMMARY: Mapping[str, str] = {
    "seed": "seed",
    "updates": "updates",
    "prompts_eval": "evaluation prompts",
    "samples_per_prompt": "samples per evaluation prompt",
    "reward_before": "reward before",
    "reward_after": "reward after",
    "reward_stderr": "standard error of the reward after",
    "all_pass_before": "all criteria passed before",
    "all_pass_after": "all criteria passed after",
    "control_reward_after": "reward of the control arm",
    "expert_only_reward_after": "reward of the expert-only arm",
    "drift_k3_step0": "drift before the first step, k3, nat per token",
    "drift_max_abs_step0": "largest logprob difference before the first step, nat",
    "bytes_full": "bytes of the whole weights",
    "bytes_delta_mean": "bytes of a delta, mean",
    "versions": "versions",
    "seconds_setup_excluded": "seconds, set-up excluded",
    "seconds_by_stage": "seconds by stage",
    "weights_sha256": "sha256 of the final weights",
}
MAY_BE_NONE = frozenset({"control_reward_after", "expert_only_reward_after", "drift_k3_step0", "drift_max_abs_step0"})


@dataclass(frozen=True, slots=True)
class Transcript:
    """One episode as decoded text, control tokens included. `reward` is None when it was not graded."""

    prompt_id: str
    step: int
    text: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything the report shows; it reads nothing from anywhere else.

    summary: exactly the keys of SUMMARY, becomes report.json;
    evals: the policy by step, at least two (before and after); control, expert_only: those arms, may be empty;
    history: training step -> metrics named as in infra.tracking.METRICS, NaN included;
    before, after: two episodes of one prompt; commands: what it opens -> the command.
    Raises ValueError for a missing or an unknown summary key, and for a None where a number belongs.
    """

    title: str
    summary: Mapping[str, Any]
    evals: Sequence[EvalReport]
    control: Sequence[EvalReport]
    expert_only: Sequence[EvalReport]
    history: Mapping[int, Mapping[str, float]]
    before: Transcript
    after: Transcript
    commands: Mapping[str, str]

    def __post_init__(self) -> None:
        missing, unknown = SUMMARY.keys() - self.summary.keys(), self.summary.keys() - SUMMARY.keys()
        if missing or unknown:
            raise ValueError(f"report summary: missing keys {sorted(missing)}, unknown keys {sorted(unknown)}")
        absent = sorted(key for key, value in self.summary.items() if value is None and key not in MAY_BE_NONE)
        if absent:
            raise ValueError(f"report summary: {absent} must have a value")
        if len(self.evals) < 2:
            raise ValueError(f"a report needs the policy evaluated before and after, got {len(self.evals)} evaluations")
        assert self.before.prompt_id == self.after.prompt_id, "the two transcripts must be of one prompt"


def write_report(data: ReportData, folder: Path) -> tuple[Path, Path]:
    """Writes report.json (the summary) and report.html, each by rename, so that a reader sees the old or the new one.

    Raises ValueError for a NaN in the summary, and for evaluations without two graded prompts in common.
    """
    summary = json.dumps(dict(data.summary), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    html = render_html(data)
    folder.mkdir(parents=True, exist_ok=True)
    _write_atomically(folder / "report.json", summary)
    _write_atomically(folder / "report.html", html)
    return folder / "report.json", folder / "report.html"


def plot_curve(data: ReportData, png_path: Path) -> None:
    """Reward and all-pass with one standard error, beside the control and the expert-only arm."""
    title = (
        f"{data.title}: {data.summary['prompts_eval']} held-out prompts × "
        f"{data.summary['samples_per_prompt']} samples, ± 1 standard error"
    )
    panels = {"Reward": _curves(data, "reward"), "All criteria passed": _curves(data, "all_pass", 100.0)}
    figures.save_png(figures.curves_figure(panels, ("mean reward", "samples (%)"), title), png_path)


def plot_comparison(comparison: Comparison, differences: Mapping[str, float], png_path: Path) -> None:
    """Every prompt's difference (from `k3core.eval.compare.prompt_differences`) and the interval of their mean."""
    c = comparison
    title = (
        f"{c.metric}: B − A = {signed(c.difference)}, {100 * c.confidence:g} % interval "
        f"{signed(c.ci_low)} to {signed(c.ci_high)}, {c.n_prompts} prompts"
    )
    figure = figures.differences_figure(list(differences.values()), c.ci_low, c.difference, c.ci_high, title)
    figures.save_png(figure, png_path)


def render_html(data: ReportData) -> str:
    """The page. Data is escaped by the template; our own SVG, whose text matplotlib escapes, is not."""
    first, last = _by_step(data.evals)[0], _by_step(data.evals)[-1]
    arms = [_arm("Policy before", first, first), _arm("Policy after", last, first)]
    arms += [_arm(name, _by_step(reports)[-1], first) for name, reports in _other_arms(data).items()]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"signed": signed, "size": size, "readable": readable}
    return environment.get_template("report.html.j2").render(
        title=data.title,
        summary=data.summary,
        labels=SUMMARY,
        first=first,
        last=last,
        headlines=[
            _headline("Mean reward", "reward", "", first, last),
            _headline("All criteria passed", "all_pass", "%", first, last),
        ],
        arms=arms,
        expert_reward=mean_and_stderr(_by_step(data.expert_only)[-1], "reward")[0] if data.expert_only else None,
        against_control=compare(_by_step(data.control)[-1], last, "reward") if data.control else None,
        learning=_learning_plots(data, first, last),
        health=_health_plots(data),
        cost=_cost_plots(data),
        nonfinite=_nonfinite(data.history),
        stops=_stops(first, last),
        episodes=[
            _Episode("Before", data.before, messages_of(data.before.text)),
            _Episode("After", data.after, messages_of(data.after.text)),
        ],
        commands=data.commands,
    )


def signed(value: float, digits: int = 3) -> str:
    """+0.207, −0.008: with a real minus sign."""
    return f"{value:+.{digits}f}".replace("-", "−")


def size(size_bytes: float) -> str:
    unit, divisor = figures.byte_unit(size_bytes)
    return f"{size_bytes / divisor:.3g} {unit}"


def readable(value: object) -> str:
    """One value of the summary as text: four significant digits for fractions, thousands set apart for counts."""
    if value is None:
        return "not measured"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {readable(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(readable(item) for item in value)
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True, slots=True)
class _Headline:
    name: str
    before: str
    before_stderr: str
    after: str
    after_stderr: str
    unit: str
    scale: float
    digits: int
    paired: Comparison


@dataclass(frozen=True, slots=True)
class _Arm:
    """`paired` compares with the policy before; None for the policy before itself."""

    name: str
    step: int
    reward: tuple[float, float]
    all_pass: tuple[float, float]
    paired: Comparison | None


@dataclass(frozen=True, slots=True)
class _Plot:
    """`svg` is None when the run recorded none of its metrics."""

    title: str
    caption: str
    svg: Markup | None


@dataclass(frozen=True, slots=True)
class _Episode:
    when: str
    transcript: Transcript
    messages: Sequence[ChatMessage]


def _by_step(reports: Sequence[EvalReport]) -> list[EvalReport]:
    return sorted(reports, key=lambda report: report.step)


def _other_arms(data: ReportData) -> dict[str, Sequence[EvalReport]]:
    arms = {"Control: more of the same supervision": data.control, "Expert demonstrations only": data.expert_only}
    return {name: reports for name, reports in arms.items() if reports}


def _headline(name: str, metric: EvalMetric, unit: str, first: EvalReport, last: EvalReport) -> _Headline:
    scale, digits = (100.0, 1) if unit == "%" else (1.0, 3)
    before, before_stderr, after, after_stderr = (
        f"{scale * value:.{digits}f}" for report in (first, last) for value in mean_and_stderr(report, metric)
    )
    paired = compare(first, last, metric)
    return _Headline(name, before, before_stderr, after, after_stderr, unit, scale, digits, paired)


def _arm(name: str, report: EvalReport, first: EvalReport) -> _Arm:
    paired = None if report is first else compare(first, report, "reward")
    return _Arm(name, report.step, mean_and_stderr(report, "reward"), mean_and_stderr(report, "all_pass"), paired)


def _curves(data: ReportData, metric: EvalMetric, scale: float = 1.0) -> list[Curve]:
    """Policy, control, expert-only. The arms start from the policy's first weights, so their lines do too."""
    evals = _by_step(data.evals)

    def curve(label: str, reports: Sequence[EvalReport]) -> Curve:
        measured = [(scale * mean, scale * stderr) for mean, stderr in (mean_and_stderr(r, metric) for r in reports)]
        return Curve(
            label, tuple(r.step for r in reports), tuple(m for m, _ in measured), tuple(error for _, error in measured)
        )

    def arm(label: str, reports: Sequence[EvalReport]) -> Curve:
        later = _by_step(reports)
        return curve(label, later if not later or later[0].step == evals[0].step else [evals[0], *later])

    return [curve("policy (RL)", evals), arm("control", data.control), arm("expert only", data.expert_only)]


def _learning_plots(data: ReportData, first: EvalReport, last: EvalReport) -> list[_Plot]:
    criteria, num_left_out = figures.criteria_figure(first.criteria_pass_rate, last.criteria_pass_rate)
    left_out = f" {num_left_out} criteria that changed less are left out." if num_left_out else ""
    return [
        _Plot(
            "Evaluation reward",
            "Mean over held-out prompts; bars are one standard error, clustered by prompt.",
            _svg(figures.curves_figure({"reward": _curves(data, "reward")}, ["mean reward"]), "Evaluation reward"),
        ),
        _Plot(
            "All criteria passed",
            "Share of evaluation samples in which nothing is wrong.",
            _svg(
                figures.curves_figure({"all": _curves(data, "all_pass", 100.0)}, ["samples (%)"]), "All criteria passed"
            ),
        ),
        _lines_plot(
            data.history,
            "Training reward",
            "Mean reward of the trajectories that each step was trained on.",
            {"rollout/reward": "reward"},
            "mean reward",
            from_zero=True,
        ),
        _Plot(
            "Criteria, before and after",
            f"Share of evaluation samples that pass each criterion.{left_out}",
            _svg(criteria, "Criteria, before and after"),
        ),
    ]


def _health_plots(data: ReportData) -> list[_Plot]:
    stale = _lines_plot(
        data.history,
        "Stale tokens",
        "Difference of log-probabilities where older weights drew the token: the policy's movement and drift together.",
        {
            "drift/stale/k3_rollout_trainer": "k3, mean per token",
            "drift/stale/abs_mean": "|difference|, mean",
            "drift/stale/abs_max": "|difference|, largest",
        },
        "difference (nat)",
        log=True,
    )
    return [
        _lines_plot(
            data.history,
            "Drift between engine and trainer",
            "Numerical difference of log-probabilities at equal weights; a zero is not drawn on a logarithmic axis.",
            {
                "drift/numeric/k3_rollout_trainer": "k3, mean per token",
                "drift/numeric/abs_p99": "|difference|, 99th percentile",
                "drift/numeric/abs_max": "|difference|, largest",
            },
            "drift (nat)",
            log=True,
        ),
        *([] if stale.svg is None else [stale]),
        _lines_plot(
            data.history,
            "Staleness",
            "Policy steps between sampling a token and training on it.",
            {"staleness/mean": "mean", "staleness/max": "largest"},
            "policy steps",
            from_zero=True,
        ),
    ]


def _cost_plots(data: ReportData) -> list[_Plot]:
    payload = _line(data.history, "publish/bytes_payload", "published")
    full = float(data.summary["bytes_full"])
    seconds = {str(stage): float(value) for stage, value in data.summary["seconds_by_stage"].items()}
    return [
        _Plot(
            "Bytes per published policy",
            f"A delta takes {size(data.summary['bytes_delta_mean'])} on average, the whole weights {size(full)}.",
            _svg(figures.bytes_figure(payload, full), "Bytes per published policy") if _is_recorded(payload) else None,
        ),
        _Plot(
            "Time by stage",
            f"The run took {readable(data.summary['seconds_setup_excluded'])} s, set-up excluded.",
            _svg(figures.stages_figure(seconds), "Time by stage") if seconds else None,
        ),
    ]


def _lines_plot(
    history: Mapping[int, Mapping[str, float]],
    title: str,
    caption: str,
    metrics: Mapping[str, str],
    ylabel: str,
    *,
    log: bool = False,
    from_zero: bool = False,
) -> _Plot:
    lines = [line for line in (_line(history, name, label) for name, label in metrics.items()) if _is_recorded(line)]
    figure = figures.lines_figure(lines, ylabel, log=log, from_zero=from_zero) if lines else None
    return _Plot(title, caption, None if figure is None else _svg(figure, title))


def _line(history: Mapping[int, Mapping[str, float]], name: str, label: str) -> Line:
    """What is missing or not finite is NaN: a gap in the line."""
    values = [(step, history[step].get(name, math.nan)) for step in sorted(history)]
    return Line(label, tuple(step for step, _ in values), tuple(v if math.isfinite(v) else math.nan for _, v in values))


def _is_recorded(line: Line) -> bool:
    return not all(math.isnan(value) for value in line.values)


def _nonfinite(history: Mapping[int, Mapping[str, float]]) -> dict[int, list[str]]:
    named = {
        step: sorted(name for name, v in history[step].items() if not math.isfinite(v)) for step in sorted(history)
    }
    return {step: names for step, names in named.items() if names}


def _stops(first: EvalReport, last: EvalReport) -> list[tuple[str, float, float]]:
    """Why evaluation episodes ended, in percent before and after; the commonest first."""

    def percent(report: EvalReport, reason: str) -> float:
        return 100.0 * report.stop_reasons.get(reason, 0) / max(1, sum(report.stop_reasons.values()))

    reasons = {*first.stop_reasons, *last.stop_reasons}
    rows = [(reason, percent(first, reason), percent(last, reason)) for reason in reasons]
    return sorted(rows, key=lambda row: (-row[2], -row[1], row[0]))


def _svg(figure: Figure, name: str) -> Markup:
    return Markup(figures.inline_svg(figure, name))


def _write_atomically(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
