"""Which tensors are alive, step by step, and the most that were alive at once."""

from __future__ import annotations


class Ledger:
    """Bytes by name. at_peak: what was alive when there was most."""

    def __init__(self) -> None:
        self.live: dict[str, float] = {}
        self.now = self.peak = 0.0
        self.at_peak: dict[str, float] = {}

    def hold(self, name: str, size: float) -> None:
        self.live[name] = self.live.get(name, 0.0) + size
        self.now += size
        self._note({})

    def free(self, *names: str) -> None:
        """Names that are not held are no fault: which tensors a step keeps depends on what is trained."""
        for name in names:
            self.now -= self.live.pop(name, 0.0)

    def spike(self, name: str, size: float) -> None:
        """Alive within one operation."""
        self.now += size
        self._note({name: size})
        self.now -= size

    def _note(self, extra: dict[str, float]) -> None:
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, {**self.live, **extra}
