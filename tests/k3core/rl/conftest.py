"""A tiny K3 with every kind of layer, and trajectories for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from k3core.model.config import K3Config
from k3core.types import SamplingParams, Trajectory

MakeTrajectory = Callable[..., Trajectory]


@pytest.fixture
def cfg() -> K3Config:
    """KDA with an MLP, KDA with experts, MLA with experts."""
    return K3Config(
        vocab_size=61,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        full_attn_layers=(3,),
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=6,
        kda_num_heads=2,
        kda_head_dim=8,
        intermediate_size=24,
        num_experts=4,
        moe_intermediate_size=8,
        routed_expert_hidden_size=12,
    )


@pytest.fixture
def make_trajectory(cfg: K3Config) -> MakeTrajectory:
    """Two turns, as an episode has them: 3 tokens of context, `turn` sampled, 2 of context, `turn` sampled."""

    def make(seed: int, turn: int = 4, sampling: SamplingParams | None = None) -> Trajectory:
        rng = np.random.default_rng(seed)
        mask_T = np.array([False] * 3 + [True] * turn + [False] * 2 + [True] * turn)
        T, L, k = len(mask_T), len(cfg.moe_layers), cfg.num_experts_per_token
        routes_TLk = np.argsort(rng.random((T, L, cfg.num_experts)), -1)[..., :k].astype(np.uint8)
        routes_TLk[-1] = 255
        return Trajectory(
            prompt_id=f"prompt-{seed}",
            sample=seed,
            seed=seed,
            tokens_T=rng.integers(cfg.vocab_size, size=T, dtype=np.int32),
            loss_mask_T=mask_T,
            rollout_logprobs_T=np.where(mask_T, rng.uniform(-6, -2, T), 0).astype(np.float32),
            routed_experts_TLk=routes_TLk,
            policy_step_T=np.where(mask_T, 0, -1).astype(np.int32),
            routed_layers=cfg.routed_layers,
            sampling=sampling or SamplingParams(),
            stop_reason="finished",
            num_turns=2,
            num_tool_calls=0,
        )

    return make
