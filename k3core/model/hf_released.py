"""The config.json of the released checkpoints, and documents like them for models of other sizes."""

from __future__ import annotations

from typing import Any

from k3core.model.config import MXFP4, K3Config
from k3core.model.hf_quantization import mxfp4_block

CONTROL_SLOTS = 256  # the last ids of the vocabulary
BOS, EOS, MEDIA, PAD = 0, 2, 21, 255  # of these slots

VOCAB = 163840
CONTEXT = 1048576  # tokens


def kimi_k3() -> dict[str, Any]:
    """Kimi K3, 2.8T. The vision tower's part is left out: nothing here reads or writes it."""
    full = [*range(4, 93, 4), 93]
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "vocab_size": VOCAB,
            "hidden_size": 7168,
            "intermediate_size": 33792,
            "num_hidden_layers": 93,
            "num_attention_heads": 96,
            "num_key_value_heads": 96,
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "rms_norm_eps": 1e-5,
            "initializer_range": 0.02,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "linear_attn_config": {
                "full_attn_layers": full,
                "kda_layers": [layer for layer in range(1, 94) if layer not in full],
                "num_heads": 96,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "use_full_rank_gate": True,
                "gate_lower_bound": -5.0,
            },
            "attn_res_block_size": 12,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "num_experts": 896,
            "num_experts_per_token": 16,
            "num_shared_experts": 2,
            "moe_intermediate_size": 3072,
            "routed_expert_hidden_size": 3584,
            "latent_moe_use_norm": True,
            "moe_router_activation_func": "sigmoid",
            "topk_method": "noaux_tc",
            "use_grouped_topk": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "moe_renormalize": True,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 0,
            "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": False,
            "quantization_config": mxfp4_block(),
            "dtype": "bfloat16",
            **_token_ids(VOCAB),
            "use_cache": True,
        },
        "media_placeholder_token_id": VOCAB - CONTROL_SLOTS + MEDIA,
        **_token_ids(VOCAB),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def kimi_linear() -> dict[str, Any]:
    """Kimi-Linear-48B-A3B, Base and Instruct."""
    full = [4, 8, 12, 16, 20, 24, 27]
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "bos_token_id": VOCAB - CONTROL_SLOTS + BOS,
        "dtype": "bfloat16",
        "eos_token_id": VOCAB - CONTROL_SLOTS + EOS,
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "hidden_act": "silu",
        "hidden_size": 2304,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": full,
            "head_dim": 128,
            "kda_layers": [layer for layer in range(1, 28) if layer not in full],
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": CONTEXT,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 1024,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32,
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_hidden_layers": 27,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "pad_token_id": VOCAB - CONTROL_SLOTS + PAD,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": VOCAB,
    }


def document_for(cfg: K3Config) -> dict[str, Any]:
    """The family's released document, with what no K3Config knows made to fit: ids within the vocabulary, head_dim."""
    is_k3 = cfg.family == "kimi_k3"
    document = kimi_k3() if is_k3 else kimi_linear()
    for part in (document, document["text_config"]) if is_k3 else (document,):
        part.update(_token_ids(cfg.vocab_size))
    if is_k3:
        document["media_placeholder_token_id"] = _slot(cfg.vocab_size, MEDIA)
        if cfg.expert_quantization != MXFP4:
            del document["text_config"]["quantization_config"]
    else:
        document["head_dim"] = cfg.hidden_size // cfg.num_attention_heads
    return document


def _token_ids(vocab_size: int) -> dict[str, int]:
    slots = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return {key: _slot(vocab_size, slot) for key, slot in slots.items()}


def _slot(vocab_size: int, slot: int) -> int:
    """A control token's id; in a vocabulary with no room for all slots, still an id of it."""
    return min(max(vocab_size - CONTROL_SLOTS, 0) + slot, vocab_size - 1)
