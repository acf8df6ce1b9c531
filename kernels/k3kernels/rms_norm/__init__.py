"""RMSNorm, plain and gated."""

from __future__ import annotations

from torch import Tensor

from k3kernels.dispatch import uses_kernel
from k3kernels.rms_norm import eager


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See the reference."""
    if not uses_kernel(x_TD):
        return eager.rms_norm(x_TD, weight_D, eps)
    from k3kernels.rms_norm import triton  # where there is no GPU, Triton need not be installed

    return triton.rms_norm(x_TD, weight_D, eps)


def gated_rms_norm(o_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """See the reference."""
    if not uses_kernel(gate_THV):
        return eager.gated_rms_norm(o_THV, gate_THV, weight_V, eps)
    from k3kernels.rms_norm import triton

    return triton.gated_rms_norm(o_THV, gate_THV, weight_V, eps)
