from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import pytest

from k3core.rollout.prefix_cache import CacheConfig, Copy, Inserted, Match, Namespace, PrefixCache, audit


class FakeEngine:
    """Owns bytes in place of tensors: a page's is a digest of all that it depends on, and so is a checkpoint's."""

    def __init__(self, cfg: CacheConfig) -> None:
        self.cfg = cfg
        self.cache = PrefixCache(cfg)
        self.device = {"page": [b"unwritten"] * cfg.num_pages, "checkpoint": [b"unwritten"] * cfg.num_checkpoints}
        self.host = {
            "page": [b"unwritten"] * cfg.num_host_pages,
            "checkpoint": [b"unwritten"] * cfg.num_host_checkpoints,
        }
        self.lineage: dict[Namespace, list[Namespace]] = {}  # whose computations a namespace may serve

    @staticmethod
    def content(kind: str, namespace: Namespace, tokens: Sequence[int], end: int) -> bytes:
        return hashlib.blake2b(f"{kind} {namespace} {list(tokens[:end])}".encode(), digest_size=12).digest()

    def perform(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            if copy.direction == "to_host":
                self.host[copy.kind][copy.target] = self.device[copy.kind][copy.source]
            else:
                self.device[copy.kind][copy.target] = self.host[copy.kind][copy.source]

    def match(self, namespace: Namespace, tokens: Sequence[int], restore: bool = True) -> Match:
        match = self.cache.match(namespace, tokens)
        audit(self.cache)
        if restore:
            self.perform(match.copies)
            self.cache.restored(match.lock, match.copies)
            audit(self.cache)
            self.check(namespace, tokens, match)
        return match

    def check(self, namespace: Namespace, tokens: Sequence[int], match: Match) -> None:
        """What the hit gives equals what a recomputation gives."""
        assert match.num_tokens % self.cfg.grid == 0
        assert 0 <= match.num_tokens <= match.kv_tokens <= max(len(tokens) - 1, 0)
        assert (match.checkpoint is None) == (match.num_tokens == 0)
        self.check_pages(namespace, tokens, match.pages, is_fresh=not match.stale_tokens)
        if match.checkpoint is not None:
            state = self.device["checkpoint"][match.checkpoint]
            served = [namespace] if not match.stale_tokens else [namespace, *self.lineage.get(namespace, [])]
            assert state in [self.content("checkpoint", n, tokens, match.num_tokens) for n in served]

    def check_pages(self, namespace: Namespace, tokens: Sequence[int], pages: Sequence[int], is_fresh: bool) -> None:
        served = [namespace] if is_fresh else [namespace, *self.lineage.get(namespace, [])]
        for index, page in enumerate(pages):
            end = (index + 1) * self.cfg.page_size
            assert self.device["page"][page] in [self.content("page", n, tokens, end) for n in served]

    def compute_pages(self, namespace: Namespace, tokens: Sequence[int], first: int) -> tuple[int, ...] | None:
        """The whole pages of tokens from page `first` on, allocated and written."""
        allocation = self.cache.allocate_pages(len(tokens) // self.cfg.page_size - first)
        if allocation is None:
            return None
        self.perform(allocation.copies)
        for index, page in enumerate(allocation.ids, first):
            self.device["page"][page] = self.content("page", namespace, tokens, (index + 1) * self.cfg.page_size)
        return allocation.ids

    def compute_checkpoint(self, namespace: Namespace, tokens: Sequence[int], position: int) -> int | None:
        allocation = self.cache.allocate_checkpoint()
        if allocation is None:
            return None
        self.perform(allocation.copies)
        self.device["checkpoint"][allocation.ids[0]] = self.content("checkpoint", namespace, tokens, position)
        return allocation.ids[0]

    def serve(self, namespace: Namespace, tokens: Sequence[int], positions: Iterable[int] | None = None) -> Match:
        """One request from match to release. positions None: the branch target and the last grid position."""
        match = self.match(namespace, tokens)
        fresh = self.compute_pages(namespace, tokens, len(match.pages))
        assert fresh is not None
        if positions is None:
            last = len(tokens) // self.cfg.grid * self.cfg.grid
            positions = {p for p in (match.branch_target, last) if p is not None and p > match.num_tokens}
        slots = {position: self.compute_checkpoint(namespace, tokens, position) for position in sorted(positions)}
        written = {position: slot for position, slot in slots.items() if slot is not None}
        self.insert(namespace, tokens, (*match.pages, *fresh), written)
        self.cache.release(match.lock)
        audit(self.cache)
        return match

    def insert(
        self, namespace: Namespace, tokens: Sequence[int], pages: Sequence[int], checkpoints: Mapping[int, int]
    ) -> Inserted:
        """Insert, free what the cache did not take, and let go."""
        inserted = self.cache.insert(namespace, tokens, pages, checkpoints)
        audit(self.cache)
        self.cache.free_pages(inserted.duplicate_pages)
        for slot in inserted.duplicate_checkpoints:
            self.cache.free_checkpoint(slot)
        self.cache.release(inserted.lock)
        audit(self.cache)
        return inserted


@pytest.fixture
def fake_engine() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture
def namespace() -> Namespace:
    return Namespace("base", None, 0, "tokenizer", "tenant")


@pytest.fixture
def roomy() -> CacheConfig:
    return CacheConfig(4, 8, 512, 256, 0, 0, page_bytes=4, checkpoint_bytes=64)
