"""Passes on the CPU, in whole multiples of ROWS rows, in which BLAS and vector loops round each row alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k3core.model.model import ROWS, Forward, K3Model
from k3core.model.state import SlotState
from k3core.rollout.runner import Pieces
from k3kernels.packing import Packing


class CpuRunner:
    """A decode's rows are the slots from 0 up to the highest that takes part.

    In inference mode, in which an operation costs torch less than without gradients alone.
    """

    def __init__(self, model: K3Model, state: SlotState) -> None:
        self.model, self.state = model, state

    @torch.inference_mode()
    def prefill(self, pieces: Pieces) -> Forward:
        slots_N = torch.tensor(pieces.slots)
        assert self.state.length_N[slots_N].tolist() == list(pieces.positions)
        packing = Packing(tuple(pieces.lengths))
        return self.model(torch.tensor(pieces.tokens), packing, None, self.state, slots_N, emits=pieces.emits)

    @torch.inference_mode()
    def decode(
        self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int], adapter: object = None
    ) -> tuple[Tensor, Tensor]:
        """One token for each: logits [N, V] and routed experts [N, L, k]."""
        del positions, adapter
        num_rows = -(-(max(slots) + 1) // ROWS) * ROWS
        slots_N = torch.tensor(slots)
        all_tokens = torch.zeros(num_rows, dtype=torch.long)
        is_active = torch.zeros(num_rows, dtype=torch.bool)
        all_tokens[slots_N] = torch.tensor(tokens)
        is_active[slots_N] = True
        forward = self.model.decode(all_tokens, self.state, is_active)
        return self.logits(forward.hidden_TD[slots_N]), forward.routed_experts_TLk[slots_N]

    @torch.inference_mode()
    def logits(self, hidden_ND: Tensor) -> Tensor:
        N = len(hidden_ND)
        return self.model.logits(torch.cat([hidden_ND, hidden_ND[:1].expand(-N % ROWS, -1)]))[:N]

    def forget(self, adapter: object) -> None:
        """Nothing is kept of an adapter."""
