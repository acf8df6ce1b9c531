"""What a rank tells its group each tick, and what the group knows after the reduction. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairingState:
    """Carried from tick to tick, and equal on every rank of a group that works.

    num_held: holds since the last fire. num_stalled: the last of those in which the pending sum did not grow.
    last_pending: the pending sum of the last hold, in tokens; None after a fire.
    """

    num_held: int = 0
    num_stalled: int = 0
    last_pending: int | None = None


@dataclass(frozen=True, slots=True)
class RankCounts:
    """One rank's queue at the start of a tick; a chunk in progress counts as pending with what is left of it.

    is_overdue is the only trace of a wall clock: the oldest request has waited longer than the time limit.
    """

    pending_tokens: int
    num_decoding: int
    kv_per_mille: int
    is_in_chunk: bool
    is_overdue: bool


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """The reduced values: sums, maxima and ORs over ranks; the lowest and the highest state, field by field."""

    num_ranks: int
    pending_tokens: int
    num_ready: int
    num_decoding: int
    max_kv_per_mille: int
    has_chunk: bool
    has_overdue: bool
    min_state: PairingState
    max_state: PairingState
    is_broken: bool = False


def broken_group(num_ranks: int, state: PairingState) -> GroupCounts:
    """What a rank knows that cannot reach its group: nothing, so that it fires."""
    return GroupCounts(num_ranks, 0, 0, 0, 0, False, False, state, state, is_broken=True)


def reduce_counts(ranks: Sequence[RankCounts], states: Sequence[PairingState]) -> GroupCounts:
    """Counts and state of every rank, in the order of ranks."""
    assert ranks, "a group has at least one rank"
    assert len(ranks) == len(states), "one state a rank"
    return GroupCounts(
        num_ranks=len(ranks),
        pending_tokens=sum(rank.pending_tokens for rank in ranks),
        num_ready=sum(rank.pending_tokens > 0 for rank in ranks),
        num_decoding=sum(rank.num_decoding for rank in ranks),
        max_kv_per_mille=max(rank.kv_per_mille for rank in ranks),
        has_chunk=any(rank.is_in_chunk for rank in ranks),
        has_overdue=any(rank.is_overdue for rank in ranks),
        min_state=_fieldwise(states, highest=False),
        max_state=_fieldwise(states, highest=True),
    )


def _fieldwise(states: Sequence[PairingState], highest: bool) -> PairingState:
    pick = max if highest else min
    last = pick(-1 if state.last_pending is None else state.last_pending for state in states)
    return PairingState(
        num_held=pick(state.num_held for state in states),
        num_stalled=pick(state.num_stalled for state in states),
        last_pending=None if last < 0 else last,
    )
