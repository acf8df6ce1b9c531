"""Which values of an architecture can be honoured, whatever file they come from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import fields

from k3core.model.config import ACTIVATIONS, MXFP4, MXFP4_GROUP, K3Config

Problem = tuple[tuple[str, ...], str]  # the fields it is about, its line

_MAY_BE_ZERO = ("first_k_dense_replace", "num_shared_experts", "qk_rope_head_dim")


def model_problems(cfg: K3Config, name: Callable[[str], str]) -> Iterator[Problem]:
    """One line for each value, or pair of values, that no model can be made of. `name` is what a field is called there."""
    for entry in fields(cfg):
        value = getattr(cfg, entry.name)
        if isinstance(value, bool) or value is None or entry.name == "gate_lower_bound":
            continue
        least = 0 if entry.name in _MAY_BE_ZERO else 1
        if isinstance(value, int) and value < least:
            yield (entry.name,), f"{name(entry.name)}: must be >= {least}, got {value}"
        if isinstance(value, float) and not (value > 0 and math.isfinite(value)):
            yield (entry.name,), f"{name(entry.name)}: must be > 0, got {value:g}"
    if cfg.gate_lower_bound is not None and not -5.0 <= cfg.gate_lower_bound < 0:
        yield (
            ("gate_lower_bound",),
            f"{name('gate_lower_bound')}: must be in [-5, 0) or none, got {cfg.gate_lower_bound:g}",
        )
    if cfg.hidden_act not in ACTIVATIONS:
        yield (
            ("hidden_act",),
            f"{name('hidden_act')}: must be 'situ' or 'silu', got {json.dumps(cfg.hidden_act)}",
        )
    layers = cfg.full_attn_layers
    if list(layers) != sorted(set(layers)) or not all(1 <= layer <= cfg.num_hidden_layers for layer in layers):
        yield (
            ("full_attn_layers", "num_hidden_layers"),
            f"{name('full_attn_layers')} {list(layers)} and {name('num_hidden_layers')} {cfg.num_hidden_layers}: "
            "layers count from 1, ascending, each once",
        )
    if cfg.first_k_dense_replace > cfg.num_hidden_layers:
        yield (
            ("first_k_dense_replace", "num_hidden_layers"),
            f"{name('first_k_dense_replace')} {cfg.first_k_dense_replace} and {name('num_hidden_layers')} "
            f"{cfg.num_hidden_layers}: there are not so many layers",
        )
    if cfg.num_experts_per_token > cfg.num_experts:
        yield (
            ("num_experts_per_token", "num_experts"),
            f"{name('num_experts_per_token')} {cfg.num_experts_per_token} and {name('num_experts')} "
            f"{cfg.num_experts}: a token cannot choose more experts than there are",
        )
    yield from _quantization_problems(cfg, name)


def _quantization_problems(cfg: K3Config, name: Callable[[str], str]) -> Iterator[Problem]:
    if cfg.expert_quantization is None:
        return
    if cfg.expert_quantization != MXFP4:
        yield (
            ("expert_quantization",),
            f"{name('expert_quantization')}: must be '{MXFP4}' or none, got {json.dumps(cfg.expert_quantization)}",
        )
        return
    width = "hidden_size" if cfg.routed_expert_hidden_size is None else "routed_expert_hidden_size"
    for key in (width, "moe_intermediate_size"):
        if getattr(cfg, key) % MXFP4_GROUP:
            yield (
                (key, "expert_quantization"),
                f"{name(key)} {getattr(cfg, key)} and {name('expert_quantization')} {MXFP4}: packed experts come in "
                f"groups of {MXFP4_GROUP} along this width",
            )
