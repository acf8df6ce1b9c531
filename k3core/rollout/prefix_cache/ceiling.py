"""The best hit rate that a workload allows, so that a measured one can be read against it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HitCeiling:
    """Hit tokens with infinite memory and a checkpoint at every grid position."""

    hit_tokens: int
    query_tokens: int

    @property
    def rate(self) -> float:
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


def hit_ceiling(requests: Iterable[tuple[Hashable, Sequence[int]]], grid: int = 1) -> HitCeiling:
    """Requests are (namespace, tokens) in order, each cached whole before the next one comes.

    A hit is the longest prefix on the grid shared with an earlier request, leaving one token to compute.
    """
    children: dict[tuple[int, Hashable], int] = {}
    hit_tokens = query_tokens = 0
    for namespace, tokens in requests:
        node = children.setdefault((-1, namespace), len(children))
        is_shared = True
        for start in range(0, len(tokens) - grid + 1, grid):
            key = (node, tuple(tokens[start : start + grid]))
            is_shared = is_shared and key in children
            if is_shared and start + grid < len(tokens):
                hit_tokens += grid
            node = children.setdefault(key, len(children))
        query_tokens += len(tokens)
    return HitCeiling(hit_tokens, query_tokens)
