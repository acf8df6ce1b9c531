"""What lies in a GPU's memory between the steps: weights, LoRA factors, the optimizer's state, and a rollout's caches."""

from __future__ import annotations

import difflib
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from k3core.checkpoint.names import expected_shapes
from k3core.model.config import K3Config
from k3core.model.precision import stored_dtype
from k3core.model.sizes import (
    ATTN_RES,
    NORMS,
    ROUTED,
    ROUTER,
    conv_window_bytes,
    kda_state_bytes,
    mla_cache_bytes,
    num_parameters,
    part_sizes,
    tensor_sizes,
)
from k3core.plan.inputs import Mesh, Training

EXPERT_MATRICES = ("w1", "w2", "w3")
WHOLE = (ATTN_RES, NORMS, ROUTER)  # parts that tp does not split
WIDE = 4  # bytes of an element of a factor, a gradient, a master copy, and of each of AdamW's two moments


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of one tp rank's part, by layer: of the routed experts of one ep rank, of all experts, and of the rest.

    others_bytes: embedding, head and final norm.
    """

    rank_experts: tuple[float, ...]
    experts: tuple[float, ...]
    rest: tuple[float, ...]
    others_bytes: float

    @property
    def num_bytes(self) -> float:
        return sum(self.experts) + sum(self.rest) + self.others_bytes

    def gathered_layers(self, mesh: Mesh) -> tuple[float, ...]:
        """Of each layer, what a GPU gathers to compute it: what its own shard is not. Without shards nothing."""
        if mesh.num_shards == 1:
            return (0.0,) * len(self.rest)
        has_all_experts = mesh.ep == mesh.num_shards  # its own ones lie there whole
        return tuple(
            rest + (0.0 if has_all_experts else experts)
            for rest, experts in zip(self.rest, self.rank_experts, strict=True)
        )


@lru_cache(maxsize=64)
def weights(cfg: K3Config, tp: int, ep: int) -> Weights:
    """In bf16, and fp32 where the model keeps it; experts as cfg stores them."""
    experts: dict[int | None, float] = defaultdict(float)
    rest: dict[int | None, float] = defaultdict(float)
    for size in tensor_sizes(cfg):
        held = float(size.stored_bytes)
        if size.name.endswith("A_log"):  # without the padding of K3's files
            held = size.parameters * stored_dtype(size.name, torch.bfloat16).itemsize
        into = experts if size.part == ROUTED else rest
        into[size.layer] += held * size.count / (1 if size.part in WHOLE else tp)
    layers = range(cfg.num_hidden_layers)
    return Weights(
        tuple(experts[layer] / ep for layer in layers),
        tuple(experts[layer] for layer in layers),
        tuple(rest[layer] for layer in layers),
        rest[None],
    )


@dataclass(frozen=True, slots=True)
class Trained:
    """Bytes on one GPU. temporary: what AdamW's step makes besides. rank_experts, rest: of the gradients before they are
    split among shards, those of the routed experts of one ep rank and those of everything else."""

    factors: float
    master: float
    gradients: float
    moments: float
    temporary: float
    rank_experts: float
    rest: float


def trained(cfg: K3Config, mesh: Mesh, training: Training) -> Trained:
    """LoRA factors in fp32 with AdamW's moments; or an fp32 master copy, gradient and moments of all weights."""
    num: float
    experts: float
    if training.mode == "lora":
        num = num_factors(cfg, training.rank, training.targets)
        of_experts = tuple(target for target in training.targets if target in EXPERT_MATRICES)
        experts = num_factors(cfg, training.rank, of_experts)
    else:
        num = num_parameters(cfg) / mesh.tp
        experts = part_sizes(cfg)[ROUTED].parameters / mesh.tp
    held = num / mesh.num_shards * WIDE
    factors, master = (held, 0.0) if training.mode == "lora" else (0.0, held)
    return Trained(factors, master, held, 2 * held, held, experts / mesh.ep * WIDE, (num - experts) * WIDE)


@lru_cache(maxsize=64)
def num_factors(cfg: K3Config, rank: int, targets: tuple[str, ...]) -> int:
    """Elements of all LoRA factors. Raises ValueError for a target that names no matrix of the model."""
    found = dict.fromkeys(targets, 0)
    for module, shape, count in _linears(cfg):
        if module in found:
            found[module] += rank * sum(shape) * count
    unused = [target for target, num in found.items() if num == 0]
    if unused:
        known = sorted({module for module, _, _ in _linears(cfg)})
        near = difflib.get_close_matches(unused[0], known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"targets {', '.join(unused)}: no matrix of this model{hint}; it has {', '.join(known)}")
    return sum(found.values())


def present_targets(cfg: K3Config, targets: tuple[str, ...]) -> tuple[str, ...]:
    """Of these, the ones that the model has: K3 and Kimi-Linear share a list of defaults, not all of its names."""
    known = {module for module, _, _ in _linears(cfg)}
    return tuple(target for target in targets if target in known)


@lru_cache(maxsize=16)
def _linears(cfg: K3Config) -> tuple[tuple[str, tuple[int, ...], int], ...]:
    """(module's name, shape, how many) of every matrix that LoRA can be put on."""
    one = replace(cfg, expert_quantization=None, num_experts=1, num_experts_per_token=1)
    out = []
    for name, shape in expected_shapes(one).items():
        module = name.removesuffix(".weight").rsplit(".", 1)[-1]
        is_linear = module in ("lm_head", "kv_a_proj_with_mqa") or module.endswith("_proj")
        if module in EXPERT_MATRICES:
            out.append((module, shape, cfg.num_experts))
        elif is_linear and not module.endswith("_res_proj"):
            out.append((module, shape, 1))
    return tuple(out)


def rollout_bytes(cfg: K3Config, mesh: Mesh, training: Training) -> tuple[float, float]:
    """(MLA cache, KDA states and windows) of one GPU's sequences at full length; of these tp splits the KDA heads."""
    sequences = -(-training.rollout_sequences // (mesh.dp * mesh.num_shards))
    state = (kda_state_bytes(cfg) + conv_window_bytes(cfg)) / mesh.tp
    return float(sequences * training.context * mla_cache_bytes(cfg)), sequences * state
