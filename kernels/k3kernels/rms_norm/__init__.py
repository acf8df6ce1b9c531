"""RMSNorm, plain and gated."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from k3kernels.dispatch import uses_kernel
from k3kernels.rms_norm import eager
from k3kernels.two_forms import forward_and_gradient


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See the reference."""
    if not uses_kernel(x_TD):
        return eager.rms_norm(x_TD, weight_D, eps)
    from k3kernels.rms_norm import triton  # where there is no GPU, Triton need not be installed

    return forward_and_gradient(partial(triton.rms_norm, eps=eps), partial(eager.rms_norm, eps=eps), x_TD, weight_D)


def gated_rms_norm(o_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """See the reference."""
    if not uses_kernel(gate_THV):
        return eager.gated_rms_norm(o_THV, gate_THV, weight_V, eps)
    from k3kernels.rms_norm import triton

    forms = (partial(triton.gated_rms_norm, eps=eps), partial(eager.gated_rms_norm, eps=eps))
    return forward_and_gradient(*forms, o_THV, gate_THV, weight_V)
