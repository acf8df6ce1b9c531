"""Fire or hold the prefills of a group: a pure function of reduced values, so that every rank reaches one verdict.

The rules are those of ATOM (github.com/ROCm/ATOM/pull/1611) and of SGLang's prefill delayer, in one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from k3core.rollout.prefill_pairing.counts import GroupCounts, PairingState


class Reason(StrEnum):
    """Why a tick fired or held, in the order in which the rules are asked."""

    GROUP_BROKEN = "group_broken"
    STATE_MISMATCH = "state_mismatch"
    NOTHING_TO_PREFILL = "nothing_to_prefill"
    NOBODY_DECODES = "nobody_decodes"
    KV_HIGH = "kv_high"
    KV_LOW = "kv_low"
    HELD_LONG = "held_long"
    CHUNK_WAITS = "chunk_waits"
    OVERDUE = "overdue"
    FULL_ENOUGH = "full_enough"
    NOT_GROWING = "not_growing"
    HOLD_ALIGN = "hold_align"
    HOLD_GROW = "hold_grow"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a hold; equal on every rank. Defaults are ATOM's where it publishes one.

    budget_tokens: what one rank prefills in one pass. low_kv_per_mille: 0 turns the low mark off.
    max_wait_s is for the caller, who turns a clock into RankCounts.is_overdue.
    Raises ValueError for bounds that would make a hold endless or a rule meaningless.
    """

    budget_tokens: int = 8192
    target_per_mille: int = 700
    high_kv_per_mille: int = 900
    low_kv_per_mille: int = 0
    max_held: int = 30
    max_held_in_chunk: int = 8
    max_stalled: int = 3
    max_wait_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("budget_tokens", "max_held", "max_held_in_chunk", "max_stalled"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1")
        if not 0 <= self.low_kv_per_mille <= self.high_kv_per_mille:
            raise ValueError(
                f"low_kv_per_mille is {self.low_kv_per_mille}: give 0 to high_kv_per_mille ({self.high_kv_per_mille})"
            )
        if not self.max_wait_s > 0:
            raise ValueError(f"max_wait_s is {self.max_wait_s}: give seconds above 0")


@dataclass(frozen=True, slots=True)
class Verdict:
    """fire: prefill in this tick, on every rank, with dummies where there is no work. state: for the next tick."""

    fire: bool
    reason: Reason
    state: PairingState


def decide(state: PairingState, counts: GroupCounts, limits: Limits) -> Verdict:
    """One tick. Decoding never waits for the answer's content: a hold delays prefills only.

    At most limits.max_held holds follow each other, whatever the counts are.
    """
    num_stalled = _num_stalled(state, counts)
    reason = _reason(state, counts, limits, num_stalled)
    if reason in (Reason.HOLD_ALIGN, Reason.HOLD_GROW):
        return Verdict(False, reason, PairingState(state.num_held + 1, num_stalled, counts.pending_tokens))
    return Verdict(True, reason, PairingState())


def _num_stalled(state: PairingState, counts: GroupCounts) -> int:
    if state.last_pending is None or counts.pending_tokens > state.last_pending:
        return 0
    return state.num_stalled + 1


def _reason(state: PairingState, counts: GroupCounts, limits: Limits, num_stalled: int) -> Reason:
    rules = (
        (Reason.GROUP_BROKEN, counts.is_broken),
        (Reason.STATE_MISMATCH, not counts.min_state == counts.max_state == state),
        (Reason.NOTHING_TO_PREFILL, counts.pending_tokens == 0),
        (Reason.NOBODY_DECODES, counts.num_decoding == 0),
        (Reason.KV_HIGH, counts.max_kv_per_mille > limits.high_kv_per_mille),
        (Reason.KV_LOW, counts.max_kv_per_mille < limits.low_kv_per_mille),
        (Reason.HELD_LONG, state.num_held >= limits.max_held),
        (Reason.CHUNK_WAITS, counts.has_chunk and state.num_held >= limits.max_held_in_chunk),
        (Reason.OVERDUE, counts.has_overdue),
        (Reason.HOLD_ALIGN, counts.num_ready < counts.num_ranks),
        (Reason.FULL_ENOUGH, _is_full_enough(counts, limits)),
        (Reason.NOT_GROWING, num_stalled >= limits.max_stalled),
    )
    return next((reason for reason, applies in rules if applies), Reason.HOLD_GROW)


def _is_full_enough(counts: GroupCounts, limits: Limits) -> bool:
    return 1000 * counts.pending_tokens >= limits.target_per_mille * counts.num_ready * limits.budget_tokens
