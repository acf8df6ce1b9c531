"""Four real processes over gloo: one verdict in each tick, finite holds, and no wait for a dead peer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from k3core.rollout.prefill_pairing import PairingState, RankCounts, reduce_counts
from k3core.rollout.prefill_pairing.ranks import from_table, to_row
from k3core.rollout.prefill_pairing.rehearsal import Rehearsal, RehearsalConfig, rehearse

CFG = RehearsalConfig(num_ticks=1500)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return rehearse(CFG, folder)


def test_all_ranks_agree_in_every_tick_that_all_completed(rehearsal: Rehearsal) -> None:
    assert rehearsal.num_common_ticks >= CFG.num_ticks
    assert rehearsal.num_equal_ticks == rehearsal.num_common_ticks


def test_holds_between_processes_are_finite(rehearsal: Rehearsal) -> None:
    assert 0 < rehearsal.longest_hold <= CFG.limits.max_held


def test_survivors_of_a_killed_peer_fail_open_in_bounded_time(rehearsal: Rehearsal) -> None:
    assert rehearsal.was_open_alone
    one_tick_more = 2 * CFG.deadline_s
    assert rehearsal.fail_open_s < one_tick_more + 1.0
    assert rehearsal.slowest_tick_s < CFG.deadline_s + 1.0


def test_no_survivor_works_on_for_more_than_the_tick_of_the_death(rehearsal: Rehearsal) -> None:
    survivors = rehearsal.num_working_ticks[:-1]
    assert max(survivors) - min(survivors) <= 1


def test_the_rehearsal_meets_the_rules_that_release_and_hold(rehearsal: Rehearsal) -> None:
    assert {"nothing_to_prefill", "nobody_decodes", "kv_high", "overdue", "full_enough", "hold_align"} <= set(
        rehearsal.ticks_by_reason
    )


COUNTS = [RankCounts(10 * n, n, 100 * n, n == 1, n == 2) for n in range(3)]
STATES = [PairingState(4, 1, 7), PairingState(4, 1, None), PairingState(4, 2, 7)]


def table(num_ticks: tuple[int, ...] = (5, 5, 5)) -> torch.Tensor:
    return torch.stack([to_row(c, s, n) for c, s, n in zip(COUNTS, STATES, num_ticks, strict=True)])


def test_a_summed_table_carries_every_rank_exactly() -> None:
    assert from_table(table(), 5) == reduce_counts(COUNTS, STATES)


def test_a_row_of_another_tick_breaks_the_group() -> None:
    with pytest.raises(RuntimeError, match="rank 1 wrote 1 rows of tick 6"):
        from_table(table((5, 6, 5)), 5)


def test_a_rank_that_wrote_nothing_breaks_the_group() -> None:
    rows = table()
    rows[2] = 0
    with pytest.raises(RuntimeError, match="rank 2 wrote 0 rows"):
        from_table(rows, 5)
