"""A node is one page of tokens below its parent, so a branch never splits one and a checkpoint never moves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

_serials = count()


@dataclass(frozen=True, slots=True)
class Reuse:
    """Decayed count of uses. `log_weight` is log2(count) + time / half_life, which orders entries at any later time."""

    log_weight: float

    def used(self, time: int, half_life: int) -> Reuse:
        return Reuse(math.log2(2.0 ** (self.log_weight - time / half_life) + 1.0) + time / half_life)


NEVER = Reuse(-math.inf)


@dataclass(slots=True, eq=False)
class Node:
    """The page that ends at `position`, and perhaps the state at exactly there.

    `page` / `host_page` and `checkpoint` / `host_checkpoint`: where each lies, one tier at a time.
    `staged_*`: the device id that a restore is copying to, the host id being its source.
    `policy_step` is the oldest policy whose weights computed anything of this prefix.
    """

    parent: Node | None
    key: tuple[int, ...]
    position: int
    policy_step: int
    page: int | None = None
    host_page: int | None = None
    checkpoint: int | None = None
    host_checkpoint: int | None = None
    staged_page: int | None = None
    staged_checkpoint: int | None = None
    num_pins: int = 0
    num_checkpoint_pins: int = 0
    page_reuse: Reuse = NEVER
    checkpoint_reuse: Reuse = NEVER
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    is_dying: bool = False  # its tree was dropped; it goes with its last pin
    serial: int = field(default_factory=lambda: next(_serials))

    @property
    def is_on_device(self) -> bool:
        return self.page is not None

    @property
    def has_checkpoint(self) -> bool:
        return self.checkpoint is not None or self.host_checkpoint is not None

    @property
    def is_restoring(self) -> bool:
        return self.staged_page is not None or self.staged_checkpoint is not None


def page_keys(tokens: Sequence[int], page_size: int, num_pages: int) -> Iterator[tuple[int, ...]]:
    for start in range(0, num_pages * page_size, page_size):
        yield tuple(tokens[start : start + page_size])


def below(node: Node) -> Iterator[Node]:
    """The node and everything under it, parents before children."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
