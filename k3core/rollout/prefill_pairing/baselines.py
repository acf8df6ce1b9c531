"""Rules to compare with: no delay, a fixed delay, and rules like SGLang's and ATOM's, as far as they are described.

Every rule maps (state, view of the group) to a Choice and the next state; none reads a clock or keeps anything.
"Like" is meant: these follow public descriptions of the rules, not the code of either project.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from k3core.rollout.prefill_pairing.counts import PairingState, RankCounts, reduce_counts
from k3core.rollout.prefill_pairing.decide import Limits, decide

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class RankView:
    """Tokens are of all waiting requests, chunks in progress included; waited_s is the oldest one's age, 0 if none."""

    pending_tokens: int
    num_queued: int
    num_decoding: int
    kv_per_mille: int
    is_in_chunk: bool
    waited_s: float


GroupView = tuple[RankView, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    fire: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Rule(Generic[State]):
    """choose(state, view) -> (choice, next state); first is the state before the first tick."""

    name: str
    first: State
    choose: Callable[[State, GroupView], tuple[Choice, State]]


def no_delay() -> Rule[None]:
    """Prefill as soon as any rank can."""
    return Rule("no delay", None, lambda state, _: (Choice(True, "no_delay"), state))


def fixed_delay(num_ticks: int) -> Rule[int]:
    """Hold each prefill for num_ticks passes, whoever else is ready. State: ticks held."""

    def choose(held: int, view: GroupView) -> tuple[Choice, int]:
        if not any(rank.pending_tokens for rank in view):
            return Choice(True, "nothing_to_prefill"), 0
        if held >= num_ticks:
            return Choice(True, "held_long"), 0
        return Choice(False, "hold_fixed"), held + 1

    return Rule(f"fixed delay {num_ticks}", 0, choose)


def pairing(limits: Limits, name: str = "pairing") -> Rule[PairingState]:
    """The rules of decide."""

    def choose(state: PairingState, view: GroupView) -> tuple[Choice, PairingState]:
        counts = reduce_counts([_rank_counts(rank, limits) for rank in view], [state] * len(view))
        verdict = decide(state, counts, limits)
        return Choice(verdict.fire, verdict.reason.value), verdict.state

    return Rule(name, PairingState(), choose)


def _rank_counts(rank: RankView, limits: Limits) -> RankCounts:
    return RankCounts(
        pending_tokens=rank.pending_tokens,
        num_decoding=rank.num_decoding,
        kv_per_mille=rank.kv_per_mille,
        is_in_chunk=rank.is_in_chunk,
        is_overdue=rank.waited_s > limits.max_wait_s,
    )


def atom_like(budget_tokens: int) -> Rule[PairingState]:
    """The same order with ATOM's published numbers, and without the rules that come from SGLang: no low mark, no clock."""
    return pairing(Limits(budget_tokens=budget_tokens, low_kv_per_mille=0, max_wait_s=float("inf")), "ATOM-like")


@dataclass(frozen=True, slots=True)
class QueueTrigger:
    """Hold while the queue is shorter than min(num_decoding · ratio, largest batch seen), for at most max_wait_s.

    window: attempts over which the largest batch is remembered; None: for ever (the mark never decays).
    """

    running_ratio: float = 0.25
    window: int | None = 16
    max_wait_s: float = 5.0


@dataclass(frozen=True, slots=True)
class SglangLimits:
    """max_delay_passes bounds the wait of a mixed group; None never gives up. low_kv_per_mille: 0 turns it off."""

    max_delay_passes: int | None = 30
    low_kv_per_mille: int = 0
    queue: QueueTrigger | None = None


@dataclass(frozen=True, slots=True)
class SglangState:
    """batches: queue lengths of the latest attempts, or, without a window, only the largest of all."""

    num_passes: int = 0
    batches: tuple[int, ...] = ()


def sglang_like(limits: SglangLimits) -> Rule[SglangState]:
    """All ranks ready: fire. None: fire. Mixed: hold for max_delay_passes, unless a rank's usage is below the low mark."""

    def choose(state: SglangState, view: GroupView) -> tuple[Choice, SglangState]:
        num_ready = sum(rank.pending_tokens > 0 for rank in view)
        if num_ready == 0:
            return Choice(True, "nothing_to_prefill"), SglangState(0, state.batches)
        batches = _remember(state.batches, sum(rank.num_queued for rank in view), limits.queue)
        reason = _sglang_hold(limits, state, batches, view, num_ready)
        if reason is not None:
            return Choice(False, reason), SglangState(state.num_passes + 1, batches)
        return Choice(True, "all_ready" if num_ready == len(view) else "mixed_released"), SglangState(0, batches)

    return Rule("SGLang-like", SglangState(), choose)


def _sglang_hold(
    limits: SglangLimits, state: SglangState, batches: tuple[int, ...], view: GroupView, num_ready: int
) -> str | None:
    if any(rank.pending_tokens and rank.kv_per_mille < limits.low_kv_per_mille for rank in view):
        return None
    may_wait = limits.max_delay_passes is None or state.num_passes < limits.max_delay_passes
    if num_ready < len(view) and may_wait:
        return "hold_mixed"
    queue = limits.queue
    if queue is None or max(rank.waited_s for rank in view) >= queue.max_wait_s:
        return None
    enough = min(sum(rank.num_decoding for rank in view) * queue.running_ratio, max(batches))
    return "hold_queue" if sum(rank.num_queued for rank in view) < enough else None


def _remember(batches: tuple[int, ...], batch: int, queue: QueueTrigger | None) -> tuple[int, ...]:
    if queue is None:
        return ()
    if queue.window is None:
        return (max(batch, *batches),) if batches else (batch,)
    return (*batches, batch)[-queue.window :]
