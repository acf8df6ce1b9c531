"""Small models in both forms, with every weight random: at their initial values many parameters change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from k3core.model.config import K3Config
from k3core.model.model import K3Model

RandomModel = Callable[[K3Config], K3Model]

WRITERS = ("o_proj.weight", "down_proj.weight", "experts.w2", "routed_expert_up_proj.weight")


@pytest.fixture
def k3() -> K3Config:
    """Five layers in blocks of two, the last block short; no two widths agree."""
    return K3Config(
        vocab_size=61,
        hidden_size=20,
        num_hidden_layers=5,
        num_attention_heads=2,
        full_attn_layers=(3, 5),
        q_lora_rank=14,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        kda_num_heads=3,
        kda_head_dim=8,
        intermediate_size=28,
        num_experts=6,
        num_experts_per_token=2,
        num_shared_experts=2,
        moe_intermediate_size=9,
        routed_expert_hidden_size=12,
    )


@pytest.fixture
def kimi_linear(k3: K3Config) -> K3Config:
    return replace(
        k3,
        q_lora_rank=None,
        mla_use_output_gate=False,
        use_full_rank_gate=False,
        gate_lower_bound=None,
        num_shared_experts=1,
        routed_expert_hidden_size=None,
        routed_scaling_factor=2.446,
        hidden_act="silu",
        attn_res_block_size=None,
    )


@pytest.fixture(params=["k3", "kimi_linear"])
def cfg(request: pytest.FixtureRequest) -> K3Config:
    """Each form of the model in turn."""
    cfg: K3Config = request.getfixturevalue(request.param)
    return cfg


@pytest.fixture
def random_model() -> RandomModel:
    """Well scaled, as a trained model is: sublayers add little and reads are soft, so rounding is hardly amplified."""

    @torch.no_grad()
    def make(cfg: K3Config) -> K3Model:
        model, generator = K3Model(cfg), torch.Generator().manual_seed(0)
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                p.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("dt_bias"):
                p.normal_(-4.0, 1.0, generator=generator)
            elif p.ndim == 1:  # A_log, e_score_correction_bias
                p.normal_(0.0, 0.2, generator=generator)
            elif name.endswith("res_proj.weight"):
                p.normal_(0.0, 0.1, generator=generator)
            elif name.endswith(WRITERS):
                p.normal_(0.0, 0.3 * p.shape[-1] ** -0.5, generator=generator)
            else:
                p.normal_(0.0, 1.0 if "embed" in name else p.shape[-1] ** -0.5, generator=generator)
        return model

    return make
