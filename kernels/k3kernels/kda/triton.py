"""KDA in chunks at fixed positions as one Triton kernel: a trainer's forward, any piece of a prefill, and decoding.

The formulas are those of `k3kernels.kda.aligned`, row by row; sums run in an order of this kernel's own, so a token has the
same bits in all of its calls, and not those of the CPU. A program has one sequence, one head and BV value columns, and
walks the rows of the chunks of C = 16 that hold its new tokens. What a row needs of those before it in its chunk is their
k, their sums G of g, and u, to which they were solved: rows of an earlier call come from the pool. Decoding is a call in
which every sequence has one new token. So all callers run one compiled kernel, and a token's bits depend on nothing but
its sequence's tokens.

A sequence reads its state once and writes it where a chunk ended: one decoding step of 16. Decays between rows are formed
as differences, whose exponents are never above 0. The state's update at a chunk's end is a product in PRECISION ("ieee",
or "tf32x3" on tensor cores), all else in the state's type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.kda.aligned import CHUNK

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
    the sequence is; each slot's lies in one piece, the slots need not follow each other. Of that chunk's rows so far: k
    [slots, 16, H, K] in the inputs' type, G [slots, 16, H, K] and u [slots, 16, H, V] in the state's. A slot needs no
    clearing: at position 0 nothing of it is read.
    """

    state: Tensor
    k: Tensor
    G: Tensor
    u: Tensor


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
def _at_end(k, u, G, G_end, S, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The state behind a whole chunk."""
    to_end = k * tl.exp(G_end[None, :] - G)
    return tl.exp(G_end)[:, None] * S + tl.dot(tl.trans(to_end), u, input_precision=PRECISION, out_dtype=S.dtype)


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
    seen_G_ptr,
    seen_u_ptr,
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
    is_key, is_value = keys < K, values < V
    state_at = (h * K + keys[:, None]) * V + values[None, :]
    is_state = is_key[:, None] & is_value[None, :]
    slot_rows = (tl.maximum(slot, 0) * C + rows) * H + h
    seen_keys, seen_values = slot_rows[:, None] * K + keys[None, :], slot_rows[:, None] * V + values[None, :]
    slot_state = tl.maximum(slot, 0) * state_stride
    first_chunk = first // C
    has_state = is_kept & (first_chunk > 0)
    S = tl.load(state_ptr + slot_state + state_at, mask=is_state & has_state, other=0.0)

    for chunk in range(first_chunk, (end + C - 1) // C):
        first_row, last_row = tl.maximum(first - chunk * C, 0), tl.minimum(end - chunk * C, C)
        is_full = last_row == C
        is_seen = (rows < first_row) & is_kept
        k = tl.load(seen_k_ptr + seen_keys, mask=is_seen[:, None] & is_key[None, :], other=0.0).to(wide)
        G = tl.load(seen_G_ptr + seen_keys, mask=is_seen[:, None] & is_key[None, :], other=0.0)
        u = tl.load(seen_u_ptr + seen_values, mask=is_seen[:, None] & is_value[None, :], other=0.0)
        last_seen = ((tl.maximum(slot, 0) * C + tl.maximum(first_row - 1, 0)) * H + h) * K
        G_i = tl.load(seen_G_ptr + last_seen + keys, mask=is_key & is_kept & (first_row > 0), other=0.0)
        for i in range(first_row, last_row):
            token = (start + chunk * C + i - first) * H + h
            reads = is_key & is_active
            k_i = tl.load(k_ptr + token * K + keys, mask=reads, other=0.0).to(wide)
            q_i = tl.load(q_ptr + token * K + keys, mask=reads, other=0.0).to(wide) * scale
            G_i += tl.load(g_ptr + token * K + keys, mask=reads, other=0.0).to(wide)
            v_i = tl.load(v_ptr + token * V + values, mask=is_value & is_active, other=0.0).to(wide)
            beta_i = tl.load(beta_ptr + token, mask=is_active, other=0.0).to(wide)
            is_i = (rows == i)[:, None]
            k, G = tl.where(is_i, k_i[None, :], k), tl.where(is_i, G_i[None, :], G)

            decay = tl.exp(G_i)
            k_state = tl.sum(S * (k_i * decay)[:, None], 0)
            q_state = tl.sum(S * (q_i * decay)[:, None], 0)
            decayed = k * tl.exp(tl.minimum(G_i[None, :] - G, 0.0))
            kk, qk = tl.sum(decayed * k_i[None, :], 1), tl.sum(decayed * q_i[None, :], 1)
            u_i = beta_i * (v_i - k_state) - tl.sum(tl.where(rows < i, beta_i * kk, 0.0)[:, None] * u, 0)
            u = tl.where(is_i, u_i[None, :], u)
            o_i = q_state + tl.sum(tl.where(rows <= i, qk, 0.0)[:, None] * u, 0)
            tl.store(o_ptr + token * V + values, o_i.to(o_ptr.dtype.element_ty), mask=is_value)
            if is_kept & (is_full == 0):  # programs read rows that were seen before the call, so nobody waits for these
                row = (slot * C + i) * H + h
                keeps_keys = is_key & (block == 0)
                tl.store(seen_k_ptr + row * K + keys, k_i.to(seen_k_ptr.dtype.element_ty), mask=keeps_keys)
                tl.store(seen_G_ptr + row * K + keys, G_i, mask=keeps_keys)
                tl.store(seen_u_ptr + row * V + values, u_i, mask=is_value)
        if is_full:
            S = _at_end(k, u, G, G_i, S, PRECISION)
            wants = tl.load(emit_positions_ptr + emit, mask=emit < last_emit, other=-1) == (chunk + 1) * C
            emit_slot = tl.load(emit_slots_ptr + emit, mask=wants, other=0).to(tl.int64)
            tl.store(checkpoints_ptr + emit_slot * checkpoint_stride + state_at, S, mask=is_state & wants & is_active)
            emit += wants.to(tl.int32)
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
    kept = (pool.state, pool.k, pool.G, pool.u)
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
        PRECISION=precision,
        num_warps=NUM_WARPS,
    )
    return o_THV


def empty_pool(
    num_slots: int, H: int, K: int, V: int, dtype: torch.dtype, wide: torch.dtype, device: torch.device
) -> KdaPool:
    """dtype is the activations', wide the state's."""
    return KdaPool(
        state=torch.zeros(num_slots, H, K, V, dtype=wide, device=device),
        k=torch.zeros(num_slots, CHUNK, H, K, dtype=dtype, device=device),
        G=torch.zeros(num_slots, CHUNK, H, K, dtype=wide, device=device),
        u=torch.zeros(num_slots, CHUNK, H, V, dtype=wide, device=device),
    )
