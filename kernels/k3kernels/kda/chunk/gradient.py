"""Gradients of the raw inputs of KDA, chunk by chunk: every block of key channels of a chunk and head on its own.

With u, the state S at the chunk's start, dS at its end and dv = A^T du from the passes over chunks:
    dP = tril(do u^T),   d pairs of k = -tril(dv u^T, -1)
    d q_decayed = do S^T,   d k_decayed = -dv S^T,   d k_to_end = u dS^T
A key's pairs are with later queries and keys, and with earlier keys. What the rows' lengths and beta need is a sum over
all key channels, and each has a closed form over the values, by linearity of o and S in q, k and beta:
    sum_c q_c dq_c = do . o,   sum_c k_c dk_c = dv . (2 u / beta - v),   d b = (1 - beta) / beta  dv . u
G's gradient is q dq and k dk of rows that decay from a start, less k dk of those that decay to an end; g's is its sum
from the row to the chunk's end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3kernels.kda.chunk.intra import (
    LOG2E,
    load_beta,
    load_decay,
    load_inverse_norm,
    load_rows,
    one_row,
    own_factors,
    product,
    running_sum,
)


@triton.jit
def difference_gradients(dM, dP, k, q, G):  # type: ignore[no-untyped-def]
    """Of pairs inside the same 16 rows, by differences: for k as row, q as row, and k as column [R, BK]."""
    R: tl.constexpr = k.shape[0]
    rows = tl.arange(0, R)
    dk_row, dq_row, dk_column = tl.zeros_like(k), tl.zeros_like(k), tl.zeros_like(k)
    for j in range(R):
        is_j = rows == j
        k_j = tl.sum(tl.where(is_j[:, None], k, 0.0), 0)[None, :]
        G_j = tl.sum(tl.where(is_j[:, None], G, 0.0), 0)[None, :]
        is_own = (rows // 16) == j // 16
        dM_j = tl.where(is_own, tl.sum(tl.where(is_j[None, :], dM, 0.0), 1), 0.0)[:, None]
        dP_j = tl.where(is_own, tl.sum(tl.where(is_j[None, :], dP, 0.0), 1), 0.0)[:, None]
        decay = tl.exp2(tl.minimum(G - G_j, 0.0))
        dk_row += dM_j * k_j * decay
        dq_row += dP_j * k_j * decay
        column = tl.sum((dM_j * k + dP_j * q) * decay, 0)[None, :]
        dk_column += tl.where(is_j[:, None], column, 0.0)
    return dk_row, dq_row, dk_column


@triton.jit
def half_gradients(dM, dP, k, q, G, DOT: tl.constexpr, PRECISION: tl.constexpr, IS_BOUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the pairs of one half: for k as row, q as row, k as column, and G [R, BK].

    Most of what G gets as a row's and as a column's cancels in its sums, so it is taken from the rounded factors that the
    products had: what cancels is then equal.
    """
    left, right = own_factors(G, IS_BOUNDED)
    k_left, q_left, k_right = (k * left).to(DOT), (q * left).to(DOT), (k * right).to(DOT)
    rows = tl.arange(0, k.shape[0])
    dM_far, dP_far = dM, dP
    if not IS_BOUNDED:
        is_far = (rows >= 16)[:, None] & (rows < 16)[None, :]
        dM_far, dP_far = tl.where(is_far, dM, 0.0), tl.where(is_far, dP, 0.0)
    dk_row, dq_row = product(dM_far, k_right, DOT, PRECISION), product(dP_far, k_right, DOT, PRECISION)
    dk_column = product(tl.trans(dM_far), k_left, DOT, PRECISION) + product(tl.trans(dP_far), q_left, DOT, PRECISION)
    dG = k_left.to(tl.float32) * dk_row + q_left.to(tl.float32) * dq_row - k_right.to(tl.float32) * dk_column
    dk_row, dq_row, dk_column = dk_row * left, dq_row * left, dk_column * right
    if not IS_BOUNDED:
        dk_near, dq_near, dk_near_column = difference_gradients(dM, dP, k, q, G)
        dG += k * (dk_near - dk_near_column) + q * dq_near
        return dk_row + dk_near, dq_row + dq_near, dk_column + dk_near_column, dG
    return dk_row, dq_row, dk_column, dG


@triton.jit
def gate_gradients(dg, f, a, dt_bias, lower_bound, IS_BOUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of z = f + dt_bias, and what each element adds to A_log's. dg is of the natural logarithm."""
    z = f + dt_bias[None, :]
    if IS_BOUNDED:
        s = 1.0 / (1.0 + tl.exp2(-a * z * LOG2E))
        dz = dg * lower_bound * a * s * (1.0 - s)
        return dz, dz * z
    s = 1.0 / (1.0 + tl.exp2(-z * LOG2E))
    return -dg * a * s, -dg * a * (tl.maximum(z, 0.0) + tl.log2(1.0 + tl.exp2(-tl.abs(z) * LOG2E)) / LOG2E)


@triton.jit
def put_unit_gradient(ptr, at, is_in, d_unit, unit, along, inverse_norm):  # type: ignore[no-untyped-def]
    """Through x / |x|: unit is the row divided by its length, along = unit . d_unit."""
    dx = inverse_norm[:, None] * (d_unit - unit * along[:, None])
    tl.store(ptr + at, dx.to(ptr.dtype.element_ty), mask=is_in[:, None])


@triton.jit(do_not_specialize=["scale", "lower_bound"])
def kda_gradient_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    f_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    starts_ptr,
    lengths_ptr,
    o_ptr,
    do_ptr,
    u_ptr,
    dv_ptr,
    states_ptr,
    d_states_ptr,
    dq_ptr,
    dk_ptr,
    df_ptr,
    db_ptr,
    dt_bias_parts_ptr,
    a_log_parts_ptr,
    scale,
    lower_bound,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    R: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):
    """dt_bias_parts [chunks, H, K] and a_log_parts [chunks, H, K / BK]: to be summed over the chunks."""
    BLOCKS: tl.constexpr = K // BK
    block, h, chunk = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS) % H, tl.program_id(0) // (BLOCKS * H)
    start, length = tl.load(starts_ptr + chunk).to(tl.int64), tl.load(lengths_ptr + chunk)
    rows, keys, values = tl.arange(0, R), block * BK + tl.arange(0, BK), tl.arange(0, V)
    is_in1, is_in2 = rows < length, rows + R < length
    token1, token2 = (start + rows) * H + h, (start + rows + R) * H + h
    value1, value2 = token1[:, None] * V + values[None, :], token2[:, None] * V + values[None, :]
    key1, key2 = token1[:, None] * K + keys[None, :], token2[:, None] * K + keys[None, :]
    row1, row2 = token1[:, None] * K + tl.arange(0, K)[None, :], token2[:, None] * K + tl.arange(0, K)[None, :]
    of_head = chunk.to(tl.int64) * H + h

    u1, u2 = load_rows(u_ptr, value1, is_in1), load_rows(u_ptr, value2, is_in2)
    dv1, dv2 = load_rows(dv_ptr, value1, is_in1), load_rows(dv_ptr, value2, is_in2)
    do1, do2 = load_rows(do_ptr, value1, is_in1), load_rows(do_ptr, value2, is_in2)
    q_along1 = tl.sum(do1 * load_rows(o_ptr, value1, is_in1), 1)
    q_along2 = tl.sum(do2 * load_rows(o_ptr, value2, is_in2), 1)
    beta1, beta2 = load_beta(b_ptr, token1, is_in1), load_beta(b_ptr, token2, is_in2)
    over1, over2 = 1.0 / tl.maximum(beta1, 1e-30), 1.0 / tl.maximum(beta2, 1e-30)
    u_along1, u_along2 = tl.sum(dv1 * u1, 1) * over1, tl.sum(dv2 * u2, 1) * over2
    k_along1 = 2.0 * u_along1 - tl.sum(dv1 * load_rows(v_ptr, value1, is_in1), 1)
    k_along2 = 2.0 * u_along2 - tl.sum(dv2 * load_rows(v_ptr, value2, is_in2), 1)
    if block == 0:
        tl.store(db_ptr + token1, ((1.0 - beta1) * u_along1).to(db_ptr.dtype.element_ty), mask=is_in1)
        tl.store(db_ptr + token2, ((1.0 - beta2) * u_along2).to(db_ptr.dtype.element_ty), mask=is_in2)
    is_before, is_seen = rows[:, None] > rows[None, :], rows[:, None] >= rows[None, :]
    u1, u2, dv1, dv2, do1, do2 = u1.to(DOT), u2.to(DOT), dv1.to(DOT), dv2.to(DOT), do1.to(DOT), do2.to(DOT)
    dP11 = tl.where(is_seen, tl.dot(do1, tl.trans(u1), input_precision=PRECISION), 0.0)
    dP21 = tl.dot(do2, tl.trans(u1), input_precision=PRECISION)
    dP22 = tl.where(is_seen, tl.dot(do2, tl.trans(u2), input_precision=PRECISION), 0.0)
    dM11 = tl.where(is_before, -tl.dot(dv1, tl.trans(u1), input_precision=PRECISION), 0.0)
    dM21 = -tl.dot(dv2, tl.trans(u1), input_precision=PRECISION)
    dM22 = tl.where(is_before, -tl.dot(dv2, tl.trans(u2), input_precision=PRECISION), 0.0)

    a = tl.exp2(tl.load(a_log_ptr + h).to(tl.float32) * LOG2E)
    dt_bias = tl.load(dt_bias_ptr + h * K + keys).to(tl.float32)
    state_at = of_head * K * V + keys[:, None] * V + values[None, :]
    S, dS = tl.load(states_ptr + state_at), tl.load(d_states_ptr + state_at)
    both = tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    S, dS = tl.trans(S.to(DOT)), tl.trans(dS.to(DOT))

    G1 = load_decay(f_ptr, key1, is_in1, a, dt_bias, lower_bound, DOT, IS_BOUNDED)
    G2 = load_decay(f_ptr, key2, is_in2, a, dt_bias, lower_bound, DOT, IS_BOUNDED)
    end1, end2 = one_row(G1, R - 1), one_row(G2, R - 1)
    decay1, decay2 = tl.exp2(end1)[None, :], tl.exp2(end2)[None, :]
    k_norm1, k_norm2 = load_inverse_norm(k_ptr, row1, is_in1), load_inverse_norm(k_ptr, row2, is_in2)
    q_norm1, q_norm2 = load_inverse_norm(q_ptr, row1, is_in1), load_inverse_norm(q_ptr, row2, is_in2)
    k1, k2 = load_rows(k_ptr, key1, is_in1) * k_norm1[:, None], load_rows(k_ptr, key2, is_in2) * k_norm2[:, None]
    q1, q2 = load_rows(q_ptr, key1, is_in1) * q_norm1[:, None], load_rows(q_ptr, key2, is_in2) * q_norm2[:, None]

    # Between the halves: rows of the second decay from the border, columns of the first to it.
    from2, to1 = tl.exp2(G2), tl.exp2(end1[None, :] - G1)
    border1, k_from2, q_from2 = (k1 * to1).to(DOT), (k2 * from2).to(DOT), (q2 * scale * from2).to(DOT)
    d_border1 = product(tl.trans(dP21), q_from2, DOT, PRECISION) + product(tl.trans(dM21), k_from2, DOT, PRECISION)
    dq_row = product(dP21, border1, DOT, PRECISION) + tl.dot(do2, S, input_precision=PRECISION) * decay1
    dk_row = product(dM21, border1, DOT, PRECISION) - tl.dot(dv2, S, input_precision=PRECISION) * decay1
    d_to_end1 = tl.dot(u1, dS, input_precision=PRECISION) * decay2 * to1
    d_to_end2 = tl.dot(u2, dS, input_precision=PRECISION) * tl.exp2(end2[None, :] - G2)
    at_end = both * tl.exp2(end1 + end2) + tl.sum(k1 * d_to_end1, 0) + tl.sum(k2 * d_to_end2, 0)

    dk_own, dq_own, dk_column, dG = half_gradients(dM22, dP22, k2, q2 * scale, G2, DOT, PRECISION, IS_BOUNDED)
    dG += q_from2.to(tl.float32) * dq_row + k_from2.to(tl.float32) * dk_row - k2 * d_to_end2
    dq_row, dk_row = scale * (dq_own + dq_row * from2), dk_own + dk_row * from2
    put_unit_gradient(dq_ptr, key2, is_in2, dq_row, q2, q_along2, q_norm2)
    put_unit_gradient(dk_ptr, key2, is_in2, dk_row + dk_column + d_to_end2, k2, k_along2, k_norm2)
    below = at_end + tl.sum(dG, 0)
    dg = running_sum(dG, DOT, True) + at_end[None, :]
    f2 = load_rows(f_ptr, key2, is_in2)
    dz, da = gate_gradients(tl.where(is_in2[:, None], dg, 0.0), f2, a, dt_bias, lower_bound, IS_BOUNDED)
    tl.store(df_ptr + key2, dz.to(df_ptr.dtype.element_ty), mask=is_in2[:, None])
    dt_bias_part, a_log_part = tl.sum(dz, 0), tl.sum(tl.sum(da, 1), 0)

    from1 = tl.exp2(G1)
    dk_own, dq_own, dk_column, dG = half_gradients(dM11, dP11, k1, q1 * scale, G1, DOT, PRECISION, IS_BOUNDED)
    dk_row = -tl.dot(dv1, S, input_precision=PRECISION) * from1
    dq_row = scale * tl.dot(do1, S, input_precision=PRECISION) * from1
    dG += q1 * dq_row + k1 * (dk_row - d_to_end1) - border1.to(tl.float32) * d_border1
    put_unit_gradient(dq_ptr, key1, is_in1, dq_row + scale * dq_own, q1, q_along1, q_norm1)
    dk = dk_row + dk_own + dk_column + d_border1 * to1 + d_to_end1
    put_unit_gradient(dk_ptr, key1, is_in1, dk, k1, k_along1, k_norm1)
    dg = running_sum(dG, DOT, True) + below[None, :]
    f1 = load_rows(f_ptr, key1, is_in1)
    dz, da = gate_gradients(tl.where(is_in1[:, None], dg, 0.0), f1, a, dt_bias, lower_bound, IS_BOUNDED)
    tl.store(df_ptr + key1, dz.to(df_ptr.dtype.element_ty), mask=is_in1[:, None])
    tl.store(dt_bias_parts_ptr + of_head * K + keys, dt_bias_part + tl.sum(dz, 0))
    tl.store(a_log_parts_ptr + of_head * BLOCKS + block, a_log_part + tl.sum(tl.sum(da, 1), 0))
