from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from k3core.rollout.prefix_cache import CacheConfig, HalfRestoreError, Namespace, audit

TOKENS = list(range(100, 140))


@pytest.fixture
def engine(fake_engine: Any, roomy: CacheConfig) -> Any:
    return fake_engine(roomy)


@pytest.fixture
def tiered(fake_engine: Any) -> Any:
    """Device room for one history of 16 tokens, host room for three."""
    return fake_engine(CacheConfig(4, 8, 4, 2, 12, 6, page_bytes=4, checkpoint_bytes=64))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("page_size", 0),
        ("grid", 6),
        ("grid", 0),
        ("num_pages", 0),
        ("num_checkpoints", 0),
        ("num_host_pages", -1),
        ("num_host_checkpoints", 3),
        ("page_bytes", 0),
        ("checkpoint_bytes", 0),
        ("half_life", 0),
    ],
)
def test_a_size_that_makes_no_sense_is_refused_by_name(roomy: CacheConfig, key: str, value: int) -> None:
    with pytest.raises(ValueError, match=key):
        dataclasses.replace(roomy, **{key: value})


def test_a_hit_at_every_cut_position_is_what_a_cold_prefill_gives(engine: Any, namespace: Namespace) -> None:
    engine.serve(namespace, TOKENS, positions=[8, 16, 24, 32, 40])
    for cut in range(len(TOKENS) + 1):
        match = engine.match(namespace, TOKENS[:cut])  # checks the contents
        assert match.num_tokens == max(cut - 1, 0) // 8 * 8
        engine.cache.release(match.lock)
        match = engine.match(namespace, [*TOKENS[:cut], 7, 7, 7])
        assert match.num_tokens == cut // 8 * 8
        engine.cache.release(match.lock)


def test_a_checkpoint_stands_at_its_own_position_and_never_at_a_shorter_key(engine: Any, namespace: Namespace) -> None:
    engine.serve(namespace, TOKENS[:24], positions=[24])
    for cut in range(25):
        match = engine.match(namespace, [*TOKENS[:cut], 7])
        assert match.num_tokens == (24 if cut == 24 else 0)
        engine.cache.release(match.lock)


def test_a_checkpoint_past_the_pages_or_off_the_grid_is_refused(engine: Any, namespace: Namespace) -> None:
    pages = engine.compute_pages(namespace, TOKENS[:16], 0)
    slot = engine.compute_checkpoint(namespace, TOKENS, 24)
    for position in (24, 12, 0, -8):
        with pytest.raises(ValueError, match="position"):
            engine.cache.insert(namespace, TOKENS, pages, {position: slot})
    with pytest.raises(ValueError, match="whole pages"):
        engine.cache.insert(namespace, TOKENS[:15], pages, {})
    audit(engine.cache)
    assert not engine.cache.roots


def test_a_branch_leaves_the_checkpoints_above_and_below_it_usable(engine: Any, namespace: Namespace) -> None:
    engine.serve(namespace, TOKENS[:32], positions=[16, 32])
    branch = [*TOKENS[:20], *range(12)]
    first = engine.serve(namespace, branch)
    assert (first.num_tokens, first.kv_tokens, first.branch_target) == (16, 20, None)
    again = engine.match(namespace, [*branch, 1])
    assert again.num_tokens == 32
    trunk = engine.match(namespace, [*TOKENS[:32], 1])
    assert trunk.num_tokens == 32


def test_the_second_branch_plans_the_checkpoint_that_the_third_one_hits(engine: Any, namespace: Namespace) -> None:
    engine.serve(namespace, [*TOKENS[:20], *range(20)], positions=[40])
    second = engine.serve(namespace, [*TOKENS[:20], *range(50, 70)])
    assert (second.num_tokens, second.kv_tokens, second.branch_target) == (0, 20, 16)
    third = engine.serve(namespace, [*TOKENS[:20], *range(80, 100)])
    assert (third.num_tokens, third.branch_target) == (16, None)


def test_an_identical_request_hits_all_but_what_must_be_computed(engine: Any, namespace: Namespace) -> None:
    engine.serve(namespace, TOKENS[:17])
    assert engine.serve(namespace, TOKENS[:17]).num_tokens == 16
    assert engine.serve(namespace, TOKENS[:16]).branch_target == 8  # 16 would leave nothing to compute


def test_nothing_is_shared_over_any_part_of_the_namespace(engine: Any, namespace: Namespace) -> None:
    """Adapters are told apart by their bytes; that both are called the same is no part of the key."""
    here = dataclasses.replace(namespace, adapter_sha256="bytes of support-bot")
    engine.serve(here, TOKENS)
    for change in (
        {"base_sha256": "other"},
        {"adapter_sha256": "other bytes of support-bot"},
        {"adapter_sha256": None},
        {"policy_step": 1},
        {"tokenizer_sha256": "other"},
        {"tenant": "other"},
    ):
        match = engine.match(dataclasses.replace(here, **change), TOKENS)
        assert (match.num_tokens, match.kv_tokens) == (0, 0), change
    assert engine.match(here, [*TOKENS, 1]).num_tokens == 40


def test_drop_makes_the_old_policy_unreachable_and_pinned_entries_die_when_released(
    engine: Any, namespace: Namespace
) -> None:
    new = dataclasses.replace(namespace, policy_step=1)
    engine.serve(namespace, TOKENS)
    held = engine.match(namespace, [*TOKENS, 1])
    assert engine.cache.update("drop", namespace, new).dropped_tokens == 40
    audit(engine.cache)
    for served in (namespace, new):
        assert engine.match(served, TOKENS).kv_tokens == 0
    engine.check(namespace, [*TOKENS, 1], held)
    assert len(engine.cache.store.pages.free) == 512 - 10
    engine.cache.release(held.lock)
    audit(engine.cache)
    assert len(engine.cache.store.pages.free) == 512
    assert len(engine.cache.store.checkpoints.free) == 256
    assert engine.cache.stats.dropped_pages == {"update": 10}
    assert not engine.cache.dying_roots


def test_a_sequence_that_outlives_a_drop_hands_nothing_of_the_old_tree_to_the_new_one(
    engine: Any, namespace: Namespace
) -> None:
    new = dataclasses.replace(namespace, policy_step=1)
    engine.serve(namespace, TOKENS[:16])
    held = engine.match(namespace, TOKENS)
    fresh = engine.compute_pages(namespace, TOKENS, len(held.pages))
    engine.cache.update("drop", namespace, new)
    inserted = engine.insert(namespace, TOKENS, (*held.pages, *fresh), {})
    assert inserted.pages == ()
    assert inserted.duplicate_pages == fresh
    engine.cache.release(held.lock)
    audit(engine.cache)
    assert len(engine.cache.store.pages.free) == 512


def test_keep_leaves_the_old_policy_under_its_own_key_only(engine: Any, namespace: Namespace) -> None:
    new = dataclasses.replace(namespace, policy_step=1)
    engine.serve(namespace, TOKENS)
    assert engine.cache.update("keep", namespace, new).kept_tokens == 40
    assert engine.match(new, TOKENS).kv_tokens == 0
    assert engine.match(namespace, [*TOKENS, 1]).num_tokens == 40


def test_continue_serves_old_entries_under_the_new_key_and_says_how_many_are_stale(
    engine: Any, namespace: Namespace
) -> None:
    new = dataclasses.replace(namespace, policy_step=1)
    engine.lineage[new] = [namespace]
    engine.serve(namespace, TOKENS[:16])
    assert engine.cache.update("continue", namespace, new).stale_tokens == 16
    match = engine.serve(new, TOKENS)
    assert (match.num_tokens, match.stale_tokens) == (16, 16)
    match = engine.match(new, [*TOKENS, 1])
    assert (match.num_tokens, match.stale_tokens) == (40, 40), "rows computed on a stale history are stale"
    assert engine.match(namespace, TOKENS).kv_tokens == 0
    assert engine.cache.stats.stale_hit_tokens == 56
    engine.serve(new, [9] * 17)
    assert engine.serve(new, [9] * 17).stale_tokens == 0


def test_a_state_of_older_weights_makes_fresh_rows_stale(engine: Any, namespace: Namespace) -> None:
    new = dataclasses.replace(namespace, policy_step=1)
    engine.serve(new, TOKENS[:8], positions=[])
    pages = engine.compute_pages(new, TOKENS[:8], 0)
    slot = engine.compute_checkpoint(namespace, TOKENS, 8)
    engine.cache.free_pages(engine.cache.insert(new, TOKENS, pages, {8: slot}, policy_step=0).duplicate_pages)
    assert engine.match(new, TOKENS, restore=False).stale_tokens == 4


def test_continue_refuses_to_mix_what_it_must_not(engine: Any, namespace: Namespace) -> None:
    engine.serve(namespace, TOKENS)
    later = dataclasses.replace(namespace, policy_step=1)
    engine.serve(later, TOKENS)
    for new, message in (
        (later, "entries of its own"),
        (namespace, "must come after"),
        (dataclasses.replace(later, tenant="other"), "tenant"),
        (dataclasses.replace(later, tokenizer_sha256="other"), "tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.cache.update("continue", namespace, new)


def test_what_is_pinned_is_never_evicted_and_allocation_says_so(tiered: Any, namespace: Namespace) -> None:
    tiered.serve(namespace, TOKENS[:16], positions=[16])
    held = tiered.match(namespace, TOKENS[:17])
    assert tiered.cache.allocate_pages(1) is None
    first = tiered.cache.allocate_checkpoint()
    assert first is not None
    assert tiered.cache.allocate_checkpoint() is None
    tiered.check(namespace, TOKENS[:17], held)
    tiered.cache.release(held.lock)
    assert tiered.cache.allocate_pages(1) is not None
    audit(tiered.cache)


def test_an_evicted_history_comes_back_from_the_host_both_halves_of_it(tiered: Any, namespace: Namespace) -> None:
    tiered.serve(namespace, TOKENS[:16], positions=[16])
    tiered.serve(namespace, [5] * 16, positions=[16])
    tiered.serve(namespace, [6] * 16, positions=[16])
    match = tiered.match(namespace, TOKENS[:17])
    assert match.num_tokens == 16
    assert [c.kind for c in match.copies if c.direction == "to_device"] == ["page"] * 4 + ["checkpoint"]
    assert tiered.cache.stats.restored_pages == 4


def test_every_half_restore_is_refused_and_undone(tiered: Any, namespace: Namespace) -> None:
    tiered.serve(namespace, TOKENS[:16], positions=[16])
    tiered.serve(namespace, [5] * 16, positions=[16])
    restores = 5
    for left_out in range(restores):
        match = tiered.match(namespace, TOKENS[:17], restore=False)
        assert match.is_staged
        wanted = [copy for copy in match.copies if copy.direction == "to_device"]
        done = [copy for copy in match.copies if copy != wanted[left_out]]
        tiered.perform(done)
        with pytest.raises(HalfRestoreError, match="1 of 5"):
            tiered.cache.restored(match.lock, done)
        audit(tiered.cache)
        assert match.lock not in tiered.cache.locks
        assert tiered.cache.stats.hits == 0
    assert tiered.match(namespace, TOKENS[:17]).num_tokens == 16


def test_a_history_on_its_way_is_not_used_by_anybody_else(tiered: Any, namespace: Namespace) -> None:
    tiered.serve(namespace, TOKENS[:16], positions=[16])
    tiered.serve(namespace, [5] * 16, positions=[16])
    first = tiered.match(namespace, TOKENS[:17], restore=False)
    second = tiered.match(namespace, TOKENS[:17], restore=False)
    assert (second.num_tokens, second.kv_tokens, second.copies) == (0, 0, ())
    tiered.perform(first.copies)
    tiered.cache.restored(first.lock, first.copies)
    assert tiered.match(namespace, TOKENS[:17]).num_tokens == 16


def test_a_full_host_drops_and_never_blocks(tiered: Any, namespace: Namespace) -> None:
    for value in range(12):
        tiered.serve(namespace, [value] * 16, positions=[16])
    stats = tiered.cache.stats
    assert sum(stats.dropped_checkpoints.values()) == 12 - 1 - 3
    assert set(stats.dropped_checkpoints) <= {"host_evicted", "host_full"}


def test_rows_without_a_state_do_not_go_to_the_host(tiered: Any, namespace: Namespace) -> None:
    tiered.serve(namespace, TOKENS[:16], positions=[])
    tiered.serve(namespace, [5] * 16, positions=[])
    assert tiered.cache.stats.dropped_pages == {"no_checkpoint": 4}
    assert tiered.cache.stats.offloaded_pages == 0


def test_the_deeper_checkpoint_outlives_the_shallow_one_at_equal_use(fake_engine: Any, namespace: Namespace) -> None:
    engine = fake_engine(CacheConfig(4, 8, 64, 2, 0, 0, page_bytes=4, checkpoint_bytes=64))
    engine.serve(namespace, TOKENS[:40], positions=[8, 40])
    engine.serve(namespace, [5] * 16, positions=[16])
    assert engine.match(namespace, [*TOKENS[:8], 1]).num_tokens == 0
    assert engine.match(namespace, [*TOKENS[:40], 1]).num_tokens == 40


def test_what_is_used_often_outlives_what_is_used_once(fake_engine: Any, namespace: Namespace) -> None:
    engine = fake_engine(CacheConfig(4, 8, 8, 8, 0, 0, page_bytes=4, checkpoint_bytes=64))
    for value in (1, 1, 1, 2, 3, 4):
        engine.serve(namespace, [value] * 17)
    assert engine.match(namespace, [1] * 17).num_tokens == 16
    assert engine.match(namespace, [2] * 17).num_tokens == 0


def test_an_abort_in_mid_prefill_leaves_nothing_owned(tiered: Any, namespace: Namespace) -> None:
    tiered.serve(namespace, TOKENS[:16], positions=[16])
    tiered.serve(namespace, [5] * 16, positions=[16])
    staged = tiered.match(namespace, TOKENS[:17], restore=False)
    tiered.cache.release(staged.lock)
    pages = tiered.compute_pages(namespace, [6] * 16, 0)
    slot = tiered.compute_checkpoint(namespace, [6] * 16, 8)
    tiered.cache.free_pages(pages)
    tiered.cache.free_checkpoint(slot)
    audit(tiered.cache)
    store = tiered.cache.store
    assert not store.pages.lent
    assert not store.checkpoints.lent
    assert not store.pinned
    assert not tiered.cache.locks


def test_freeing_twice_is_caught(engine: Any, namespace: Namespace) -> None:
    pages = engine.compute_pages(namespace, TOKENS, 0)
    engine.cache.free_pages(pages)
    with pytest.raises(AssertionError, match="not lent"):
        engine.cache.free_pages(pages[:1])


def test_two_writers_of_one_prefix_keep_one_copy(engine: Any, namespace: Namespace) -> None:
    first = engine.compute_pages(namespace, TOKENS, 0)
    second = engine.compute_pages(namespace, TOKENS, 0)
    slots = [engine.compute_checkpoint(namespace, TOKENS, 40) for _ in range(2)]
    assert engine.insert(namespace, TOKENS, first, {40: slots[0]}).taken_pages == first
    inserted = engine.insert(namespace, TOKENS, second, {40: slots[1]})
    assert inserted.duplicate_pages == second
    assert inserted.duplicate_checkpoints == (slots[1],)
    assert inserted.pages == first


def test_with_room_every_lookup_equals_the_dictionary_of_all_that_was_inserted(
    fake_engine: Any, roomy: CacheConfig, namespace: Namespace
) -> None:
    engine = fake_engine(dataclasses.replace(roomy, num_pages=2048, num_checkpoints=1024))
    rng = random.Random(0)
    rows: set[tuple[int, ...]] = set()
    states: set[tuple[int, ...]] = set()
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        usable = [p for p in range(1, len(tokens)) if tuple(tokens[:p]) in states]
        reach = [p for p in range(1, len(tokens)) if tuple(tokens[:p]) in rows]
        positions = [p for p in range(8, len(tokens) + 1, 8) if rng.random() < 0.5]
        match = engine.serve(namespace, tokens, positions=positions)
        hit, kv = max(usable, default=0), max(reach, default=0)
        assert (match.num_tokens, match.kv_tokens) == (hit, kv)
        assert match.branch_target == (kv // 8 * 8 if kv // 8 * 8 > hit else None)
        rows |= {tuple(tokens[:p]) for p in range(4, len(tokens) + 1, 4)}
        states |= {tuple(tokens[:p]) for p in positions}


def test_equal_calls_give_equal_decisions(fake_engine: Any, namespace: Namespace) -> None:
    def replay() -> list[object]:
        engine = fake_engine(CacheConfig(4, 8, 12, 3, 8, 2, page_bytes=4, checkpoint_bytes=64))
        rng = random.Random(1)
        return [engine.serve(namespace, [rng.randrange(2) for _ in range(25)]) for _ in range(200)]

    assert replay() == replay()


def test_a_long_history_overflows_no_stack(fake_engine: Any) -> None:
    namespace = Namespace("base", None, 0, "tokenizer", "tenant")
    cfg = CacheConfig(1, 1, 3000, 2, 3000, 2, page_bytes=1, checkpoint_bytes=64)
    engine = fake_engine(cfg)
    tokens = list(range(3000))
    for offset in (0, 1):
        cache = engine.cache
        pages = cache.allocate_pages(3000)
        slot = cache.allocate_checkpoint()
        inserted = cache.insert(namespace, [t + offset for t in tokens], pages.ids, {3000: slot.ids[0]})
        cache.release(inserted.lock)
    audit(engine.cache)
    assert engine.cache.stats.offloaded_pages == 3000
    engine.cache.allocate_pages(3000)
    audit(engine.cache)
