"""Ids of one kind on one tier: each is free, lent to a caller, or owned by a node."""

from __future__ import annotations

from collections.abc import Iterable

from k3core.rollout.prefix_cache.tree import Node


class Pool:
    """Lowest free id last in, first out. Asserts that nobody gives what is not theirs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = list(range(size - 1, -1, -1))
        self.lent: set[int] = set()
        self.owner: dict[int, Node] = {}

    def lend(self, num_ids: int) -> tuple[int, ...]:
        ids = tuple(self.free.pop() for _ in range(num_ids))
        self.lent.update(ids)
        return ids

    def take_back(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            assert id_ in self.lent, f"id {id_} is not lent: freed twice, or the cache took it over"
            self.lent.remove(id_)
            self.free.append(id_)

    def hand_over(self, id_: int, node: Node) -> int:
        """Lent by a caller, from now on the node's."""
        assert id_ in self.lent, f"id {id_} is not lent: only allocated ids can be inserted"
        self.lent.remove(id_)
        self.owner[id_] = node
        return id_

    def own(self, node: Node) -> int:
        return self.hand_over(self.lend(1)[0], node)

    def disown(self, id_: int) -> None:
        del self.owner[id_]
        self.free.append(id_)
