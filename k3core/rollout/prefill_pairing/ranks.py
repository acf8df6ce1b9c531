"""One small SUM all-reduce a tick over gloo, with a deadline, so that every rank decides on the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from k3core.rollout.prefill_pairing.counts import GroupCounts, PairingState, RankCounts, broken_group, reduce_counts
from k3core.rollout.prefill_pairing.decide import Limits, Reason, Verdict, decide

NUM_FIELDS = 10


class PairingGroup:
    """The ranks that prefill together. Every member calls tick once a scheduler pass, whether it has work or not.

    An all-reduce that fails or outlasts deadline_s breaks the group for good: from then on tick fires without
    talking to anybody, and only a new PairingGroup over new processes holds again. cause says what broke it.
    Survivors may part in the very tick in which a peer dies, because some of them may have had its row already;
    the next tick breaks for those too.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        limits: Limits,
        deadline_s: float,
        state: PairingState | None = None,
    ) -> None:
        """process_group: a gloo group, None for the default one. Raises ValueError for a group that is not gloo."""
        backend = dist.get_backend(process_group)
        if backend != "gloo":
            raise ValueError(
                f"process_group is {backend}: give a gloo group, whose deadline does not stop a GPU stream"
            )
        self.limits = limits
        self.deadline_s = deadline_s
        self.state = state or PairingState()
        self.num_ranks = dist.get_world_size(process_group)
        self.num_ticks = 0
        self.reasons: Counter[Reason] = Counter()
        self.cause: Exception | None = None
        self._rank = dist.get_rank(process_group)
        self._group = process_group

    @property
    def is_broken(self) -> bool:
        return self.cause is not None

    def tick(self, own: RankCounts) -> Verdict:
        """Blocks for at most deadline_s; raises nothing that the group or a peer did wrong."""
        verdict = decide(self.state, self._reduce(own), self.limits)
        self.state = verdict.state
        self.reasons[verdict.reason] += 1
        self.num_ticks += 1
        return verdict

    def _reduce(self, own: RankCounts) -> GroupCounts:
        if self.cause is None:
            table_PF = torch.zeros(self.num_ranks, NUM_FIELDS, dtype=torch.int64)
            table_PF[self._rank] = to_row(own, self.state, self.num_ticks)
            try:
                work = dist.all_reduce(table_PF, group=self._group, async_op=True)
                work.wait(timedelta(seconds=self.deadline_s))
                return from_table(table_PF, self.num_ticks)
            except Exception as error:  # whatever it is, a prefill must not wait for it
                self.cause = error
        return broken_group(self.num_ranks, self.state)


def to_row(counts: RankCounts, state: PairingState, num_ticks: int) -> Tensor:
    """int64 [fields]. A sum over a table of which each rank fills its own row is an exact gather."""
    return torch.tensor(
        [
            1,
            num_ticks,
            counts.pending_tokens,
            counts.num_decoding,
            counts.kv_per_mille,
            counts.is_in_chunk,
            counts.is_overdue,
            state.num_held,
            state.num_stalled,
            -1 if state.last_pending is None else state.last_pending,
        ],
        dtype=torch.int64,
    )


def from_table(table_PF: Tensor, num_ticks: int) -> GroupCounts:
    """int64 [peers, fields] after the sum. Raises RuntimeError when a row is missing, doubled or of another tick."""
    rows: Sequence[Sequence[int]] = table_PF.tolist()
    for rank, row in enumerate(rows):
        if row[0] != 1 or row[1] != num_ticks:
            raise RuntimeError(
                f"rank {rank} wrote {row[0]} rows of tick {row[1]}, expected 1 of {num_ticks}: form the group anew"
            )
    counts = [RankCounts(row[2], row[3], row[4], bool(row[5]), bool(row[6])) for row in rows]
    states = [PairingState(row[7], row[8], None if row[9] < 0 else row[9]) for row in rows]
    return reduce_counts(counts, states)
