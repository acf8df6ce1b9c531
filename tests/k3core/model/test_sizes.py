from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from k3core.checkpoint.names import expected_shapes
from k3core.model.config import K3Config
from k3core.model.model import K3Model, build_model
from k3core.model.presets import PRESETS
from k3core.model.sizes import (
    bank_rows,
    conv_window_bytes,
    kda_state_bytes,
    mla_cache_bytes,
    num_active_parameters,
    num_parameters,
    num_tensors,
    part_sizes,
    stored_bytes,
    tensor_sizes,
)
from k3core.model.state import SlotState
from k3core.model.weights import named_tensors

K3, LINEAR = PRESETS["kimi-k3"], PRESETS["kimi-linear-48b-a3b"]
PACKED = K3Config(
    routed_expert_hidden_size=64, moe_intermediate_size=32, num_shared_experts=2, expert_quantization="mxfp4"
)


def test_the_released_models_are_as_large_as_published() -> None:
    """2.8T parameters of which 104B work on a token, and 1.56 TB in 497,220 tensors, 168 of them the vision tower's."""
    assert num_parameters(K3) == 2_779_484_476_000
    assert num_active_parameters(K3) == 105_364_017_760
    assert sum(stored_bytes(K3).values()) == 1_559_965_606_912
    assert num_tensors(K3) == 497_220 - 168
    assert num_parameters(LINEAR) == 49_122_681_728
    assert num_active_parameters(LINEAR) == 3_484_459_904


@pytest.mark.parametrize(
    "cfg",
    [
        PRESETS["tiny"],
        LINEAR,
        replace(K3, expert_quantization=None),
        K3Config(q_lora_rank=None, use_full_rank_gate=False, attn_res_block_size=None, routed_expert_hidden_size=None),
        K3Config(num_shared_experts=0, latent_moe_use_norm=False, moe_layer_freq=2),
    ],
)
def test_the_count_is_that_of_the_model(cfg: K3Config) -> None:
    with torch.device("meta"):
        model = K3Model(cfg)
    assert num_parameters(cfg) == sum(tensor.numel() for tensor in model.state_dict().values())


@pytest.mark.parametrize("cfg", [PRESETS["tiny"], PACKED, replace(PACKED, attn_res_block_size=None)])
def test_the_bytes_are_those_of_the_models_tensors(cfg: K3Config) -> None:
    """In bf16; but for the zeros behind A_log that K3's files have."""
    tensors = named_tensors(build_model(cfg, torch.bfloat16, "meta"))
    padding = sum(4 * (128 - cfg.kda_num_heads) for name in tensors if name.endswith("A_log"))
    assert sum(stored_bytes(cfg).values()) == sum(t.numel() * t.itemsize for t in tensors.values()) + padding
    assert num_tensors(cfg) == len(tensors)


def test_scales_are_bytes_but_no_parameters() -> None:
    sizes = stored_bytes(PACKED)
    plain = replace(PACKED, expert_quantization=None)
    assert num_parameters(PACKED) == num_parameters(plain)
    routed = part_sizes(plain)["routed experts"]
    assert sizes["mxfp4 codes"] == routed.parameters // 2
    assert sizes["mxfp4 scales"] == routed.parameters // 32
    assert sizes["bf16"] + routed.stored_bytes == stored_bytes(plain)["bf16"]


def test_the_parts_add_up() -> None:
    for cfg in (*PRESETS.values(), PACKED):
        assert sum(part.parameters for part in part_sizes(cfg).values()) == num_parameters(cfg)
        assert sum(part.stored_bytes for part in part_sizes(cfg).values()) == sum(stored_bytes(cfg).values())
        assert num_tensors(cfg) == len(expected_shapes(cfg))


def test_a_token_works_with_the_experts_that_it_chose() -> None:
    experts = part_sizes(PRESETS["tiny"])["routed experts"]
    assert experts.active * 8 == experts.parameters * 2
    others = [part for name, part in part_sizes(PRESETS["tiny"]).items() if name != "routed experts"]
    assert all(part.active == part.parameters for part in others)


def test_every_tensor_has_its_part() -> None:
    """By the names that a reader would look for."""
    found = {size.name: size.part for size in tensor_sizes(K3)}
    for name, part in {
        "embed_tokens.weight": "embeddings",
        "lm_head.weight": "embeddings",
        "norm.weight": "norms",
        "output_attn_res_proj.weight": "AttnRes",
        "layers.0.mlp.up_proj.weight": "dense MLP",
        "layers.0.self_attn.g_proj.weight": "KDA",
        "layers.3.self_attn.g_proj.weight": "MLA",
        "layers.3.self_attn.q_a_layernorm.weight": "MLA",
        "layers.1.mlp_res_norm.weight": "AttnRes",
        "layers.1.self_attention_res_proj.weight": "AttnRes",
        "layers.1.input_layernorm.weight": "norms",
        "layers.1.block_sparse_moe.gate.e_score_correction_bias": "router",
        "layers.1.block_sparse_moe.routed_expert_norm.weight": "norms",
        "layers.1.block_sparse_moe.routed_expert_up_proj.weight": "latent projections",
        "layers.1.block_sparse_moe.shared_experts.down_proj.weight": "shared experts",
        "layers.1.block_sparse_moe.experts.0.w2.weight_scale": "routed experts",
    }.items():
        assert found[name] == part, name


@pytest.mark.parametrize("cfg", [PRESETS["tiny"], LINEAR])
def test_what_a_sequence_keeps_is_what_the_engine_allocates(cfg: K3Config) -> None:
    with torch.device("meta"):
        state = SlotState(cfg, num_slots=1, max_length=32, dtype=torch.bfloat16)
    assert 32 * mla_cache_bytes(cfg) == sum(t.numel() * t.itemsize for t in state.pages_PSC.values())
    assert kda_state_bytes(cfg) == sum(t.numel() * t.itemsize for t in state.kda_NHKV.values())
    assert conv_window_bytes(cfg) == sum(t.numel() * t.itemsize for t in state.window_NJP.values())


def test_the_bank_has_a_row_for_every_block_that_began() -> None:
    assert [bank_rows(cfg) for cfg in (K3, LINEAR, PRESETS["tiny"])] == [8, 0, 2]
