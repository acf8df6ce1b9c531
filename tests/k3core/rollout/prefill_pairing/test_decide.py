"""Properties of one tick: order of the rules, finite holds, equal verdicts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3core.rollout.prefill_pairing import (
    GroupCounts,
    Limits,
    PairingState,
    RankCounts,
    Reason,
    broken_group,
    decide,
    reduce_counts,
)

LIMITS = Limits(budget_tokens=100)
FRESH = PairingState()
HOLDS = {Reason.HOLD_ALIGN, Reason.HOLD_GROW}

ranks = st.builds(
    RankCounts,
    pending_tokens=st.integers(0, 150),
    num_decoding=st.integers(0, 3),
    kv_per_mille=st.integers(0, 1000),
    is_in_chunk=st.booleans(),
    is_overdue=st.booleans(),
)
groups = st.lists(ranks, min_size=1, max_size=6)
states = st.builds(PairingState, st.integers(0, 40), st.integers(0, 5), st.one_of(st.none(), st.integers(0, 400)))
limits = st.builds(
    Limits,
    budget_tokens=st.integers(1, 200),
    target_per_mille=st.integers(0, 2000),
    high_kv_per_mille=st.integers(500, 1000),
    low_kv_per_mille=st.integers(0, 500),
    max_held=st.integers(1, 40),
    max_held_in_chunk=st.integers(1, 10),
    max_stalled=st.integers(1, 5),
)


def quiet(state: PairingState = FRESH, **changes: object) -> GroupCounts:
    """Four ranks, three of them with a little work: held for alignment unless a change releases it."""
    rank = RankCounts(pending_tokens=10, num_decoding=5, kv_per_mille=500, is_in_chunk=False, is_overdue=False)
    counts = reduce_counts([rank, rank, rank, replace(rank, pending_tokens=0)], [state] * 4)
    return replace(counts, **changes)  # type: ignore[arg-type]


def reason(counts: GroupCounts, state: PairingState = FRESH) -> Reason:
    return decide(state, counts, LIMITS).reason


def test_a_rank_without_work_holds_the_group() -> None:
    assert reason(quiet()) == Reason.HOLD_ALIGN


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"is_broken": True}, Reason.GROUP_BROKEN),
        ({"max_state": PairingState(1)}, Reason.STATE_MISMATCH),
        ({"pending_tokens": 0, "num_ready": 0}, Reason.NOTHING_TO_PREFILL),
        ({"num_decoding": 0}, Reason.NOBODY_DECODES),
        ({"max_kv_per_mille": 901}, Reason.KV_HIGH),
        ({"has_overdue": True}, Reason.OVERDUE),
        ({"pending_tokens": 280, "num_ready": 4}, Reason.FULL_ENOUGH),
        ({"pending_tokens": 279, "num_ready": 4}, Reason.HOLD_GROW),
        ({"pending_tokens": 4000, "num_ready": 3}, Reason.HOLD_ALIGN),
        ({"has_chunk": True}, Reason.HOLD_ALIGN),
        ({"max_kv_per_mille": 900}, Reason.HOLD_ALIGN),
    ],
)
def test_each_rule_releases_or_holds_at_its_bound(changes: dict[str, object], expected: Reason) -> None:
    assert reason(quiet(FRESH, **changes)) == expected


def test_usage_below_the_low_mark_releases() -> None:
    low = replace(LIMITS, low_kv_per_mille=501)
    assert decide(PairingState(), quiet(), low).reason == Reason.KV_LOW


def test_an_earlier_rule_names_the_reason() -> None:
    state = PairingState(30, 3, 30)
    counts = quiet(state, has_chunk=True, has_overdue=True, max_kv_per_mille=950)
    assert reason(counts, state) == Reason.KV_HIGH
    assert reason(replace(counts, max_kv_per_mille=500), state) == Reason.HELD_LONG
    assert reason(replace(counts, num_decoding=0), state) == Reason.NOBODY_DECODES
    assert reason(replace(counts, is_broken=True), state) == Reason.GROUP_BROKEN


@pytest.mark.parametrize(("has_chunk", "expected", "num_holds"), [(False, "held_long", 30), (True, "chunk_waits", 8)])
def test_a_rank_that_never_has_work_delays_the_others_by_the_bound(
    has_chunk: bool, expected: str, num_holds: int
) -> None:
    state = PairingState()
    for tick in range(num_holds):
        verdict = decide(state, quiet(state, has_chunk=has_chunk), LIMITS)
        assert not verdict.fire
        state = verdict.state
        assert state.num_held == tick + 1
    verdict = decide(state, quiet(state, has_chunk=has_chunk), LIMITS)
    assert (verdict.reason, verdict.state) == (expected, PairingState())


def test_a_sum_that_stops_growing_is_released_after_three_ticks() -> None:
    state, reasons = PairingState(), []
    for pending in (40, 50, 60, 60, 60, 60):
        verdict = decide(state, quiet(state, num_ready=4, pending_tokens=pending), LIMITS)
        reasons.append(verdict.reason)
        state = verdict.state
    assert reasons == [Reason.HOLD_GROW] * 5 + [Reason.NOT_GROWING]


def test_ranks_with_unequal_states_all_fire_and_agree_again() -> None:
    rank = RankCounts(10, 5, 500, False, False)
    apart = [PairingState(3, 0, 20), PairingState(4, 0, 20)]
    verdicts = [decide(state, reduce_counts([rank, rank], apart), LIMITS) for state in apart]
    assert [v.reason for v in verdicts] == [Reason.STATE_MISMATCH] * 2
    assert {v.state for v in verdicts} == {PairingState()}


@given(st.lists(groups, min_size=1, max_size=120), limits)
def test_holds_are_finite_whatever_the_counts(ticks: list[list[RankCounts]], limits: Limits) -> None:
    state, num_in_a_row = PairingState(), 0
    for group in ticks:
        verdict = decide(state, reduce_counts(group, [state] * len(group)), limits)
        num_in_a_row = 0 if verdict.fire else num_in_a_row + 1
        state = verdict.state
        assert state.num_held == num_in_a_row <= limits.max_held
        assert state.num_stalled <= state.num_held


@given(groups, st.lists(states, min_size=6, max_size=6), limits)
def test_every_rank_of_a_group_reaches_the_same_verdict(
    group: list[RankCounts], states: list[PairingState], limits: Limits
) -> None:
    own = states[: len(group)]
    counts = reduce_counts(group, own)
    assert len({decide(state, counts, limits) for state in own}) == 1


@given(groups, states, limits, st.randoms())
def test_the_order_of_ranks_does_not_matter(
    group: list[RankCounts], state: PairingState, limits: Limits, random: Random
) -> None:
    verdict = decide(state, reduce_counts(group, [state] * len(group)), limits)
    random.shuffle(group)
    assert decide(state, reduce_counts(group, [state] * len(group)), limits) == verdict


@given(groups, states, limits)
def test_a_hold_counts_up_and_a_fire_starts_over(group: list[RankCounts], state: PairingState, limits: Limits) -> None:
    verdict = decide(state, reduce_counts(group, [state] * len(group)), limits)
    assert verdict.fire == (verdict.reason not in HOLDS)
    assert verdict.state.num_held == (0 if verdict.fire else state.num_held + 1)


@given(groups, states, limits)
def test_nothing_is_held_that_has_nothing_to_hide_behind(
    group: list[RankCounts], state: PairingState, limits: Limits
) -> None:
    idle = [replace(rank, num_decoding=0) for rank in group]
    assert decide(state, reduce_counts(idle, [state] * len(group)), limits).fire


@given(states, limits)
def test_a_broken_group_fails_open(state: PairingState, limits: Limits) -> None:
    verdict = decide(state, broken_group(4, state), limits)
    assert (verdict.fire, verdict.reason) == (True, Reason.GROUP_BROKEN)


@pytest.mark.parametrize("bad", [{"max_held": 0}, {"budget_tokens": 0}, {"low_kv_per_mille": 950}, {"max_wait_s": 0.0}])
def test_bounds_that_make_no_sense_are_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        replace(LIMITS, **bad)  # type: ignore[arg-type]
