"""Packed tokens on a GPU: one description of a call for every layer, whether it trains, prefills or decodes.

The same kernels run for all three, and each token's bits depend on its own sequence alone, so an engine and a trainer that
both run these agree to the bit (k3kernels.kda.triton, k3kernels.mla.triton).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3core.model.state import SlotState
from k3kernels.kda.triton import INACTIVE, UNKEPT, KdaWork, decode_work, prefill_work
from k3kernels.packing import Packing


@dataclass(frozen=True)
class PackedWork:
    """kda: sequences, slots and checkpoints. Token t is at position_T of the sequence whose pages are row sequence_T of
    `table`; below 0 it takes no part. Its latent row goes to page_T, offset_T of the state's pages; without a state the
    rows are their own pages of one token. max_new: no sequence has more tokens; max_context: none ends later.
    """

    kda: KdaWork
    sequence_T: Tensor
    position_T: Tensor
    table: Tensor
    page_T: Tensor | None
    offset_T: Tensor | None
    max_new: int
    max_context: int
    has_emits: bool = False


def whole_sequences(packing: Packing) -> PackedWork:
    """A trainer's forward pass: nothing is kept."""
    device = torch.device(packing.device)
    N, length = packing.num_sequences, packing.max_length
    kda = prefill_work(list(packing.lengths), [0] * N, [UNKEPT] * N, [], device)
    rows_NM = packing.starts_N.unsqueeze(-1) + torch.arange(length, device=device)
    table = rows_NM.clamp(max=packing.num_tokens - 1).int()
    return PackedWork(kda, packing.seq_T.int(), packing.pos_T.int(), table, None, None, length, length)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Room for pieces of prompts: so many tokens, sequences and checkpoints on the way. All that a pass depends on is one
    row of integers, so a captured graph is fed by one copy."""

    num_tokens: int
    num_sequences: int
    num_emits: int

    def values(
        self,
        tokens: Sequence[int],
        lengths: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        emits: Sequence[tuple[int, int, int]],
    ) -> list[int]:
        """Sequence n has lengths[n] of the tokens, lives in slots[n] and goes on at positions[n]; emits are (n, position,
        checkpoint)."""
        T, N, E = self.num_tokens, self.num_sequences, self.num_emits
        emits = sorted(emits)
        starts, sequence, edges = [0], [], [0]
        for n, length in enumerate(lengths):
            starts.append(starts[-1] + length)
            sequence += [n] * length
            edges.append(edges[-1] + sum(each == n for each, _, _ in emits))
        return [
            *_filled(tokens, T, 0),
            *_filled(sequence, T, -1),
            *_filled(starts[:-1], N, 0),
            *_filled(lengths, N, 0),
            *_filled(positions, N, 0),
            *_filled(slots, N, INACTIVE),
            *_filled(edges, N + 1, edges[-1]),
            *_filled([position for _, position, _ in emits], E, 0),
            *_filled([checkpoint for _, _, checkpoint in emits], E, 0),
        ]

    def nothing(self) -> list[int]:
        return self.values([], [], [], [], [])

    def work(self, values: Tensor, state: SlotState) -> tuple[Tensor, PackedWork]:
        """Views of `values` on the device, as a pass takes them."""
        T, N, E = self.num_tokens, self.num_sequences, self.num_emits
        tokens_T, sequence_T, starts, lengths, positions, slots, edges, where, to = values.split(
            [T, T, N, N, N, N, N + 1, E, E]
        )
        kda = KdaWork(starts, lengths, positions, slots, edges, where, to)
        is_token_T, n_T = sequence_T >= 0, sequence_T.clamp(min=0)
        order_T = torch.arange(T, dtype=torch.int32, device=values.device)
        position_T = torch.where(is_token_T, positions[n_T] + order_T - starts[n_T], -1)
        slot_T = slots[n_T].clamp(min=0)
        page_T, offset_T = _places(state, slot_T, position_T.clamp(min=0))
        page_T = torch.where(is_token_T, page_T, len(state.slots.pages_PLSC) - 1)  # a page of nobody's
        work = PackedWork(kda, slot_T, position_T, state.table_NM, page_T, offset_T, T, state.max_length, E > 0)
        return tokens_T, work


def _filled(values: Sequence[int], length: int, filler: int) -> list[int]:
    return [*values, *[filler] * (length - len(values))]


def decode(state: SlotState, slots_N: Tensor, positions_N: Tensor) -> PackedWork:
    """One token for each row; rows of slot INACTIVE take no part. What is in slots and positions (int32) is read when the
    work is done, so a captured graph follows them."""
    is_active_N = slots_N != INACTIVE
    at_N = torch.where(is_active_N, positions_N, 0)
    kda = decode_work(slots_N, at_N)
    page_N, offset_N = _places(state, slots_N.clamp(min=0), at_N)
    page_N = torch.where(is_active_N, page_N, len(state.slots.pages_PLSC) - 1)  # a page of nobody's
    masked_N = torch.where(is_active_N, positions_N, -1)
    return PackedWork(kda, slots_N, masked_N, state.table_NM, page_N, offset_N, 1, state.max_length)


def _places(state: SlotState, slot_T: Tensor, position_T: Tensor) -> tuple[Tensor, Tensor]:
    return state.table_NM[slot_T, position_T // state.page_size].long(), (position_T % state.page_size).long()
