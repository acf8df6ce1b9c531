"""Who prefills and who waits: a pure decision, carried out by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that is not running: how many tokens it must prefill, and the slot it owns (None: new sequence)."""

    sequence: str
    num_tokens: int
    slot: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """(sequence, slot) pairs to prefill now; everybody else waits."""

    prefill: tuple[tuple[str, int], ...]


def schedule(waiting: Sequence[Waiting], free_slots: Sequence[int], max_prefill_tokens: int) -> Plan:
    """First come, first served within the token budget; sequences that own a slot before new ones.

    One request is always taken, however long, so that none waits for ever. New sequences take the lowest
    free slots, which keeps the running ones together.
    """
    free = sorted(free_slots)
    prefill: list[tuple[str, int]] = []
    budget = max_prefill_tokens
    for request in sorted(waiting, key=lambda w: w.slot is None):
        slot = request.slot
        if prefill and request.num_tokens > budget:
            break
        if slot is None:
            if not free:
                break
            slot = free.pop(0)
        prefill.append((request.sequence, slot))
        budget -= request.num_tokens
    return Plan(tuple(prefill))
