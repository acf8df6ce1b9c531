"""Properties of the pure decision: who prefills now."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from k3core.rollout.scheduler import Waiting, schedule

Case = tuple[list[Waiting], list[int], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Waiting requests, some of which own a slot; free slots that nobody owns, in any order; a token budget."""
    owned = draw(st.lists(st.integers(0, 30), unique=True, max_size=6))
    slots: list[int | None] = [*owned, *[None] * draw(st.integers(0, 8))]
    slots = draw(st.permutations(slots))
    waiting = [Waiting(f"s{n}", draw(st.integers(1, 50)), slot) for n, slot in enumerate(slots)]
    free = draw(st.lists(st.integers(0, 30).filter(lambda slot: slot not in owned), unique=True, max_size=8))
    return waiting, free, draw(st.integers(1, 120))


def taken(case: Case) -> tuple[list[Waiting], list[int]]:
    """The requests that were taken, and their slots."""
    by_name = {request.sequence: request for request in case[0]}
    plan = schedule(*case)
    return [by_name[name] for name, _ in plan.prefill], [slot for _, slot in plan.prefill]


@given(cases())
def test_no_slot_and_no_request_is_taken_twice(case: Case) -> None:
    requests, slots = taken(case)
    assert len(set(slots)) == len(slots)
    assert len({request.sequence for request in requests}) == len(requests)


@given(cases())
def test_an_owner_gets_its_own_slot_and_a_newcomer_a_free_one(case: Case) -> None:
    requests, slots = taken(case)
    for request, slot in zip(requests, slots, strict=True):
        assert slot == request.slot if request.slot is not None else slot in case[1]


@given(cases())
def test_only_a_single_request_may_exceed_the_budget(case: Case) -> None:
    requests, _ = taken(case)
    assert len(requests) <= 1 or sum(request.num_tokens for request in requests) <= case[2]


@given(cases())
def test_owners_go_first_and_each_kind_in_order_of_arrival(case: Case) -> None:
    waiting, _, _ = case
    queue = [r for r in waiting if r.slot is not None] + [r for r in waiting if r.slot is None]
    requests, _ = taken(case)
    assert requests == queue[: len(requests)]


@given(cases())
def test_nobody_waits_who_could_be_served(case: Case) -> None:
    waiting, free, budget = case
    requests, slots = taken(case)
    rest = [r for r in waiting if r.slot is not None] + [r for r in waiting if r.slot is None]
    rest = rest[len(requests) :]
    if not rest:
        return
    has_slot = rest[0].slot is not None or bool(set(free) - set(slots))
    fits = not requests or sum(request.num_tokens for request in requests) + rest[0].num_tokens <= budget
    assert not (has_slot and fits)


@given(cases())
def test_newcomers_take_the_lowest_free_slots(case: Case) -> None:
    requests, slots = taken(case)
    given_out = [slot for request, slot in zip(requests, slots, strict=True) if request.slot is None]
    assert given_out == sorted(case[1])[: len(given_out)]


def test_everybody_is_served_in_the_end() -> None:
    waiting = [Waiting(f"s{n}", 10 + n, None) for n in range(30)]
    served = []
    while waiting:
        plan = schedule(waiting, [0, 1, 2], 25)  # the three slots come back after every pass
        served += [name for name, _ in plan.prefill]
        waiting = [request for request in waiting if request.sequence not in served]
    assert served == [f"s{n}" for n in range(30)]
