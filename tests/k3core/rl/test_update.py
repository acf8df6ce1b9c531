from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3core.rl.advantages import Advantaged
from k3core.rl.batch import make_batch
from k3core.rl.gspo import GspoConfig
from k3core.rl.optim import OptimConfig
from k3core.rl.trainer import Trainer
from k3core.rl.update import UpdateConfig, update_policy
from k3core.rollout.engine import K3Engine
from k3core.rollout.protocol import GenerateRequest
from k3core.types import SamplingParams, Trajectory
from k3kernels.packing import Packing

MakeTrajectory = Callable[..., Trajectory]
OPTIM = OptimConfig(learning_rate=1e-3)
GSPO = GspoConfig()


class RecordingTrainer(Trainer):
    """Remembers the sequences and the metrics of every pass, and after how many passes each step came."""

    def __init__(self, cfg: K3Config) -> None:
        super().__init__(cfg, OPTIM)
        self.sequences: list[list[int]] = []
        self.passes: list[dict[str, float]] = []
        self.steps: list[int] = []

    def forward_backward(self, tokens_T: Tensor, packing: Packing, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        metrics = super().forward_backward(tokens_T, packing, *args, **kwargs)
        self.sequences += [piece.tolist() for piece in tokens_T.split(packing.lengths)]
        self.passes.append({name: float(value) for name, value in metrics.items()})
        return metrics

    def optim_step(self, learning_rate: float | None = None) -> Any:
        self.steps.append(len(self.passes))
        return super().optim_step(learning_rate)


@pytest.fixture
def kept(make_trajectory: MakeTrajectory) -> list[Advantaged]:
    return [Advantaged(make_trajectory(seed, turn=2 + seed % 4), (-1.0) ** seed) for seed in range(7)]


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def logprobs(trainer: Trainer, t: Trajectory) -> np.ndarray:
    batch = make_batch([t], [0.0], [0], router_replay=True)
    with torch.no_grad():
        return trainer.logprobs(
            batch.tokens_T, batch.packing, batch.target_M, batch.replay_TLk, batch.temperature
        ).numpy()


def as_sampled_by(trainer: Trainer, t: Trajectory) -> Trajectory:
    """With the logprobs that an engine of the trainer's weights would have reported."""
    logprobs_T = np.zeros(len(t.tokens_T), np.float32)
    logprobs_T[t.loss_mask_T] = logprobs(trainer, t)
    return replace(t, rollout_logprobs_T=logprobs_T)


def test_the_same_update_from_the_same_state_gives_the_same_bits(cfg: K3Config, kept: list[Advantaged]) -> None:
    """What a retry does: the version again, then the batch again; also in a trainer that had gone elsewhere."""
    start, other = Trainer(cfg, OPTIM, seed=0), Trainer(cfg, OPTIM, seed=5)
    update_policy(start, kept, UpdateConfig(), GSPO, seed=1, policy_step=0)
    version = start.save()
    first = update_policy(start, kept, UpdateConfig(microbatch_rows=3), GSPO, seed=2, policy_step=0)
    other.load(*version)
    second = update_policy(other, kept, UpdateConfig(microbatch_rows=3), GSPO, seed=2, policy_step=0)
    for a, b in zip(start.save(), other.save(), strict=True):
        assert same_bits(a, b)
    assert first == second
    assert not same_bits(start.save()[0], version[0])


@pytest.mark.parametrize(("minibatches", "rows"), [(1, 16), (2, 2), (3, 1), (7, 4), (50, 4)])
def test_every_kept_trajectory_is_trained_on_once(
    cfg: K3Config, kept: list[Advantaged], minibatches: int, rows: int
) -> None:
    trainer = RecordingTrainer(cfg)
    result = update_policy(trainer, kept, UpdateConfig(minibatches, rows), GSPO, seed=0, policy_step=0)
    assert sorted(trainer.sequences) == sorted(item.trajectory.tokens_T.tolist() for item in kept)
    assert len(trainer.steps) == min(minibatches, 7)
    assert result.vetoes == ()
    assert result.metrics["train/tokens"] == sum(len(item.trajectory.tokens_T) for item in kept)


def test_minibatches_are_shuffled_by_the_seed(cfg: K3Config, kept: list[Advantaged]) -> None:
    def order(seed: int) -> list[list[int]]:
        trainer = RecordingTrainer(cfg)
        update_policy(trainer, kept, UpdateConfig(minibatches=7), GSPO, seed, policy_step=0)
        return trainer.sequences

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_old_logprobs_are_the_trainers_so_the_first_minibatch_has_a_ratio_of_exactly_one(
    cfg: K3Config, kept: list[Advantaged]
) -> None:
    """The engine's are nats away in these trajectories, and still nothing is taken for a change of policy."""
    trainer = RecordingTrainer(cfg)
    metrics = update_policy(
        trainer, kept, UpdateConfig(minibatches=2, microbatch_rows=2), GSPO, seed=0, policy_step=0
    ).metrics
    first, second = trainer.passes[: trainer.steps[0]], trainer.passes[trainer.steps[0] :]
    assert len(first) > 1
    for part in first:
        assert part["ratio_max"] == 1.0
        assert part["ratio_sum"] == part["num_sequences"]
        assert part["num_clipped"] == part["num_masked_tokens"] == 0
    assert any(part["ratio_sum"] != part["num_sequences"] for part in second)
    assert metrics["drift/numeric/abs_p50"] > 0.1

    one = update_policy(
        Trainer(cfg, OPTIM), kept, UpdateConfig(minibatches=1, microbatch_rows=2), GSPO, seed=0, policy_step=0
    ).metrics
    assert (one["gspo/ratio_mean"], one["gspo/ratio_max"], one["gspo/clip_fraction"]) == (1.0, 1.0, 0.0)


def test_metrics_are_means_over_all_minibatches(cfg: K3Config, kept: list[Advantaged]) -> None:
    trainer = RecordingTrainer(cfg)
    metrics = update_policy(
        trainer, kept, UpdateConfig(minibatches=3, microbatch_rows=2), GSPO, seed=0, policy_step=0
    ).metrics
    total = {name: sum(part[name] for part in trainer.passes) for name in trainer.passes[0]}
    assert total["num_sequences"] == 7
    assert total["num_tokens"] == sum(item.trajectory.loss_mask_T.sum() for item in kept)
    assert metrics["gspo/loss"] == pytest.approx(total["loss"] / 3)
    assert metrics["gspo/ratio_mean"] == pytest.approx(total["ratio_sum"] / 7)
    assert metrics["gspo/ratio_max"] == max(part["ratio_max"] for part in trainer.passes)
    assert metrics["gspo/clip_fraction"] == total["num_clipped"] / 7
    assert metrics["gspo/tis_mean"] == pytest.approx(total["tis_sum"] / total["num_tokens"])
    assert metrics["gspo/tis_clip_fraction"] == total["num_tis_clipped"] / total["num_tokens"] > 0
    assert metrics["train/vetoed_steps"] == 0
    assert metrics["train/learning_rate"] == OPTIM.learning_rate


def test_microbatching_does_not_change_the_gradient(cfg: K3Config, kept: list[Advantaged]) -> None:
    norms = [
        update_policy(Trainer(cfg, OPTIM), kept, UpdateConfig(1, rows), GSPO, seed=0, policy_step=0).metrics[
            "train/grad_norm"
        ]
        for rows in (1, 3, 16)
    ]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


def test_a_better_trajectory_becomes_likelier_and_a_worse_one_less_likely(
    cfg: K3Config, make_trajectory: MakeTrajectory
) -> None:
    for seed in range(3):
        trainer = Trainer(cfg, OPTIM, seed=seed)
        better, worse = (as_sampled_by(trainer, make_trajectory(2 * seed + i)) for i in range(2))
        kept = [Advantaged(better, 1.0), Advantaged(worse, -1.0)]
        before = [logprobs(trainer, t).sum() for t in (better, worse)]
        result = update_policy(trainer, kept, UpdateConfig(minibatches=1), GSPO, seed=0, policy_step=0)
        assert result.metrics["drift/numeric/abs_max"] < 1e-5
        after = [logprobs(trainer, t).sum() for t in (better, worse)]
        assert after[0] > before[0] + 0.01
        assert after[1] < before[1] - 0.01


def test_a_trajectory_with_a_nan_vetoes_its_step_and_shows(cfg: K3Config, kept: list[Advantaged]) -> None:
    broken_T = kept[3].trajectory.rollout_logprobs_T.copy()
    broken_T[4] = float("nan")
    kept[3] = replace(kept[3], trajectory=replace(kept[3].trajectory, rollout_logprobs_T=broken_T))
    trainer = Trainer(cfg, OPTIM)
    before = trainer.save()
    result = update_policy(trainer, kept, UpdateConfig(minibatches=1, microbatch_rows=2), GSPO, seed=0, policy_step=0)
    assert result.vetoes == ("the loss is nan",)
    assert result.metrics["train/vetoed_steps"] == 1
    assert math.isnan(result.metrics["gspo/loss"])
    assert math.isnan(result.metrics["drift/numeric/abs_max"])
    assert "train/grad_norm" not in result.metrics
    for a, b in zip(trainer.save(), before, strict=True):
        assert same_bits(a, b)

    result = update_policy(trainer, kept, UpdateConfig(minibatches=7), GSPO, seed=0, policy_step=0)
    assert result.vetoes == ("the loss is nan",)  # the other six were applied
    assert not same_bits(trainer.save()[0], before[0])


@pytest.mark.parametrize("bad_pass", [0, 6])
def test_a_ratio_that_is_nan_is_not_lost_among_the_others(cfg: K3Config, kept: list[Advantaged], bad_pass: int) -> None:
    trainer = RecordingTrainer(cfg)

    def poison(module: Any, args: Any, output: Tensor) -> Tensor:  # noqa: ARG001
        """Only in a pass with gradients, so that the old logprobs stay whole."""
        is_bad = torch.is_grad_enabled() and len(trainer.passes) == bad_pass
        return output * float("nan") if is_bad else output

    trainer.model.norm.register_forward_hook(poison)
    result = update_policy(trainer, kept, UpdateConfig(minibatches=7), GSPO, seed=0, policy_step=0)
    assert len(result.vetoes) == 1
    assert math.isnan(result.metrics["gspo/ratio_max"])
    assert math.isnan(result.metrics["gspo/ratio_mean"])


def test_missing_routes_are_a_share_of_the_tokens_that_were_inputs(
    cfg: K3Config, make_trajectory: MakeTrajectory
) -> None:
    def fraction(routes_of_first: Callable[[np.ndarray], None], **changes: bool) -> float | None:
        pair = [make_trajectory(0), make_trajectory(1)]
        routes = pair[0].routed_experts_TLk.copy()
        routes_of_first(routes)
        pair[0] = replace(pair[0], routed_experts_TLk=routes)
        kept = [Advantaged(t, a) for t, a in zip(pair, (1.0, -1.0), strict=True)]
        metrics = update_policy(Trainer(cfg, OPTIM), kept, UpdateConfig(**changes), GSPO, seed=0, policy_step=0).metrics
        return metrics.get("drift/route_missing_fraction")

    def lose_three_tokens(routes_TLk: np.ndarray) -> None:
        routes_TLk[2:5] = 255

    def lose_one_layer_of_one_token(routes_TLk: np.ndarray) -> None:
        routes_TLk[2, 1] = 255

    assert fraction(lambda _: None) == 0.0
    assert fraction(lose_three_tokens) == 3 / 24
    assert fraction(lose_one_layer_of_one_token) == 1 / 48
    assert fraction(lose_three_tokens, router_replay=False) is None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_what_our_engine_samples_at_a_temperature_is_what_the_trainer_computes(
    cfg: K3Config, temperature: float
) -> None:
    """Behaviour logprobs are of the distribution that was sampled, so the ratio is 1; read otherwise it is not."""
    trainer = Trainer(cfg, OPTIM)
    engine = K3Engine(cfg, stop_token=60, num_slots=2, max_length=64)
    engine.load(0, trainer.save()[0])
    sampling = SamplingParams(temperature=temperature, max_tokens=20)
    context = list(range(9))
    kept = []
    for sample, advantage in enumerate((1.0, -1.0)):
        request = GenerateRequest(f"#{sample}", context, sampling, seed=sample)
        generation = asyncio.run(engine.generate(request))
        n = len(generation.tokens_T)
        no_route = np.full((1, *generation.routed_experts_TLk.shape[1:]), 255, np.uint8)
        trajectory = Trajectory(
            prompt_id="prompt",
            sample=sample,
            seed=sample,
            tokens_T=np.concatenate([np.array(context, np.int32), generation.tokens_T]),
            loss_mask_T=np.array([False] * 9 + [True] * n),
            rollout_logprobs_T=np.concatenate([np.zeros(9, np.float32), generation.logprobs_T]),
            routed_experts_TLk=np.concatenate([generation.routed_experts_TLk, no_route]),
            policy_step_T=np.concatenate([np.full(9, -1, np.int32), generation.policy_step_T]),
            sampling=sampling,
            stop_reason="finished",
            num_turns=1,
            num_tool_calls=0,
            routed_layers=generation.routed_layers,
        )
        kept.append(Advantaged(trajectory, advantage))

    def metrics(items: list[Advantaged]) -> dict[str, float]:
        return update_policy(
            Trainer(cfg, OPTIM), items, UpdateConfig(minibatches=1), GSPO, seed=0, policy_step=0
        ).metrics

    right = metrics(kept)
    assert right["drift/numeric/abs_max"] < 1e-5
    assert right["gspo/tis_mean"] == pytest.approx(1, abs=1e-5)
    assert right["drift/route_missing_fraction"] == 0.0
    misread = [
        replace(item, trajectory=replace(item.trajectory, sampling=replace(sampling, temperature=1.4))) for item in kept
    ]
    assert metrics(misread)["drift/numeric/abs_max"] > 0.05


def test_routes_of_another_models_layers_are_refused_by_name(cfg: K3Config, make_trajectory: MakeTrajectory) -> None:
    shifted = tuple(f"layers.{i + 1}.block_sparse_moe" for i in cfg.moe_layers)
    kept = [Advantaged(replace(make_trajectory(n), routed_layers=shifted), 1.0 - 2 * n) for n in range(2)]
    with pytest.raises(ValueError, match=r"routes were recorded for .*layers\.2\.block_sparse_moe"):
        update_policy(Trainer(cfg, OPTIM), kept, UpdateConfig(), GSPO, seed=0, policy_step=0)


def test_routes_without_layer_names_are_refused(cfg: K3Config, make_trajectory: MakeTrajectory) -> None:
    kept = [Advantaged(replace(make_trajectory(n), routed_layers=()), 1.0 - 2 * n) for n in range(2)]
    with pytest.raises(ValueError, match="each layer's routes need its name"):
        update_policy(Trainer(cfg, OPTIM), kept, UpdateConfig(), GSPO, seed=0, policy_step=0)
