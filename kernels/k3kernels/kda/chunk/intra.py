"""What a chunk of KDA needs of its own 64 tokens, whatever the state: all chunks at once, one program a chunk and head.

With G the inclusive sum of log decays g from the chunk's start, k and q of unit length:
    M_ij = beta_i sum_c k_ic k_jc e^(G_ic - G_jc)  (j < i),   A = (I + M)^-1 diag(beta)
    P_ij = scale sum_c q_ic k_jc e^(G_ic - G_jc)  (j <= i)
A program walks the chunk as two halves of 32 rows and blocks of key channels, so that what lives at a time fits its
registers and its code the cache of instructions. Exponents are split so
that both factors stay finite: between the halves at their border, where both are below 0; inside a half, where the gate
is bounded by -5, at its middle (80 at most). Where it is not, between 16 rows and 16 at their border, and inside those the
differences themselves are formed.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def log2_decay(f, a, dt_bias, lower_bound, IS_BOUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """g [rows, K], in powers of two: `kda_gate` of the raw gate f. a = exp(A_log)."""
    z = f + dt_bias[None, :]
    if IS_BOUNDED:
        return lower_bound / (1.0 + tl.exp2(-a * z * LOG2E)) * LOG2E
    return -a * softplus(z) * LOG2E


@triton.jit
def softplus(z):  # type: ignore[no-untyped-def]
    return tl.maximum(z, 0.0) + tl.log2(1.0 + tl.exp2(-tl.abs(z) * LOG2E)) * LN2


@triton.jit
def one_row(x, at: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.sum(tl.where((tl.arange(0, x.shape[0]) == at)[:, None], x, 0.0), 0)


@triton.jit
def product(x, y, DOT: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """x y, both rounded to DOT."""
    return tl.dot(x.to(DOT), y.to(DOT), input_precision=PRECISION)


@triton.jit
def differences(x, k, G):  # type: ignore[no-untyped-def]
    """sum_c x_ic k_jc 2^(G_ic - G_jc) for i and j <= i of the same 16 rows; elsewhere 0, or anything above the diagonal."""
    R: tl.constexpr = x.shape[0]
    rows = tl.arange(0, R)
    out = tl.zeros([R, R], tl.float32)
    for j in range(R):
        is_j = rows == j
        k_j = tl.sum(tl.where(is_j[:, None], k, 0.0), 0)[None, :]
        G_j = tl.sum(tl.where(is_j[:, None], G, 0.0), 0)[None, :]
        column = tl.sum(x * k_j * tl.exp2(tl.minimum(G - G_j, 0.0)), 1)
        out += tl.where(is_j[None, :] & ((rows // 16) == j // 16)[:, None], column[:, None], 0.0)
    return out


@triton.jit
def own_factors(G, IS_BOUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """2^(G_i - G_ref) and 2^(G_ref - G_j): inside a half, or of its last 16 rows with its first 16."""
    border = one_row(G, 15)[None, :]
    if IS_BOUNDED:
        return tl.exp2(G - border), tl.exp2(border - G)
    return tl.exp2(tl.minimum(G - border, 0.0)), tl.exp2(tl.minimum(border - G, 0.0))


@triton.jit
def own_pairs(x, x_left, k, k_right, G, DOT: tl.constexpr, PRECISION: tl.constexpr, IS_BOUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """sum_c x_ic k_jc 2^(G_ic - G_jc) of one half for j <= i; above the diagonal it may be anything."""
    pairs = product(x_left, tl.trans(k_right), DOT, PRECISION)
    if IS_BOUNDED:
        return pairs
    rows = tl.arange(0, x.shape[0])
    return tl.where((rows >= 16)[:, None] & (rows < 16)[None, :], pairs, differences(x, k, G))


@triton.jit
def unit_lower_inverse(M, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(I + M)^-1 of strictly lower matrices M [N, 32, 32] in fp32.

    Of the diagonal blocks of 16 rows as (I - M)(I + M^2)(I + M^4)(I + M^8): M^16 is 0. Its terms reach 6,435 where all keys
    of a block are one and cancel to 1 (of 32 rows they would reach 3e8), so products of 21 bits are enough. With D those
    inverses and L what is left of M, (I + M)^-1 = D - D L D.
    """
    N: tl.constexpr = M.shape[0]
    R: tl.constexpr = M.shape[1]
    B: tl.constexpr = 16
    rows = tl.arange(0, R)
    is_own = ((rows // B)[:, None] == (rows // B)[None, :])[None, :, :]
    own = tl.reshape(tl.where(is_own, M, 0.0), (N * R, R // B, B))
    power = tl.reshape(tl.sum(own, 1), (N * R // B, B, B))
    at = tl.arange(0, B)
    X = tl.where(at[:, None] == at[None, :], 1.0, 0.0)[None, :, :] - power
    for _ in tl.static_range(3):
        power = tl.dot(power, power, input_precision=PRECISION)
        X += tl.dot(X, power, input_precision=PRECISION)
    wide = tl.reshape(tl.broadcast_to(tl.reshape(X, (N * R, 1, B)), (N * R, R // B, B)), (N, R, R))
    D = tl.where(is_own, wide, 0.0)
    LD = tl.dot(tl.where(is_own, 0.0, M), D, input_precision=PRECISION)
    return D - tl.dot(D, LD, input_precision=PRECISION)


@triton.jit
def load_rows(ptr, at, is_in):  # type: ignore[no-untyped-def]
    return tl.load(ptr + at, mask=is_in[:, None], other=0.0).to(tl.float32)


@triton.jit
def load_inverse_norm(ptr, at, is_in):  # type: ignore[no-untyped-def]
    """1 / sqrt(sum x^2 + 1e-6) of each row."""
    x = load_rows(ptr, at, is_in)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def running_sum(x, DOT: tl.constexpr, IS_UPWARD: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """Inclusive, down the rows (or up): a product with ones, exact in three parts of bf16."""
    rows = tl.arange(0, x.shape[0])
    is_summed = (rows[:, None] <= rows[None, :]) if IS_UPWARD else (rows[:, None] >= rows[None, :])
    ones = tl.where(is_summed, 1.0, 0.0).to(DOT)
    high = x.to(DOT)
    if tl.float32 == DOT:
        return tl.dot(ones, high, input_precision="ieee")
    x -= high.to(tl.float32)
    middle = x.to(DOT)
    low = (x - middle.to(tl.float32)).to(DOT)
    return tl.dot(ones, high, tl.dot(ones, middle, tl.dot(ones, low)))


@triton.jit
def load_decay(f_ptr, at, is_in, a, dt_bias, lower_bound, DOT: tl.constexpr, IS_BOUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Inclusive sums of the log decay from the first of these rows."""
    g = log2_decay(load_rows(f_ptr, at, is_in), a, dt_bias, lower_bound, IS_BOUNDED)
    return running_sum(tl.where(is_in[:, None], g, 0.0), DOT)


@triton.jit
def load_beta(b_ptr, token, is_in):  # type: ignore[no-untyped-def]
    b = tl.load(b_ptr + token, mask=is_in, other=0.0).to(tl.float32)
    return tl.where(is_in, 1.0 / (1.0 + tl.exp2(-b * LOG2E)), 0.0)


@triton.jit
def put(ptr, at, x):  # type: ignore[no-untyped-def]
    tl.store(ptr + at, x.to(ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["scale", "lower_bound"])
def kda_intra_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    f_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    starts_ptr,
    lengths_ptr,
    q_decayed_ptr,
    k_decayed_ptr,
    k_to_end_ptr,
    P_ptr,
    A_ptr,
    decay_ptr,
    norms_ptr,
    scale,
    lower_bound,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    R: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):
    """starts, lengths [chunks]: the first token and number of tokens of each chunk. Results by chunk, head and row."""
    C: tl.constexpr = 2 * R
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, length = tl.load(starts_ptr + chunk).to(tl.int64), tl.load(lengths_ptr + chunk)
    rows = tl.arange(0, R)
    is_in1, is_in2 = rows < length, rows + R < length
    token1, token2 = (start + rows) * H + h, (start + rows + R) * H + h
    of_head = chunk.to(tl.int64) * H + h
    tile1, tile2 = of_head * C + rows, of_head * C + R + rows
    a = tl.exp2(tl.load(a_log_ptr + h).to(tl.float32) * LOG2E)
    beta1, beta2 = load_beta(b_ptr, token1, is_in1), load_beta(b_ptr, token2, is_in2)
    row1, row2 = token1[:, None] * K + tl.arange(0, K)[None, :], token2[:, None] * K + tl.arange(0, K)[None, :]
    k_norm1, k_norm2 = load_inverse_norm(k_ptr, row1, is_in1), load_inverse_norm(k_ptr, row2, is_in2)
    q_norm1, q_norm2 = load_inverse_norm(q_ptr, row1, is_in1), load_inverse_norm(q_ptr, row2, is_in2)
    norm_at = of_head * 2 * C + rows
    tl.store(norms_ptr + norm_at, k_norm1)
    tl.store(norms_ptr + norm_at + R, k_norm2)
    tl.store(norms_ptr + norm_at + C, q_norm1)
    tl.store(norms_ptr + norm_at + C + R, q_norm2)
    q_norm1, q_norm2 = q_norm1 * scale, q_norm2 * scale

    M11, M21, M22 = (tl.zeros([R, R], tl.float32),) * 3
    P11, P21, P22 = (tl.zeros([R, R], tl.float32),) * 3
    for first in range(0, K, BK):
        keys = first + tl.arange(0, BK)
        dt_bias = tl.load(dt_bias_ptr + h * K + keys).to(tl.float32)
        key1, key2 = token1[:, None] * K + keys[None, :], token2[:, None] * K + keys[None, :]
        put1, put2 = tile1[:, None] * K + keys[None, :], tile2[:, None] * K + keys[None, :]

        G = load_decay(f_ptr, key1, is_in1, a, dt_bias, lower_bound, DOT, IS_BOUNDED)
        end1 = one_row(G, R - 1)
        k = load_rows(k_ptr, key1, is_in1) * k_norm1[:, None]
        q = load_rows(q_ptr, key1, is_in1) * q_norm1[:, None]
        left, right = own_factors(G, IS_BOUNDED)
        k_right = k * right
        M11 += own_pairs(k, k * left, k, k_right, G, DOT, PRECISION, IS_BOUNDED)
        P11 += own_pairs(q, q * left, k, k_right, G, DOT, PRECISION, IS_BOUNDED)
        decay = tl.exp2(G)
        put(q_decayed_ptr, put1, q * decay)
        put(k_decayed_ptr, put1, k * decay)
        to_border = k * tl.exp2(end1[None, :] - G)

        G = load_decay(f_ptr, key2, is_in2, a, dt_bias, lower_bound, DOT, IS_BOUNDED)
        end2 = one_row(G, R - 1)
        put(k_to_end_ptr, put1, to_border * tl.exp2(end2)[None, :])
        tl.store(decay_ptr + of_head * K + keys, tl.exp2(end1 + end2))
        k = load_rows(k_ptr, key2, is_in2) * k_norm2[:, None]
        q = load_rows(q_ptr, key2, is_in2) * q_norm2[:, None]
        left, right = own_factors(G, IS_BOUNDED)
        k_right = k * right
        M22 += own_pairs(k, k * left, k, k_right, G, DOT, PRECISION, IS_BOUNDED)
        P22 += own_pairs(q, q * left, k, k_right, G, DOT, PRECISION, IS_BOUNDED)
        put(k_to_end_ptr, put2, k * tl.exp2(end2[None, :] - G))
        decay = tl.exp2(G)
        k, q = k * decay, q * decay
        to_border = tl.trans(to_border)
        M21 += product(k, to_border, DOT, PRECISION)
        P21 += product(q, to_border, DOT, PRECISION)
        decay1 = tl.exp2(end1)[None, :]
        put(q_decayed_ptr, put2, q * decay1)
        put(k_decayed_ptr, put2, k * decay1)

    is_before, is_seen = rows[:, None] > rows[None, :], rows[:, None] >= rows[None, :]
    square1, square2 = tile1[:, None] * C + rows[None, :], tile2[:, None] * C + rows[None, :]
    put(P_ptr, square1, tl.where(is_seen, P11, 0.0))
    put(P_ptr, square1 + R, tl.zeros([R, R], tl.float32))
    put(P_ptr, square2, P21)
    put(P_ptr, square2 + R, tl.where(is_seen, P22, 0.0))
    M11, M22 = tl.where(is_before, beta1[:, None] * M11, 0.0), tl.where(is_before, beta2[:, None] * M22, 0.0)
    inverses = unit_lower_inverse(tl.permute(tl.join(M11, M22), (2, 0, 1)), INVERSE_PRECISION)
    A11, A22 = tl.split(tl.permute(inverses, (1, 2, 0)))
    M21_A11 = tl.dot(beta2[:, None] * M21, A11, input_precision=INVERSE_PRECISION)
    put(A_ptr, square1, A11 * beta1[None, :])
    put(A_ptr, square1 + R, tl.zeros([R, R], tl.float32))
    A21 = -tl.dot(A22, M21_A11, input_precision=INVERSE_PRECISION)
    put(A_ptr, square2, A21 * beta1[None, :])
    put(A_ptr, square2 + R, A22 * beta2[None, :])
