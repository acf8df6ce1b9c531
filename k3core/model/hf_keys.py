"""The keys of a released config.json: which of them say what the architecture is, and which only one value can be honoured of."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from k3core.model.config import K3Config

LINEAR = "linear_attn_config"
FULL_LAYERS, KDA_LAYERS = f"{LINEAR}.full_attn_layers", f"{LINEAR}.kda_layers"
LAYERS = "num_hidden_layers"
QUANTIZATION = "quantization_config"
TIED = "tie_word_embeddings"

Kind = Literal["count", "number", "flag", "text"]
When = Literal["always", "in K3", "with situ", "with latent experts", "if not the default"]


@dataclass(frozen=True, slots=True)
class Key:
    """A key (dotted, inside the text part) that holds K3Config's `field`.

    when: where a document must have it. Elsewhere its absence means `absent`, as in the files of Kimi-Linear, which knows
    none of K3's parts. nullable: null is a value, "without this part".
    """

    field: str
    kind: Kind
    path: str = ""
    when: When = "always"
    nullable: bool = False
    absent: object = None

    @property
    def place(self) -> str:
        return self.path or self.field


KEYS = (
    Key("vocab_size", "count"),
    Key("hidden_size", "count"),
    Key(LAYERS, "count"),
    Key("num_attention_heads", "count"),
    Key("q_lora_rank", "count", nullable=True),
    Key("kv_lora_rank", "count"),
    Key("qk_nope_head_dim", "count"),
    Key("qk_rope_head_dim", "count"),
    Key("v_head_dim", "count"),
    Key("mla_use_output_gate", "flag", when="in K3", absent=False),
    Key("kda_num_heads", "count", f"{LINEAR}.num_heads"),
    Key("kda_head_dim", "count", f"{LINEAR}.head_dim"),
    Key("short_conv_kernel_size", "count", f"{LINEAR}.short_conv_kernel_size"),
    Key("use_full_rank_gate", "flag", f"{LINEAR}.use_full_rank_gate", when="in K3", absent=False),
    Key("gate_lower_bound", "number", f"{LINEAR}.gate_lower_bound", when="in K3", nullable=True),
    Key("intermediate_size", "count"),
    Key("first_k_dense_replace", "count"),
    Key("moe_layer_freq", "count"),
    Key("num_experts", "count"),
    Key("num_experts_per_token", "count"),
    Key("num_shared_experts", "count"),
    Key("moe_intermediate_size", "count"),
    Key("routed_expert_hidden_size", "count", when="in K3", nullable=True),
    Key("latent_moe_use_norm", "flag", when="with latent experts", absent=False),
    Key("moe_renormalize", "flag"),
    Key("routed_scaling_factor", "number"),
    Key("hidden_act", "text"),
    Key("activation_situ_beta", "number", when="with situ", absent=K3Config().activation_situ_beta),
    Key("activation_situ_linear_beta", "number", when="with situ", nullable=True),
    Key("attn_res_block_size", "count", when="in K3", nullable=True),
    Key("rms_norm_eps", "number"),
    # The released files have no key for it: the reference takes the class's own default.
    Key("latent_norm_eps", "number", when="if not the default", absent=K3Config().latent_norm_eps),
)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A key of which only some values can be honoured; why_not says of the others what they would need."""

    key: str
    allowed: tuple[object, ...]
    why_not: str
    required: bool = False

    def refuses(self, value: object) -> bool:
        # 0 is 0.0, but true is not 1.
        return not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.allowed)


FIXED = (
    Fixed("mla_use_nope", (True,), "rotary positions are not implemented", required=True),
    Fixed("moe_router_activation_func", ("sigmoid",), "the router has no other score", required=True),
    Fixed("topk_method", ("noaux_tc", None), "the router has no other choice of experts"),
    Fixed("num_expert_group", (1, None), "experts are not chosen by group"),
    Fixed("n_group", (1, None), "experts are not chosen by group"),
    Fixed("topk_group", (1, None), "experts are not chosen by group"),
    Fixed("num_nextn_predict_layers", (0, None), "layers that predict further tokens cannot be loaded"),
    Fixed(TIED, (False, None), "the head has a matrix of its own"),
    Fixed("attention_bias", (False, None), "no projection has a bias"),
    Fixed("attention_dropout", (0, None), "there is no dropout"),
    Fixed("rope_scaling", (None,), "there are no rotary positions to scale"),
)


def _layer_types(cfg: K3Config) -> list[str]:
    return ["linear_attention" if cfg.is_kda(i) else "full_attention" for i in range(cfg.num_hidden_layers)]


def _mlp_layer_types(cfg: K3Config) -> list[str]:
    return ["sparse" if cfg.is_moe(i) else "dense" for i in range(cfg.num_hidden_layers)]


# What other programs write beside the keys above: it says the same again, and must not say another thing.
REPEATED: dict[str, Callable[[K3Config], object]] = {
    "num_key_value_heads": lambda cfg: cfg.num_attention_heads,
    "num_experts_per_tok": lambda cfg: cfg.num_experts_per_token,
    "n_shared_experts": lambda cfg: cfg.num_shared_experts,
    "num_local_experts": lambda cfg: cfg.num_experts,
    "n_routed_experts": lambda cfg: cfg.num_experts,
    "norm_topk_prob": lambda cfg: cfg.moe_renormalize,
    "qk_head_dim": lambda cfg: cfg.qk_nope_head_dim + cfg.qk_rope_head_dim,
    "linear_head_dim": lambda cfg: cfg.kda_head_dim,
    "linear_num_heads": lambda cfg: cfg.kda_num_heads,
    "linear_conv_kernel_dim": lambda cfg: cfg.short_conv_kernel_size,
    "layer_types": _layer_types,
    "mlp_layer_types": _mlp_layer_types,
}

# Carried along without being read: they do not touch the text model's function.
CARRIED = frozenset(
    {
        *("architectures", "model_type", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
        *("media_placeholder_token_id", "ignore_index", "vision_config", "text_config"),
        *("head_dim", "initializer_range", "model_max_length", "max_position_embeddings"),
        *("rope_theta", "rope_parameters", "use_grouped_topk", "ep_size", "pretraining_tp"),
        *("use_cache", "output_router_logits", "output_attentions", "output_hidden_states", "return_dict"),
        *("aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "id2label", "label2id", "problem_type"),
        *("chunk_size_feed_forward", "is_encoder_decoder", "generation_config"),
    }
)

MISSING = object()


def find(text: Mapping[str, Any], path: str) -> Any:
    """What a dotted path holds, or MISSING."""
    value: Any = text
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def put(text: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    for part in parents:
        text = text.setdefault(part, {})
    text[last] = value


def fault(key: Key, value: object) -> str | None:
    """Why the value is not of the key's kind; None when it is."""
    if value is None:
        return None if key.nullable else "must not be null"
    if key.kind == "count":
        return None if type(value) is int else f"expected a whole number, got {show(value)}"
    if key.kind == "number":
        is_number = type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
        return None if is_number else f"expected a number, got {show(value)}"
    if key.kind == "flag":
        return None if isinstance(value, bool) else f"expected true or false, got {show(value)}"
    return None if isinstance(value, str) else f"expected text, got {show(value)}"


def show(value: object) -> str:
    """One short line of JSON."""
    if isinstance(value, Mapping):
        return "an object"
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
