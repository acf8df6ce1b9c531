"""One tick of continuous batching as a pure decision: who decodes, which prompt pieces go along, who gives way.

Memory is counted in pages of `page_size` tokens and in state slots. A sequence takes a slot, the pages of its prompt
and one page to decode into when it is admitted, so a prefill that has begun never lacks memory; a decode that outgrows
its pages takes one more. Two orders decide everything: rank (priority, arrival, name) says who is served first, and
age (arrival, name) names the one sequence that is never preempted, so that some sequence always gets to its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine holds. Raises ValueError, naming the key, for values under which a sequence could wait for ever.

    max_batch_tokens is per tick; max_length bounds prompt and generated tokens together.
    """

    max_batch_tokens: int
    num_slots: int
    page_size: int
    total_pages: int
    max_length: int
    max_queue: int
    chunk_multiple: int = 16
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        for key in ("num_slots", "page_size", "total_pages", "max_length", "max_queue", "chunk_multiple"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}: set it to at least 1")
        least = self.num_slots + self.chunk_multiple - 1
        if self.max_batch_tokens < least:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}: set it to at least {least} "
                "(num_slots + chunk_multiple - 1), or decodes can starve a prefill"
            )
        if not (math.isfinite(self.retry_after_s) and self.retry_after_s > 0):
            raise ValueError(f"retry_after_s is {self.retry_after_s}: set it to a positive number of seconds")

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sequence that holds no memory.

    priority 0 is the most urgent; arrival is a counter of the engine's and stays the same over preemptions. Prefill
    starts at num_cached, which a cache has the state of; the pages of those tokens count all the same.
    """

    sequence: str
    arrival: int
    num_tokens: int
    max_tokens: int
    priority: int = 0
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Running:
    """A sequence with a slot and num_pages pages: prefilling, or decoding once all of its num_tokens are prefilled.

    num_generated counts drawn tokens, the last of which is yet to be fed; the first comes with the prompt's last piece.
    """

    sequence: str
    arrival: int
    num_tokens: int
    max_tokens: int
    num_prefilled: int
    num_generated: int
    num_pages: int
    priority: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.num_prefilled <= self.num_tokens, self
        assert self.is_decoding == (self.num_generated > 0), self
        assert self.num_generated < self.max_tokens, f"{self.sequence} is finished"

    @property
    def is_decoding(self) -> bool:
        return self.num_prefilled == self.num_tokens


@dataclass(frozen=True, slots=True)
class Free:
    """Memory that nobody holds (what a cache would give up at once included)."""

    pages: int
    slots: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, end) of a prompt."""

    sequence: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that takes a slot and num_pages pages."""

    sequence: str
    num_pages: int


@dataclass(frozen=True, slots=True)
class Plan:
    """To be carried out in this order: preempt, grow, admit, then one batch of `decode` and `prefill`.

    preempted: give back slot and pages, and put these into the queue. grown: decodes that take one page each.
    Each sequence has one piece at most; the last piece of a prompt yields its first token.
    """

    decode: tuple[str, ...]
    prefill: tuple[Piece, ...]
    admitted: tuple[Admission, ...]
    preempted: tuple[Waiting, ...]
    grown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """May join the queue."""


@dataclass(frozen=True, slots=True)
class Refused:
    """retry_after_s None: never, however often it is asked."""

    reason: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Freed:
    """What an abort gives back, and what the sequence was doing (None: it is not known, which is no error)."""

    phase: Literal["waiting", "prefill", "decode"] | None
    pages: int
    slots: int


def admit(queue_length: int, request: Waiting, limits: Limits) -> Accepted | Refused:
    """Whether a new request may join a queue of this length. What is accepted can always be scheduled when alone."""
    if request.num_tokens < 1 or request.max_tokens < 1:
        return Refused("prompt and max_tokens must have at least 1 token each", None)
    if not 0 <= request.num_cached < request.num_tokens:
        return Refused(f"num_cached is {request.num_cached}: leave at least 1 of {request.num_tokens} tokens", None)
    most_tokens = request.num_tokens + request.max_tokens
    if most_tokens > limits.max_length:
        return Refused(
            f"{request.num_tokens} prompt tokens and max_tokens {request.max_tokens} exceed max_length "
            f"{limits.max_length}: shorten one of them",
            None,
        )
    if limits.num_pages(most_tokens) > limits.total_pages:
        return Refused(
            f"{most_tokens} tokens need {limits.num_pages(most_tokens)} pages of total_pages {limits.total_pages}: "
            "shorten the prompt or lower max_tokens",
            None,
        )
    if queue_length >= limits.max_queue:
        return Refused(f"the queue is full (max_queue {limits.max_queue})", limits.retry_after_s)
    return Accepted()


def abort(sequence: str, waiting: Sequence[Waiting], running: Sequence[Running]) -> Freed:
    """What comes free when this sequence is dropped between two ticks, whatever its phase."""
    for run in running:
        if run.sequence == sequence:
            return Freed("decode" if run.is_decoding else "prefill", run.num_pages, 1)
    is_waiting = any(request.sequence == sequence for request in waiting)
    return Freed("waiting" if is_waiting else None, 0, 0)


def schedule(
    waiting: Sequence[Waiting],
    running: Sequence[Running],
    free: Free,
    limits: Limits,
    hold_prefill: bool = False,
) -> Plan:
    """The plan of one tick; the order within `waiting` and `running` does not matter.

    Decodes come first, one token each. What is left of max_batch_tokens goes to prefills in rank order, those that
    have begun before those that wait; the first that does not fit ends the tick, so that nobody is overtaken for ever.
    hold_prefill (the verdict when data-parallel ranks prefill together) leaves decodes only. A tick that preempts does
    not admit: the memory it made is for decodes.
    """
    _check_inputs(waiting, running, free, limits)
    preempted, grown, free_pages = _make_room(running, free.pages, limits)
    gone = {request.sequence for request in preempted}
    stays = sorted((run for run in running if run.sequence not in gone), key=_rank)
    decode = tuple(run.sequence for run in stays if run.is_decoding)
    pieces: list[Piece] = []
    admitted: list[Admission] = []
    if not hold_prefill:
        budget = limits.max_batch_tokens - len(decode)
        begun = [run for run in stays if not run.is_decoding]
        for run in begun:
            end = _chunk_end(run.num_prefilled, run, budget, limits)
            if end == run.num_prefilled:
                break
            pieces.append(Piece(run.sequence, run.num_prefilled, end))
            budget -= end - run.num_prefilled
        if len(pieces) == len(begun) and not preempted:
            new_pieces, admitted = _admissions(waiting, budget, Free(free_pages, free.slots), limits)
            pieces += new_pieces
    return Plan(decode, tuple(pieces), tuple(admitted), tuple(preempted), tuple(grown))


def _make_room(running: Sequence[Running], free_pages: int, limits: Limits) -> tuple[list[Waiting], list[str], int]:
    """(preempted, grown, pages still free) after every decode that stays has a page for its token.

    The oldest is served first and then all by rank, so a victim (the last of those not served yet, or else the needy
    one itself) has never been given a page in the same tick.
    """
    preempted: list[Waiting] = []
    grown: list[str] = []
    if not running:
        return preempted, grown, free_pages
    oldest = min(running, key=_age)
    queue = [oldest, *sorted((run for run in running if run is not oldest), key=_rank)]
    while queue:
        run = queue.pop(0)
        if not run.is_decoding or limits.num_pages(run.num_tokens + run.num_generated) <= run.num_pages:
            continue
        while free_pages == 0:
            victim = queue.pop() if queue else run
            assert victim is not oldest, f"{run.sequence} is alone and lacks a page: somebody else holds pages"
            free_pages += victim.num_pages
            preempted.append(_requeued(victim))
            if victim is run:
                break
        else:
            free_pages -= 1
            grown.append(run.sequence)
    return preempted, grown, free_pages


def _admissions(
    waiting: Sequence[Waiting], budget: int, free: Free, limits: Limits
) -> tuple[list[Piece], list[Admission]]:
    """Those at the head of the queue for whom tokens, pages and a slot are there."""
    pieces: list[Piece] = []
    admitted: list[Admission] = []
    free_pages = free.pages
    for request in sorted(waiting, key=_rank):
        most_pages = limits.num_pages(request.num_tokens + request.max_tokens)
        num_pages = min(limits.num_pages(request.num_tokens) + 1, most_pages)
        end = _chunk_end(request.num_cached, request, budget, limits)
        if end == request.num_cached or num_pages > free_pages or len(admitted) == free.slots:
            break
        admitted.append(Admission(request.sequence, num_pages))
        pieces.append(Piece(request.sequence, request.num_cached, end))
        free_pages -= num_pages
        budget -= end - request.num_cached
    return pieces, admitted


def _chunk_end(start: int, request: Waiting | Running, budget: int, limits: Limits) -> int:
    """Where the piece that begins at `start` ends; `start` itself when the budget does not hold a piece."""
    if request.num_tokens - start <= budget:
        return request.num_tokens
    return start + budget // limits.chunk_multiple * limits.chunk_multiple


def _requeued(run: Running) -> Waiting:
    """The sequence as it waits after preemption: what it has generated is now part of what it prefills."""
    return Waiting(
        run.sequence,
        run.arrival,
        run.num_tokens + run.num_generated,
        run.max_tokens - run.num_generated,
        run.priority,
    )


def _rank(request: Waiting | Running) -> tuple[int, int, str]:
    return request.priority, request.arrival, request.sequence


def _age(run: Running) -> tuple[int, str]:
    return run.arrival, run.sequence


def _check_inputs(waiting: Sequence[Waiting], running: Sequence[Running], free: Free, limits: Limits) -> None:
    names = [request.sequence for request in waiting] + [run.sequence for run in running]
    assert len(names) == len(set(names)), "a sequence is given twice"
    assert all(0 <= request.num_cached < request.num_tokens for request in waiting), "nothing is left to prefill"
    assert min(free.pages, free.slots) >= 0, free
    assert len(running) + free.slots <= limits.num_slots, f"{len(running)} running and {free} exceed {limits}"
    num_held = sum(run.num_pages for run in running)
    assert num_held + free.pages <= limits.total_pages, f"{num_held} pages held and {free} exceed {limits}"
