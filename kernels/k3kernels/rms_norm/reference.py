"""RMSNorm, plain and gated: where it rounds is part of the definition."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """weight * round(x / rms(x)): mean of squares in fp32 (fp64 stays fp64), one rounding to x's dtype before the weight.

    The Hugging Face order. Kernels that multiply by the weight in fp32 and round once differ by one ulp in bf16.
    """
    x32_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    scale_T1 = torch.rsqrt(x32_TD.square().mean(-1, keepdim=True) + eps)
    return (x32_TD * scale_T1).to(x_TD.dtype) * weight_D


def gated_rms_norm(o_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """KDA's output norm: round(o / rms(o) * weight * sigmoid(gate)), per head, a single rounding (gate's dtype)."""
    wide = torch.promote_types(o_THV.dtype, torch.float32)
    o32_THV = o_THV.to(wide)
    scale_TH1 = torch.rsqrt(o32_THV.square().mean(-1, keepdim=True) + eps)
    return (o32_THV * scale_TH1 * weight_V.to(wide) * torch.sigmoid(gate_THV.to(wide))).to(gate_THV.dtype)
