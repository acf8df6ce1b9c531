"""The architecture as data. Field names are those of the released config.json (k3 and kimi_linear)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar

T = TypeVar("T")

Family = Literal["kimi_k3", "kimi_linear"]

ACTIVATIONS = ("situ", "silu")
MXFP4 = "mxfp4"
MXFP4_GROUP = 32  # values that share one scale, along a matrix's input axis


def _about(default: T, text: str) -> T:
    """A field with its explanation, which forms and command lines show."""
    value: T = field(default=default, metadata={"description": text})
    return value


@dataclass(frozen=True, slots=True)
class K3Config:
    """A hybrid KDA + gated MLA + AttnRes + LatentMoE decoder.

    full_attn_layers is 1-based, as in the released files; every other layer is KDA.
    gate_lower_bound None selects Kimi-Linear's softplus decay; attn_res_block_size None the ordinary residual;
    routed_expert_hidden_size None puts the experts at full width; q_lora_rank None a plain q_proj.
    expert_quantization "mxfp4" stores the routed experts packed: 4-bit codes and one scale byte for every 32 of them.
    """

    vocab_size: int = _about(512, "rows of the embedding and of the head")
    hidden_size: int = _about(96, "width of the residual stream")
    num_hidden_layers: int = _about(4, "decoder layers")
    num_attention_heads: int = _about(4, "heads of the MLA layers")
    full_attn_layers: tuple[int, ...] = _about((4,), "MLA layers, counted from 1; the others are KDA")
    # MLA
    q_lora_rank: int | None = _about(48, "low rank of the queries; none: a plain q_proj")
    kv_lora_rank: int = _about(48, "low rank of keys and values, which is what the cache holds")
    qk_nope_head_dim: int = _about(24, "of each head's queries and keys, the part of its own")
    qk_rope_head_dim: int = _about(12, "of queries and keys, the part whose key all heads share; it is not rotated")
    v_head_dim: int = _about(24, "values of one MLA head")
    mla_use_output_gate: bool = _about(True, "a sigmoid gate before the MLA layers' o_proj")
    # KDA
    kda_num_heads: int = _about(4, "heads of the KDA layers")
    kda_head_dim: int = _about(24, "keys and values of one KDA head")
    short_conv_kernel_size: int = _about(4, "taps of the convolution before q, k and v")
    use_full_rank_gate: bool = _about(True, "KDA's output gate as one matrix; false: as two of rank kda_head_dim")
    gate_lower_bound: float | None = _about(-5.0, "least log decay of a token; none: Kimi-Linear's softplus form")
    # MLP and MoE
    intermediate_size: int = _about(192, "width of the dense layers' MLP")
    first_k_dense_replace: int = _about(1, "dense layers before the first MoE layer")
    moe_layer_freq: int = _about(1, "of the layers after them, every so many-th is MoE")
    num_experts: int = _about(8, "routed experts of a MoE layer")
    num_experts_per_token: int = _about(2, "of these, chosen for one token")
    num_shared_experts: int = _about(1, "experts that every token passes, as one MLP")
    moe_intermediate_size: int = _about(48, "width of one expert")
    routed_expert_hidden_size: int | None = _about(48, "latent width of the routed experts; none: hidden_size")
    latent_moe_use_norm: bool = _about(True, "a norm on the experts' sum, before it leaves the latent width")
    moe_renormalize: bool = _about(True, "the chosen experts' weights sum to 1")
    routed_scaling_factor: float = _about(1.0, "of the chosen experts' weights")
    expert_quantization: str | None = _about(None, "mxfp4: routed experts are stored packed; none: as the rest")
    hidden_act: str = _about("situ", "gated activation of all MLPs: situ (K3) or silu (Kimi-Linear)")
    activation_situ_beta: float = _about(4.0, "bound of SiTU's gate")
    activation_situ_linear_beta: float | None = _about(25.0, "bound of SiTU's linear part; none: unbounded")
    # residual stream and norms
    attn_res_block_size: int | None = _about(2, "layers of one Attention Residuals block; none: ordinary residual")
    rms_norm_eps: float = _about(1e-5, "of every norm but q_a_layernorm and kv_a_layernorm")
    latent_norm_eps: float = _about(1e-6, "of q_a_layernorm and kv_a_layernorm (serving engines: 1e-5)")

    @property
    def family(self) -> Family:
        """Whose files can hold it: Kimi-Linear's know none of the parts that K3 adds, K3's can go without each."""
        of_k3 = (
            self.attn_res_block_size is not None,
            self.routed_expert_hidden_size is not None,
            self.gate_lower_bound is not None,
            self.use_full_rank_gate,
            self.mla_use_output_gate,
            self.hidden_act == "situ",
        )
        return "kimi_k3" if any(of_k3) else "kimi_linear"

    def is_kda(self, layer: int) -> bool:
        """layer is 0-based."""
        return layer + 1 not in self.full_attn_layers

    def is_moe(self, layer: int) -> bool:
        """layer is 0-based."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based."""
        return tuple(i for i in range(self.num_hidden_layers) if self.is_kda(i))

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """0-based."""
        return tuple(i for i in range(self.num_hidden_layers) if not self.is_kda(i))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based."""
        return tuple(i for i in range(self.num_hidden_layers) if self.is_moe(i))

    @property
    def routed_layers(self) -> tuple[str, ...]:
        """Names of the MoE layers, in the order of recorded routes."""
        return tuple(f"layers.{i}.block_sparse_moe" for i in self.moe_layers)
