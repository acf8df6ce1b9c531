"""LatentMoE: router at full width, experts in a latent space, shared experts beside them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from k3core.model.config import MXFP4, K3Config
from k3core.model.layers import MLP, Linear, RMSNorm, product, situ_betas
from k3kernels.dispatch import is_batch_invariant, uses_invariant_product, uses_kernel
from k3kernels.linear import linear
from k3kernels.linear.low_rank import wide_output
from k3kernels.moe import LoraPair, Matrices, PackedMatrices, moe_experts, route
from k3kernels.mxfp4 import GROUP, packed_shapes


class Router(nn.Module):
    """Scores at full width in fp32. The correction bias takes part in the choice only, and has no gradient."""

    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(cfg.num_experts, cfg.hidden_size))
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(cfg.num_experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor) -> Tensor:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        if x_TD.dtype == self.weight.dtype == torch.bfloat16 and uses_kernel(x_TD) and not is_batch_invariant():
            return wide_output(x_TD, self.weight)
        if x_TD.dtype == self.weight.dtype and uses_invariant_product(x_TD):
            return linear(x_TD, self.weight, wide)  # the same sums of the same products
        return product(x_TD.to(wide), self.weight.to(wide))


class Experts(nn.Module):
    """All experts of a layer, stacked; the checkpoint names them one by one (k3core.model.weights).

    Matrices are w1 and w3 [E, width, hidden] and w2 [E, hidden, width]: parameters, or with quantization "mxfp4" two
    uint8 buffers each, `w1_packed` [E, width, hidden/2] and `w1_scale` [E, width, hidden/32], which are not trained.
    Raises ValueError for another quantization, and for widths that do not divide into its groups.
    """

    def __init__(self, num_experts: int, hidden: int, width: int, quantization: str | None = None) -> None:
        super().__init__()
        self._shapes = {
            "w1": (num_experts, width, hidden),
            "w2": (num_experts, hidden, width),
            "w3": (num_experts, width, hidden),
        }
        if quantization not in (None, MXFP4):
            raise ValueError(f"model.expert_quantization: must be {MXFP4!r} or none, got {quantization!r}")
        if quantization is not None and (hidden % GROUP or width % GROUP):
            raise ValueError(
                f"model.expert_quantization {quantization}: experts of {width} x {hidden} do not divide into groups of "
                f"{GROUP} along both widths (moe_intermediate_size; routed_expert_hidden_size or hidden_size)"
            )
        self.is_packed = quantization is not None
        for name, shape in self._shapes.items():
            if self.is_packed:
                codes_shape, scale_shape = packed_shapes(shape)
                self.register_buffer(f"{name}_packed", torch.empty(codes_shape, dtype=torch.uint8))
                self.register_buffer(f"{name}_scale", torch.empty(scale_shape, dtype=torch.uint8))
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self._lora_scales = dict.fromkeys(self._shapes, 0.0)
        for name in self._shapes:
            self.register_parameter(f"{name}_lora_A", None)
            self.register_parameter(f"{name}_lora_B", None)

    def shape(self, name: str) -> tuple[int, int, int]:
        """(E, out, in) of the matrix `name` (w1, w2 or w3)."""
        return self._shapes[name]

    def matrices(self, name: str, dtype: torch.dtype) -> Matrices:
        """The matrix `name` of every expert, as `moe_experts` takes it; packed ones give type `dtype`."""
        if self.is_packed:
            return PackedMatrices(self.get_buffer(f"{name}_packed"), self.get_buffer(f"{name}_scale"), dtype)
        return self.get_parameter(name)

    def expert(self, name: str, e: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """One expert's matrix [out, in] without LoRA: a packed one unpacked to dtype, which is exact, else a view."""
        return self.matrices(name, dtype)[e]

    def attach_lora(self, name: str, rank: int, alpha: float, generator: torch.Generator) -> None:
        """One pair (A [E, r, in], B [E, out, r]) for every expert's matrix `name` (w1, w2 or w3).

        Factors are fp32, or fp64 where the weights are: an update of 1e-5 would vanish in a bf16 factor.
        """
        E, out_features, in_features = self.shape(name)
        stored = self.get_buffer(f"{name}_packed") if self.is_packed else self.get_parameter(name)
        wide = torch.promote_types(stored.dtype, torch.float32)
        bound = in_features**-0.5
        A = torch.empty(E, rank, in_features).uniform_(-bound, bound, generator=generator)
        setattr(self, f"{name}_lora_A", nn.Parameter(A.to(stored.device, wide)))
        B = torch.zeros(E, out_features, rank, dtype=wide, device=stored.device)
        setattr(self, f"{name}_lora_B", nn.Parameter(B))
        self._lora_scales[name] = alpha / rank

    def branch(self, name: str) -> tuple[Tensor | None, Tensor | None, float]:
        return getattr(self, f"{name}_lora_A"), getattr(self, f"{name}_lora_B"), self._lora_scales[name]

    def set_branch(self, name: str, A: Tensor | None, B: Tensor | None, scale: float) -> None:
        setattr(self, f"{name}_lora_A", A)
        setattr(self, f"{name}_lora_B", B)
        self._lora_scales[name] = scale

    def lora(self, name: str) -> LoraPair | None:
        A, B = getattr(self, f"{name}_lora_A"), getattr(self, f"{name}_lora_B")
        return None if A is None or B is None else LoraPair(A, B, self._lora_scales[name])


class LatentMoE(nn.Module):
    def __init__(self, cfg: K3Config) -> None:
        super().__init__()
        self.cfg = cfg
        width = cfg.routed_expert_hidden_size or cfg.hidden_size
        self.gate = Router(cfg)
        self.experts = Experts(cfg.num_experts, width, cfg.moe_intermediate_size, cfg.expert_quantization)
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
        experts = self.experts
        w1, w3, w2 = (experts.matrices(name, z_TR.dtype) for name in ("w1", "w3", "w2"))
        lora = (experts.lora("w1"), experts.lora("w3"), experts.lora("w2"))
        r_TR = moe_experts(z_TR, experts_Tk, weights_Tk, w1, w3, w2, situ_betas(cfg), lora)
        if self.is_latent:
            # The norm sees the sum over experts, never one expert alone.
            r_TR = self.routed_expert_norm(r_TR) if cfg.latent_moe_use_norm else r_TR
            r_TR = self.routed_expert_up_proj(r_TR)
        if cfg.num_shared_experts:
            r_TR = r_TR + self.shared_experts(x_TD)
        return r_TR, experts_Tk
