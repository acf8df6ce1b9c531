"""One tick of continuous batching: a test per rule, and a loop that carries plans out over random traffic."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3core.rollout.scheduling import (
    Accepted,
    Admission,
    Free,
    Freed,
    Limits,
    Piece,
    Plan,
    Refused,
    Running,
    Waiting,
    abort,
    admit,
    schedule,
)

LIMITS = Limits(max_batch_tokens=64, num_slots=8, page_size=16, total_pages=100, max_length=512, max_queue=4)


def prefilling(name: str, arrival: int, num_tokens: int, done: int = 0, priority: int = 0) -> Running:
    return Running(name, arrival, num_tokens, 32, done, 0, LIMITS.num_pages(num_tokens) + 1, priority)


def decoding(name: str, arrival: int, num_pages: int, priority: int = 0, is_needy: bool = True) -> Running:
    """A decode whose next token is the first of a new page, or (not is_needy) the last of its own."""
    num_tokens = num_pages * LIMITS.page_size - 4
    return Running(name, arrival, num_tokens, 32, num_tokens, 5 if is_needy else 4, num_pages, priority)


# --- tokens


def test_prefill_gets_what_the_decodes_leave_of_the_budget() -> None:
    running = [decoding(f"d{n}", n, 2, is_needy=False) for n in range(3)]
    plan = schedule([], [*running, prefilling("p", 9, 200)], Free(10, 4), LIMITS)
    assert plan.decode == ("d0", "d1", "d2")
    assert plan.prefill == (Piece("p", 0, 48),)  # 61 tokens are left, three whole chunks


def test_decodes_are_not_blocked_by_an_older_and_more_urgent_prefill() -> None:
    plan = schedule([], [prefilling("p", 0, 500), decoding("d", 9, 2, 5, is_needy=False)], Free(10, 6), LIMITS)
    assert plan.decode == ("d",)


def test_a_chunk_is_a_multiple_unless_it_ends_the_prompt() -> None:
    cut, whole = (schedule([], [prefilling("p", 0, n)], Free(10, 7), LIMITS).prefill for n in (70, 61))
    assert cut == (Piece("p", 0, 64),)
    assert whole == (Piece("p", 0, 61),)


def test_prefills_that_have_begun_go_before_more_urgent_ones_that_wait() -> None:
    running = [prefilling("late", 5, 100, 80), prefilling("early", 4, 100, 80), prefilling("urgent", 6, 100, 84, -1)]
    plan = schedule([Waiting("new", 0, 100, 8, -2)], running, Free(50, 5), LIMITS)
    assert plan.prefill == (Piece("urgent", 84, 100), Piece("early", 80, 100), Piece("late", 80, 100))
    assert not plan.admitted  # 8 tokens are left, less than a chunk


def test_the_waiting_are_taken_by_priority_then_arrival_then_name() -> None:
    waiting = [Waiting("c", 1, 8, 8, 1), Waiting("b", 2, 8, 8), Waiting("a", 2, 8, 8), Waiting("z", 0, 8, 8, 2)]
    plan = schedule(waiting, [], Free(50, 8), LIMITS)
    assert [piece.sequence for piece in plan.prefill] == ["a", "b", "c", "z"]


def test_a_small_request_does_not_overtake_a_prefill_for_which_the_tokens_do_not_suffice() -> None:
    waiting = [Waiting("first", 0, 60, 8), Waiting("second", 1, 200, 8), Waiting("small", 2, 2, 8)]
    plan = schedule(waiting, [], Free(50, 8), LIMITS)
    assert plan.admitted == (Admission("first", 5),)


def test_a_prefill_for_which_a_chunk_is_not_left_is_overtaken_by_nobody() -> None:
    running = [prefilling("first", 0, 60), prefilling("second", 1, 200), prefilling("small", 2, 2)]
    plan = schedule([Waiting("new", 3, 2, 8)], running, Free(50, 5), LIMITS)
    assert (plan.prefill, plan.admitted) == ((Piece("first", 0, 60),), ())


def test_prefill_begins_after_the_cached_tokens() -> None:
    plan = schedule([Waiting("w", 0, 60, 8, num_cached=37)], [], Free(50, 8), LIMITS)
    assert plan.prefill == (Piece("w", 37, 60),)


def test_holding_prefill_leaves_decodes_alone() -> None:
    running = [prefilling("p", 0, 100), decoding("d", 1, 2)]
    plan = schedule([Waiting("w", 0, 8, 8)], running, Free(50, 6), LIMITS, hold_prefill=True)
    assert plan == Plan(("d",), (), (), (), ("d",))


# --- memory


@pytest.mark.parametrize(("free_pages", "is_admitted"), [(3, True), (2, False)])
def test_admission_needs_the_prompts_pages_and_one_to_decode_into(free_pages: int, is_admitted: bool) -> None:
    plan = schedule([Waiting("w", 0, 20, 200)], [], Free(free_pages, 1), LIMITS)
    assert plan.admitted == ((Admission("w", 3),) if is_admitted else ())
    assert bool(plan.prefill) == is_admitted


def test_admission_asks_for_no_more_pages_than_the_sequence_can_ever_fill() -> None:
    assert schedule([Waiting("w", 0, 20, 12)], [], Free(2, 1), LIMITS).admitted == (Admission("w", 2),)


def test_admission_needs_a_slot() -> None:
    waiting = [Waiting("a", 0, 8, 8), Waiting("b", 1, 8, 8)]
    assert schedule(waiting, [], Free(50, 1), LIMITS).admitted == (Admission("a", 1),)


def test_a_small_request_does_not_overtake_one_that_waits_for_pages() -> None:
    assert not schedule([Waiting("big", 0, 400, 8), Waiting("small", 1, 8, 8)], [], Free(20, 8), LIMITS).admitted


def test_a_decode_takes_a_page_when_its_token_begins_one() -> None:
    running = [decoding("full", 0, 2), decoding("roomy", 1, 2, is_needy=False)]
    plan = schedule([], running, Free(1, 6), LIMITS)
    assert (plan.grown, plan.decode, plan.preempted) == (("full",), ("full", "roomy"), ())


def test_the_youngest_of_the_lowest_priority_is_preempted_with_its_tokens_so_far() -> None:
    running = [
        decoding("needy", 0, 2),
        decoding("urgent", 9, 2, is_needy=False),
        decoding("old", 3, 2, 1, is_needy=False),
        decoding("young", 4, 2, 1, is_needy=False),
    ]
    plan = schedule([], running, Free(0, 4), LIMITS)
    assert plan.preempted == (Waiting("young", 4, 32, 28, 1),)
    assert (plan.decode, plan.grown) == (("needy", "urgent", "old"), ("needy",))


def test_the_pages_of_one_victim_serve_several_decodes() -> None:
    running = [decoding("a", 0, 2), decoding("b", 1, 2), decoding("c", 2, 2), decoding("victim", 3, 2, is_needy=False)]
    plan = schedule([], running, Free(1, 4), LIMITS)
    assert [request.sequence for request in plan.preempted] == ["victim"]
    assert plan.grown == ("a", "b", "c")


def test_a_prefill_can_be_the_one_that_gives_way() -> None:
    plan = schedule([], [decoding("needy", 0, 2), prefilling("p", 1, 100, 32)], Free(0, 6), LIMITS)
    assert plan.preempted == (Waiting("p", 1, 100, 32),)
    assert plan.prefill == ()


def test_the_oldest_is_never_preempted_even_when_its_priority_is_lowest() -> None:
    running = [decoding("oldest", 0, 2, 9), decoding("urgent", 1, 2, 0)]
    plan = schedule([], running, Free(0, 6), LIMITS)
    assert [request.sequence for request in plan.preempted] == ["urgent"]
    assert plan.decode == ("oldest",)


def test_a_decode_for_which_nobody_may_give_way_gives_way_itself() -> None:
    running = [decoding("oldest", 0, 2, is_needy=False), decoding("needy", 1, 2)]
    plan = schedule([], running, Free(0, 6), LIMITS)
    assert [request.sequence for request in plan.preempted] == ["needy"]
    assert (plan.decode, plan.grown) == (("oldest",), ())


def test_a_tick_that_preempts_does_not_admit() -> None:
    running = [decoding("needy", 0, 2), decoding("victim", 1, 20, is_needy=False)]
    assert not schedule([Waiting("w", 2, 8, 8)], running, Free(0, 6), LIMITS).admitted


def test_the_preempted_come_before_those_of_their_priority_that_have_not_run() -> None:
    running = [decoding("needy", 0, 2), decoding("victim", 1, 3, is_needy=False)]
    back = schedule([], running, Free(0, 6), LIMITS).preempted
    plan = schedule([Waiting("new", 2, 8, 8), *back], [], Free(50, 6), LIMITS)
    assert [admission.sequence for admission in plan.admitted] == ["victim", "new"]


# --- the door


def test_what_exceeds_max_length_or_all_pages_is_refused_for_good_even_by_a_full_queue() -> None:
    few_pages = replace(LIMITS, total_pages=4)
    for request, limits, key in [
        (Waiting("w", 0, 500, 13), LIMITS, "max_length"),
        (Waiting("w", 0, 60, 5), few_pages, "total_pages"),
        (Waiting("w", 0, 60, 0), LIMITS, "max_tokens"),
        (Waiting("w", 0, 0, 5), LIMITS, "prompt"),
        (Waiting("w", 0, 60, 5, num_cached=60), LIMITS, "num_cached"),
    ]:
        verdict = admit(4, request, limits)
        assert isinstance(verdict, Refused)
        assert verdict.retry_after_s is None
        assert key in verdict.reason
        assert "\n" not in verdict.reason
    assert admit(0, Waiting("w", 0, 500, 12), LIMITS) == Accepted()
    assert admit(0, Waiting("w", 0, 60, 4), few_pages) == Accepted()


def test_a_full_queue_says_when_to_come_again() -> None:
    assert admit(3, Waiting("w", 0, 8, 8), LIMITS) == Accepted()
    assert admit(4, Waiting("w", 0, 8, 8), LIMITS) == Refused("the queue is full (max_queue 4)", 1.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, 0) for key in ("num_slots", "page_size", "total_pages", "max_length", "max_queue", "chunk_multiple")],
        ("max_batch_tokens", 22),
        ("retry_after_s", 0.0),
        ("retry_after_s", float("nan")),
    ],
)
def test_limits_that_cannot_work_are_refused_by_the_name_of_their_key(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{key} is [^\n]*$"):
        Limits(**{**asdict(LIMITS), key: value})


def test_the_smallest_budget_moves_a_prefill_beside_decodes_in_all_other_slots() -> None:
    limits = replace(LIMITS, max_batch_tokens=23)
    running = [decoding(f"d{n}", n, 2, is_needy=False) for n in range(7)]
    assert schedule([], [*running, prefilling("p", 9, 200)], Free(0, 0), limits).prefill == (Piece("p", 0, 16),)


def test_an_abort_says_what_comes_free_in_every_phase() -> None:
    waiting, running = [Waiting("w", 0, 8, 8)], [prefilling("p", 1, 100, 16), decoding("d", 2, 3)]
    freed = [abort(name, waiting, running) for name in ("w", "p", "d", "unknown")]
    assert freed == [Freed("waiting", 0, 0), Freed("prefill", 8, 1), Freed("decode", 3, 1), Freed(None, 0, 0)]


# --- all rules at once


@dataclass(slots=True)
class Loop:
    """A fake engine: carries plans out, counts memory by itself, and checks each plan against what it knows."""

    limits: Limits
    waiting: dict[str, Waiting] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    pages: int = 0
    slots: int = 0
    num_preempted: int = 0
    finished: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pages, self.slots = self.limits.total_pages, self.limits.num_slots

    def tick(self, rng: random.Random, hold_prefill: bool, stops: Callable[[], bool]) -> Plan:
        waiting, running = list(self.waiting.values()), list(self.running.values())
        free = Free(self.pages, self.slots)
        plan = schedule(waiting, running, free, self.limits, hold_prefill)
        other_waiting, other_running = rng.sample(waiting, len(waiting)), rng.sample(running, len(running))
        assert schedule(other_waiting, other_running, free, self.limits, hold_prefill) == plan
        if running:
            oldest = min(running, key=lambda run: (run.arrival, run.sequence)).sequence
            assert oldest not in {request.sequence for request in plan.preempted}
        self._move_memory(plan)
        num_tokens = len(plan.decode) + sum(piece.end - piece.start for piece in plan.prefill)
        assert num_tokens <= self.limits.max_batch_tokens
        assert set(plan.decode) == {name for name, run in self.running.items() if run.is_decoding}
        assert len({*plan.decode, *(piece.sequence for piece in plan.prefill)}) == len(plan.decode) + len(plan.prefill)
        assert not (hold_prefill and (plan.prefill or plan.admitted))
        for piece in plan.prefill:
            self._feed(piece, stops())
        for name in plan.decode:
            self._decode(name, stops())
        return plan

    def _move_memory(self, plan: Plan) -> None:
        for request in plan.preempted:
            run = self.running.pop(request.sequence)
            assert request.num_tokens + request.max_tokens == run.num_tokens + run.max_tokens
            self.waiting[request.sequence] = request
            self.pages += run.num_pages
            self.slots += 1
            self.num_preempted += 1
        for name in plan.grown:
            self.running[name] = replace(self.running[name], num_pages=self.running[name].num_pages + 1)
            self.pages -= 1
        for taken in plan.admitted:
            new = self.waiting.pop(taken.sequence)
            self.running[new.sequence] = Running(
                *(new.sequence, new.arrival, new.num_tokens, new.max_tokens, new.num_cached, 0),
                *(taken.num_pages, new.priority),
            )
            self.pages -= taken.num_pages
            self.slots -= 1
        assert min(self.pages, self.slots) >= 0

    def _feed(self, piece: Piece, is_stop: bool) -> None:
        """The last piece of a prompt yields its first token."""
        run = self.running[piece.sequence]
        length = piece.end - piece.start
        assert piece.start == run.num_prefilled
        assert length > 0
        assert piece.end == run.num_tokens or length % self.limits.chunk_multiple == 0
        assert piece.end <= run.num_pages * self.limits.page_size
        is_last = piece.end == run.num_tokens
        if is_last and (is_stop or run.max_tokens == 1):
            self._finish(piece.sequence)
            return
        self.running[piece.sequence] = replace(run, num_prefilled=piece.end, num_generated=int(is_last))

    def _decode(self, name: str, is_stop: bool) -> None:
        """The last drawn token is fed into a page that the sequence has, and one more is drawn."""
        run = self.running[name]
        assert run.num_tokens + run.num_generated <= run.num_pages * self.limits.page_size
        if is_stop or run.num_generated + 1 == run.max_tokens:
            self._finish(name)
        else:
            self.running[name] = replace(run, num_generated=run.num_generated + 1)

    def _finish(self, name: str) -> None:
        self.drop(name)
        self.finished.append(name)

    def drop(self, name: str) -> None:
        freed = abort(name, list(self.waiting.values()), list(self.running.values()))
        assert (freed.phase == "waiting") == (name in self.waiting)
        self.waiting.pop(name, None)
        self.running.pop(name, None)
        self.pages += freed.pages
        self.slots += freed.slots
        assert self.pages == self.limits.total_pages - sum(run.num_pages for run in self.running.values())
        assert self.slots == self.limits.num_slots - len(self.running)


def random_limits(rng: random.Random) -> Limits:
    num_slots, chunk = rng.randint(1, 12), rng.choice([1, 4, 16])
    return Limits(
        max_batch_tokens=num_slots + chunk - 1 + rng.choice([0, 0, 7, 100]),
        num_slots=num_slots,
        page_size=rng.choice([1, 4, 16]),
        total_pages=rng.randint(4, 40),
        max_length=rng.randint(20, 200),
        max_queue=1000,
        chunk_multiple=chunk,
    )


def random_request(rng: random.Random, name: str, arrival: int, num_priorities: int) -> Waiting:
    num_tokens = rng.choice([rng.randint(1, 20), rng.randint(1, 150)])
    num_cached = rng.choice([0, 0, rng.randrange(num_tokens)])
    max_tokens, priority = rng.randint(1, 40), rng.randrange(num_priorities)
    return Waiting(name, arrival, num_tokens, max_tokens, priority, num_cached)


def most_ticks(request: Waiting, limits: Limits) -> int:
    """What it needs when every tick moves it, all that it generated before a preemption prefilled again."""
    least_budget = limits.max_batch_tokens - limits.num_slots + 1
    chunk = least_budget // limits.chunk_multiple * limits.chunk_multiple
    return (request.num_tokens + request.max_tokens) // chunk + 1 + request.max_tokens


def simulate(rng: random.Random, num_requests: int) -> Loop:
    """Traffic until all is done, within the ticks that a queue served one by one would take."""
    limits, num_priorities = random_limits(rng), rng.choice([1, 3])
    loop, aborted, accepted, bound = Loop(limits), set[str](), set[str](), 0
    names = rng.sample(range(num_requests), num_requests)  # so that names and arrivals are in different orders
    coming = [random_request(rng, f"s{name}", n // 2, num_priorities) for n, name in enumerate(names)]
    coming.reverse()
    stop_rate, abort_rate, hold_rate = rng.choice([0.0, 0.05]), rng.choice([0.0, 0.03]), rng.choice([0.0, 0.3])
    burst = rng.choice([1, 3, num_requests])
    num_ticks = 0
    while coming or loop.waiting or loop.running:
        for _ in range(min(len(coming), rng.randint(0, burst))):
            request = coming.pop()
            if isinstance(admit(len(loop.waiting), request, limits), Accepted):
                loop.waiting[request.sequence] = request
                accepted.add(request.sequence)
                bound += most_ticks(request, limits)
        for name in [*loop.waiting, *loop.running]:
            if rng.random() < abort_rate:
                loop.drop(name)
                aborted.add(name)
        hold_prefill = rng.random() < hold_rate
        is_idle = not (loop.waiting or loop.running)
        plan = loop.tick(rng, hold_prefill, lambda: rng.random() < stop_rate)
        assert is_idle or hold_prefill or plan.decode or plan.prefill, "a tick moved nobody"
        num_ticks += not (hold_prefill or is_idle)
        assert num_ticks <= bound, "somebody starves"
    assert sorted([*loop.finished, *aborted]) == sorted(accepted)
    assert (loop.pages, loop.slots) == (limits.total_pages, limits.num_slots)
    return loop


def test_random_traffic_keeps_every_rule_and_comes_to_its_end() -> None:
    loops = [simulate(random.Random(seed), 60) for seed in range(120)]
    assert sum(len(loop.finished) for loop in loops) > 2000
    assert sum(loop.num_preempted for loop in loops) > 200


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_short_traffic_keeps_every_rule_and_comes_to_its_end(seed: int, num_requests: int) -> None:
    simulate(random.Random(seed), num_requests)
