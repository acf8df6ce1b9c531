"""Gated activations and their gradients inside kernels: quick where bf16 sees no difference, exact in fp32."""

from __future__ import annotations

import triton
import triton.language as tl

from k3kernels.linear.triton import _round_to
from k3kernels.situ.triton import _tanh


@triton.jit
def _power(x):  # type: ignore[no-untyped-def]
    """2^x where 1 is seen beside it in fp32, and its bound elsewhere, so that products of three of them are finite."""
    x = tl.minimum(tl.maximum(x, -40.0, tl.PropagateNan.ALL), 40.0, tl.PropagateNan.ALL)
    return tl.exp2(x)


@triton.jit
def _quick_factors(gate, up, beta, linear_beta, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    LOG2E: tl.constexpr = 1.4426950408889634
    s = _power(gate * LOG2E)
    if KIND == 0:
        return gate, s / (s + 1), up
    a = _power(gate * (2 * LOG2E / beta))
    if KIND == 1:
        quotient = 1 / ((a + 1) * (s + 1))
        return (a - 1) * (s + 1) * quotient, s * (a + 1) * quotient, up
    u = _power(up * (2 * LOG2E / linear_beta))
    others = (s + 1) * (u + 1)
    quotient = 1 / (others * (a + 1))
    of_gate = (a + 1) * quotient
    return (a - 1) * (others * quotient), s * (u + 1) * of_gate, (u - 1) * (s + 1) * of_gate


@triton.jit
def _factors(gate, up, beta, linear_beta, KIND: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """tanh(gate / beta), sigmoid(gate), tanh(up / linear_beta); for KIND 0 and 1 gate or up where there is no tanh of it."""
    if not EXACT:
        return _quick_factors(gate, up, beta, linear_beta, KIND)
    sigmoid = 1 / (1 + tl.exp(-gate))
    if KIND == 0:
        return gate, sigmoid, up
    if KIND == 1:
        return _tanh(gate / beta), sigmoid, up
    return _tanh(gate / beta), sigmoid, _tanh(up / linear_beta)


@triton.jit
def _activated(  # type: ignore[no-untyped-def]
    gate, up, beta, linear_beta, KIND: tl.constexpr, dtype: tl.constexpr, INTERPRETED: tl.constexpr
):
    """KIND 0 is SiLU, 1 SiTU, 2 SiTU with a linear beta; of rounded gate and up, in fp32."""
    t, s, tau = _factors(gate, up, beta, linear_beta, KIND, dtype == tl.float32)
    if KIND == 0:
        return _round_to(t * s, dtype, INTERPRETED).to(tl.float32) * tau
    if KIND == 2:
        tau = linear_beta * tau
    return beta * t * s * tau


@triton.jit
def _activation_gradients(  # type: ignore[no-untyped-def]
    grad, gate, up, beta, linear_beta, KIND: tl.constexpr, dtype: tl.constexpr, INTERPRETED: tl.constexpr
):
    """The value, and the gradients of gate and up; fp32."""
    t, s, tau = _factors(gate, up, beta, linear_beta, KIND, dtype == tl.float32)
    if KIND == 0:
        silu = t * s
        rounded = _round_to(silu, dtype, INTERPRETED).to(tl.float32)
        return rounded * up, grad * up * (s + silu * (1 - s)), grad * silu
    ts = t * s
    slope = s - ts * t + beta * ts * (1 - s)
    grad_up = grad * beta * ts
    if KIND == 2:
        grad_up = grad_up * (1 - tau * tau)
        tau = linear_beta * tau
    return beta * ts * tau, grad * slope * tau, grad_up
