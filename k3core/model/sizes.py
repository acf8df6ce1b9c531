"""How large a model is: parameters, bytes in a checkpoint, and what a sequence keeps. Computed from shapes alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TypeVar

import torch

from k3core.checkpoint.names import (
    PACKED,
    SCALE,
    expected_shapes,
    is_packed,
    written_dtype,
    written_shape,
)
from k3core.model.config import K3Config

K = TypeVar("K")

EMBEDDINGS, KDA, MLA = "embeddings", "KDA", "MLA"
DENSE, ROUTED, SHARED, ROUTER = "dense MLP", "routed experts", "shared experts", "router"
LATENT, ATTN_RES, NORMS = "latent projections", "AttnRes", "norms"
PARTS = (EMBEDDINGS, KDA, MLA, DENSE, ROUTED, SHARED, ROUTER, LATENT, ATTN_RES, NORMS)

CODES, SCALES = "mxfp4 codes", "mxfp4 scales"
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_NAME = re.compile(r"^(?:layers\.(\d+)\.)?(.+)$")
_FIRST_EXPERT = ".experts.0."


@dataclass(frozen=True, slots=True)
class TensorSize:
    """One tensor of a checkpoint, or with count > 1 one of so many equal ones: an expert's matrix.

    layer is 0-based, None outside the layers. parameters and stored_bytes are of one; scales are no parameters.
    """

    name: str
    part: str
    layer: int | None
    stored_as: str
    parameters: int
    stored_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class PartSize:
    """active: of the parameters, those that work on one token."""

    parameters: int
    active: int
    stored_bytes: int


@lru_cache(maxsize=16)
def tensor_sizes(cfg: K3Config, dtype: torch.dtype = torch.bfloat16) -> tuple[TensorSize, ...]:
    """Of a checkpoint of type `dtype` in the family's own form; an expert's matrices once, for all experts."""
    layout = cfg.family
    sizes = []
    for name, shape in expected_shapes(cfg).items():
        is_expert = ".experts." in name
        if is_expert and _FIRST_EXPERT not in name:
            continue
        match = _NAME.match(name)
        assert match is not None
        stored = written_dtype(name, dtype)
        packed = CODES if name.endswith(PACKED) else SCALES
        sizes.append(
            TensorSize(
                name,
                _part(cfg, match[1], match[2]),
                None if match[1] is None else int(match[1]),
                packed if is_packed(name) else _DTYPES[stored],
                0 if name.endswith(SCALE) else prod(shape) * (2 if name.endswith(PACKED) else 1),
                prod(written_shape(name, shape, layout)) * stored.itemsize,
                cfg.num_experts if is_expert else 1,
            )
        )
    return tuple(sizes)


def part_sizes(cfg: K3Config) -> dict[str, PartSize]:
    """By part, in the order of PARTS; parts that the model lacks are left out.

    A token's active parameters are all but those of the experts that it does not choose; embedding and head count whole.
    """
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for size in tensor_sizes(cfg):
        chosen = cfg.num_experts_per_token if size.part == ROUTED else size.count
        counts = size.parameters * size.count, size.parameters * chosen, size.stored_bytes * size.count
        found[size.part] = [a + b for a, b in zip(found[size.part], counts, strict=True)]
    return {part: PartSize(*found[part]) for part in PARTS if part in found}


def num_parameters(cfg: K3Config) -> int:
    return sum(size.parameters * size.count for size in tensor_sizes(cfg))


def num_active_parameters(cfg: K3Config) -> int:
    """That work on one token: see part_sizes."""
    return sum(part.active for part in part_sizes(cfg).values())


def stored_bytes(cfg: K3Config, dtype: torch.dtype = torch.bfloat16) -> dict[str, int]:
    """Bytes in a checkpoint by how they are stored: bf16, fp32, mxfp4 codes, mxfp4 scales."""
    return _sums(tensor_sizes(cfg, dtype), lambda size: size.stored_as)


def num_tensors(cfg: K3Config) -> int:
    """In a checkpoint."""
    return sum(size.count for size in tensor_sizes(cfg))


def bank_rows(cfg: K3Config) -> int:
    """Rows of width hidden_size that Attention Residuals keep of a token, at the last layer."""
    block = cfg.attn_res_block_size
    return 0 if block is None else -(-cfg.num_hidden_layers // block)


def mla_cache_bytes(cfg: K3Config, element_bytes: int = 2) -> int:
    """Of one token, all MLA layers together: the latent row and the shared key."""
    return len(cfg.mla_layers) * (cfg.kv_lora_rank + cfg.qk_rope_head_dim) * element_bytes


def kda_state_bytes(cfg: K3Config) -> int:
    """Of one sequence, all KDA layers together: the recurrent state, in fp32."""
    return len(cfg.kda_layers) * cfg.kda_num_heads * cfg.kda_head_dim**2 * 4


def conv_window_bytes(cfg: K3Config, element_bytes: int = 2) -> int:
    """Of one sequence, all KDA layers together: the last inputs of the convolutions of q, k and v."""
    width = 3 * cfg.kda_num_heads * cfg.kda_head_dim
    return len(cfg.kda_layers) * (cfg.short_conv_kernel_size - 1) * width * element_bytes


def _sums(sizes: Iterable[TensorSize], key: Callable[[TensorSize], K]) -> dict[K, int]:
    sums: dict[K, int] = defaultdict(int)
    for size in sizes:
        sums[key(size)] += size.stored_bytes * size.count
    return dict(sums)


def _part(cfg: K3Config, layer: str | None, name: str) -> str:
    """`name` without the layer's prefix."""
    if layer is None:
        if name.startswith(("embed_tokens", "lm_head")):
            return EMBEDDINGS
        return ATTN_RES if "attn_res" in name else NORMS
    if name.startswith("self_attn."):
        return KDA if cfg.is_kda(int(layer)) else MLA
    starts = {
        "mlp.": DENSE,
        "block_sparse_moe.experts.": ROUTED,
        "block_sparse_moe.shared_experts.": SHARED,
        "block_sparse_moe.gate.": ROUTER,
        "block_sparse_moe.routed_expert_norm.": NORMS,
        "block_sparse_moe.routed_expert_": LATENT,
        "self_attention_res_": ATTN_RES,
        "mlp_res_": ATTN_RES,
    }
    return next((part for start, part in starts.items() if name.startswith(start)), NORMS)
