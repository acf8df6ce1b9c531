from __future__ import annotations

import math

import numpy as np
import pytest

from k3core.rl.drift import drift

BOTH = ("drift/k3_rollout_trainer", "drift/k3_trainer_rollout")


def test_a_gaussian_gap_of_sd_sigma_is_half_its_variance_both_ways() -> None:
    sigma = 0.04
    gap = np.random.default_rng(0).normal(-(sigma**2) / 2, sigma, 400_000)  # the mean keeps both distributions normed
    engine = np.full(len(gap), -2.0)
    for name in BOTH:
        assert drift(engine + gap, engine)[name] == pytest.approx(sigma**2 / 2, rel=0.02)


def test_each_direction_is_the_divergence_that_it_names() -> None:
    engine, trainer = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.2, 0.7])
    drawn = np.repeat(np.arange(3), [500, 300, 200])  # tokens as the engine draws them
    result = drift(np.log(trainer)[drawn], np.log(engine)[drawn])
    assert result["drift/k3_rollout_trainer"] == pytest.approx(float((engine * np.log(engine / trainer)).sum()))
    assert result["drift/k3_trainer_rollout"] == pytest.approx(float((trainer * np.log(trainer / engine)).sum()))


def test_equal_logprobs_drift_by_exactly_nothing() -> None:
    logprobs = np.random.default_rng(0).uniform(-9, 0, 100).astype(np.float32)
    assert set(drift(logprobs, logprobs).values()) == {0.0}


def test_one_token_far_away_is_neither_clamped_nor_hidden() -> None:
    engine = np.full(1000, -30.0, dtype=np.float32)
    trainer = engine.copy()
    trainer[7] = 0.0
    result = drift(trainer, engine)
    assert result["drift/k3_rollout_trainer"] == pytest.approx((math.exp(30) - 1 - 30) / 1000)
    assert (result["drift/abs_max"], result["drift/abs_p50"], result["drift/abs_p99"]) == (30.0, 0.0, 0.0)


def test_quantiles_are_of_the_absolute_difference() -> None:
    result = drift(np.arange(-100.0, 1.0) / 100, np.zeros(101))
    assert result["drift/abs_p50"] == pytest.approx(0.5)
    assert result["drift/abs_p99"] == pytest.approx(0.99)


def test_without_tokens_there_is_no_drift_to_report() -> None:
    assert drift(np.zeros(0, np.float32), np.zeros(0, np.float32)) == {}


def test_a_logprob_that_is_nan_shows() -> None:
    assert all(math.isnan(value) for value in drift(np.array([float("nan"), 0.0]), np.zeros(2)).values())
