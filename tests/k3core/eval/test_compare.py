from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from k3core.eval.compare import allows_promotion, compare, mean_and_stderr, prompt_differences
from k3core.types import EvalReport, SamplingParams


def report(rewards: Mapping[str, Sequence[float | None]], label: str = "policy", suite: str = "a" * 64) -> EvalReport:
    rows = {prompt: tuple(samples) for prompt, samples in rewards.items()}
    return EvalReport(
        run="r1",
        step=3,
        label=label,
        suite_sha256=suite,
        sampling=SamplingParams(),
        rewards=rows,
        fractions={prompt: tuple(None if v is None else v / 2 for v in row) for prompt, row in rows.items()},
        all_pass={prompt: tuple(None if v is None else v >= 1 for v in row) for prompt, row in rows.items()},
        criteria_pass_rate={},
        stop_reasons={},
        mean_turns=1.0,
    )


def test_the_difference_is_the_mean_of_the_prompts_own_differences():
    a = report({"p1": [0.0, 1.0], "p2": [0.2, 0.4], "p3": [1.0]})
    b = report({"p1": [1.0, 1.0], "p2": [0.3, 0.1], "p3": [1.0, 1.0]})
    c = compare(a, b, "reward")
    assert (c.n_prompts, c.n_ungraded) == (3, 0)
    assert c.mean_a == pytest.approx((0.5 + 0.3 + 1.0) / 3)
    assert c.mean_b == pytest.approx((1.0 + 0.2 + 1.0) / 3)
    assert c.difference == pytest.approx((0.5 - 0.1 + 0.0) / 3)
    assert prompt_differences(a, b, "reward") == pytest.approx({"p1": 0.5, "p2": -0.1, "p3": 0.0})


def test_the_same_shift_on_every_prompt_has_an_interval_without_width():
    values = {f"p{i}": [i / 10] for i in range(5)}
    shifted = {prompt: [row[0] + 0.25] for prompt, row in values.items()}
    c = compare(report(values), report(shifted), "reward")
    assert (c.ci_low, c.ci_high, c.p_better) == pytest.approx((0.25, 0.25, 1.0))


def test_two_prompts_have_the_bootstrap_of_a_fair_coin():
    """Differences 0 and 1 resample to 0, ½, ½, 1: P(difference > 0) is ¾ and the outer quantiles are the ends."""
    c = compare(report({"p1": [0], "p2": [0]}), report({"p1": [0], "p2": [1]}), "reward")
    assert (c.ci_low, c.ci_high) == (0.0, 1.0)
    assert c.p_better == pytest.approx(0.75 + 0.125, abs=0.02)


def test_a_report_against_itself_is_a_tie_and_does_not_allow_promotion():
    a = report({"p1": [0.1], "p2": [0.9]})
    c = compare(a, a, "reward")
    assert (c.difference, c.ci_low, c.ci_high, c.p_better) == (0.0, 0.0, 0.0, 0.5)
    assert not allows_promotion(c)


def test_promotion_needs_the_whole_interval_above_zero():
    prompts = [f"p{i}" for i in range(20)]
    base = report({prompt: [0.0] for prompt in prompts})
    mixed = report({prompt: [1.0 if i % 2 else -0.9] for i, prompt in enumerate(prompts)})
    clear = report({prompt: [1.0 if i % 5 else 0.5] for i, prompt in enumerate(prompts)})
    assert compare(base, mixed, "reward").difference > 0
    assert not allows_promotion(compare(base, mixed, "reward"))
    assert allows_promotion(compare(base, clear, "reward"))


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(7)
    truth, n, covered, trials = 0.1, 40, 0, 200
    for trial in range(trials):
        difficulty_N = rng.uniform(0, 1, n)
        a = report({f"p{i}": rng.normal(d, 0.3, 2) for i, d in enumerate(difficulty_N)})
        b = report({f"p{i}": rng.normal(d + truth, 0.3, 2) for i, d in enumerate(difficulty_N)})
        c = compare(a, b, "reward", confidence=0.9, resamples=400, seed=trial)
        covered += c.ci_low <= truth <= c.ci_high
    assert 0.82 <= covered / trials <= 0.96  # 0.9 expected; 4 standard errors are 0.085


def test_pairing_removes_the_spread_between_prompts():
    rng = np.random.default_rng(0)
    difficulty_N = rng.uniform(0, 1, 50)
    a = report({f"p{i}": [d] for i, d in enumerate(difficulty_N)})
    b = report({f"p{i}": [d + 0.05 + rng.normal(0, 0.01)] for i, d in enumerate(difficulty_N)})
    c = compare(a, b, "reward")
    assert c.ci_high - c.ci_low < 0.01 < mean_and_stderr(a, "reward")[1]


def test_the_seed_decides_the_interval():
    rng = np.random.default_rng(1)
    a, b = (report({f"p{i}": rng.uniform(0, 1, 2) for i in range(30)}) for _ in range(2))
    assert compare(a, b, "reward", seed=1) == compare(a, b, "reward", seed=1)
    assert compare(a, b, "reward", seed=1).ci_low != compare(a, b, "reward", seed=2).ci_low


def test_the_other_suite_is_refused_by_naming_both():
    a = report({"p1": [0], "p2": [0]}, "policy", suite="1" * 64)
    b = report({"p1": [0], "p2": [0]}, "control", suite="2" * 64)
    with pytest.raises(ValueError, match=r"'policy'.*111111111111.*'control'.*222222222222"):
        compare(a, b, "reward")
    with pytest.raises(ValueError, match="evaluate both on one suite"):
        prompt_differences(a, b, "reward")


def test_no_common_prompt_is_refused_by_naming_both():
    with pytest.raises(ValueError, match=r"'policy'.*'control'.*share 0 prompts"):
        compare(report({"p1": [0], "p2": [0]}), report({"p3": [0], "p4": [0]}, "control"), "reward")


def test_a_prompt_without_a_grade_is_left_out_and_counted_and_never_a_zero():
    a = report({"p1": [1.0, None], "p2": [None, None], "p3": [0.5, 0.5], "p4": [0.5, 0.5]})
    b = report({"p1": [1.0, 1.0], "p2": [1.0, 1.0], "p3": [None, None], "p4": [0.75, 0.75]})
    c = compare(a, b, "reward")
    assert (c.n_prompts, c.n_ungraded) == (2, 2)
    assert (c.mean_a, c.mean_b) == pytest.approx((0.75, 0.875))


def test_the_standard_error_counts_prompts_and_not_samples():
    once = report({"p1": [0.0], "p2": [1.0], "p3": [0.5]})
    often = report({prompt: list(row) * 100 for prompt, row in once.rewards.items()})
    expected = (0.5, np.std([0.0, 1.0, 0.5], ddof=1) / np.sqrt(3))
    assert mean_and_stderr(once, "reward") == pytest.approx(expected)
    assert mean_and_stderr(often, "reward") == pytest.approx(expected)


def test_each_metric_reads_its_own_grades():
    a = report({"p1": [1.0], "p2": [0.5]})
    assert mean_and_stderr(a, "reward")[0] == pytest.approx(0.75)
    assert mean_and_stderr(a, "fraction")[0] == pytest.approx(0.375)
    assert mean_and_stderr(a, "all_pass")[0] == pytest.approx(0.5)


def test_one_graded_prompt_has_no_standard_error():
    with pytest.raises(ValueError, match="at least two"):
        mean_and_stderr(report({"p1": [1.0], "p2": [None]}), "reward")
