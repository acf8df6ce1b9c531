"""Absorbed MLA over paged latent rows: one kernel for a trainer's forward, prefill and decoding.

A program has one query's heads and SPLIT keys, which it takes in blocks of fixed size from a fixed position on; a second
kernel folds the splits of a query in order. Where blocks and splits lie depends on positions alone, and a program never
has more than one query, so a query's bits depend on nothing but itself and the rows up to its position.

bf16 rows are multiplied on tensor cores with queries and unnormalised probabilities rounded to bf16; sums are fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Triton's interpreter has no bf16 products; there all is fp32 and nothing is rounded before the result."""
SPLIT = 512  # keys of a program
SCRATCH_BYTES = 256 << 20  # of partial results; more queries take turns


@triton.jit(do_not_specialize=["scale", "page", "max_pages", "first"])
def mla_paged_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    pool_ptr,
    table_ptr,
    sequence_ptr,
    position_ptr,
    peak_ptr,
    total_ptr,
    part_ptr,
    scale,
    page,
    page_stride,
    max_pages,
    first,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BH: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
    BS: tl.constexpr,
    SPLIT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Query first + program 0, head block program 1, split program 2 -> its peak, sum and weighted rows, unnormalised."""
    tl.static_assert(SPLIT % BS == 0)
    query, split = tl.program_id(0), tl.program_id(2)
    token = (first + query).to(tl.int64)
    position = tl.load(position_ptr + token).to(tl.int32)
    begin = split * SPLIT
    if position >= begin:
        row_type: tl.constexpr = tl.float32 if INTERPRETED else pool_ptr.dtype.element_ty
        heads, latent, shared = tl.program_id(1) * BH + tl.arange(0, BH), tl.arange(0, BR), tl.arange(0, BP)
        is_head = (heads < H)[:, None]
        is_latent, is_shared = (latent < R)[None, :], (shared < C - R)[None, :]
        q_at = q_ptr + (token * H + heads[:, None]) * C
        q_latent = tl.load(q_at + latent[None, :], mask=is_head & is_latent, other=0.0).to(row_type)
        q_shared = tl.load(q_at + R + shared[None, :], mask=is_head & is_shared, other=0.0).to(row_type)
        pages_ptr = table_ptr + tl.load(sequence_ptr + token).to(tl.int64) * max_pages
        peak, total = tl.full([BH], float("-inf"), tl.float32), tl.zeros([BH], tl.float32)
        part = tl.zeros([BH, BR], tl.float32)
        for block in range(begin, tl.minimum(position + 1, begin + SPLIT), BS):
            keys = block + tl.arange(0, BS)
            is_key = keys <= position
            pages = tl.load(pages_ptr + keys // page, mask=is_key, other=0).to(tl.int64)
            row_at = pool_ptr + (pages * page_stride + (keys % page) * C)[:, None]
            c = tl.load(row_at + latent[None, :], mask=is_key[:, None] & is_latent, other=0.0).to(row_type)
            p = tl.load(row_at + R + shared[None, :], mask=is_key[:, None] & is_shared, other=0.0).to(row_type)
            scores = tl.dot(q_latent, tl.trans(c), input_precision="ieee")
            scores = tl.dot(q_shared, tl.trans(p), scores, input_precision="ieee") * scale
            scores = tl.where(is_key[None, :], scores, float("-inf"))
            peak_now = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp(scores - peak_now[:, None])
            shrink = tl.exp(peak - peak_now)
            total = total * shrink + tl.sum(weights, 1)
            part = tl.dot(weights.to(row_type), c, part * shrink[:, None], input_precision="ieee")
            peak = peak_now
        at = (query * tl.num_programs(2) + split).to(tl.int64) * H + heads
        tl.store(peak_ptr + at, peak, mask=heads < H)
        tl.store(total_ptr + at, total, mask=heads < H)
        tl.store(part_ptr + at[:, None] * R + latent[None, :], part, mask=is_head & is_latent)


@triton.jit(do_not_specialize=["first", "num_splits"])
def merge_splits_kernel(  # type: ignore[no-untyped-def]
    peak_ptr,
    total_ptr,
    part_ptr,
    position_ptr,
    out_ptr,
    first,
    num_splits,
    H: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One query and head: its splits from the first to the last, and the quotient. 0 for a position below 0."""
    query, head = tl.program_id(0), tl.program_id(1)
    token = (first + query).to(tl.int64)
    position = tl.load(position_ptr + token).to(tl.int32)
    latent = tl.arange(0, BR)
    peak, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    out = tl.zeros([BR], tl.float32)
    for split in range((position + SPLIT) // SPLIT):
        at = (query * num_splits + split).to(tl.int64) * H + head + tl.arange(0, 1)
        peak_here = tl.load(peak_ptr + at)
        peak_now = tl.maximum(peak, peak_here)
        shrink, grow = tl.exp(peak - peak_now), tl.exp(peak_here - peak_now)
        total = total * shrink + tl.load(total_ptr + at) * grow
        out = out * shrink + tl.load(part_ptr + at * R + latent, mask=latent < R, other=0.0) * grow
        peak = peak_now
    out = tl.where(position >= 0, out / tl.where(position >= 0, total, 1.0), 0.0)
    tl.store(out_ptr + (token * H + head) * R + latent, out.to(out_ptr.dtype.element_ty), mask=latent < R)


def mla_paged(
    q_THC: Tensor,
    pool_PSC: Tensor,
    page_table_NM: Tensor,
    sequence_T: Tensor,
    position_T: Tensor,
    R: int,
    scale: float,
    max_context: int | None = None,
) -> Tensor:
    """softmax(q c^T scale) c[:R] of query t at position_T over rows s <= position of its sequence: [T, H, R], q's type.

    pool [pages, page, C] bf16 or fp32, each page in one piece; row s of sequence n is pool[page_table[n, s // page], s % page]. The query's own
    row must be in it. A position below 0 marks a query that takes no part and gets zeros. max_context: the most rows
    that any query sees, which sizes the scratch memory and changes no bit; by default what the table can hold.
    Nothing waits for the device.
    """
    T, H, C = q_THC.shape
    page = pool_PSC.shape[1]
    assert pool_PSC[:1].is_contiguous(), "a page of the pool must be contiguous"
    assert page_table_NM.is_contiguous(), "page table must be contiguous"
    q_THC = q_THC.contiguous()
    out_THR = q_THC.new_empty(T, H, R)
    num_splits = triton.cdiv(max_context or page_table_NM.shape[1] * page, SPLIT)
    turn = max(1, min(T, SCRATCH_BYTES // (4 * num_splits * H * (R + 2))))
    peak, total = torch.empty(2, turn, num_splits, H, dtype=torch.float32, device=q_THC.device)
    part = torch.empty(turn, num_splits, H, R, dtype=torch.float32, device=q_THC.device)
    tile = pick_tile(H, C, R, pool_PSC.dtype)
    for first in range(0, T, turn):
        queries = min(turn, T - first)
        mla_paged_kernel[(queries, triton.cdiv(H, tile["BH"]), num_splits)](
            *(q_THC, pool_PSC, page_table_NM, sequence_T, position_T, peak, total, part),
            *(scale, page, pool_PSC.stride(0), page_table_NM.shape[1], first),
            H=H,
            C=C,
            R=R,
            **tile,
            SPLIT=SPLIT,
            INTERPRETED=INTERPRETED,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
        merge_splits_kernel[(queries, H)](
            *(peak, total, part, position_T, out_THR, first, num_splits), H=H, R=R, BR=tile["BR"], SPLIT=SPLIT
        )
    return out_THR


NUM_WARPS, NUM_STAGES = 8, 2


def pick_tile(H: int, C: int, R: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes by the model's shape alone: BH heads, BR latent and BP shared columns, BS keys."""
    return {
        "BH": max(16, min(32, triton.next_power_of_2(H))),
        "BR": max(16, triton.next_power_of_2(R)),
        "BP": max(16, triton.next_power_of_2(C - R)),
        "BS": 64 if dtype == torch.bfloat16 else 16,
    }
