"""A long batch as segments, one after the other, so that what lies between the passes is of one segment at a time.

A sequence that is cut has a part in each of several segments: its state goes from one to the next, its gradient back.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from torch import Tensor

from k3kernels.kda.chunk.table import ROWS, ChunkTable, make_chunk_table

SEGMENT_TOKENS = 16_384
"""A longer batch is cut. A segment's parts, states and gradients of states take 217 KiB a token at K3's width."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Which tokens, chunks and sequences of the batch it has; its table counts from its own first ones.

    continues: its first part is not its sequence's first. is_continued: its last part is not its sequence's last.
    """

    table: ChunkTable
    tokens: slice
    chunks: slice
    sequences: slice
    continues: bool
    is_continued: bool

    def states(self, given_NHKV: Tensor | None, carried_HKV: Tensor | None, at: int) -> Tensor | None:
        """One a part: the given of its sequences (None: zeros), but the carried as number at, where there is one."""
        own = None if given_NHKV is None else rows_of(given_NHKV, self.sequences)
        if carried_HKV is None:
            return own
        zeros = (self.table.num_sequences, *carried_HKV.shape)
        states = carried_HKV.new_zeros(zeros) if own is None else own.clone()
        states[at] = carried_HKV
        return states


def rows_of(x: Tensor, rows: slice) -> Tensor:
    """x itself where that is all of it: a batch of one segment does nothing more than its passes."""
    return x if rows.stop - rows.start == len(x) else x[rows]


@lru_cache(maxsize=16)  # each layer asks for the same
def cut(table: ChunkTable, segment_tokens: int) -> tuple[Segment, ...]:
    """As few segments as that allows and about as long as each other: none has more than segment_tokens + ROWS - 1.

    A function of the lengths alone, and so are the bits. Empty sequences are with the one before them.
    """
    T, firsts = table.num_tokens, [0, *accumulate(table.lengths)]
    num_segments = max(1, -(-T // segment_tokens))
    if num_segments == 1:
        whole = (slice(0, T), slice(0, table.num_chunks), slice(0, table.num_sequences))
        return (Segment(table, *whole, continues=False, is_continued=False),)

    def sequence_at(token: int) -> int:
        return bisect_right(firsts, token) - 1

    def next_cut(token: int) -> int:
        n = sequence_at(token)
        return min(firsts[n] + -(-(token - firsts[n]) // ROWS) * ROWS, firsts[n + 1])

    segments: list[Segment] = []
    chunk = 0
    for first, end in pairwise(sorted({next_cut(i * T // num_segments) for i in range(num_segments)} | {0, T})):
        continues, is_continued = first not in firsts, end not in firsts
        sequences = range(sequence_at(first) if first else 0, sequence_at(end) + is_continued)
        spans = [(max(firsts[n], first), min(firsts[n + 1], end)) for n in sequences]
        emits = tuple(
            (n - sequences.start, position + firsts[n] - spans[n - sequences.start][0], slot)
            for n, position, slot in table.emits
            if n in sequences and first < position + firsts[n] <= end
        )
        own = make_chunk_table(tuple(stop - start for start, stop in spans), table.starts_C.device, emits)
        chunks = slice(chunk, chunk := chunk + own.num_chunks)
        rows = (slice(first, end), chunks, slice(sequences.start, sequences.stop))
        segments.append(Segment(own, *rows, continues=continues, is_continued=is_continued))
    return tuple(segments)
