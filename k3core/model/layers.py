"""Linear (with an optional LoRA branch), RMSNorm and the gated MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3core.model.config import K3Config
from k3kernels.dispatch import is_batch_invariant, uses_invariant_product, uses_kernel
from k3kernels.linear import linear
from k3kernels.linear.low_rank import lora_linear
from k3kernels.rms_norm import rms_norm
from k3kernels.situ import gated_activation


class Linear(nn.Module):
    """y = x W^T (+ scale (x A^T) B^T once LoRA is attached; arXiv 2106.09685). No linear of K3 has a bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.lora_A: nn.Parameter | None
        self.lora_B: nn.Parameter | None
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)
        self.lora_scale = 0.0

    def attach_lora(self, rank: int, alpha: float, generator: torch.Generator) -> None:
        """A uniform in +-1/sqrt(in), B zero: the function does not change until B does.

        Factors are fp32, or fp64 where the weight is: an update of 1e-5 would vanish in a bf16 factor.
        """
        out_features, in_features = self.weight.shape
        bound = in_features**-0.5
        wide, device = torch.promote_types(self.weight.dtype, torch.float32), self.weight.device
        A = torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(A.to(device, wide))
        self.lora_B = nn.Parameter(torch.zeros(out_features, rank, dtype=wide, device=device))
        self.lora_scale = alpha / rank

    def set_branch(self, A: Tensor | None, B: Tensor | None, scale: float) -> None:
        """Parameters of this module or of another's branch, as they are."""
        setattr(self, "lora_A", A)  # noqa: B010
        setattr(self, "lora_B", B)  # noqa: B010
        self.lora_scale = scale

    def effective_weight(self) -> Tensor:
        """W + scale B A: for the places that fold a projection into another operation.

        With LoRA in at least fp32, whatever W is: rounded to bf16, a small update would be lost.
        """
        if self.lora_A is None or self.lora_B is None:
            return self.weight
        return self.weight + self.lora_scale * (self.lora_B @ self.lora_A)

    def forward(self, x: Tensor) -> Tensor:
        """The factors are multiplied in x's type, and their product is added in it."""
        if self.lora_A is not None and self.lora_B is not None and uses_kernel(x) and not is_batch_invariant():
            return lora_linear(x, self.weight, self.lora_A, self.lora_B, self.lora_scale)
        y = product(x, self.weight)
        if self.lora_A is not None and self.lora_B is not None:
            y = y + self.lora_scale * product(product(x, self.lora_A.to(x.dtype)), self.lora_B.to(x.dtype))
        return y


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T; on a GPU, where bits must not depend on the batch, by a kernel whose sums have one order."""
    return linear(x, weight) if uses_invariant_product(x) else F.linear(x, weight)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class MLP(nn.Module):
    """down(act(gate(x), up(x))): SiTU for K3, SiLU for Kimi-Linear."""

    def __init__(self, cfg: K3Config, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(cfg.hidden_size, width)
        self.up_proj = Linear(cfg.hidden_size, width)
        self.down_proj = Linear(width, cfg.hidden_size)
        self.cfg = cfg

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(gated_activation(self.gate_proj(x_TD), self.up_proj(x_TD), situ_betas(self.cfg)))


def situ_betas(cfg: K3Config) -> tuple[float, float | None] | None:
    """SiTU's (beta, linear_beta), or None for SiLU. Raises ValueError for another activation."""
    if cfg.hidden_act == "situ":
        return cfg.activation_situ_beta, cfg.activation_situ_linear_beta
    if cfg.hidden_act == "silu":
        return None
    raise ValueError(f"model.hidden_act: {cfg.hidden_act!r} is not known; use situ or silu")
