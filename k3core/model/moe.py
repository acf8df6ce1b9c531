"""LatentMoE: router at full width, experts in a latent space, shared experts beside them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3core.model.config import K3Config
from k3core.model.layers import MLP, Linear, RMSNorm
from k3kernels.moe import moe_experts, route


class Router(nn.Module):
    """Scores at full width in fp32. The correction bias takes part in the choice only, and has no gradient."""

    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(cfg.num_experts, cfg.hidden_size))
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(cfg.num_experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor) -> Tensor:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        return F.linear(x_TD.to(wide), self.weight.to(wide))


class Experts(nn.Module):
    """All experts of a layer, stacked; the checkpoint names them one by one (k3core.model.weights)."""

    def __init__(self, num_experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.w3 = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.lora_scale = 0.0
        for name in ("w1", "w2", "w3"):
            self.register_parameter(f"{name}_lora_A", None)
            self.register_parameter(f"{name}_lora_B", None)

    def attach_lora(self, name: str, rank: int, alpha: float, generator: torch.Generator) -> None:
        """One pair (A [E, r, in], B [E, out, r]) for every expert's matrix `name` (w1, w2 or w3)."""
        E, out_features, in_features = getattr(self, name).shape
        bound = in_features**-0.5
        A = torch.empty(E, rank, in_features).uniform_(-bound, bound, generator=generator)
        setattr(self, f"{name}_lora_A", nn.Parameter(A.to(self.w1)))
        setattr(self, f"{name}_lora_B", nn.Parameter(self.w1.new_zeros(E, out_features, rank)))
        self.lora_scale = alpha / rank

    def effective(self, name: str) -> Tensor:
        """The stacked matrix `name`, with its LoRA product added when there is one."""
        weight, A, B = (getattr(self, key) for key in (name, f"{name}_lora_A", f"{name}_lora_B"))
        merged: Tensor = weight if A is None else weight + self.lora_scale * (B @ A)
        return merged


class LatentMoE(nn.Module):
    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        self.cfg = cfg
        width = cfg.routed_expert_hidden_size or cfg.hidden_size
        self.gate = Router(cfg)
        self.experts = Experts(cfg.num_experts, width, cfg.moe_intermediate_size)
        self.is_latent = cfg.routed_expert_hidden_size is not None
        if self.is_latent:
            self.routed_expert_down_proj = Linear(cfg.hidden_size, width)
            if cfg.latent_moe_use_norm:
                self.routed_expert_norm = RMSNorm(width, cfg.rms_norm_eps)
            self.routed_expert_up_proj = Linear(width, cfg.hidden_size)
        if cfg.num_shared_experts:
            self.shared_experts = MLP(cfg, cfg.num_shared_experts * cfg.moe_intermediate_size)

    def forward(self, x_TD: Tensor, replay_Tk: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the output and the experts that were used, [T, k]."""
        cfg = self.cfg
        experts_Tk, weights_Tk = route(
            self.gate(x_TD),
            self.gate.e_score_correction_bias,
            cfg.num_experts_per_token,
            cfg.moe_renormalize,
            cfg.routed_scaling_factor,
            replay_Tk,
        )
        z_TR = self.routed_expert_down_proj(x_TD) if self.is_latent else x_TD
        w1, w3, w2 = (self.experts.effective(name) for name in ("w1", "w3", "w2"))
        situ = (cfg.activation_situ_beta, cfg.activation_situ_linear_beta) if cfg.hidden_act == "situ" else None
        r_TR = moe_experts(z_TR, experts_Tk, weights_Tk, w1, w3, w2, situ)
        if self.is_latent:
            # The norm sees the sum over experts, never one expert alone.
            r_TR = self.routed_expert_norm(r_TR) if cfg.latent_moe_use_norm else r_TR
            r_TR = self.routed_expert_up_proj(r_TR)
        if cfg.num_shared_experts:
            r_TR = r_TR + self.shared_experts(x_TD)
        return r_TR, experts_Tk
