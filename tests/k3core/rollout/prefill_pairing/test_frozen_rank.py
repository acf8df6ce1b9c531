"""A peer that hangs with its connections open: nothing but the deadline tells."""

from __future__ import annotations

from pathlib import Path

from k3core.rollout.prefill_pairing.rehearsal import RehearsalConfig, rehearse


def test_survivors_of_a_frozen_peer_fail_open_after_the_deadline(tmp_path: Path) -> None:
    cfg = RehearsalConfig(num_ranks=3, num_ticks=100, deadline_s=1.5, freezes_last=True)
    rehearsal = rehearse(cfg, tmp_path)
    assert rehearsal.num_equal_ticks == rehearsal.num_common_ticks >= cfg.num_ticks
    assert rehearsal.was_open_alone
    assert cfg.deadline_s * 0.9 < rehearsal.fail_open_s < 2 * cfg.deadline_s + 1.0
