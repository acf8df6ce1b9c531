"""Attention Residual read forward, one program a token: each row is read once, and nothing is copied or stacked.

The softmax over a token's rows is online: with a new peak, what was added so far is scaled down. A row's two sums and
the order of the rows are the same in every batch. Without gradients; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.alignment import aligned
from k3kernels.linear.triton import INTERPRETED, _round_to

ELEMENTS_PER_WARP = 512
MAX_WARPS = 16


@triton.jit
def _load_row(row_ptrs, r, at, is_in):  # type: ignore[no-untyped-def]
    """Row r of a token, zeros behind the last one."""
    row_ptr = row_ptrs[0]
    for s in tl.static_range(1, len(row_ptrs)):
        row_ptr = tl.where(r == s, row_ptrs[s], row_ptr)
    return tl.load(row_ptr + at, mask=is_in & (r < len(row_ptrs)), other=0.0)


@triton.jit
def _add_pairs(a, b, c, d):  # type: ignore[no-untyped-def]
    return a + c, b + d


@triton.jit(do_not_specialize=["eps"])
def attn_res_mix_kernel(  # type: ignore[no-untyped-def]
    row_ptrs,
    norm_ptr,
    proj_ptr,
    out_ptr,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """row_ptrs is a tuple of pointers to [T, D]. Two rows are on their way while one is summed."""
    columns = tl.arange(0, BLOCK)
    is_in = columns < D
    at = tl.program_id(0).to(tl.int64) * D + columns
    row, behind = _load_row(row_ptrs, 0, at, is_in), _load_row(row_ptrs, 1, at, is_in)
    norm = tl.load(norm_ptr + columns, mask=is_in, other=0.0).to(tl.float32)
    query = norm * tl.load(proj_ptr + columns, mask=is_in, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weight = 0.0
    peak = float("-inf")
    for r in range(len(row_ptrs)):
        far_behind = _load_row(row_ptrs, r + 2, at, is_in)
        x = row.to(tl.float32)
        dot, square = tl.reduce((x * query, x * x), 0, _add_pairs)
        score = dot * tl.rsqrt(square / D + eps)
        new_peak = tl.maximum(peak, score)
        shrink, grow = tl.exp(peak - new_peak), tl.exp(score - new_peak)
        total = total * shrink + grow * x
        weight = weight * shrink + grow
        peak = new_peak
        row, behind = behind, far_behind
    tl.store(out_ptr + at, _round_to(total / weight, out_ptr.dtype.element_ty, INTERPRETED), mask=is_in)


def launch_options(D: int) -> dict[str, int | bool]:
    """Set by the width alone."""
    block = triton.next_power_of_2(D)
    num_warps = min(MAX_WARPS, max(1, block // ELEMENTS_PER_WARP))
    return {"D": D, "BLOCK": block, "INTERPRETED": INTERPRETED, "num_warps": num_warps}


def attn_res_mix(rows: Sequence[Tensor], norm_D: Tensor, proj_D: Tensor, eps: float) -> Tensor:
    """`reference.attn_res_mix`: rows are R tensors [T, D] of one type, read where they lie; a token's bits are its own.

    norm and proj bf16 or fp32; their product is taken in fp32. One compilation for each number of rows R.
    Raises ValueError for rows that are neither all bf16 nor all fp32.
    """
    if {row.dtype for row in rows} not in ({torch.bfloat16}, {torch.float32}):
        found = sorted({str(row.dtype) for row in rows})
        raise ValueError(f"attn_res_mix takes rows all bf16 or all fp32, got {', '.join(found)}: convert them")
    T, D = rows[0].shape
    assert all(row.shape == (T, D) for row in rows), [row.shape for row in rows]
    out_TD = torch.empty(T, D, dtype=rows[0].dtype, device=rows[0].device)
    if T:
        attn_res_mix_kernel[(T,)](
            tuple(aligned(row) for row in rows),
            aligned(norm_D),
            aligned(proj_D),
            out_TD,
            eps,
            **launch_options(D),
        )
    return out_TD
