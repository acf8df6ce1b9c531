"""What the cache is told once: its sizes, and what makes two equal token prefixes the same history."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides the token ids that rows and states depend on; the key of a tree's root.

    adapter_sha256 is the digest of the adapter's bytes (None: no adapter): its name says nothing about them.
    """

    base_sha256: str
    adapter_sha256: str | None
    policy_step: int
    tokenizer_sha256: str
    tenant: str


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes in tokens, ids and bytes. Checkpoints stand at multiples of `grid` only, so always at a page's end.

    half_life: number of matches after which an entry that nobody asked for counts half.
    Raises ValueError naming the key.
    """

    page_size: int
    grid: int
    num_pages: int
    num_checkpoints: int
    num_host_pages: int
    num_host_checkpoints: int
    page_bytes: int
    checkpoint_bytes: int
    half_life: int = 1024

    def __post_init__(self) -> None:
        for key in ("page_size", "grid", "num_pages", "num_checkpoints", "page_bytes", "checkpoint_bytes", "half_life"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} = {getattr(self, key)}: must be at least 1")
        for key in ("num_host_pages", "num_host_checkpoints"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} = {getattr(self, key)}: must not be negative (0: no host tier)")
        if self.grid % self.page_size:
            raise ValueError(f"grid = {self.grid}: must be a multiple of page_size {self.page_size}")
        if (self.num_host_pages == 0) != (self.num_host_checkpoints == 0):
            raise ValueError(
                f"num_host_pages = {self.num_host_pages}, num_host_checkpoints = {self.num_host_checkpoints}: "
                "the host tier holds both histories; set both or neither to 0"
            )
