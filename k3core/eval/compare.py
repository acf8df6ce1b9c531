"""Two evaluations of one suite, paired by prompt. The prompt is the unit: samples of one prompt are not independent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from k3core.types import EvalReport

EvalMetric = Literal["reward", "fraction", "all_pass"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """B against A over `n_prompts` prompts that both have a grade for; positive means that B is better.

    ci_low, ci_high: bootstrap interval of `difference` at `confidence`;
    p_better: share of resamples in which B is ahead, a tie counting half;
    n_ungraded: prompts left out because one side has no grade.
    """

    metric: EvalMetric
    n_prompts: int
    n_ungraded: int
    mean_a: float
    mean_b: float
    difference: float
    ci_low: float
    ci_high: float
    confidence: float
    p_better: float


def compare(
    a: EvalReport,
    b: EvalReport,
    metric: EvalMetric,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Paired percentile bootstrap over prompts (Efron and Tibshirani 1993, ch. 13).

    Raises ValueError for different suites and for fewer than two prompts graded on both sides.
    """
    assert 0.0 < confidence < 1.0, confidence
    _check_same_suite(a, b)
    means_a, means_b = _prompt_means(a, metric), _prompt_means(b, metric)
    prompts = sorted(means_a.keys() & means_b.keys())
    if len(prompts) < 2:
        raise ValueError(
            f"{_name(a)} and {_name(b)} share {len(prompts)} prompts with a {metric} grade on both sides; "
            "a comparison needs at least two: evaluate both on the same prompts"
        )
    a_N = np.array([means_a[prompt] for prompt in prompts])
    b_N = np.array([means_b[prompt] for prompt in prompts])
    difference_N = b_N - a_N
    rng = np.random.default_rng(seed)
    n = len(prompts)
    resampled = np.array([difference_N[rng.integers(n, size=n)].mean() for _ in range(resamples)])
    tail = (1.0 - confidence) / 2.0
    ci_low, ci_high = np.quantile(resampled, [tail, 1.0 - tail])
    return Comparison(
        metric=metric,
        n_prompts=n,
        n_ungraded=len(_samples(a, metric).keys() | _samples(b, metric).keys()) - n,
        mean_a=float(a_N.mean()),
        mean_b=float(b_N.mean()),
        difference=float(difference_N.mean()),
        ci_low=float(ci_low),
        ci_high=float(ci_high),
        confidence=confidence,
        p_better=float(np.mean(resampled > 0) + 0.5 * np.mean(resampled == 0)),
    )


def prompt_differences(a: EvalReport, b: EvalReport, metric: EvalMetric) -> dict[str, float]:
    """B minus A by prompt id, over the prompts that both have a grade for. ValueError for different suites."""
    _check_same_suite(a, b)
    means_a, means_b = _prompt_means(a, metric), _prompt_means(b, metric)
    return {prompt: means_b[prompt] - means_a[prompt] for prompt in sorted(means_a.keys() & means_b.keys())}


def mean_and_stderr(report: EvalReport, metric: EvalMetric) -> tuple[float, float]:
    """Mean over prompts and its standard error, clustered by prompt: std of the prompts' means / √prompts.

    Prompts without a grade are left out. ValueError below two graded prompts, where no error can be estimated.
    """
    means_N = np.array(list(_prompt_means(report, metric).values()))
    if len(means_N) < 2:
        raise ValueError(
            f"{_name(report)} has {len(means_N)} prompts with a {metric} grade; "
            "a standard error needs at least two: evaluate more prompts"
        )
    return float(means_N.mean()), float(means_N.std(ddof=1) / np.sqrt(len(means_N)))


def allows_promotion(comparison: Comparison) -> bool:
    """True when the whole interval is above zero."""
    return comparison.ci_low > 0.0


def _samples(report: EvalReport, metric: EvalMetric) -> Mapping[str, tuple[float | None, ...]]:
    if metric == "reward":
        return report.rewards
    return report.fractions if metric == "fraction" else report.all_pass


def _prompt_means(report: EvalReport, metric: EvalMetric) -> dict[str, float]:
    """Mean over the graded samples of each prompt that has any."""
    graded = {
        prompt: [float(value) for value in samples if value is not None]
        for prompt, samples in _samples(report, metric).items()
    }
    return {prompt: sum(values) / len(values) for prompt, values in graded.items() if values}


def _check_same_suite(a: EvalReport, b: EvalReport) -> None:
    if a.suite_sha256 != b.suite_sha256:
        raise ValueError(
            f"{_name(a)} was evaluated on suite {a.suite_sha256[:12]} and {_name(b)} on {b.suite_sha256[:12]}: "
            "evaluate both on one suite"
        )


def _name(report: EvalReport) -> str:
    return f"{report.label!r} (run {report.run}, step {report.step})"
