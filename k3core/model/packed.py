"""Packed tokens on a GPU: one description of a call for every layer, whether it trains, prefills or decodes.

The same kernels run for all three, and each token's bits depend on its own sequence alone, so an engine and a trainer that
both run these agree to the bit (k3kernels.kda.triton, k3kernels.mla.triton).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3core.model.state import Emit, SlotState
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


def prefill(
    packing: Packing, state: SlotState, slots: Sequence[int], positions: Sequence[int], emits: Sequence[Emit]
) -> PackedWork:
    """Pieces of prompts; sequence n lives in slots[n] and goes on at positions[n]."""
    device = torch.device(packing.device)
    wanted = [(emit.n, emit.position, emit.checkpoint) for emit in emits]
    kda = prefill_work(list(packing.lengths), list(positions), list(slots), wanted, device)
    position_T = (packing.pos_T + kda.positions_N[packing.seq_T]).int()
    slot_T = kda.slots_N[packing.seq_T]
    page_T, offset_T = _places(state, slot_T, position_T)
    end = max(start + length for start, length in zip(positions, packing.lengths, strict=True))
    return PackedWork(kda, slot_T, position_T, state.table_NM, page_T, offset_T, packing.max_length, end, bool(wanted))


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
