"""The trainer and the engine of this process, resident between stages: `at` loads a version only when another is there.

A stage is a pure function of references whoever runs it: a warm process is fast, a cold one loads from the store.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infra import policies
from infra.config import RunConfig
from infra.host_weights import load_shared
from infra.serving import ServingEngine, resident_sha256
from infra.store import Store
from k3core.chat import chat_format
from k3core.checkpoint.tensors import from_safetensors, from_torch, to_torch
from k3core.model.model import build_model
from k3core.model.weights import is_adapter_tensor
from k3core.rl.trainer import Trainer
from k3core.rollout.engine import K3Engine
from k3core.tokenizer import Tokenizer
from k3core.types import PolicyVersion, Ref


@dataclass(slots=True)
class Pool:
    """One trainer and one engine for one model config. `loads` counts what had to be read from the store."""

    cfg: RunConfig
    store: Store
    loads: dict[str, int] = field(default_factory=lambda: {"trainer": 0, "engine": 0})
    _trainer: Trainer | None = None
    _trainer_at: tuple[str, str] | None = None
    _fresh_adapter: dict[str, Tensor] = field(default_factory=dict)
    _engine: K3Engine | None = None
    _engine_at: str | None = None
    _engine_lock: threading.Lock = field(default_factory=threading.Lock)

    def trainer_at(self, policy: PolicyVersion, optimizer: Ref | None) -> Trainer:
        """The trainer with these weights and this optimizer state (None: fresh)."""
        wanted = (policy.weights_sha256, optimizer.sha256 if optimizer else "fresh")
        if self._trainer is None:
            cfg = self.cfg
            # What a checkpoint filled needs no random weights first: for a large model they take minutes.
            model = None if cfg.warm_start.init is None else build_model(cfg.model)
            self._trainer = Trainer(
                cfg.model,
                cfg.train.optim,
                cfg.train.lora,
                cfg.seed,
                model=model,
                activation_checkpointing=cfg.train.activation_checkpointing,
            )
            self._fresh_adapter, _ = self._trainer.save(adapter_only=True)
        if self._trainer_at != wanted:
            self._trainer_at = None  # half loaded is nowhere
            state = {} if optimizer is None else load_tensors_ref(self.store, optimizer)
            self._trainer.load(load_policy(self.store, policy, self._fresh_adapter), state)
            self._trainer_at = wanted
            self.loads["trainer"] += 1
        return self._trainer

    def trainer_is_at(self, weights_sha256: str, optimizer: Ref) -> None:
        """Say where a step has taken the trainer, so that the next stage finds it there."""
        self._trainer_at = (weights_sha256, optimizer.sha256)

    def trainer_lost(self) -> None:
        """Its weights are no version any more; the next `trainer_at` loads."""
        self._trainer_at = None

    def engine_at(self, policy: PolicyVersion, tokenizer: Tokenizer) -> K3Engine:
        with self._engine_lock:  # a load that ran into its time-out may still be at it
            if self._engine is None:
                cfg = self.cfg
                self._engine = K3Engine(
                    cfg.model,
                    chat_format(tokenizer).stop_token,
                    num_slots=cfg.rollout.max_running,
                    max_length=cfg.environment.max_tokens,
                    lora=cfg.train.lora,
                    tokenizer=tokenizer,
                )
            if self._engine_at != policy.weights_sha256 or self._engine.policy_step != policy.step:
                self._engine_at = None
                held = self._engine.served_tensors()
                without = {name: torch.zeros_like(t) for name, t in held.items() if is_adapter_tensor(name)}
                weights = load_policy(self.store, policy, without)
                self._engine.load(policy.step, weights, base_sha256=policy.weights_sha256)
                self._engine_at = policy.weights_sha256
                self.loads["engine"] += 1
            return self._engine

    def own_engine(self, tokenizer: Tokenizer) -> OwnEngine:
        return OwnEngine(self, tokenizer)

    def serving_engines(self, tokenizer: Tokenizer) -> Sequence[ServingEngine]:
        """Those that must acknowledge a version before it counts as served."""
        return [self.own_engine(tokenizer)]


@dataclass(frozen=True, slots=True)
class OwnEngine:
    """This process's engine, as `serve` asks for it."""

    pool: Pool
    tokenizer: Tokenizer
    name: str = "embedded"

    def load(self, version: PolicyVersion) -> str:
        """The identity of the tensors that the engine computes with once it is at `version`."""
        engine = self.pool.engine_at(version, self.tokenizer)
        return resident_sha256(version, from_torch(engine.served_tensors()))


_pools: dict[str, Pool] = {}


def pool_for(cfg: RunConfig, config_sha256: str, store: Store) -> Pool:
    """The process's pool for this config; another config replaces it, so that only one model is resident."""
    if config_sha256 not in _pools:
        _pools.clear()
        _pools[config_sha256] = Pool(cfg, store)
    return _pools[config_sha256]


def load_policy(store: Store, policy: PolicyVersion, fresh: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a version's model. An adapter stands on its run's step 0; a version without one gets `fresh`, an
    adapter that changes nothing (empty in mode "full")."""
    tensors = to_torch(load_shared(store, policy))
    if policy.kind != "adapter":
        return {**fresh, **tensors}
    base = policies.read_version(store, policy.run, 0)
    if base is None:
        raise ValueError(f"{policy.weights.uri}: an adapter, but step 0 of run {policy.run!r} is not published")
    return {**to_torch(load_shared(store, base)), **tensors}


def load_tensors_ref(store: Store, ref: Ref) -> dict[str, Tensor]:
    """The tensors of one safetensors file in the store."""
    return to_torch(from_safetensors(store.get(ref), ref.uri))
