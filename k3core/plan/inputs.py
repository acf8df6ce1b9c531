"""What a plan is made for: the GPUs, how the work is split among them, and one training step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from k3core.model.config import MXFP4_GROUP, K3Config

GIB = 1 << 30
CONTEXT_BYTES = 0.6 * GIB  # of a CUDA context, outside the allocator's reach

# What LoRA of a run's default settings trains, where a model has it.
ATTENTION = (
    *("q_proj", "k_proj", "v_proj", "g_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """memory_bytes: of one GPU, what its allocator can use. Speeds are of one GPU, bytes per second in one direction."""

    name: str
    memory_bytes: float
    gpus_per_node: int = 8
    nvlink_bytes_per_s: float = 326e9
    network_bytes_per_s: float = 50e9


def _named(name: str, total_mib: int, nvlink: float) -> Machine:
    return Machine(name, total_mib * (1 << 20) - CONTEXT_BYTES, nvlink_bytes_per_s=nvlink)


# NVLink with both directions in use: on the H200 measured at 326 GB/s of its nominal 450; the same share of the others'.
MACHINES = {
    "h100": _named("h100", 81_559, 326e9),
    "h200": _named("h200", 143_771, 326e9),
    "b200": _named("b200", 183_359, 652e9),
}


@dataclass(frozen=True, slots=True)
class Mesh:
    """dp x fsdp x cp x tp GPUs. ep ranks are among those of fsdp x cp, which share the experts out between them.

    dp: replicas of everything. fsdp: weights, gradients and optimizer in shards, gathered a layer at a time. cp: each
    sequence's tokens. tp: heads, MLP widths and the vocabulary. ep: whole experts.
    """

    fsdp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    dp: int = 1

    @property
    def num_gpus(self) -> int:
        return self.dp * self.fsdp * self.cp * self.tp

    @property
    def num_shards(self) -> int:
        """Of what is not split by tp: cp ranks hold the same weights, so they take part in the sharding."""
        return self.fsdp * self.cp


@dataclass(frozen=True, slots=True)
class Training:
    """One optimizer step, or with rollout_sequences > 0 a trainer and an engine that share the GPUs in turn.

    lengths: of the sequences that one rank of dp x fsdp packs into a forward and backward pass.
    mode "lora": frozen weights, factors of rank `rank` on the modules `targets` (w1, w2, w3: of every routed expert).
    mode "full": bf16 weights with fp32 master copies and gradients, experts unpacked.
    trained_share: of the tokens, those with a loss. rollout_sequences: decoded at once, over all GPUs, up to the longest
    of `lengths`.
    """

    lengths: tuple[int, ...]
    mode: Literal["lora", "full"] = "lora"
    rank: int = 64
    targets: tuple[str, ...] = ATTENTION
    trained_share: float = 1.0
    rollout_sequences: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def context(self) -> int:
        return max(self.lengths)


def packed(context: int, batch_tokens: int | None = None) -> tuple[int, ...]:
    """Sequences of `context` tokens that make up batch_tokens; one, without it."""
    return (context,) * max(1, -(-(batch_tokens or context) // context))


def problems(cfg: K3Config, mesh: Mesh, training: Training) -> Iterator[str]:
    """One line for each reason why no plan can be made."""
    for axis in ("fsdp", "ep", "cp", "tp", "dp"):
        if getattr(mesh, axis) < 1:
            yield f"mesh {axis}={getattr(mesh, axis)}: must be at least 1"
    if min(mesh.fsdp, mesh.ep, mesh.cp, mesh.tp, mesh.dp) < 1:
        return
    if mesh.num_shards % mesh.ep:
        yield f"mesh ep={mesh.ep} and fsdp x cp = {mesh.num_shards}: ep must divide it, its ranks are among those"
    if cfg.num_experts % mesh.ep:
        yield f"mesh ep={mesh.ep} and num_experts {cfg.num_experts}: experts are shared out whole, so ep must divide them"
    divided = {
        "num_attention_heads": cfg.num_attention_heads,
        "linear_attn_config.num_heads": cfg.kda_num_heads,
        "intermediate_size": cfg.intermediate_size,
        "moe_intermediate_size": cfg.moe_intermediate_size,
        "vocab_size": cfg.vocab_size,
    }
    for name, size in divided.items():
        if size % mesh.tp:
            yield f"mesh tp={mesh.tp} and {name} {size}: tp must divide it"
    is_packed = cfg.expert_quantization is not None and training.mode == "lora"
    if is_packed and cfg.moe_intermediate_size % (mesh.tp * MXFP4_GROUP):
        yield (
            f"mesh tp={mesh.tp} and moe_intermediate_size {cfg.moe_intermediate_size}: packed experts come in groups of "
            f"{MXFP4_GROUP} along it"
        )
    if not training.lengths or min(training.lengths) < 1:
        yield f"lengths {list(training.lengths)}: at least one sequence of at least one token"
    elif any(length % mesh.cp for length in training.lengths):
        yield f"mesh cp={mesh.cp} and sequences of {sorted(set(training.lengths))} tokens: cp must divide them"
    if not 0 < training.trained_share <= 1:
        yield f"trained_share {training.trained_share:g}: must be > 0 and <= 1"
    if training.mode == "lora" and training.rank < 1:
        yield f"rank {training.rank}: must be at least 1"
    if training.rollout_sequences < 0:
        yield f"rollout_sequences {training.rollout_sequences}: must not be negative"
