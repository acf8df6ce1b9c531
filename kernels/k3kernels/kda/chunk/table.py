"""Which tokens each chunk of a packed batch has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

ROWS = 64
"""Tokens of a chunk."""

Emits = tuple[tuple[int, int, int], ...]
"""(sequence, position, slot) of each state that is kept."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """On the device, int32; the same for all layers of a pass. A chunk never crosses from one sequence into the next.

    starts, lengths [chunks]: its first token and how many it has. edges [N + 1]: sequence n has the chunks edges[n] to
    edges[n + 1] and the tokens tokens[n] to tokens[n + 1]. emits [chunks]: where the state behind the chunk is kept, or -1; None where no state is.
    lengths and emits: what it was made of.
    """

    starts_C: Tensor
    lengths_C: Tensor
    edges_N: Tensor
    tokens_N: Tensor
    emits_C: Tensor | None
    lengths: tuple[int, ...]
    emits: Emits
    num_chunks: int
    num_sequences: int
    num_tokens: int


def make_chunk_table(lengths: tuple[int, ...], device: torch.device, emits: Emits = ()) -> ChunkTable:
    """Of sequences that lie one behind the other.

    Raises ValueError for a position that is not a multiple of ROWS inside the sequence.
    """
    counts = [-(-length // ROWS) for length in lengths]
    edges = np.concatenate([[0], np.cumsum(counts)])
    first_tokens = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.concatenate([[0] * 0, *(np.arange(n) * ROWS + at for n, at in zip(counts, first_tokens, strict=False))])
    ends = np.repeat(first_tokens[1:], counts)
    slots = np.full(len(starts), -1)
    for n, position, slot in emits:
        if position % ROWS or not 0 < position <= lengths[n]:
            raise ValueError(
                f"emits: position {position} of sequence {n} must be a multiple of {ROWS} in (0, {lengths[n]}]"
            )
        slots[edges[n] + position // ROWS - 1] = slot
    columns = [starts, np.minimum(ends - starts, ROWS), slots]
    parts = [torch.from_numpy(np.asarray(x, dtype=np.int32)) for x in (*columns, edges, first_tokens)]
    starts_C, lengths_C, slots_C, edges_N, tokens_N = (x.to(device, non_blocking=True) for x in parts)
    sizes = (len(starts), len(lengths), int(first_tokens[-1]))
    return ChunkTable(starts_C, lengths_C, edges_N, tokens_N, slots_C if emits else None, lengths, emits, *sizes)


chunk_table = lru_cache(maxsize=16)(make_chunk_table)  # each layer asks for the same one
