"""Supervised steps from random weights or a checkpoint (the warm start), or from a version (the control arms)."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from infra import policies
from infra.init_weights import fill_model, write_file
from infra.parts import Arm, build_environment, chat_settings, supervised_optim
from infra.pool import load_tensors_ref
from infra.provenance import trainer_build
from infra.scratch import scratch_folder
from infra.stages.context import Context, Inputs, Progress, no_progress
from infra.stages.init import Read, find_read, read_init
from infra.stages.record import stage_key
from infra.store import Store
from k3core.chat import ChatSettings
from k3core.checkpoint.tensors import from_torch, to_safetensors, to_torch
from k3core.envs.demonstrations import mixture
from k3core.errors import RunError
from k3core.model.model import build_model
from k3core.rl.supervised import Demonstration, demonstration, supervised_step, warmup_cosine
from k3core.rl.trainer import Trainer
from k3core.sealed import canonical_json, seal, unseal
from k3core.tokenizer import Tokenizer
from k3core.types import PolicyVersion, Ref

NAME = "warm_start"
WARMUP_STEPS = 20
LAST_FACTOR = 0.1  # of the learning rate, at the end of the cosine over the expert steps
ROWS_AT_ONCE = 16


class DivergedError(RunError):
    """A supervised step met a loss or gradient that is not finite."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """steps of `rows` demonstrations.

    The first `expert_steps` take flawless demonstrations alone, at a learning rate that rises to `peak` and falls along
    a cosine; the others a share of `arm.expert_share`, at `mixture_rate`.
    """

    arm: Arm
    expert_steps: int
    steps: int
    rows: int
    peak: float
    mixture_rate: float
    seed: int


def warm_start(inputs: Inputs, root: str, progress: Progress = no_progress) -> Ref:
    """Record with output `weights`. Resumes from the last of its own checkpoints.

    From warm_start.init the weights are the checkpoint's, widened to fp32 without a change of value; with no supervised
    steps after it, they go from its files into one of the store's, a tensor at a time.
    """
    context = Context.open(inputs, root)
    w = context.cfg.warm_start
    provenance: dict[str, Any] = {"warm_start": asdict(w)}
    made: dict[str, Ref] = {}
    read: Read | None
    metrics: dict[str, float] = {}
    if w.init is not None and w.steps == 0:
        read, made["weights"] = _copy_init(context, progress)
    else:
        read, trainer = _first_trainer(context, progress)
        schedule = Schedule(
            Arm("mixture", w.expert_share, 0),
            w.expert_steps,
            w.steps,
            w.rows,
            w.learning_rate,
            w.mixture_learning_rate,
            w.seed,
        )
        metrics["warm_start/loss"] = train_supervised(context, trainer, schedule, NAME, w.checkpoint_every, progress)
        weights, _ = trainer.save()
        made["weights"] = context.store.put(_weights_key(context), to_safetensors(from_torch(weights)))
        provenance["trainer"] = trainer_build(trainer)
    if read is not None:
        made["init_digests"] = read.contents
        provenance["init"] = read.described
    read_inputs = {"tokenizer": inputs.tokenizer, "init": inputs.init}
    return context.record(NAME, 0, made, metrics, inputs=read_inputs, provenance=provenance)


def _copy_init(context: Context, progress: Progress) -> tuple[Read, Ref]:
    """The checkpoint's tensors as the run's, in one file of the store; never more than one of them in memory."""
    run = context.store.local_path(context.cfg.run)  # the disk that will hold them; elsewhere, any
    with scratch_folder(run or Path(tempfile.gettempdir()), f".{context.cfg.run}-init-") as folder:
        path = folder / "weights.safetensors"
        read = read_init(context, lambda tensors: write_file(path, context.cfg.model, tensors), progress)
        return read, context.store.put_file(_weights_key(context), path, replace=True)


def _first_trainer(context: Context, progress: Progress) -> tuple[Read | None, Trainer]:
    """With random weights, or those of the checkpoint; of none in particular when training goes on from a save."""
    cfg = context.cfg
    optim, seed = supervised_optim(cfg), cfg.warm_start.seed
    recomputes = cfg.train.activation_checkpointing
    if cfg.warm_start.init is None:
        return None, Trainer(cfg.model, optim, seed=seed, activation_checkpointing=recomputes)
    model = build_model(cfg.model)
    trainer = Trainer(cfg.model, optim, seed=seed, model=model, activation_checkpointing=recomputes)
    if _is_saved(context.store, _checkpoint_key(context, NAME)):
        return find_read(context), trainer
    return read_init(context, lambda tensors: fill_model(trainer.model, tensors), progress), trainer


def _weights_key(context: Context) -> str:
    return stage_key(context.cfg.run, 0, "weights.safetensors")


def continue_supervised(
    context: Context, policy: PolicyVersion, arm: Arm, sequences: int, progress: Progress
) -> dict[str, Tensor]:
    """The weights of `policy` after `sequences` more demonstrations, at the warm start's settings."""
    cfg = context.cfg
    w = cfg.warm_start
    recomputes = cfg.train.activation_checkpointing
    trainer = Trainer(cfg.model, supervised_optim(cfg), seed=w.seed, activation_checkpointing=recomputes)
    trainer.load(to_torch(policies.load(context.store, policy)), {})  # without an adapter, also in mode "lora"
    schedule = Schedule(arm, 0, max(1, sequences // w.rows), w.rows, w.learning_rate, w.mixture_learning_rate, w.seed)
    train_supervised(context, trainer, schedule, f"control/{arm.name}-{sequences}", w.checkpoint_every, progress)
    return trainer.save()[0]


def train_supervised(
    context: Context, trainer: Trainer, schedule: Schedule, name: str, checkpoint_every: int, progress: Progress
) -> float:
    """The loss over the last steps. What a checkpoint holds (weights, moments, step) is all that a later step depends
    on, so a resumed arm ends bit for bit where an uninterrupted one does."""
    store, tokenizer = context.store, context.tokenizer()
    settings = chat_settings(context.cfg, build_environment(context.cfg), tokenizer)
    key = _checkpoint_key(context, name)
    step, losses = _restore(store, key, trainer)
    while step < schedule.steps:
        is_expert_step = step < schedule.expert_steps
        share = 1.0 if is_expert_step else schedule.arm.expert_share
        first = schedule.arm.first_index + step * schedule.rows
        batch = [_draw(schedule.seed, first + i, share, tokenizer, settings) for i in range(schedule.rows)]
        rate = schedule.mixture_rate
        if is_expert_step:
            rate = schedule.peak * warmup_cosine(step, schedule.expert_steps, WARMUP_STEPS, LAST_FACTOR)
        done = supervised_step(trainer, batch, ROWS_AT_ONCE, rate)
        if not done.result.applied:
            raise DivergedError(
                f"{name} step {step}: {done.result.reason}; lower warm_start.learning_rate ({schedule.peak:g})"
                f" or warm_start.mixture_learning_rate ({schedule.mixture_rate:g})"
            )
        losses = [*losses, done.loss][-50:]
        step += 1
        progress(step, schedule.steps)
        if step % checkpoint_every == 0 or step == schedule.steps:
            _save(store, key, trainer, step, losses)
    return sum(losses) / max(1, len(losses))


def _draw(seed: int, index: int, expert_share: float, tokenizer: Tokenizer, settings: ChatSettings) -> Demonstration:
    _, _, messages = mixture(seed, index, expert_share)
    return demonstration(messages, tokenizer, settings)


def _save(store: Store, key: str, trainer: Trainer, step: int, losses: list[float]) -> None:
    weights, optimizer = trainer.save()
    refs = {}
    for part, tensors in (("weights", weights), ("optimizer", optimizer)):
        ref = store.put(f"{key}/{step:06d}-{part}.safetensors", to_safetensors(from_torch(tensors)))
        refs[part] = {"uri": ref.uri, "sha256": ref.sha256, "size_bytes": ref.size_bytes}
    store.put(_latest(key), canonical_json(seal({"step": step, "losses": losses, **refs})))


def _restore(store: Store, key: str, trainer: Trainer) -> tuple[int, list[float]]:
    document = store.read_manifest(_latest(key))
    if document is None:
        return 0, []
    content = unseal(document, store.uri(_latest(key)))
    weights, optimizer = (load_tensors_ref(store, Ref(**content[part])) for part in ("weights", "optimizer"))
    trainer.load(weights, optimizer)
    return content["step"], content["losses"]


def _is_saved(store: Store, key: str) -> bool:
    return store.read(_latest(key)) is not None


def _checkpoint_key(context: Context, name: str) -> str:
    return f"{context.cfg.run}/checkpoints/{name}"


def _latest(key: str) -> str:
    return f"{key}/latest.json"
