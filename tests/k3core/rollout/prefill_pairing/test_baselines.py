"""The rules that pairing is compared with."""

from __future__ import annotations

from k3core.rollout.prefill_pairing.baselines import (
    Choice,
    GroupView,
    QueueTrigger,
    RankView,
    SglangLimits,
    SglangState,
    fixed_delay,
    no_delay,
    sglang_like,
)

BUSY = RankView(pending_tokens=50, num_queued=2, num_decoding=10, kv_per_mille=400, is_in_chunk=False, waited_s=1.0)
IDLE = RankView(pending_tokens=0, num_queued=0, num_decoding=10, kv_per_mille=400, is_in_chunk=False, waited_s=0.0)
MIXED: GroupView = (BUSY, BUSY, BUSY, IDLE)


def test_no_delay_always_fires() -> None:
    assert no_delay().choose(None, MIXED)[0].fire


def test_a_fixed_delay_holds_for_its_length_and_starts_over() -> None:
    rule, held, fires = fixed_delay(2), 0, []
    for _ in range(6):
        choice, held = rule.choose(held, (BUSY,) * 4)
        fires.append(choice.fire)
    assert fires == [False, False, True] * 2


def test_sglang_like_holds_a_mixed_group_up_to_its_passes() -> None:
    rule = sglang_like(SglangLimits(max_delay_passes=2))
    state, reasons = rule.first, []
    for _ in range(3):
        choice, state = rule.choose(state, MIXED)
        reasons.append(choice.reason)
    assert reasons == ["hold_mixed", "hold_mixed", "mixed_released"]
    assert rule.choose(rule.first, (BUSY,) * 4)[0] == Choice(True, "all_ready")
    assert rule.choose(rule.first, (IDLE,) * 4)[0] == Choice(True, "nothing_to_prefill")


def test_sglang_like_releases_a_rank_whose_usage_is_below_the_low_mark() -> None:
    assert sglang_like(SglangLimits(low_kv_per_mille=401)).choose(SglangState(), MIXED)[0].fire
    assert not sglang_like(SglangLimits(low_kv_per_mille=400)).choose(SglangState(), MIXED)[0].fire


def test_a_windowed_mark_forgets_and_an_endless_one_does_not() -> None:
    for window, fires in ((16, True), (None, False)):
        rule = sglang_like(SglangLimits(queue=QueueTrigger(running_ratio=1.0, window=window, max_wait_s=60.0)))
        state = SglangState(batches=(30,))
        for _ in range(16):
            choice, state = rule.choose(state, (BUSY,) * 4)
        assert choice.fire == fires


def test_the_cap_on_waiting_beats_the_mark() -> None:
    rule = sglang_like(SglangLimits(queue=QueueTrigger(running_ratio=1.0, window=None, max_wait_s=1.0)))
    assert rule.choose(SglangState(batches=(30,)), (BUSY,) * 4)[0].fire
