"""Counts since the cache was made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class CacheStats:
    """A staged hit counts once it is restored. dropped_*: entries lost by reason.

    Reasons: no_checkpoint (rows that no state makes usable), host_full, host_evicted, update.
    """

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    stale_hit_tokens: int = 0
    stale_tokens: int = 0
    offloaded_pages: int = 0
    offloaded_checkpoints: int = 0
    restored_pages: int = 0
    restored_checkpoints: int = 0
    refused_restores: int = 0
    dropped_pages: Counter[str] = field(default_factory=Counter)
    dropped_checkpoints: Counter[str] = field(default_factory=Counter)

    @property
    def hit_rate(self) -> float | None:
        """Hit tokens over query tokens; None before the first query."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else None
