from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from k3core.rl.batch import batch_sha256, make_batch, microbatches
from k3core.types import SamplingParams, Supports, Trajectory

MakeTrajectory = Callable[..., Trajectory]


def test_targets_are_the_sampled_tokens_and_everything_about_them_lines_up(make_trajectory: MakeTrajectory) -> None:
    pair = [make_trajectory(0, turn=2), make_trajectory(1, turn=5)]
    batch = make_batch(pair, [0.5, -2.0], [7, 3], router_replay=True)
    mask_T = np.concatenate([t.loss_mask_T for t in pair])
    assert batch.packing.lengths == (9, 15)
    assert batch.target_M.tolist() == mask_T.nonzero()[0].tolist()
    assert batch.seq_M.tolist() == [0] * 4 + [1] * 10
    assert batch.tokens_T.tolist() == [*pair[0].tokens_T, *pair[1].tokens_T]
    assert batch.rollout_logprobs_M.tolist() == np.concatenate([t.rollout_logprobs_T for t in pair])[mask_T].tolist()
    assert batch.advantages_N.tolist() == [0.5, -2.0]
    assert batch.order_N == (7, 3)


def test_missing_routes_are_minus_one_and_none_is_shifted(make_trajectory: MakeTrajectory) -> None:
    t = make_trajectory(0)
    routes = t.routed_experts_TLk.copy()
    routes[4:6] = 255  # a span that the engine did not report, as for a cached prefix
    holed = replace(t, routed_experts_TLk=routes)
    replay_TLk = make_batch([make_trajectory(1), holed], [0, 0], [0, 1], router_replay=True).replay_TLk
    assert replay_TLk is not None
    own = replay_TLk[len(t.tokens_T) :]
    missing = [4, 5, len(t.tokens_T) - 1]
    assert (own < 0).all(-1).all(-1).nonzero().squeeze(-1).tolist() == missing
    kept = [i for i in range(len(t.tokens_T)) if i not in missing]
    assert own[kept].tolist() == t.routed_experts_TLk[kept].tolist()


def test_the_missing_mark_is_that_of_the_routes_own_width(make_trajectory: MakeTrajectory) -> None:
    t = make_trajectory(0)
    wide = t.routed_experts_TLk.astype(np.uint16)
    wide[0], wide[-1] = 255, 65535  # expert 255 of many, and the mark
    replay_TLk = make_batch([replace(t, routed_experts_TLk=wide)], [0], [0], router_replay=True).replay_TLk
    assert replay_TLk is not None
    assert (replay_TLk[0] == 255).all()
    assert (replay_TLk[-1] == -1).all()


def test_without_router_replay_routes_are_not_read(make_trajectory: MakeTrajectory) -> None:
    assert make_batch([make_trajectory(0)], [0], [0], router_replay=False).replay_TLk is None


@pytest.mark.parametrize("name", ["loss_mask_T", "rollout_logprobs_T", "routed_experts_TLk", "policy_step_T"])
def test_an_array_of_another_length_is_refused_naming_prompt_and_sample(
    make_trajectory: MakeTrajectory, name: str
) -> None:
    t = make_trajectory(3)
    short = replace(t, **{name: getattr(t, name)[:-1]})
    with pytest.raises(ValueError, match=f"prompt prompt-3 sample 3: {name} has 12 rows, tokens 13"):
        make_batch([make_trajectory(0), short], [0, 0], [0, 1], router_replay=True)


def test_routes_of_another_model_or_width_are_refused(make_trajectory: MakeTrajectory) -> None:
    t = make_trajectory(3)
    for other in (t.routed_experts_TLk[:, :1], t.routed_experts_TLk.astype(np.uint16)):
        with pytest.raises(ValueError, match="prompt prompt-3 sample 3: routed_experts_TLk is uint"):
            make_batch([make_trajectory(0), replace(t, routed_experts_TLk=other)], [0, 0], [0, 1], router_replay=True)


def test_a_sampled_first_token_is_refused(make_trajectory: MakeTrajectory) -> None:
    t = make_trajectory(3)
    mask_T = t.loss_mask_T.copy()
    mask_T[0] = True
    with pytest.raises(ValueError, match="prompt prompt-3 sample 3: the first token must be context"):
        make_batch([replace(t, loss_mask_T=mask_T)], [0], [0], router_replay=False)


def test_mixed_temperatures_are_refused(make_trajectory: MakeTrajectory) -> None:
    warm, cool = make_trajectory(0), make_trajectory(1, sampling=SamplingParams(temperature=0.7))
    with pytest.raises(ValueError, match=r"different temperatures \[0.7, 1.0\]"):
        make_batch([warm, cool], [0, 0], [0, 1], router_replay=False)
    assert make_batch([cool], [0], [0], router_replay=False).temperature == 0.7


@pytest.mark.parametrize("sampling", [SamplingParams(top_p=0.9), SamplingParams(top_k=5), SamplingParams(min_p=0.1)])
def test_a_cut_sampling_distribution_is_refused_with_the_reason(
    make_trajectory: MakeTrajectory, sampling: SamplingParams
) -> None:
    with pytest.raises(ValueError, match=r"prompt prompt-1 sample 1: .* 1 at equal weights; .* record the supports"):
        make_batch([make_trajectory(0), make_trajectory(1, sampling=sampling)], [0, 0], [0, 1], router_replay=False)


def supported(t: Trajectory) -> Trajectory:
    """Each sampled token was drawn among itself and the next two ids; the last one from the whole vocabulary."""
    rows = [np.arange(i, i + 3, dtype=np.int32) if m else None for i, m in zip(t.tokens_T, t.loss_mask_T, strict=True)]
    return replace(t, supports=Supports.of_rows([*rows[:-1], None]), sampling=replace(t.sampling, top_p=0.9))


def test_supports_are_those_of_the_trained_tokens_in_their_order(make_trajectory: MakeTrajectory) -> None:
    whole, cut = make_trajectory(0), supported(make_trajectory(1))
    batch = make_batch([whole, cut], [0, 0], [0, 1], router_replay=False)
    assert batch.supports_M is not None
    assert len(batch.supports_M) == len(batch.target_M) == 16
    assert batch.supports_M[:8] == (None,) * 8
    assert batch.supports_M[15] is None
    for support, token in zip(batch.supports_M[8:15], batch.tokens_T[batch.target_M[8:15]].tolist(), strict=True):
        assert support is not None
        assert support.tolist() == [token, token + 1, token + 2]
    assert batch.to(torch.device("cpu")).supports_M is batch.supports_M
    assert make_batch([whole], [0], [0], router_replay=False).supports_M is None


def test_a_greedy_trajectory_is_refused_with_the_reason(make_trajectory: MakeTrajectory) -> None:
    greedy = replace(supported(make_trajectory(1)), sampling=SamplingParams(temperature=0))
    with pytest.raises(ValueError, match=r"prompt prompt-1 sample 1: sampled with temperature 0: .* no gradient"):
        make_batch([greedy], [0], [0], router_replay=False)


def test_torn_supports_are_refused(make_trajectory: MakeTrajectory) -> None:
    t = supported(make_trajectory(1))
    assert t.supports is not None
    ids_K, counts_T = t.supports.ids_K, t.supports.counts_T
    of_context = np.roll(counts_T, -1)
    for torn in (Supports(ids_K[:-1], counts_T), Supports(ids_K, counts_T[:-1]), Supports(ids_K, of_context)):
        with pytest.raises(ValueError, match=r"prompt prompt-1 sample 1: supports of .* it is torn"):
            make_batch([replace(t, supports=torn)], [0], [0], router_replay=False)


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
def test_microbatches_hold_every_sequence_once_and_say_where_it_came_from(
    make_trajectory: MakeTrajectory, rows: int
) -> None:
    trajectories = [make_trajectory(seed, turn=1 + seed * 5 % 7) for seed in range(7)]
    batches = microbatches(trajectories, [float(seed) for seed in range(7)], rows, router_replay=True)
    assert sorted(place for batch in batches for place in batch.order_N) == list(range(7))
    assert max(batch.packing.num_sequences for batch in batches) <= rows
    for batch in batches:
        pieces = batch.tokens_T.split(batch.packing.lengths)
        for place, piece, advantage in zip(batch.order_N, pieces, batch.advantages_N.tolist(), strict=True):
            assert piece.tolist() == trajectories[place].tokens_T.tolist()
            assert advantage == place
    lengths = [length for batch in batches for length in batch.packing.lengths]
    assert lengths == sorted(lengths)  # sequences of like length share a micro-batch


def test_a_batchs_digest_changes_with_whatever_an_update_reads(make_trajectory: MakeTrajectory) -> None:
    trajectories, advantages = [make_trajectory(0), make_trajectory(1)], [0.5, -0.5]
    digests = {batch_sha256(trajectories, advantages), batch_sha256(trajectories, [0.5, -0.5000001])}
    t = trajectories[1]
    for name in ("tokens_T", "loss_mask_T", "rollout_logprobs_T", "routed_experts_TLk"):
        for place in (0, 6, len(t.tokens_T) - 1):
            array = getattr(t, name).copy()
            flat = array[place : place + 1].reshape(-1)
            flat[-1] = (
                not flat[-1]
                if array.dtype == bool
                else np.nextafter(flat[-1], 9)
                if array.dtype.kind == "f"
                else flat[-1] ^ 1
            )
            digests.add(batch_sha256([trajectories[0], replace(t, **{name: array})], advantages))
    digests |= {batch_sha256(trajectories[::-1], advantages), batch_sha256(trajectories[:1], advantages[:1])}
    cut = supported(t)
    assert cut.supports is not None
    narrower = replace(cut, supports=replace(cut.supports, ids_K=cut.supports.ids_K ^ 1))
    digests |= {batch_sha256([trajectories[0], other], advantages) for other in (cut, narrower)}
    assert len(digests) == 2 + 4 * 3 + 2 + 2


def test_a_batchs_digest_does_not_depend_on_memory_layout(make_trajectory: MakeTrajectory) -> None:
    t = make_trajectory(0)
    strided = np.repeat(t.tokens_T, 2)[::2]
    relaid = replace(t, tokens_T=strided, routed_experts_TLk=np.asfortranarray(t.routed_experts_TLk))
    assert not strided.flags.c_contiguous
    assert not relaid.routed_experts_TLk.flags.c_contiguous
    assert batch_sha256([relaid], [1.0]) == batch_sha256([t], [1.0])


def test_a_batch_is_a_copy_of_its_trajectories(make_trajectory: MakeTrajectory) -> None:
    t = make_trajectory(0)
    before = batch_sha256([t], [1.0])
    batch = make_batch([t], [1.0], [0], router_replay=True)
    for tensor in (batch.tokens_T, batch.rollout_logprobs_M, batch.replay_TLk):
        assert isinstance(tensor, torch.Tensor)
        tensor.zero_()
    assert batch_sha256([t], [1.0]) == before
