"""KDA token by token: convolution, gate, state and output norm in one kernel, states in place.

One program a sequence and head: it makes all tokens' keys, queries, decays and values first, then walks the state a block
of value columns at a time, so that many programs share a multiprocessor and its memory is kept busy, and norms the outputs
at the end; what passes between the three lies in a small scratch. A token is: the convolution of q, k and v with its window
and SiLU (rounded to the inputs' type), unit length, decay, read, write, read, and the gated output norm, in fp32 throughout.
A call has up to W tokens of each sequence. With writes=False nothing is written but the outputs: that verifies a draft of W
tokens against the state as it stands. What was accepted of it is then committed by the same inputs with writes=True and
has_outputs=False: the raw records of ReplaySSM's exact form. Both run the same operations in the same order as single
steps, so all three agree to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.kda.chunk.intra import LOG2E, log2_decay
from k3kernels.linear.triton import INTERPRETED, _round_to

TAPS = 4
NUM_WARPS, BLOCK_V = 2, 64  # fewer columns read the records too often, more leave a state too few loads on their way
RECORD_ROWS = 6  # of a token and head, K wide, fp32: q, k, decay, v, beta, o


@dataclass(frozen=True, slots=True)
class StepWeights:
    """taps [4, 3, H, K] fp32, or None where q, k and v come convolved; A_log [H], dt_bias [H, K] fp32; norm [V] fp32 of the
    gated output norm, or None where o itself is wanted."""

    taps: Tensor | None
    A_log_H: Tensor
    dt_bias_HK: Tensor
    norm_V: Tensor | None
    norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class StepPool:
    """By slot: states [slots, H, K, V] fp32 and the three inputs before the next token [slots, 3, 3, H, K], oldest first,
    in the inputs' type; None where q, k and v come convolved. Slots need not follow each other, each lies in one piece."""

    states: Tensor
    windows: Tensor | None


@triton.jit
def _convolved(x, w0, w1, w2, taps_ptr, at, stride, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    y = w0.to(tl.float32) * tl.load(taps_ptr + at) + w1.to(tl.float32) * tl.load(taps_ptr + stride + at)
    y += w2.to(tl.float32) * tl.load(taps_ptr + 2 * stride + at)
    y += x.to(tl.float32) * tl.load(taps_ptr + 3 * stride + at)
    return _round_to(y / (1.0 + tl.exp2(-y * LOG2E)), x.dtype, INTERPRETED)


@triton.jit
def _unit(x):  # type: ignore[no-untyped-def]
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit(do_not_specialize=["scale", "lower_bound", "eps", "W"])
def kda_step_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    f_ptr,
    b_ptr,
    gate_ptr,
    taps_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    states_ptr,
    windows_ptr,
    slots_ptr,
    lengths_ptr,
    y_ptr,
    scratch_ptr,
    scale,
    lower_bound,
    eps,
    state_stride,
    window_stride,
    W,
    H: tl.constexpr,
    K: tl.constexpr,
    BV: tl.constexpr,
    RECORD: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    HAS_CONV: tl.constexpr,
    HAS_NORM: tl.constexpr,
    WRITES: tl.constexpr,
    HAS_OUTPUTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """qkv [N, W, 3, H, K]; f, gate and y [N, W, H, K]; b [N, W, H]; scratch [N, W, H, 6, K] fp32.
    Values have as many channels as keys."""
    n, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    slot = tl.load(slots_ptr + n).to(tl.int64)
    length = tl.where(slot >= 0, tl.load(lengths_ptr + n), 0)
    slot = tl.maximum(slot, 0)
    keys = tl.arange(0, K)
    P = H * K
    channel = h * K + keys
    a = tl.exp2(tl.load(a_log_ptr + h).to(tl.float32) * LOG2E)
    dt_bias = tl.load(dt_bias_ptr + channel).to(tl.float32)
    if HAS_CONV:
        window_ptrs = windows_ptr + slot * window_stride + channel
        q0, k0, v0 = tl.load(window_ptrs), tl.load(window_ptrs + P), tl.load(window_ptrs + 2 * P)
        q1, k1, v1 = tl.load(window_ptrs + 3 * P), tl.load(window_ptrs + 4 * P), tl.load(window_ptrs + 5 * P)
        q2, k2, v2 = tl.load(window_ptrs + 6 * P), tl.load(window_ptrs + 7 * P), tl.load(window_ptrs + 8 * P)
    for t in range(length):
        token = n * W + t
        x_ptrs = qkv_ptr + token * 3 * P + channel
        q, k, v = tl.load(x_ptrs), tl.load(x_ptrs + P), tl.load(x_ptrs + 2 * P)
        if HAS_CONV:
            q3, k3, v3 = q, k, v
            q = _convolved(q3, q0, q1, q2, taps_ptr, channel, 3 * P, INTERPRETED)
            k = _convolved(k3, k0, k1, k2, taps_ptr, P + channel, 3 * P, INTERPRETED)
            v = _convolved(v3, v0, v1, v2, taps_ptr, 2 * P + channel, 3 * P, INTERPRETED)
            q0, q1, q2, k0, k1, k2, v0, v1, v2 = q1, q2, q3, k1, k2, k3, v1, v2, v3
        q, k, v = _unit(q.to(tl.float32)) * scale, _unit(k.to(tl.float32)), v.to(tl.float32)
        f = tl.load(f_ptr + token * P + channel).to(tl.float32)
        g = tl.sum(log2_decay(f[None, :], a, dt_bias, lower_bound, IS_BOUNDED), 0)
        beta = 1.0 / (1.0 + tl.exp2(-tl.load(b_ptr + token * H + h).to(tl.float32) * LOG2E))
        record_ptrs = scratch_ptr + (token * H + h) * RECORD + keys
        tl.store(record_ptrs, q)
        tl.store(record_ptrs + K, k)
        tl.store(record_ptrs + 2 * K, tl.exp2(g))
        tl.store(record_ptrs + 3 * K, v)
        tl.store(record_ptrs + 4 * K, tl.zeros([K], tl.float32) + beta)
    tl.debug_barrier()

    for first in range(0, K, BV):
        values = first + tl.arange(0, BV)
        state_ptrs = states_ptr + slot * state_stride + channel[:, None] * K + values[None, :]
        S = tl.load(state_ptrs, mask=length > 0, other=0.0)
        for t in range(length):
            record = scratch_ptr + ((n * W + t) * H + h) * RECORD
            q, k, decay = tl.load(record + keys), tl.load(record + K + keys), tl.load(record + 2 * K + keys)
            v, beta = tl.load(record + 3 * K + values), tl.load(record + 4 * K)
            S *= decay[:, None]
            u = beta * (v - tl.sum(S * k[:, None], 0))
            S += k[:, None] * u[None, :]
            if HAS_OUTPUTS:
                tl.store(record + 5 * K + values, tl.sum(S * q[:, None], 0))
        if WRITES:
            tl.store(state_ptrs, S, mask=length > 0)
    if HAS_OUTPUTS:
        tl.debug_barrier()
        for t in range(length):
            token = n * W + t
            o = tl.load(scratch_ptr + (token * H + h) * RECORD + 5 * K + keys)
            if HAS_NORM:
                o *= tl.rsqrt(tl.sum(o * o, 0) / K + eps) * tl.load(norm_ptr + keys).to(tl.float32)
                gate = tl.load(gate_ptr + token * P + channel).to(tl.float32)
                o /= 1.0 + tl.exp2(-gate * LOG2E)
            tl.store(y_ptr + token * P + channel, _round_to(o, y_ptr.dtype.element_ty, INTERPRETED))
    if HAS_OUTPUTS:
        for t in range(length, W):  # nobody's tokens, but a router may read them
            tl.store(y_ptr + (n * W + t) * P + channel, tl.zeros([K], y_ptr.dtype.element_ty))
    if WRITES and HAS_CONV:
        is_kept = (keys >= 0) & (length > 0)
        tl.store(window_ptrs, q0, mask=is_kept)
        tl.store(window_ptrs + P, k0, mask=is_kept)
        tl.store(window_ptrs + 2 * P, v0, mask=is_kept)
        tl.store(window_ptrs + 3 * P, q1, mask=is_kept)
        tl.store(window_ptrs + 4 * P, k1, mask=is_kept)
        tl.store(window_ptrs + 5 * P, v1, mask=is_kept)
        tl.store(window_ptrs + 6 * P, q2, mask=is_kept)
        tl.store(window_ptrs + 7 * P, k2, mask=is_kept)
        tl.store(window_ptrs + 8 * P, v2, mask=is_kept)


def kda_steps(
    qkv_NW3HK: Tensor,
    f_NWHK: Tensor,
    b_NWH: Tensor,
    gate_NWHK: Tensor | None,
    weights: StepWeights,
    pool: StepPool,
    slots_N: Tensor,
    lengths_N: Tensor,
    lower_bound: float | None,
    scale: float,
    writes: bool = True,
    has_outputs: bool = True,
) -> Tensor | None:
    """The first lengths_N[n] of the W tokens of each sequence, whose slot is slots_N[n] (below 0: nobody's, zeros come out).

    Inputs in one type, bf16 or fp32, contiguous; slots and lengths int32. Returns y [N, W, H, K] in the inputs' type, zeros
    behind a sequence's length, or None without outputs. Nothing waits for the device, and a captured graph reads slots and
    lengths when it is replayed.
    """
    N, W, _, H, K = qkv_NW3HK.shape
    assert K >= 16, K
    assert K & (K - 1) == 0, K
    assert (weights.taps is None) == (pool.windows is None)
    assert (weights.norm_V is None) == (gate_NWHK is None)
    y_NWHK = torch.empty_like(f_NWHK) if has_outputs else None
    unused = weights.A_log_H
    kda_step_kernel[(N * H,)](
        *(qkv_NW3HK, f_NWHK, b_NWH, unused if gate_NWHK is None else gate_NWHK),
        *(unused if weights.taps is None else weights.taps, weights.A_log_H, weights.dt_bias_HK),
        unused if weights.norm_V is None else weights.norm_V,
        *(pool.states, unused if pool.windows is None else pool.windows, slots_N, lengths_N),
        unused if y_NWHK is None else y_NWHK,
        torch.empty(N, W, H, RECORD_ROWS, K, dtype=torch.float32, device=f_NWHK.device),
        *(scale, lower_bound or 0.0, weights.norm_eps),
        *(pool.states.stride(0), 0 if pool.windows is None else pool.windows.stride(0), W),
        H=H,
        K=K,
        BV=min(K, BLOCK_V),
        RECORD=RECORD_ROWS * K,
        IS_BOUNDED=lower_bound is not None,
        HAS_CONV=weights.taps is not None,
        HAS_NORM=weights.norm_V is not None,
        WRITES=writes,
        HAS_OUTPUTS=has_outputs,
        INTERPRETED=INTERPRETED,
        num_warps=NUM_WARPS,
    )
    return y_NWHK
