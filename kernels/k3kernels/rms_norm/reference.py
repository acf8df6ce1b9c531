"""RMSNorm, plain and gated: where it rounds is part of the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.dtypes import at_least_fp32


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """round(weight * round(x / rms(x))): mean of squares and quotient in at least fp32, rounded before the weight.

    The Hugging Face order. Kernels that multiply by the weight in fp32 and round once differ by one ulp in bf16.
    """
    x_wide_TD = x_TD.to(at_least_fp32(x_TD.dtype))
    inverse_T1 = torch.rsqrt(x_wide_TD.square().mean(-1, keepdim=True) + eps)
    return ((x_wide_TD * inverse_T1).to(x_TD.dtype) * weight_D).to(x_TD.dtype)


def gated_rms_norm(o_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """KDA's output norm: round(o / rms(o) * weight * sigmoid(gate)), per head, a single rounding (gate's dtype)."""
    wide = at_least_fp32(o_THV.dtype)
    o_wide_THV = o_THV.to(wide)
    inverse_TH1 = torch.rsqrt(o_wide_THV.square().mean(-1, keepdim=True) + eps)
    return (o_wide_THV * inverse_TH1 * weight_V.to(wide) * torch.sigmoid(gate_THV.to(wide))).to(gate_THV.dtype)
