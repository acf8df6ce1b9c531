"""How an engine's passes run: what a runner is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from k3core.model.model import Forward
from k3core.model.state import Emit


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of prompts, packed: sequence n has lengths[n] of the tokens, lives in slots[n] and goes on at positions[n].

    emits: checkpoints on the way. adapter: whose branches the model has, None for the policy's own.
    """

    tokens: Sequence[int]
    lengths: Sequence[int]
    slots: Sequence[int]
    positions: Sequence[int]
    emits: Sequence[Emit] = ()
    adapter: object = None


class Runner(Protocol):
    """See `CpuRunner` and `GpuRunner`. What a pass returns may be overwritten by the next one of its kind."""

    def prefill(self, pieces: Pieces) -> Forward: ...

    def decode(
        self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int], adapter: object = None
    ) -> tuple[Tensor, Tensor]:
        """One token for each: logits [N, V] and routed experts [N, L, k]."""

    def logits(self, hidden_ND: Tensor) -> Tensor: ...

    def forget(self, adapter: object) -> None:
        """Its factors are other tensors now."""
