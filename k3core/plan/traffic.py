"""What one GPU sends to others in a forward and a backward pass and an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from k3core.model.config import K3Config
from k3core.plan.activations import A, Local, W
from k3core.plan.inputs import Machine, Mesh
from k3core.plan.states import Trained, Weights

# A layer runs forward, again to be recomputed, and backward; what it exchanges is exchanged each time.
PASSES = 3


@dataclass(frozen=True, slots=True)
class Flow:
    """num_bytes: sent by one GPU, as many received. seconds: at the link's speed, nothing hidden behind computation."""

    name: str
    axis: str
    link: str
    num_bytes: float
    seconds: float


def flows(cfg: K3Config, machine: Machine, mesh: Mesh, at: Local, held: Weights, moved: Trained) -> tuple[Flow, ...]:
    """Ring collectives: of n ranks each sends (n - 1) / n of the whole. Experts are taken to be chosen evenly."""
    sizes = _bytes(cfg, mesh, at, held, moved)
    return tuple(
        Flow(name, axis, _link(machine, ranks), num_bytes, num_bytes / _speed(machine, ranks))
        for name, axis, ranks, num_bytes in sizes
        if num_bytes > 0
    )


def _bytes(
    cfg: K3Config, mesh: Mesh, at: Local, held: Weights, moved: Trained
) -> Iterator[tuple[str, str, int, float]]:
    """(what, axis, number of GPUs that the ranks span, bytes)."""
    shards, replicas = mesh.num_shards, mesh.num_shards // mesh.ep  # of everything else, and of an ep rank's experts
    span = shards * mesh.tp
    rest = sum(held.rest) + held.others_bytes
    gathered = rest * _others(shards) + sum(held.rank_experts) * _others(replicas)
    yield "all-gather of weights", _axes(mesh), span, 2 * gathered
    gradients = moved.rest * _others(shards) + moved.rank_experts * _others(replicas)
    yield "reduce-scatter of gradients", _axes(mesh), span, gradients
    yield "all-reduce of gradients", "dp", mesh.num_gpus, 2 * moved.gradients * _others(mesh.dp)
    width = cfg.routed_expert_hidden_size or cfg.hidden_size
    rows = at.T * cfg.num_experts_per_token * len(cfg.moe_layers) * _others(mesh.ep)
    yield "dispatch of rows to experts", "ep", mesh.ep * mesh.tp, PASSES * rows * width * A
    yield "combine of the experts' rows", "ep", mesh.ep * mesh.tp, PASSES * rows * width * A
    if mesh.cp > 1:
        latent = at.T * (cfg.kv_lora_rank + cfg.qk_rope_head_dim) * A * len(cfg.mla_layers)
        yield "latent rows of the other parts", "cp", mesh.cp * mesh.tp, PASSES * latent * (mesh.cp - 1)
        state = at.N * at.kda_heads * cfg.kda_head_dim**2 * W * len(cfg.kda_layers)
        yield "KDA states, part to part", "cp", mesh.cp * mesh.tp, PASSES * state
    if mesh.tp > 1:
        stream = at.T * at.D * A * 2 * cfg.num_hidden_layers
        yield "all-reduce of sublayers' outputs", "tp", mesh.tp, PASSES * 2 * stream * _others(mesh.tp)


def _others(ranks: int) -> float:
    """The share of a whole that the other ranks have."""
    return (ranks - 1) / ranks


def _axes(mesh: Mesh) -> str:
    return "fsdp x cp" if mesh.cp > 1 else "fsdp"


def _link(machine: Machine, num_gpus: int) -> str:
    return "NVLink" if num_gpus <= machine.gpus_per_node else "network"


def _speed(machine: Machine, num_gpus: int) -> float:
    return machine.nvlink_bytes_per_s if num_gpus <= machine.gpus_per_node else machine.network_bytes_per_s
