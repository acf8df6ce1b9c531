"""The architecture as data. Field names are those of the released config.json (k3 and kimi_linear)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class K3Config:
    """A hybrid KDA + gated MLA + AttnRes + LatentMoE decoder.

    full_attn_layers is 1-based, as in the released files; every other layer is KDA.
    gate_lower_bound None selects Kimi-Linear's softplus decay; attn_res_block_size None the ordinary residual;
    routed_expert_hidden_size None puts the experts at full width; q_lora_rank None a plain q_proj.
    """

    vocab_size: int = 512
    hidden_size: int = 96
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    full_attn_layers: tuple[int, ...] = (4,)
    # MLA
    q_lora_rank: int | None = 48
    kv_lora_rank: int = 48
    qk_nope_head_dim: int = 24
    qk_rope_head_dim: int = 12
    v_head_dim: int = 24
    mla_use_output_gate: bool = True
    # KDA
    kda_num_heads: int = 4
    kda_head_dim: int = 24
    short_conv_kernel_size: int = 4
    use_full_rank_gate: bool = True
    gate_lower_bound: float | None = -5.0
    # MLP and MoE
    intermediate_size: int = 192
    first_k_dense_replace: int = 1
    num_experts: int = 8
    num_experts_per_token: int = 2
    num_shared_experts: int = 1
    moe_intermediate_size: int = 48
    routed_expert_hidden_size: int | None = 48
    latent_moe_use_norm: bool = True
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    hidden_act: str = "situ"
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float | None = 25.0
    # residual stream and norms
    attn_res_block_size: int | None = 2
    rms_norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-6

    def is_kda(self, layer: int) -> bool:
        """layer is 0-based."""
        return layer + 1 not in self.full_attn_layers

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_hidden_layers) if self.is_moe(i))

    @property
    def routed_layers(self) -> tuple[str, ...]:
        """Names of the MoE layers, in the order of recorded routes."""
        return tuple(f"layers.{i}.block_sparse_moe" for i in self.moe_layers)
