"""What the cache answers: ids and copies, nothing done yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class HalfRestoreError(RuntimeError):
    """Not every copy of a restore was made. It is rolled back and its lock is gone; match again."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy between the tiers; source and target are ids of the tier that each lies in."""

    kind: Literal["page", "checkpoint"]
    direction: Literal["to_host", "to_device"]
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """Device ids lent to the caller. The copies save what they held: make them, in order, before writing."""

    ids: tuple[int, ...]
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix at which latent rows and state both stand, pinned until `release(lock)`.

    pages cover num_tokens; checkpoint (None: num_tokens is 0) holds the state at exactly num_tokens.
    kv_tokens is how far latent rows alone reach; branch_target (None: nothing to gain) is where the coming prefill
    should leave a checkpoint. copies are made in order; where is_staged, nothing of the hit may be read before
    `restored(lock, ...)`. stale_tokens of the hit stem from weights older than the namespace's, the oldest of them from
    policy oldest_step.
    """

    num_tokens: int
    pages: tuple[int, ...]
    checkpoint: int | None
    kv_tokens: int
    branch_target: int | None
    copies: tuple[Copy, ...]
    lock: int
    stale_tokens: int
    oldest_step: int

    @property
    def is_staged(self) -> bool:
        return any(copy.direction == "to_device" for copy in self.copies)


@dataclass(frozen=True, slots=True)
class Inserted:
    """What became of the caller's ids. `duplicate_*` are still the caller's: free them (after switching to `pages`).

    pages are the tree's ids for the inserted prefix, pinned until `release(lock)`; they end early where a restore is
    in flight, or where the caller's page belongs to a dropped tree.
    """

    pages: tuple[int, ...]
    taken_pages: tuple[int, ...]
    taken_checkpoints: tuple[int, ...]
    duplicate_pages: tuple[int, ...]
    duplicate_checkpoints: tuple[int, ...]
    lock: int


@dataclass(frozen=True, slots=True)
class Updated:
    """What an update did, in tokens of latent rows: gone, still under the old key, served on under the new key."""

    dropped_tokens: int
    kept_tokens: int
    stale_tokens: int
