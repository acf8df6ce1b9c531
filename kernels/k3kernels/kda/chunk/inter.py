"""The state of KDA from chunk to chunk, and the outputs: one program a sequence, head and block of value columns."""

from __future__ import annotations

import triton
import triton.language as tl

from k3kernels.kda.chunk.intra import load_rows


@triton.jit
def kda_inter_kernel(  # type: ignore[no-untyped-def]
    v_ptr,
    q_decayed_ptr,
    k_decayed_ptr,
    k_to_end_ptr,
    P_ptr,
    A_ptr,
    decay_ptr,
    initial_ptr,
    edges_ptr,
    tokens_ptr,
    o_ptr,
    final_ptr,
    states_ptr,
    u_ptr,
    emit_ptr,
    emitted_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    KEEPS_STATES: tl.constexpr,
    HAS_EMITS: tl.constexpr,
    WRITES_O: tl.constexpr,
    STAGES: tl.constexpr,
):
    """edges, tokens [N + 1]: sequence n has the chunks edges[n] to edges[n + 1] and the tokens tokens[n] to tokens[n + 1].
    With S its state at a chunk's start:

        u = A (v - k_decayed S);   o = q_decayed S + P u;   S <- decay S + k_to_end^T u
    emit [chunks]: where the state after a chunk is kept, or -1. KEEPS_STATES: for a backward pass, u by token, and the
    state at each chunk's start.
    """
    BLOCKS: tl.constexpr = V // BV
    block, h, n = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS) % H, tl.program_id(0) // (BLOCKS * H)
    rows, keys, values = tl.arange(0, C), tl.arange(0, K), block * BV + tl.arange(0, BV)
    state_at = keys[:, None] * V + values[None, :]
    if HAS_INITIAL:
        S = tl.load(initial_ptr + (n * H + h).to(tl.int64) * K * V + state_at)
    else:
        S = tl.zeros([K, BV], tl.float32)
    first, last = tl.load(edges_ptr + n), tl.load(edges_ptr + n + 1)
    start, end = tl.load(tokens_ptr + n).to(tl.int64), tl.load(tokens_ptr + n + 1)
    for chunk in tl.range(first, last, num_stages=STAGES):
        of_head = (tl.zeros([], tl.int64) + chunk) * H + h  # the interpreter counts in plain integers
        tile = of_head * C + rows
        key_tile, square = tile[:, None] * K + keys[None, :], tile[:, None] * C + rows[None, :]
        token = start + (chunk - first) * C + rows
        is_in = token < end
        token = token * H + h
        value_at = token[:, None] * V + values[None, :]
        k_decayed, q_decayed = tl.load(k_decayed_ptr + key_tile).to(DOT), tl.load(q_decayed_ptr + key_tile).to(DOT)
        A, P = tl.load(A_ptr + square).to(DOT), tl.load(P_ptr + square).to(DOT)
        k_to_end, decay = tl.load(k_to_end_ptr + key_tile).to(DOT), tl.load(decay_ptr + of_head * K + keys)
        v = load_rows(v_ptr, value_at, is_in)
        narrow = S.to(DOT)
        if KEEPS_STATES:
            tl.store(states_ptr + of_head * K * V + state_at, narrow.to(states_ptr.dtype.element_ty))
        u = v - tl.dot(k_decayed, narrow, input_precision=PRECISION)
        u = tl.dot(A, u.to(DOT), input_precision=PRECISION).to(DOT)
        if KEEPS_STATES:
            tl.store(u_ptr + value_at, u.to(u_ptr.dtype.element_ty), mask=is_in[:, None])
        if WRITES_O:
            o = tl.dot(q_decayed, narrow, input_precision=PRECISION)
            o = tl.dot(P, u, o, input_precision=PRECISION)
            tl.store(o_ptr + value_at, o.to(o_ptr.dtype.element_ty), mask=is_in[:, None])
        S = tl.dot(tl.trans(k_to_end), u, S * decay[:, None], input_precision=PRECISION)
        if HAS_EMITS:
            slot = tl.load(emit_ptr + chunk).to(tl.int64)
            tl.store(emitted_ptr + (slot * H + h) * K * V + state_at, S, mask=slot >= 0)
    tl.store(final_ptr + (n * H + h).to(tl.int64) * K * V + state_at, S)


@triton.jit
def kda_inter_backward_kernel(  # type: ignore[no-untyped-def]
    do_ptr,
    q_decayed_ptr,
    k_decayed_ptr,
    k_to_end_ptr,
    P_ptr,
    A_ptr,
    decay_ptr,
    d_final_ptr,
    edges_ptr,
    tokens_ptr,
    dv_ptr,
    d_states_ptr,
    d_initial_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """From the last chunk to the first, with dS the gradient of the state at a chunk's end (kept in d_states):

    du = P^T do + k_to_end dS;   dv = A^T du;   dS <- decay dS + q_decayed^T do - k_decayed^T dv
    """
    BLOCKS: tl.constexpr = V // BV
    block, h, n = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS) % H, tl.program_id(0) // (BLOCKS * H)
    rows, keys, values = tl.arange(0, C), tl.arange(0, K), block * BV + tl.arange(0, BV)
    state_at = keys[:, None] * V + values[None, :]
    if HAS_FINAL:
        dS = tl.load(d_final_ptr + (n * H + h).to(tl.int64) * K * V + state_at).to(tl.float32)
    else:
        dS = tl.zeros([K, BV], tl.float32)
    first, last = tl.load(edges_ptr + n), tl.load(edges_ptr + n + 1)
    start, end = tl.load(tokens_ptr + n).to(tl.int64), tl.load(tokens_ptr + n + 1)
    for back in tl.range(0, last - first, num_stages=STAGES):
        chunk = last - 1 - back
        of_head = (tl.zeros([], tl.int64) + chunk) * H + h  # the interpreter counts in plain integers
        tile = of_head * C + rows
        key_tile, square = tile[:, None] * K + keys[None, :], tile[:, None] * C + rows[None, :]
        token = start + (chunk - first) * C + rows
        is_in = token < end
        value_at = (token * H + h)[:, None] * V + values[None, :]
        k_decayed, q_decayed = tl.load(k_decayed_ptr + key_tile).to(DOT), tl.load(q_decayed_ptr + key_tile).to(DOT)
        A, P = tl.load(A_ptr + square).to(DOT), tl.load(P_ptr + square).to(DOT)
        k_to_end, decay = tl.load(k_to_end_ptr + key_tile).to(DOT), tl.load(decay_ptr + of_head * K + keys)
        do = tl.load(do_ptr + value_at, mask=is_in[:, None], other=0.0).to(DOT)
        narrow = dS.to(DOT)
        tl.store(d_states_ptr + of_head * K * V + state_at, narrow.to(d_states_ptr.dtype.element_ty))
        du = tl.dot(k_to_end, narrow, input_precision=PRECISION)
        du = tl.dot(tl.trans(P), do, du, input_precision=PRECISION)
        dv = tl.dot(tl.trans(A), du.to(DOT), input_precision=PRECISION)
        tl.store(dv_ptr + value_at, dv.to(dv_ptr.dtype.element_ty), mask=is_in[:, None])
        dS = tl.dot(tl.trans(q_decayed), do, dS * decay[:, None], input_precision=PRECISION)
        dS = tl.dot(tl.trans(k_decayed), (-dv).to(DOT), dS, input_precision=PRECISION)
    tl.store(d_initial_ptr + (n * H + h).to(tl.int64) * K * V + state_at, dS)
