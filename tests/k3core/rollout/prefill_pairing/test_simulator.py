"""The simulator's bookkeeping, the default trace, and two published failures on traces built to show them."""

from __future__ import annotations

from functools import cache

import pytest

from k3core.rollout.prefill_pairing import Limits
from k3core.rollout.prefill_pairing.baselines import (
    QueueTrigger,
    SglangLimits,
    atom_like,
    fixed_delay,
    no_delay,
    pairing,
    sglang_like,
)
from k3core.rollout.prefill_pairing.simulator import CostModel, Outcome, simulate
from k3core.rollout.prefill_pairing.traces import (
    TraceConfig,
    TracedTrajectory,
    Turn,
    burst_trace,
    drift_trace,
    make_trace,
)

COST = CostModel()
LIMITS = Limits(budget_tokens=COST.budget_tokens)
RULES = {
    "no delay": no_delay(),
    "fixed delay": fixed_delay(8),
    "SGLang-like": sglang_like(SglangLimits()),
    "ATOM-like": atom_like(COST.budget_tokens),
    "pairing": pairing(LIMITS),
}


@cache
def outcome(rule: str) -> Outcome:
    return simulate(make_trace(TraceConfig(), seed=0), RULES[rule], COST)  # type: ignore[arg-type]


def test_a_case_worked_by_hand() -> None:
    trace = (
        TracedTrajectory(0, (Turn(1.0, 100, 2),)),
        TracedTrajectory(1, (Turn(1.0, 40, 1),)),
    )
    cost = CostModel(pass_s=1.0, prefill_token_s=0.01, decode_s=0.5, budget_tokens=60, kv_tokens=1000)
    done = simulate(trace, no_delay(), cost)
    # Pass 1: 60 and 40 tokens, 1.6 s. Pass 2: 40 and 0, one decodes, 1.9 s. Passes 3 and 4: one decodes, 1.5 s each.
    assert done.duration_s == pytest.approx(1.0 + 1.6 + 1.9 + 1.5 + 1.5)
    assert done.ttft_s == pytest.approx((1.6, 3.5))
    assert (done.padded_tokens, done.prefill_slots) == (20 + 40, 120 + 80)
    assert (done.late_padded_tokens, done.late_prefill_slots) == (40, 80)
    assert done.stall_s == pytest.approx(0.4)
    assert done.output_tokens == 3


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_serves_every_turn(rule: str) -> None:
    trace = make_trace(TraceConfig(), seed=0)
    turns = [turn for trajectory in trace for turn in trajectory.turns]
    assert len(outcome(rule).ttft_s) == len(turns) == 128 * 50
    assert outcome(rule).output_tokens == sum(turn.num_decode for turn in turns)
    useful = outcome(rule).prefill_slots - outcome(rule).padded_tokens
    assert useful == sum(turn.num_prefill for turn in turns)


def test_a_seed_gives_one_trace_and_one_outcome() -> None:
    cfg = TraceConfig(num_trajectories=16, num_turns=5)
    assert make_trace(cfg, 1) == make_trace(cfg, 1) != make_trace(cfg, 2)
    assert simulate(make_trace(cfg, 1), pairing(LIMITS), COST) == simulate(make_trace(cfg, 1), pairing(LIMITS), COST)


def test_pairing_trades_first_token_time_for_less_padding_and_less_stall() -> None:
    paired, eager = outcome("pairing"), outcome("no delay")
    assert paired.padded_share < 0.8 * eager.padded_share
    assert paired.stall_s < 0.7 * eager.stall_s
    assert paired.ttft_percentile_s(50) > eager.ttft_percentile_s(50)


def test_holds_of_the_bounded_rules_are_bounded() -> None:
    assert outcome("pairing").longest_hold <= LIMITS.max_held
    assert outcome("ATOM-like").longest_hold <= LIMITS.max_held
    assert outcome("SGLang-like").longest_hold <= 30


def test_decoding_goes_on_in_every_hold() -> None:
    """Eight tokens in eight held passes: a request that decodes does not notice the one that waits."""
    trace = (TracedTrajectory(0, (Turn(0.0, 10, 8),)), TracedTrajectory(1, (Turn(0.001, 10, 1),)))
    done = simulate(trace, pairing(LIMITS), CostModel(pass_s=0.1, prefill_token_s=0.0, decode_s=0.0))
    assert done.duration_s == pytest.approx(0.1 * (1 + 8 + 1 + 1))
    assert done.num_vetoed == done.longest_hold == 8


def test_synthetic_a_mark_that_never_decays_vetoes_almost_all_admissions() -> None:
    """Mechanism of SGLang pull 32880, which reports about 97 % on a trace that is not public."""
    endless = QueueTrigger(running_ratio=1.0, window=None, max_wait_s=float("inf"))
    bad = simulate(burst_trace(), sglang_like(SglangLimits(queue=endless)), COST)
    windowed = QueueTrigger(running_ratio=1.0, window=16, max_wait_s=5.0)
    repaired = simulate(burst_trace(), sglang_like(SglangLimits(queue=windowed)), COST)
    good = simulate(burst_trace(), pairing(LIMITS), COST)
    assert bad.vetoed_share >= 0.97
    assert bad.longest_hold > 10 * LIMITS.max_held
    for bounded in (repaired, good):
        assert bounded.longest_hold <= LIMITS.max_held
        assert bounded.ttft_percentile_s(50) < bad.ttft_percentile_s(50) / 4
        assert bounded.num_prefill_passes > 3 * bad.num_prefill_passes


def test_synthetic_without_any_bound_a_mixed_group_waits_for_ever() -> None:
    stuck = simulate(burst_trace(), sglang_like(SglangLimits(max_delay_passes=None)), COST, max_passes=20_000)
    assert stuck.longest_hold > 15_000
    assert len(stuck.ttft_s) < 128 * 6


@pytest.mark.parametrize("rule", [no_delay(), fixed_delay(2), sglang_like(SglangLimits(max_delay_passes=2))])
def test_synthetic_ranks_that_drift_apart_by_chunks_stay_apart_under_short_waits(rule: object) -> None:
    """Mechanism of SGLang issue 35241: each mixed pass delays all ranks alike, so that the next one is mixed too."""
    done = simulate(_drift(), rule, COST)  # type: ignore[arg-type]
    assert done.late_padded_share == 0.75


def test_synthetic_pairing_closes_the_gap_once_and_for_all() -> None:
    done = simulate(_drift(), pairing(LIMITS), COST)
    assert done.late_padded_share < 0.02
    assert done.output_tokens_per_s > 2 * simulate(_drift(), no_delay(), COST).output_tokens_per_s


def _drift() -> tuple[TracedTrajectory, ...]:
    return drift_trace(COST.budget_tokens, COST.pass_s + COST.prefill_token_s * COST.budget_tokens)


def test_percentiles_of_nothing_are_refused() -> None:
    trace = (TracedTrajectory(0, (Turn(0.0, 10, 1),)),)
    with pytest.raises(ValueError, match="no turn was prefilled"):
        simulate(trace, no_delay(), COST, max_passes=0).ttft_percentile_s(50)
