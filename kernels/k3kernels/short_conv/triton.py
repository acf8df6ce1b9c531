"""What KDA does between its projections and its recurrence: the short convolution of q, k and v, and the gates.

A program of the convolution has up to BT tokens of one sequence and some heads' channels, and takes one token after
the other: the sums of a token, also the one of its norm, are those of one compiled kernel, in prefill of any pieces
and in decoding. The J - 1 inputs before the call's first token come from the sequence's slot. Only the programs with a
sequence's first tokens read its slot (BT is at least J - 1), and those same programs write it: nobody waits.

Without gradients; nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.alignment import ALIGNMENT, aligned
from k3kernels.kda.triton import WORK, KdaWork
from k3kernels.linear.triton import INTERPRETED, _round_to

BT = 16  # tokens of a program
TILE = 1024  # channels of a program: whole heads, at least one
NUM_WARPS = 4
NORM_EPS = 1e-6  # l2_norm's


@triton.jit
def _input_at(  # type: ignore[no-untyped-def]
    x_ptr, slot_ptr, channels, is_in, index, start, position, slot, P: tl.constexpr, J: tl.constexpr
):
    """Input number `index` of a call's sequence, fp32: below 0 it is the slot's, before position 0 it is zero."""
    is_new, was_seen = (index >= 0) & (slot != -1), (index < 0) & (position + index >= 0) & (slot >= 0)
    x = tl.load(x_ptr + (start + index) * P + channels, mask=is_in & is_new, other=0.0).to(tl.float32)
    row = tl.minimum(index, -1) + J - 1
    return x + tl.load(slot_ptr + row * P + channels, mask=is_in & was_seen, other=0.0).to(tl.float32)


LAUNCH = ["T", "num_blocks", "has_checkpoints", "window_steps", "checkpoint_steps"]
"""Sizes that choose no other compilation."""


@triton.jit(do_not_specialize=LAUNCH, do_not_specialize_on_alignment=WORK)
def short_conv_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    taps_ptr,
    window_ptr,
    checkpoints_ptr,
    out_ptr,
    starts_ptr,
    lengths_ptr,
    positions_ptr,
    slots_ptr,
    edges_ptr,
    emit_positions_ptr,
    emit_slots_ptr,
    T,
    num_blocks,
    has_checkpoints,
    window_steps,
    checkpoint_steps,
    eps: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    HB: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """x [T, 3, H, K], taps [J, 3, H, K], window and checkpoints [slots, J - 1, 3, H, K], out [3, T, H, K].

    Slots lie window_steps and checkpoint_steps times 16 bytes apart, which so is known to the compiler.
    """
    STEP: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    P: tl.constexpr = 3 * H * K
    HEAD_BLOCKS: tl.constexpr = (3 * H + HB - 1) // HB
    n = tl.program_id(0) // (num_blocks * HEAD_BLOCKS)
    block = (tl.program_id(0) // HEAD_BLOCKS) % num_blocks
    length = tl.load(lengths_ptr + n).to(tl.int64)
    begin = (block * BT).to(tl.int64)
    if begin >= length:
        return
    start, slot = tl.load(starts_ptr + n).to(tl.int64), tl.load(slots_ptr + n).to(tl.int64)
    position = tl.load(positions_ptr + n).to(tl.int64)
    slot_ptr = window_ptr + tl.maximum(slot, 0) * window_steps * STEP
    heads = (tl.program_id(0) % HEAD_BLOCKS) * HB + tl.arange(0, HB)
    keys = tl.arange(0, BK)
    channels = heads[:, None] * K + keys[None, :]
    is_in = (heads < 3 * H)[:, None] & (keys < K)[None, :]
    is_normed = (heads < 2 * H)[:, None]
    out_ptrs = out_ptr + (heads // H).to(tl.int64)[:, None] * T * H * K + (heads % H)[:, None] * K + keys[None, :]

    end = tl.minimum(begin + BT, length)
    for index in range(begin, end):
        y = tl.zeros([HB, BK], tl.float32)
        for j in tl.static_range(J):
            tap = tl.load(taps_ptr + j * P + channels, mask=is_in, other=0.0).to(tl.float32)
            y += tap * _input_at(x_ptr, slot_ptr, channels, is_in, index - (J - 1) + j, start, position, slot, P, J)
        y = _round_to(y / (1 + tl.exp(-y)), dtype, INTERPRETED).to(tl.float32)
        unit = y * tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
        rounded = _round_to(tl.where(is_normed, unit, y), dtype, INTERPRETED)
        tl.store(out_ptrs + (start + index) * H * K, rounded, mask=is_in)

    last_emit = tl.load(edges_ptr + n + has_checkpoints)  # without checkpoints as many as there were before: none
    for emit in range(tl.load(edges_ptr + n), last_emit):
        behind = tl.load(emit_positions_ptr + emit).to(tl.int64) - position
        is_here = (behind > begin) & (behind <= end) & (slot != -1)
        checkpoint_ptr = checkpoints_ptr + tl.load(emit_slots_ptr + emit).to(tl.int64) * checkpoint_steps * STEP
        for j in tl.static_range(J - 1):
            index = behind - (J - 1) + j
            x = _input_at(x_ptr, slot_ptr, channels, is_in, index, start, position, slot, P, J)
            tl.store(checkpoint_ptr + j * P + channels, x.to(dtype), mask=is_in & is_here)
    if block == 0:
        for j in tl.static_range(J - 1):
            x = _input_at(x_ptr, slot_ptr, channels, is_in, length - (J - 1) + j, start, position, slot, P, J)
            tl.debug_barrier()  # all threads have read a row before it is overwritten
            tl.store(slot_ptr + j * P + channels, x.to(dtype), mask=is_in & (slot >= 0))


def short_conv_packed(
    qkv_TP: Tensor,
    taps_JP: Tensor,
    window_SJP: Tensor,
    work: KdaWork,
    num_heads: int,
    max_length: int,
    checkpoints: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k with `l2_norm` and v, [T, H, K] each, contiguous, in qkv's type, of short_conv with SiLU.

    qkv_TP [T, 3HK] (q | k | v) bf16 or fp32; taps_JP [J, 3HK], the three convolutions' weights transposed, fp32 (or
    bf16); window_SJP [slots, J - 1, 3HK] in qkv's type: each slot's last inputs, written in place. A slot's lie in one
    piece, slots any multiple of 16 bytes apart. None needs clearing: at position 0 nothing of it is read. max_length: no
    sequence of the call is longer (1 in decoding). checkpoints [slots, J - 1, 3HK] gets the windows at work's
    emit_positions, which without it are passed over. The rows of an INACTIVE sequence are zeros, and it changes nothing;
    rows of T that belong to no sequence are undefined.
    J is at most BT + 1.
    """
    (T, P), J = qkv_TP.shape, taps_JP.shape[0]
    H, K = num_heads, P // (3 * num_heads)
    assert P == 3 * H * K, (P, H)
    assert taps_JP.shape == (J, P), taps_JP.shape
    assert J - 1 <= BT, J
    has_checkpoints = checkpoints is not None
    checkpoints = window_SJP if checkpoints is None else checkpoints
    for pool in (window_SJP, checkpoints):
        assert pool[:1].is_contiguous(), pool.stride()
        assert pool.data_ptr() % ALIGNMENT == 0, pool.storage_offset()
        assert pool.stride(0) * pool.element_size() % ALIGNMENT == 0, pool.stride()
        assert pool.shape[1:] == (J - 1, P), pool.shape
        assert pool.dtype == qkv_TP.dtype, pool.dtype
    qkv_TP, taps_JP = aligned(qkv_TP), aligned(taps_JP)
    out = torch.empty(3, T, H, K, dtype=qkv_TP.dtype, device=qkv_TP.device)
    N, num_blocks = len(work.slots_N), triton.cdiv(max_length, BT)
    block_k = triton.next_power_of_2(K)
    heads = max(1, TILE // block_k)
    if N and T and num_blocks:
        short_conv_kernel[(N * num_blocks * triton.cdiv(3 * H, heads),)](
            qkv_TP,
            taps_JP,
            window_SJP,
            checkpoints,
            out,
            *(work.starts_N, work.lengths_N, work.positions_N, work.slots_N),
            *(work.emit_edges, work.emit_positions, work.emit_slots),
            T,
            num_blocks,
            int(has_checkpoints),
            *(pool.stride(0) * pool.element_size() // ALIGNMENT for pool in (window_SJP, checkpoints)),
            eps=NORM_EPS,
            H=H,
            K=K,
            J=J,
            HB=heads,
            BK=block_k,
            BT=BT,
            INTERPRETED=INTERPRETED,
            num_warps=NUM_WARPS,
        )
    q, k, v = out.unbind(0)
    return q, k, v


@triton.jit
def _softplus(x):  # type: ignore[no-untyped-def]
    """max(x, 0) + log1p(e^-|x|), the latter as 2 atanh(s) with s at most 1/3: exp(x) does not vanish beside 1."""
    u = tl.exp(-tl.abs(x))
    s = u / (2 + u)
    y = s * s
    series = 1 / 11 + y * (1 / 13 + y * (1 / 15 + y * (1 / 17)))
    series = 1 / 3 + y * (1 / 5 + y * (1 / 7 + y * (1 / 9 + y * series)))
    return tl.maximum(x, 0.0) + 2 * (s + s * y * series)


@triton.jit(do_not_specialize=["lower_bound"])
def kda_gates_kernel(  # type: ignore[no-untyped-def]
    f_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    g_ptr,
    beta_ptr,
    lower_bound,
    H: tl.constexpr,
    K: tl.constexpr,
    HB: tl.constexpr,
    BK: tl.constexpr,
    HAS_BOUND: tl.constexpr,
):
    """f and g [T, H, K], b and beta [T, H]; a program has one token's HB heads."""
    HEAD_BLOCKS: tl.constexpr = (H + HB - 1) // HB
    token = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    heads, keys = (tl.program_id(0) % HEAD_BLOCKS) * HB + tl.arange(0, HB), tl.arange(0, BK)
    is_head = heads < H
    is_in = is_head[:, None] & (keys < K)[None, :]
    channels = heads[:, None] * K + keys[None, :]
    z = tl.load(f_ptr + token * H * K + channels, mask=is_in, other=0.0).to(tl.float32)
    z += tl.load(dt_bias_ptr + channels, mask=is_in, other=0.0).to(tl.float32)
    a = tl.exp(tl.load(A_log_ptr + heads, mask=is_head, other=0.0).to(tl.float32))[:, None]
    g = lower_bound / (1 + tl.exp(-a * z)) if HAS_BOUND else -a * _softplus(z)
    tl.store(g_ptr + token * H * K + channels, g, mask=is_in)
    b = tl.load(b_ptr + token * H + heads, mask=is_head, other=0.0).to(tl.float32)
    tl.store(beta_ptr + token * H + heads, 1 / (1 + tl.exp(-b)), mask=is_head)


def kda_gates(
    f_TP: Tensor, b_TH: Tensor, A_log_H: Tensor, dt_bias_P: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """`kda_gate(f)` [T, H, K] and sigmoid(b) [T, H], both fp32.

    f_TP [T, HK] (or [T, H, K]) and b_TH bf16 or fp32, A_log [H] and dt_bias [HK] too.
    """
    T, H = b_TH.shape
    K = dt_bias_P.numel() // H
    g_THK = torch.empty(T, H, K, dtype=torch.float32, device=f_TP.device)
    beta_TH = torch.empty(T, H, dtype=torch.float32, device=f_TP.device)
    if T:
        block_k = triton.next_power_of_2(K)
        heads = max(1, min(TILE // block_k, triton.next_power_of_2(H)))
        kda_gates_kernel[(T * triton.cdiv(H, heads),)](
            f_TP.contiguous(),
            b_TH.contiguous(),
            A_log_H.contiguous(),
            dt_bias_P.contiguous(),
            g_THK,
            beta_TH,
            float(lower_bound or 0.0),
            H=H,
            K=K,
            HB=heads,
            BK=block_k,
            HAS_BOUND=lower_bound is not None,
            num_warps=NUM_WARPS,
        )
    return g_THK, beta_TH
