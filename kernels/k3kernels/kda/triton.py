"""KDA in chunks at fixed positions as one Triton kernel: a trainer's forward, any piece of a prefill, and decoding.

The formulas are those of `k3kernels.kda.aligned`; sums within a chunk run in an order of this kernel's own, so a token has
the same bits in all of its calls, and not those of the CPU. A program has one sequence, one head and BV value columns,
and walks the chunks of C = 16 rows that hold its new tokens. Rows of the first chunk that were seen in an earlier call
come from the pool, rows behind the last token are zeros, and zeros change no sum. Decoding is a call in which every
sequence has one new token. So all callers run one compiled kernel, and a token's bits depend on nothing but its
sequence's tokens. BV is one constant: it cuts no sum, yet another width may be multiplied by other instructions.

A sequence reads its state once and writes it where a chunk ended: one decoding step of 16. Products with the state run
in PRECISION ("ieee", or "tf32x3" on tensor cores); those among the rows always in "ieee", because their factors
e^(G) reach e^(-80) and e^80, and the low parts of a split number would leave fp32's range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.kda.aligned import CHUNK, is_bounded

BLOCK_V = 32  # value columns of a program
NUM_WARPS = 4  # of 8 it spills less and takes longer
INACTIVE = -1
"""Slot of a sequence that takes no part: its outputs are 0 and it changes nothing."""
UNKEPT = -2
"""Slot of a sequence that begins at position 0 and of which nothing is kept, as in a trainer's forward."""


@dataclass(frozen=True, slots=True)
class KdaPool:
    """What sequences keep between calls, by slot.

    state [slots, H, K, V] fp32 (fp64 for fp32 inputs, where it is affordable) stands at the start of the chunk in which
    the sequence is; each slot's lies in one piece, the slots need not follow each other. k, v [slots, 16, H, K or V] in
    the inputs' type, g and beta [slots, 16, H, K], [slots, 16, H] in fp32 or wider are that chunk's rows so far. A slot
    needs no clearing: at position 0 nothing of it is read.
    """

    state: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


@dataclass(frozen=True, slots=True)
class KdaWork:
    """Which tokens a call has, on the device, the same for all layers; integers of 4 or 8 bytes.

    Sequence n has the packed rows starts[n] to starts[n] + lengths[n], the first of which is at positions[n]; it lives
    in slots[n]. Its state at emit_positions[e] is copied to checkpoint emit_slots[e] for e in
    edges[n]:edges[n + 1]: ascending multiples of 16, behind positions[n] and up to its end.
    """

    starts_N: Tensor
    lengths_N: Tensor
    positions_N: Tensor
    slots_N: Tensor
    emit_edges: Tensor
    emit_positions: Tensor
    emit_slots: Tensor


def decode_work(slots_N: Tensor, positions_N: Tensor) -> KdaWork:
    """One token for each sequence. slots and positions are kept, not copied: a captured graph reads what is in them."""
    N, device = len(slots_N), slots_N.device
    none = torch.zeros(N + 1, dtype=torch.int32, device=device)
    starts_N = torch.arange(N, dtype=torch.int32, device=device)
    return KdaWork(starts_N, torch.ones_like(starts_N), positions_N, slots_N, none, none, none)


def prefill_work(
    lengths: list[int], positions: list[int], slots: list[int], emits: list[tuple[int, int, int]], device: torch.device
) -> KdaWork:
    """Sequences packed one after the other. emits: (sequence, position, checkpoint slot) in any order.

    Raises ValueError for a position that is not a chunk's end inside the call.
    """
    for n, position, _ in emits:
        if position % CHUNK or not positions[n] < position <= positions[n] + lengths[n]:
            raise ValueError(
                f"emits: position {position} of sequence {n} must be a multiple of {CHUNK} in "
                f"({positions[n]}, {positions[n] + lengths[n]}]"
            )
    emits = sorted(emits)
    edges, starts = [0], [0]
    for n, length in enumerate(lengths):
        edges.append(edges[-1] + sum(sequence == n for sequence, _, _ in emits))
        starts.append(starts[-1] + length)

    def to_device(values: list[int]) -> Tensor:
        return torch.tensor(values or [0], dtype=torch.int32).to(device, non_blocking=True)

    where, to = [position for _, position, _ in emits], [slot for _, _, slot in emits]
    return KdaWork(*map(to_device, (starts[:-1], lengths, positions, slots, edges, where, to)))


@triton.jit
def _pairs_by_difference(rows, k, G, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """[j, i]: sum_c k_jc x_ic e^(G_ic - G_jc) for j <= i; the exponents are never above 0."""
    order = tl.arange(0, C)
    pairs = tl.zeros([C, C], G.dtype)
    for j in range(C):
        is_j = (order == j)[:, None]
        k_j, G_j = tl.sum(tl.where(is_j, k, 0.0), 0), tl.sum(tl.where(is_j, G, 0.0), 0)
        decay = tl.exp(tl.minimum(G - G_j[None, :], 0.0))
        pairs = tl.where(is_j, tl.sum(rows * (k_j[None, :] * decay), 1)[None, :], pairs)
    return pairs


@triton.jit
def _chunk_tile(q, k, v, g, beta, S, IS_BOUNDED: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """o [C, BV] of a chunk's rows and the state at its end, from the state S [K, BV] at its start; q is scaled.

    Pairs are laid out [j, i], so that a solved row's weights lie along u's rows.
    """
    order = tl.arange(0, C)
    is_before = order[:, None] < order[None, :]
    G = tl.cumsum(g, 0)
    expG = tl.exp(G)
    k_decayed, q_decayed = k * expG, q * expG
    if IS_BOUNDED:
        back = k * tl.exp(-G)
        kk = tl.dot(back, tl.trans(k_decayed), input_precision="ieee", out_dtype=S.dtype)
        qk = tl.dot(back, tl.trans(q_decayed), input_precision="ieee", out_dtype=S.dtype)
    else:
        kk, qk = _pairs_by_difference(k, k, G, C), _pairs_by_difference(q, k, G, C)
    M = tl.where(is_before, kk * beta[None, :], 0.0)
    P = tl.where(is_before | (order[:, None] == order[None, :]), qk, 0.0)
    u = beta[:, None] * (v - tl.dot(k_decayed, S, input_precision=PRECISION, out_dtype=S.dtype))
    for i in range(1, C):
        weights = tl.sum(tl.where((order == i)[None, :], M, 0.0), 1)
        seen = tl.sum(weights[:, None] * u, 0)
        u = tl.where((order == i)[:, None], u - seen[None, :], u)
    o = tl.dot(q_decayed, S, input_precision=PRECISION, out_dtype=S.dtype)
    o += tl.dot(tl.trans(P), u, input_precision="ieee", out_dtype=S.dtype)
    G_end = tl.sum(tl.where((order == C - 1)[:, None], G, 0.0), 0)
    to_end = k * tl.exp(G_end[None, :] - G)
    S = tl.exp(G_end)[:, None] * S + tl.dot(tl.trans(to_end), u, input_precision=PRECISION, out_dtype=S.dtype)
    return o, S


@triton.jit
def _load_rows(new_ptr, new_at, is_new, seen_ptr, seen_at, is_seen, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The chunk's rows: new ones of this call, seen ones of the pool, and zeros."""
    seen = tl.load(seen_ptr + seen_at, mask=is_seen, other=0.0).to(dtype)
    return tl.where(is_seen, seen, tl.load(new_ptr + new_at, mask=is_new, other=0.0).to(dtype))


WORK = ["starts_ptr", "lengths_ptr", "positions_ptr", "slots_ptr", "edges_ptr", "emit_positions_ptr", "emit_slots_ptr"]
"""Where these lie in memory chooses no other compilation."""


@triton.jit(do_not_specialize=["scale"], do_not_specialize_on_alignment=WORK)
def kda_aligned_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    o_ptr,
    state_ptr,
    seen_k_ptr,
    seen_v_ptr,
    seen_g_ptr,
    seen_beta_ptr,
    checkpoints_ptr,
    starts_ptr,
    lengths_ptr,
    positions_ptr,
    slots_ptr,
    edges_ptr,
    emit_positions_ptr,
    emit_slots_ptr,
    scale,
    state_stride,
    checkpoint_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The pointers are the fields of the inputs, `KdaPool` and `KdaWork`, all contiguous but for the strides of slots."""
    wide: tl.constexpr = state_ptr.dtype.element_ty
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    block, h, n = tl.program_id(0) % BLOCKS, (tl.program_id(0) // BLOCKS) % H, tl.program_id(0) // (BLOCKS * H)
    slot = tl.load(slots_ptr + n).to(tl.int64)
    is_active, is_kept = slot != -1, slot >= 0
    start, first = tl.load(starts_ptr + n).to(tl.int64), tl.load(positions_ptr + n).to(tl.int64)
    end = first + tl.load(lengths_ptr + n).to(tl.int64)
    emit, last_emit = tl.load(edges_ptr + n), tl.load(edges_ptr + n + 1)

    rows, keys, values = tl.arange(0, C), tl.arange(0, BK), block * BV + tl.arange(0, BV)
    is_key, is_value = (keys < K)[None, :], (values < V)[None, :]
    state_at = (h * K + keys[:, None]) * V + values[None, :]
    is_state = (keys < K)[:, None] & is_value
    slot_rows = (tl.maximum(slot, 0) * C + rows) * H + h
    slot_state = tl.maximum(slot, 0) * state_stride
    first_chunk = first // C
    has_state = is_kept & (first_chunk > 0)
    S = tl.load(state_ptr + slot_state + state_at, mask=is_state & has_state, other=0.0)

    for chunk in range(first_chunk, (end + C - 1) // C):
        at = chunk * C + rows
        is_new = (at >= first) & (at < end)
        reads = is_new & is_active
        is_seen = (at < first) & is_kept
        token_rows = (start + at - first) * H + h
        new_keys, new_values = token_rows[:, None] * K + keys[None, :], token_rows[:, None] * V + values[None, :]
        seen_keys, seen_values = slot_rows[:, None] * K + keys[None, :], slot_rows[:, None] * V + values[None, :]
        q = tl.load(q_ptr + new_keys, mask=reads[:, None] & is_key, other=0.0).to(wide) * scale
        read_keys, pool_keys = reads[:, None] & is_key, is_seen[:, None] & is_key
        k = _load_rows(k_ptr, new_keys, read_keys, seen_k_ptr, seen_keys, pool_keys, wide)
        g = _load_rows(g_ptr, new_keys, read_keys, seen_g_ptr, seen_keys, pool_keys, wide)
        read_values, pool_values = reads[:, None] & is_value, is_seen[:, None] & is_value
        v = _load_rows(v_ptr, new_values, read_values, seen_v_ptr, seen_values, pool_values, wide)
        beta = _load_rows(beta_ptr, token_rows, reads, seen_beta_ptr, slot_rows, is_seen, wide)

        o, S_end = _chunk_tile(q, k, v, g, beta, S, IS_BOUNDED, PRECISION, C)
        tl.store(o_ptr + new_values, o.to(o_ptr.dtype.element_ty), mask=is_new[:, None] & is_value)
        is_full = (chunk + 1) * C <= end
        if is_full:
            S = S_end
            wants = tl.load(emit_positions_ptr + emit, mask=emit < last_emit, other=-1) == (chunk + 1) * C
            emit_slot = tl.load(emit_slots_ptr + emit, mask=wants, other=0).to(tl.int64)
            tl.store(checkpoints_ptr + emit_slot * checkpoint_stride + state_at, S, mask=is_state & wants & is_active)
            emit += wants.to(tl.int32)
        else:
            # Each program reads seen rows only, so nobody waits for these.
            keeps, keeps_keys = is_new & is_kept, is_key & (block == 0)
            kept_k, kept_v = k.to(seen_k_ptr.dtype.element_ty), v.to(seen_v_ptr.dtype.element_ty)
            tl.store(seen_k_ptr + seen_keys, kept_k, mask=keeps[:, None] & keeps_keys)
            tl.store(seen_g_ptr + seen_keys, g.to(seen_g_ptr.dtype.element_ty), mask=keeps[:, None] & keeps_keys)
            tl.store(seen_v_ptr + seen_values, kept_v, mask=keeps[:, None] & is_value)
            beta_mask = keeps & (block == 0)
            tl.store(seen_beta_ptr + slot_rows, beta.to(seen_beta_ptr.dtype.element_ty), mask=beta_mask)
    if end // C > first_chunk:
        tl.store(state_ptr + slot_state + state_at, S, mask=is_state & is_kept)


def kda_aligned_packed(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_THK: Tensor,
    beta_TH: Tensor,
    pool: KdaPool,
    work: KdaWork,
    lower_bound: float | None,
    scale: float,
    checkpoints: Tensor | None = None,
    precision: str = "tf32x3",
) -> Tensor:
    """o [T, H, V] in v's type; pool and checkpoints [slots, H, K, V] are written in place.

    q and k are normalised; q, k, v in one type of float, g and beta fp32 or wider. Rows of T that belong to no sequence
    are undefined. `precision` changes bits: all callers take the same. Nothing waits for the device.
    """
    H, K = k_THK.shape[1:]
    V = v_THV.shape[-1]
    inputs = tuple(x.contiguous() for x in (q_THK, k_THK, v_THV, g_THK, beta_TH))
    kept = (pool.state, pool.k, pool.v, pool.g, pool.beta)
    checkpoints = pool.state if checkpoints is None else checkpoints
    assert all(x[:1].is_contiguous() for x in (pool.state, checkpoints))
    assert all(x.is_contiguous() for x in kept[1:])
    o_THV = torch.empty_like(inputs[2])
    block_v = max(16, min(BLOCK_V, triton.next_power_of_2(V)))
    kda_aligned_kernel[(len(work.slots_N) * H * triton.cdiv(V, block_v),)](
        *inputs,
        o_THV,
        *kept,
        checkpoints,
        *(work.starts_N, work.lengths_N, work.positions_N, work.slots_N),
        *(work.emit_edges, work.emit_positions, work.emit_slots),
        scale,
        pool.state.stride(0),
        checkpoints.stride(0),
        H=H,
        K=K,
        V=V,
        BK=max(16, triton.next_power_of_2(K)),
        BV=block_v,
        C=CHUNK,
        IS_BOUNDED=is_bounded(lower_bound),
        PRECISION=precision,
        num_warps=NUM_WARPS,
    )
    return o_THV


def empty_pool(
    num_slots: int, H: int, K: int, V: int, dtype: torch.dtype, wide: torch.dtype, device: torch.device
) -> KdaPool:
    """dtype is the activations', wide the state's."""
    g_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return KdaPool(
        state=torch.zeros(num_slots, H, K, V, dtype=wide, device=device),
        k=torch.zeros(num_slots, CHUNK, H, K, dtype=dtype, device=device),
        v=torch.zeros(num_slots, CHUNK, H, V, dtype=dtype, device=device),
        g=torch.zeros(num_slots, CHUNK, H, K, dtype=g_dtype, device=device),
        beta=torch.zeros(num_slots, CHUNK, H, dtype=g_dtype, device=device),
    )
