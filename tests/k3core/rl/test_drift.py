from __future__ import annotations

import math

import numpy as np
import pytest

from k3core.rl.drift import differences, drift

BOTH = ("k3_rollout_trainer", "k3_trainer_rollout")


def test_a_gaussian_gap_of_sd_sigma_is_half_its_variance_both_ways() -> None:
    sigma = 0.04
    gap = np.random.default_rng(0).normal(-(sigma**2) / 2, sigma, 400_000)  # the mean keeps both distributions normed
    engine = np.full(len(gap), -2.0)
    for name in BOTH:
        assert differences(engine + gap, engine)[name] == pytest.approx(sigma**2 / 2, rel=0.02)


def test_each_direction_is_the_divergence_that_it_names() -> None:
    engine, trainer = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.2, 0.7])
    drawn = np.repeat(np.arange(3), [500, 300, 200])  # tokens as the engine draws them
    result = differences(np.log(trainer)[drawn], np.log(engine)[drawn])
    assert result["k3_rollout_trainer"] == pytest.approx(float((engine * np.log(engine / trainer)).sum()))
    assert result["k3_trainer_rollout"] == pytest.approx(float((trainer * np.log(trainer / engine)).sum()))


def test_equal_logprobs_drift_by_exactly_nothing() -> None:
    logprobs = np.random.default_rng(0).uniform(-9, 0, 100).astype(np.float32)
    found = differences(logprobs, logprobs)
    assert found.pop("tokens") == 100
    assert set(found.values()) == {0.0}


def test_one_token_far_away_is_neither_clamped_nor_hidden() -> None:
    engine = np.full(1000, -30.0, dtype=np.float32)
    trainer = engine.copy()
    trainer[7] = 0.0
    result = differences(trainer, engine)
    assert result["k3_rollout_trainer"] == pytest.approx((math.exp(30) - 1 - 30) / 1000)
    assert (result["abs_max"], result["abs_p50"], result["abs_p99"]) == (30.0, 0.0, 0.0)


def test_quantiles_are_of_the_absolute_difference() -> None:
    result = differences(np.arange(-100.0, 1.0) / 100, np.zeros(101))
    assert result["abs_p50"] == pytest.approx(0.5)
    assert result["abs_p99"] == pytest.approx(0.99)


def test_without_tokens_there_is_no_drift_to_report() -> None:
    nothing = np.zeros(0, np.float32)
    assert differences(nothing, nothing) == {}
    assert drift(nothing, nothing, np.zeros(0, np.int32), 3) == {}


def test_a_logprob_that_is_nan_shows() -> None:
    found = differences(np.array([float("nan"), 0.0]), np.zeros(2))
    assert (found.pop("tokens"), found.pop("differing_tokens")) == (2, 1)
    assert all(math.isnan(value) for value in found.values())


def test_tokens_of_these_weights_and_of_others_are_told_apart() -> None:
    engine = np.array([-1.0, -2.0, -3.0, -4.0, -5.0], np.float32)
    trainer = np.array([-1.0, -2.5, -3.0, -3.0, np.nextafter(np.float32(-5), np.float32(0))], np.float32)
    found = drift(trainer, engine, np.array([4, 3, 4, 2, 4]), 4)
    assert {name.rsplit("/", 1)[0] for name in found} == {"drift/numeric", "drift/stale"}
    assert found["drift/numeric/tokens"] == 3
    assert found["drift/numeric/differing_tokens"] == 1
    assert 0 < found["drift/numeric/abs_max"] < 1e-6
    assert found["drift/numeric/abs_mean"] == pytest.approx(found["drift/numeric/abs_max"] / 3)
    assert found["drift/stale/tokens"] == found["drift/stale/differing_tokens"] == 2
    assert (found["drift/stale/abs_mean"], found["drift/stale/abs_max"]) == (0.75, 1.0)


@pytest.mark.parametrize(("step", "absent"), [(4, "stale"), (5, "numeric")])
def test_a_kind_without_tokens_is_absent_and_not_zero(step: int, absent: str) -> None:
    logprobs = np.full(3, -1.0, np.float32)
    found = drift(logprobs, logprobs, np.full(3, 4, np.int32), step)
    assert found
    assert not [name for name in found if f"/{absent}/" in name]
