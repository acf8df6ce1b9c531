"""One policy update: advantages, micro-batches, GSPO over minibatches, and what happened as metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from k3core.rl.advantages import Advantaged
from k3core.rl.batch import Batch, microbatches
from k3core.rl.drift import drift
from k3core.rl.gspo import GspoConfig, gspo_loss
from k3core.rl.trainer import Trainer
from k3core.types import Trajectory


@dataclass(frozen=True, slots=True)
class UpdateConfig:
    """minibatches: optimizer steps per batch of trajectories; the ratio's old policy is the one before the first."""

    minibatches: int = 2
    microbatch_rows: int = 16
    router_replay: bool = True


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """metrics by their tracked names. vetoes: why optimizer steps were refused; empty when all were applied."""

    metrics: dict[str, float]
    vetoes: tuple[str, ...]


def update_policy(
    trainer: Trainer, kept: Sequence[Advantaged], cfg: UpdateConfig, gspo: GspoConfig, seed: int
) -> UpdateResult:
    """Every kept trajectory is trained on once. The minibatches are a seeded shuffle, so a retry repeats them exactly."""
    assert kept
    trajectories = [item.trajectory for item in kept]
    old_logprobs, rollout_logprobs, missing = trainer_logprobs(trainer, trajectories, cfg)
    metrics = drift(np.concatenate(old_logprobs), np.concatenate(rollout_logprobs))
    metrics["drift/route_missing_fraction"] = missing

    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(seed)).tolist()
    minibatches = np.array_split(np.array(order), min(cfg.minibatches, len(kept)))
    totals: dict[str, float] = {}
    grad_norms: list[float] = []
    vetoes: list[str] = []
    for members in minibatches:
        batches = microbatches(
            [trajectories[i] for i in members],
            [kept[i].advantage for i in members],
            cfg.microbatch_rows,
            cfg.router_replay,
        )
        for batch in batches:
            old_M = torch.from_numpy(np.concatenate([old_logprobs[members[place]] for place in batch.order_N]))
            part = trainer.forward_backward(
                batch.tokens_T,
                batch.packing,
                batch.target_M,
                partial(_loss, batch=batch, old_M=old_M, num_sequences=len(members), gspo=gspo),
                batch.replay_TLk,
                batch.temperature,
            )
            for name, value in part.items():
                new = float(value)
                totals[name] = max(totals.get(name, new), new) if name == "ratio_max" else totals.get(name, 0.0) + new
        result = trainer.optim_step()
        if result.applied:
            grad_norms.append(result.grad_norm)
        else:
            vetoes.append(result.reason or "refused")
    metrics |= _gspo_metrics(totals, len(minibatches))
    metrics["train/vetoed_steps"] = float(len(vetoes))
    metrics["train/learning_rate"] = trainer.optimizer.cfg.learning_rate
    metrics["train/tokens"] = float(sum(len(t.tokens_T) for t in trajectories))
    if grad_norms:
        metrics["train/grad_norm"] = float(np.mean(grad_norms))
    return UpdateResult(metrics, tuple(vetoes))


@torch.no_grad()
def trainer_logprobs(
    trainer: Trainer, trajectories: Sequence[Trajectory], cfg: UpdateConfig
) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """Per trajectory: logprobs of its sampled tokens by the trainer now and by the engine then; share of tokens whose
    routes were not recorded (a sequence's last token never has one)."""
    ours: list[np.ndarray] = [np.empty(0, np.float32)] * len(trajectories)
    engines = [t.rollout_logprobs_T[t.loss_mask_T] for t in trajectories]
    missing = total = 0
    for batch in microbatches(trajectories, [0.0] * len(trajectories), cfg.microbatch_rows, cfg.router_replay):
        logprobs_M = trainer.logprobs(
            batch.tokens_T, batch.packing, batch.target_M, batch.replay_TLk, batch.temperature
        ).numpy()
        counts = torch.bincount(batch.seq_M, minlength=batch.packing.num_sequences).tolist()
        for place, piece in zip(batch.order_N, np.split(logprobs_M, np.cumsum(counts)[:-1]), strict=True):
            ours[place] = piece
        total += batch.packing.num_tokens - batch.packing.num_sequences
        if batch.replay_TLk is not None and batch.replay_TLk.numel():
            missing += int((batch.replay_TLk < 0).any(-1).any(-1).sum()) - batch.packing.num_sequences
    return ours, engines, max(missing, 0) / max(total, 1)


def _loss(
    logprobs_M: Tensor, batch: Batch, old_M: Tensor, num_sequences: int, gspo: GspoConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    return gspo_loss(
        logprobs_M,
        old_M,
        batch.rollout_logprobs_M,
        batch.advantages_N,
        torch.ones_like(logprobs_M, dtype=torch.bool),
        batch.seq_M,
        num_sequences,
        gspo,
    )


def _gspo_metrics(totals: dict[str, float], num_minibatches: int) -> dict[str, float]:
    sequences, tokens = max(totals["num_sequences"], 1.0), max(totals["num_tokens"], 1.0)
    return {
        "gspo/loss": totals["loss"] / num_minibatches,
        "gspo/ratio_mean": totals["ratio_sum"] / sequences,
        "gspo/ratio_max": totals["ratio_max"],
        "gspo/clip_fraction": totals["num_clipped"] / sequences,
        "gspo/dual_clip_fraction": totals["num_dual_clipped"] / sequences,
        "gspo/masked_token_fraction": totals["num_masked_tokens"] / tokens,
        "gspo/tis_mean": totals["tis_sum"] / tokens,
        "gspo/tis_clip_fraction": totals["num_tis_clipped"] / tokens,
    }
