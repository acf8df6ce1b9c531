"""Update: one policy step from scored groups, applied once however often it is tried."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict

from infra.ledger import Ledger
from infra.provenance import trainer_build
from infra.records import decode
from infra.stages.context import Context, Inputs, Progress, no_progress
from infra.stages.record import read_record, stage_key
from k3core.checkpoint.tensors import from_torch, to_safetensors, weights_sha256
from k3core.rl.advantages import group_advantages
from k3core.rl.batch import batch_sha256, microbatches
from k3core.rl.trainer import Trainer
from k3core.rl.update import UpdateConfig, drift_of, logprobs_of, update_policy
from k3core.types import PolicyVersion, Ref, ScoredGroup


def update_step(
    inputs: Inputs,
    root: str,
    policy: PolicyVersion,
    score: Ref,
    optimizer: Ref | None,
    progress: Progress = no_progress,
) -> Ref:
    """Record of step policy.step + 1 with outputs `weights` and `optimizer`.

    The ledger decides: an entry for this step and this batch means that it was applied, and its record is returned;
    an entry with another batch is refused (ValueError). Weights and optimizer state are stored before the entry.
    """
    context = Context.open(inputs, root)
    cfg, store, step = context.cfg, context.store, policy.step + 1
    groups = decode(store.get(read_record(store, score).outputs["groups"]), tuple[ScoredGroup, ...], score.uri)
    advantages = group_advantages(groups, cfg.train.normalize_std)
    assert advantages.kept, "the flow draws other prompts when no group has variance"
    digest = batch_sha256([item.trajectory for item in advantages.kept], [item.advantage for item in advantages.kept])
    ledger = Ledger(store, cfg.run)
    if (entry := ledger.get(step)) is not None and entry["batch_sha256"] == digest:
        return Ref(**entry["result"]["record"])

    trainer = context.pool.trainer_at(policy, optimizer)
    context.pool.trainer_lost()  # until the step is recorded, the resident weights are no version
    first_drift = _drift_of_all(trainer, groups, cfg.train.update, policy.step) if step == 1 else {}
    result = update_policy(
        trainer, advantages.kept, cfg.train.update, cfg.gspo, seed=step, policy_step=policy.step, progress=progress
    )
    weights, state = trainer.save()
    raw = from_torch(weights)
    outputs = {
        "weights": store.put(stage_key(cfg.run, step, "weights.safetensors"), to_safetensors(raw)),
        "optimizer": store.put(stage_key(cfg.run, step, "optimizer.safetensors"), to_safetensors(from_torch(state))),
    }
    steps_behind = [
        policy.step - int(s) for g in groups for t in g.trajectories for s in set(t.policy_step_T) if s >= 0
    ]
    metrics = {
        **result.metrics,
        **first_drift,
        "train/seconds": context.elapsed(),
        "staleness/mean": sum(steps_behind) / max(1, len(steps_behind)),
        "staleness/max": float(max(steps_behind, default=0)),
    }
    notes = {"batch_sha256": digest, "vetoes": "; ".join(result.vetoes)}
    # A name of its own: of two tries at the same time, the slower must not overwrite what the ledger refers to.
    record = context.record(
        "update",
        step,
        outputs,
        metrics,
        notes=notes,
        name=f"update-{uuid.uuid4().hex[:8]}",
        inputs={"score": score, "policy": policy.weights, "optimizer": optimizer},
        provenance={"gspo": asdict(cfg.gspo), "train": asdict(cfg.train), "trainer": trainer_build(trainer)},
    )
    entry = ledger.record(step, digest, {"record": asdict(record), "weights_sha256": weights_sha256(raw)})
    recorded = Ref(**entry["result"]["record"])
    if recorded == record:
        context.pool.trainer_is_at(weights_sha256(raw), outputs["optimizer"])
    return recorded


def _drift_of_all(
    trainer: Trainer, groups: Sequence[ScoredGroup], cfg: UpdateConfig, policy_step: int
) -> dict[str, float]:
    """Before the first update: over every sampled token of the batch, not only those that are trained on."""
    trajectories = [t for group in groups for t in group.trajectories if t.loss_mask_T.any()]
    batches = microbatches(trajectories, [0.0] * len(trajectories), cfg.microbatch_rows, cfg.router_replay)
    return drift_of(batches, [logprobs_of(trainer, batch) for batch in batches], policy_step)
