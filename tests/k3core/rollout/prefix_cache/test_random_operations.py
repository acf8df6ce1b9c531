"""Random operations against recomputation: whatever the cache hands out is what a cold prefill would have written."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from k3core.rollout.prefix_cache import CacheConfig, HalfRestoreError, Match, Namespace, audit


@dataclass
class Sequence:
    """A running sequence: what it holds, and whether its hit is still on its way."""

    namespace: Namespace
    tokens: list[int]
    match: Match
    is_staged: bool
    pages: tuple[int, ...] = ()  # all of its prefix
    own_pages: tuple[int, ...] = ()
    checkpoints: dict[int, int] = field(default_factory=dict)
    locks: list[int] = field(default_factory=list)
    oldest_step: int = 0


class Traffic:
    """Draws one operation at a time; every one ends with an audit."""

    def __init__(self, engine: Any, seed: int) -> None:
        self.engine = engine
        self.cache = engine.cache
        self.cfg = engine.cfg
        self.rng = random.Random(seed)
        self.tenants = [Namespace("base", adapter, 0, "tokenizer", "t") for adapter in (None, "a", "b")]
        self.histories: list[list[int]] = []
        self.running: list[Sequence] = []
        self.seen: Counter[str] = Counter()

    def step(self) -> None:
        operations = [(self.start, 4), (self.advance, 12), (self.abort, 1), (self.update, 0.15), (self.look, 2)]
        operation = self.rng.choices([o for o, _ in operations], [w for _, w in operations])[0]
        operation()
        audit(self.cache)

    def draw_tokens(self) -> list[int]:
        """A history that was there before, cut anywhere, and something new: they meet, branch and repeat."""
        known = self.rng.choice(self.histories) if self.histories else []
        history = known[: self.rng.randrange(len(known) + 1)] if self.rng.random() < 0.5 else known
        return self.extend(history if len(history) < 36 else [])

    def extend(self, history: list[int]) -> list[int]:
        tokens = history + [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 10))]
        self.histories = [*self.histories[-7:], tokens]
        return tokens

    def start(self) -> None:
        if len(self.running) >= 4:
            return
        namespace = self.rng.choice(self.tenants)
        tokens = self.draw_tokens()
        match = self.cache.match(namespace, tokens)
        self.seen["staged" if match.is_staged else "hit" if match.num_tokens else "miss"] += 1
        self.seen["branch"] += match.branch_target is not None
        self.engine.perform(copy for copy in match.copies if copy.direction == "to_host")
        sequence = Sequence(namespace, tokens, match, match.is_staged, match.pages, locks=[match.lock])
        sequence.oldest_step = namespace.policy_step
        self.running.append(sequence)
        if not match.is_staged:
            self.engine.check(namespace, tokens, match)

    def advance(self) -> None:
        if not self.running:
            return
        sequence = self.rng.choice(self.running)
        if sequence.is_staged:
            self.restore(sequence)
        elif len(sequence.pages) < len(sequence.tokens) // self.cfg.page_size:
            self.prefill(sequence)
        else:
            self.insert(sequence)

    def restore(self, sequence: Sequence) -> None:
        wanted = [copy for copy in sequence.match.copies if copy.direction == "to_device"]
        done = wanted if self.rng.random() < 0.7 else self.rng.sample(wanted, self.rng.randrange(len(wanted)))
        self.engine.perform(done)
        if len(done) < len(wanted):
            with pytest.raises(HalfRestoreError):
                self.cache.restored(sequence.match.lock, done)
            self.running.remove(sequence)
            self.seen["half restore"] += 1
            return
        self.cache.restored(sequence.match.lock, done)
        sequence.is_staged = False
        self.seen["restored"] += 1
        match = dataclasses.replace(sequence.match, stale_tokens=sequence.match.num_tokens)
        self.engine.check(sequence.namespace, sequence.tokens, match)

    def prefill(self, sequence: Sequence) -> None:
        fresh = self.engine.compute_pages(sequence.namespace, sequence.tokens, len(sequence.pages))
        if fresh is None:
            self.seen["no room"] += 1
            self.abort(sequence)
            return
        sequence.own_pages += fresh
        sequence.pages += fresh
        last = len(sequence.tokens) // self.cfg.grid * self.cfg.grid
        for position in {sequence.match.branch_target, last} - {None, 0}:
            if (
                position > sequence.match.num_tokens
                and position not in sequence.checkpoints
                and self.rng.random() < 0.8
            ):
                slot = self.engine.compute_checkpoint(sequence.namespace, sequence.tokens, position)
                if slot is not None:
                    sequence.checkpoints[position] = slot

    def insert(self, sequence: Sequence) -> None:
        inserted = self.cache.insert(
            sequence.namespace, sequence.tokens, sequence.pages, sequence.checkpoints, policy_step=sequence.oldest_step
        )
        audit(self.cache)
        self.engine.check_pages(sequence.namespace, sequence.tokens, inserted.pages, is_fresh=False)
        self.seen["insert"] += 1
        self.cache.free_pages(inserted.duplicate_pages)
        for slot in inserted.duplicate_checkpoints:
            self.cache.free_checkpoint(slot)
        is_whole = len(inserted.pages) == len(sequence.pages)
        for lock in sequence.locks:
            self.cache.release(lock)
        sequence.locks, sequence.pages, sequence.own_pages = [inserted.lock], inserted.pages, ()
        sequence.checkpoints = {}
        if not is_whole or len(sequence.tokens) > 36 or self.rng.random() < 0.6:
            self.abort(sequence)
        else:
            sequence.tokens = self.extend(sequence.tokens)

    def abort(self, sequence: Sequence | None = None) -> None:
        """At whatever point it is: everything it holds goes back."""
        if sequence is None:
            if not self.running:
                return
            sequence = self.rng.choice(self.running)
            self.seen["abort"] += 1
        self.running.remove(sequence)
        self.cache.free_pages(sequence.own_pages)
        for slot in sequence.checkpoints.values():
            self.cache.free_checkpoint(slot)
        for lock in sequence.locks:
            self.cache.release(lock)

    def update(self) -> None:
        """One adapter's policy moves on. Running sequences go on under the new key only where its entries do."""
        index = self.rng.randrange(len(self.tenants))
        old = self.tenants[index]
        new = dataclasses.replace(old, policy_step=old.policy_step + 1)
        rule = self.rng.choice(["drop", "keep", "continue"])
        self.cache.update(rule, old, new)
        if rule == "continue":
            self.engine.lineage[new] = [old, *self.engine.lineage.get(old, [])]
            for sequence in self.running:
                if sequence.namespace == old:
                    sequence.namespace = new
        self.tenants[index] = new
        self.seen[rule] += 1

    def look(self) -> None:
        """What running sequences hold is untouched, whatever was evicted meanwhile."""
        for sequence in self.running:
            if not sequence.is_staged:
                self.engine.check_pages(sequence.namespace, sequence.tokens, sequence.pages, is_fresh=False)

    def finish(self) -> None:
        while self.running:
            self.abort(self.running[-1])
        audit(self.cache)
        store = self.cache.store
        assert not store.pinned
        assert not self.cache.locks
        assert not self.cache.dying_roots
        assert not store.pages.lent
        assert not store.checkpoints.lent


SIZES = [
    CacheConfig(2, 4, 24, 6, 24, 6, page_bytes=4, checkpoint_bytes=64),
    CacheConfig(2, 4, 40, 12, 60, 20, page_bytes=4, checkpoint_bytes=64),  # host larger than device
    CacheConfig(2, 8, 32, 3, 6, 2, page_bytes=64, checkpoint_bytes=4),  # a host that is always full
    CacheConfig(3, 3, 30, 20, 0, 0, page_bytes=4, checkpoint_bytes=64, half_life=4),  # no host
    CacheConfig(1, 2, 60, 4, 40, 20, page_bytes=1, checkpoint_bytes=64),  # states are what is short
]


@pytest.mark.parametrize("seed", range(len(SIZES)))
def test_random_operations_hand_out_what_recomputation_gives(fake_engine: Any, seed: int) -> None:
    engine = fake_engine(SIZES[seed])
    traffic = Traffic(engine, seed)
    for _ in range(8000):
        traffic.step()
    traffic.finish()
    seen = traffic.seen
    wanted = {"hit", "miss", "branch", "insert", "abort", "no room", "drop", "keep", "continue"}
    if engine.cfg.num_host_pages:
        wanted |= {"staged", "restored", "half restore"}
    assert min(seen[what] for what in wanted) >= 10, seen
    assert engine.cache.stats.stale_hit_tokens > 0
    for namespace in traffic.tenants:
        engine.cache.update("drop", namespace, namespace)
    audit(engine.cache)
