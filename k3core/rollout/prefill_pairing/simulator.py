"""Discrete-event simulation of a group's passes under a rule, with a stated cost model. No claim about a GPU."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from k3core.rollout.prefill_pairing.baselines import GroupView, RankView, Rule
from k3core.rollout.prefill_pairing.traces import Trace, TracedTrajectory

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class CostModel:
    """A pass takes pass_s + prefill_token_s · max over ranks of prefilled tokens + decode_s · decoding requests.

    kv_tokens is a rank's room, which usage is counted against but which admits nobody and turns nobody away.
    """

    pass_s: float = 0.02
    prefill_token_s: float = 4e-5
    decode_s: float = 1e-4
    budget_tokens: int = 8192
    kv_tokens: int = 2_000_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """Ratios come as numerator and denominator.

    padded_tokens / prefill_slots: slots are ranks · max_r over prefill passes. stall_s: time that prefills added to
    passes in which somebody decoded. num_vetoed / num_attempts: ticks with work that held, of all ticks with work.
    ttft_s: sorted, one a turn, from its arrival to the end of its prefill.
    late_padded_tokens / late_prefill_slots: the same share over the second half of the prefill passes.
    """

    rule: str
    padded_tokens: int
    prefill_slots: int
    late_padded_tokens: int
    late_prefill_slots: int
    num_prefill_passes: int
    stall_s: float
    output_tokens: int
    duration_s: float
    ttft_s: tuple[float, ...]
    num_vetoed: int
    num_attempts: int
    longest_hold: int
    ticks_by_reason: dict[str, int]

    @property
    def padded_share(self) -> float:
        return self.padded_tokens / self.prefill_slots if self.prefill_slots else 0.0

    @property
    def late_padded_share(self) -> float:
        return self.late_padded_tokens / self.late_prefill_slots if self.late_prefill_slots else 0.0

    @property
    def vetoed_share(self) -> float:
        return self.num_vetoed / self.num_attempts if self.num_attempts else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    def ttft_percentile_s(self, percent: int) -> float:
        """Nearest rank. Raises ValueError when no turn was prefilled."""
        if not self.ttft_s:
            raise ValueError("no turn was prefilled: run a trace with turns")
        return self.ttft_s[max(0, -(-percent * len(self.ttft_s) // 100) - 1)]


@dataclass(slots=True)
class Request:
    """One turn while it waits or runs; num_context: tokens of its trajectory that are in the cache."""

    trajectory: TracedTrajectory
    index: int
    arrived_s: float
    num_left: int
    num_context: int
    is_started: bool = False


@dataclass(slots=True)
class RankQueue:
    """waiting is first come, first served; only its head may be a chunk in progress.

    active_tokens: cached tokens of running turns, the ones they are decoding left out; idle histories can be evicted.
    """

    waiting: deque[Request] = field(default_factory=deque)
    pending_tokens: int = 0
    num_decoding: int = 0
    active_tokens: int = 0

    def view(self, now_s: float, cost: CostModel) -> RankView:
        head = self.waiting[0] if self.waiting else None
        return RankView(
            pending_tokens=self.pending_tokens,
            num_queued=len(self.waiting),
            num_decoding=self.num_decoding,
            kv_per_mille=min(1000, 1000 * self.active_tokens // cost.kv_tokens),
            is_in_chunk=head is not None and head.is_started,
            waited_s=now_s - head.arrived_s if head else 0.0,
        )

    def prefill(self, budget: int) -> tuple[int, list[Request]]:
        """Takes up to budget tokens off the queue; gives how many, and the requests that are done with it."""
        num_taken, done = 0, []
        while self.waiting and num_taken < budget:
            head = self.waiting[0]
            if not head.is_started:
                head.is_started = True
                self.active_tokens += head.num_context
            step = min(head.num_left, budget - num_taken)
            head.num_left -= step
            num_taken += step
            if head.num_left == 0:
                done.append(self.waiting.popleft())
        self.pending_tokens -= num_taken
        self.active_tokens += num_taken
        return num_taken, done


def simulate(trace: Trace, rule: Rule[State], cost: CostModel, max_passes: int | None = None) -> Outcome:
    """Runs passes until every turn is decoded, or max_passes are over.

    A pass first asks the rule, then prefills if it fires, and moves every decoding request by one token either way.
    With nothing to do at all, time jumps to the next arrival.
    """
    queues = [RankQueue() for _ in range(1 + max(trajectory.rank for trajectory in trace))]
    order = count()
    arrivals: list[tuple[float, int, Request]] = []
    finishing: list[tuple[int, int, Request]] = []  # by the pass that decodes the last token
    state, now_s, num_passes = rule.first, 0.0, 0
    prefills: list[tuple[int, int]] = []
    ttft_s: list[float] = []
    reasons: Counter[str] = Counter()
    stall_s, output_tokens, num_vetoed, num_attempts, held, longest_hold = 0.0, 0, 0, 0, 0, 0

    def arrive(trajectory: TracedTrajectory, index: int, from_s: float, num_context: int) -> None:
        turn = trajectory.turns[index]
        request = Request(trajectory, index, from_s + turn.tool_s, turn.num_prefill, num_context)
        heapq.heappush(arrivals, (request.arrived_s, next(order), request))

    for trajectory in trace:
        arrive(trajectory, 0, 0.0, 0)
    while arrivals or finishing or any(queue.waiting for queue in queues):
        if max_passes is not None and num_passes >= max_passes:
            break
        if arrivals and not finishing and not any(queue.waiting for queue in queues):
            now_s = max(now_s, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now_s:
            _, _, request = heapq.heappop(arrivals)
            queues[request.trajectory.rank].waiting.append(request)
            queues[request.trajectory.rank].pending_tokens += request.num_left
        view: GroupView = tuple(queue.view(now_s, cost) for queue in queues)
        choice, state = rule.choose(state, view)
        reasons[choice.reason] += 1
        has_work = any(rank.pending_tokens for rank in view)
        num_attempts += has_work
        num_vetoed += has_work and not choice.fire
        held = 0 if choice.fire else held + 1
        longest_hold = max(longest_hold, held)
        num_decoding = len(finishing)
        taken = [queue.prefill(cost.budget_tokens) if choice.fire else (0, []) for queue in queues]
        largest = max(num_taken for num_taken, _ in taken)
        now_s += cost.pass_s + cost.prefill_token_s * largest + cost.decode_s * num_decoding
        num_passes += 1
        output_tokens += num_decoding
        stall_s += cost.prefill_token_s * largest if num_decoding else 0.0
        if largest:
            slots = largest * len(queues)
            prefills.append((slots - sum(num_taken for num_taken, _ in taken), slots))
        while finishing and finishing[0][0] <= num_passes:
            _, _, request = heapq.heappop(finishing)
            turn = request.trajectory.turns[request.index]
            num_context = request.num_context + turn.num_prefill + turn.num_decode
            queue = queues[request.trajectory.rank]
            queue.num_decoding -= 1
            queue.active_tokens -= request.num_context + turn.num_prefill
            if request.index + 1 < len(request.trajectory.turns):
                arrive(request.trajectory, request.index + 1, now_s, num_context)
        for queue, (_, done) in zip(queues, taken, strict=True):
            queue.num_decoding += len(done)
            for request in done:
                ttft_s.append(now_s - request.arrived_s)
                last_pass = num_passes + request.trajectory.turns[request.index].num_decode
                heapq.heappush(finishing, (last_pass, next(order), request))
    late = prefills[len(prefills) // 2 :]
    return Outcome(
        rule=rule.name,
        padded_tokens=sum(padded for padded, _ in prefills),
        prefill_slots=sum(slots for _, slots in prefills),
        late_padded_tokens=sum(padded for padded, _ in late),
        late_prefill_slots=sum(slots for _, slots in late),
        num_prefill_passes=len(prefills),
        stall_s=stall_s,
        output_tokens=output_tokens,
        duration_s=now_s,
        ttft_s=tuple(sorted(ttft_s)),
        num_vetoed=num_vetoed,
        num_attempts=num_attempts,
        longest_hold=longest_hold,
        ticks_by_reason=dict(reasons),
    )
