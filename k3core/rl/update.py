"""One policy update: advantages, micro-batches, GSPO over minibatches, and what happened as metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

from k3core.rl.advantages import Advantaged
from k3core.rl.batch import Batch, microbatches
from k3core.rl.drift import drift
from k3core.rl.gspo import GspoConfig, gspo_loss
from k3core.rl.trainer import Trainer


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
    trainer: Trainer,
    kept: Sequence[Advantaged],
    cfg: UpdateConfig,
    gspo: GspoConfig,
    seed: int,
    policy_step: int,
    progress: Callable[[int, int], None] | None = None,
) -> UpdateResult:
    """Every kept trajectory is trained on once. The minibatches are a seeded shuffle, so a retry repeats them exactly.
    Batches wait in host memory; one at a time goes to the trainer's device.

    policy_step: the version that the trainer's weights are now, which tells numeric drift from stale tokens.
    progress(done, of) is called after each pass over a micro-batch; what it raises ends the update.
    """
    assert kept
    minibatches = _minibatches(kept, cfg, seed)
    batches = [batch for minibatch in minibatches for batch in minibatch]
    for batch in batches:
        if batch.replay_TLk is not None and batch.routed_layers != trainer.model.cfg.routed_layers:
            raise ValueError(
                f"routes were recorded for {batch.routed_layers}, this model routes in {trainer.model.cfg.routed_layers}:"
                " engine and trainer must have the same layers"
            )
    # On the batches that are trained on: in others a logprob may differ in its last bits, and the ratio of the first
    # minibatch would not be exactly 1.
    passes = count(1)
    old_logprobs: list[Tensor] = []
    for batch in batches:
        old_logprobs.append(logprobs_of(trainer, batch))
        if progress is not None:
            progress(next(passes), 2 * len(batches))
    metrics = drift_of(batches, old_logprobs, policy_step) | _route_metrics(batches)

    old = iter(old_logprobs)
    totals: dict[str, float] = {}
    grad_norms: list[float] = []
    vetoes: list[str] = []
    for minibatch in minibatches:
        num_sequences = sum(batch.packing.num_sequences for batch in minibatch)
        for on_host in minibatch:
            batch = on_host.to(trainer.device)
            part = trainer.forward_backward(
                batch.tokens_T,
                batch.packing,
                batch.target_M,
                partial(_loss, batch=batch, old_M=next(old), num_sequences=num_sequences, gspo=gspo),
                batch.replay_TLk,
                batch.temperature,
                batch.supports_M,
            )
            for name, value in part.items():
                join = np.maximum if name == "ratio_max" else np.add  # both keep a NaN
                totals[name] = float(join(totals.get(name, 0.0), float(value)))
            if progress is not None:
                progress(next(passes), 2 * len(batches))
        result = trainer.optim_step()
        if result.applied:
            grad_norms.append(result.grad_norm)
        else:
            vetoes.append(result.reason or "refused")
    metrics |= _gspo_metrics(totals, len(minibatches))
    metrics["train/vetoed_steps"] = float(len(vetoes))
    metrics["train/learning_rate"] = trainer.optimizer.cfg.learning_rate
    metrics["train/tokens"] = float(sum(batch.packing.num_tokens for batch in batches))
    if grad_norms:
        metrics["train/grad_norm"] = float(np.mean(grad_norms))
    return UpdateResult(metrics, tuple(vetoes))


def _minibatches(kept: Sequence[Advantaged], cfg: UpdateConfig, seed: int) -> list[list[Batch]]:
    """The micro-batches of each optimizer step; every kept trajectory is in one of them."""
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(seed)).tolist()
    return [
        microbatches(
            [kept[i].trajectory for i in members],
            [kept[i].advantage for i in members],
            cfg.microbatch_rows,
            cfg.router_replay,
        )
        for members in np.array_split(np.array(order), min(cfg.minibatches, len(kept)))
    ]


@torch.no_grad()
def logprobs_of(trainer: Trainer, batch: Batch) -> Tensor:
    """The trainer's, of a batch's trained tokens, under the distribution that they were drawn from: fp32 [M]."""
    return trainer.logprobs(
        batch.tokens_T, batch.packing, batch.target_M, batch.replay_TLk, batch.temperature, batch.supports_M
    )


def drift_of(batches: Sequence[Batch], logprobs: Sequence[Tensor], policy_step: int) -> dict[str, float]:
    """`drift` of these batches in host memory; logprobs: each batch's, by the trainer at version policy_step."""
    return drift(
        torch.cat(list(logprobs)).cpu().numpy(),
        torch.cat([batch.rollout_logprobs_M for batch in batches]).numpy(),
        torch.cat([batch.policy_step_M for batch in batches]).numpy(),
        policy_step,
    )


def _route_metrics(batches: Sequence[Batch]) -> dict[str, float]:
    """Share of tokens and layers without recorded experts. A sequence's last token never has any: it was no input."""
    missing = total = 0
    for batch in batches:
        if batch.replay_TLk is not None:
            missing_TL = (batch.replay_TLk < 0).any(-1)
            missing_TL[batch.packing.last_N] = False
            missing += int(missing_TL.sum())
            total += (batch.packing.num_tokens - batch.packing.num_sequences) * missing_TL.shape[1]
    return {"drift/route_missing_fraction": missing / total} if total else {}


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
    """Means over what there was; without a sequence or token the mean is left out."""
    sequences, tokens = totals["num_sequences"], totals["num_tokens"]
    metrics = {"gspo/loss": totals["loss"] / num_minibatches}
    if sequences:
        metrics |= {
            "gspo/ratio_mean": totals["ratio_sum"] / sequences,
            "gspo/ratio_max": totals["ratio_max"],
            "gspo/clip_fraction": totals["num_clipped"] / sequences,
            "gspo/dual_clip_fraction": totals["num_dual_clipped"] / sequences,
        }
    if tokens:
        metrics |= {
            "gspo/masked_token_fraction": totals["num_masked_tokens"] / tokens,
            "gspo/tis_mean": totals["tis_sum"] / tokens,
            "gspo/tis_clip_fraction": totals["num_tis_clipped"] / tokens,
        }
    return metrics
