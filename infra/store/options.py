"""How a store moves bytes and how long it insists."""

from __future__ import annotations

from dataclasses import dataclass

MIN_PART_BYTES = 5 << 20  # S3's bound for all parts but the last
MAX_PARTS = 10_000


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Only S3 reads them. Objects above `part_bytes` move in parts, `parallelism` of them at a time and in memory.

    tries: of one request, with pauses that double from `pause_s` to `max_pause_s`, each shortened by up to a half at
    random so that many clients do not come back together. read_timeout_s: without one byte from the server.
    """

    part_bytes: int = 32 << 20
    parallelism: int = 8
    tries: int = 8
    pause_s: float = 0.2
    max_pause_s: float = 10.0
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.part_bytes < MIN_PART_BYTES:
            raise ValueError(f"part_bytes must be at least {MIN_PART_BYTES}, found {self.part_bytes}")
        if self.parallelism < 1 or self.tries < 1:
            raise ValueError(f"parallelism and tries must be at least 1, found {self.parallelism} and {self.tries}")

    def pause(self, num_failed: int, random01: float) -> float:
        """Seconds before the next try, after `num_failed` of them."""
        return min(self.pause_s * 2.0 ** (num_failed - 1), self.max_pause_s) * (1.0 - random01 / 2)

    def part_bytes_of(self, size_bytes: int) -> int:
        """Whole MiB, and large enough that no object has more parts than S3 takes."""
        needed = -(-size_bytes // MAX_PARTS)
        return max(self.part_bytes, -(-needed // (1 << 20)) << 20)


def spans(size_bytes: int, part_bytes: int) -> list[tuple[int, int]]:
    """[start, stop) of each part; the last one may be shorter. An empty object has none."""
    return [(start, min(start + part_bytes, size_bytes)) for start in range(0, size_bytes, part_bytes)]
