"""The Attention Residual read on a GPU, forward and gradient in one pass each: nothing is copied, stacked or kept but the
rows and 2 R + 3 numbers a token.

Rows are read where they lie, so a token-major bank [T, B, D] takes no more memory or time than separate rows. A token's
own results have the same bits in every batch; the weights' gradients have the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from k3kernels.alignment import ALIGNMENT, aligned
from k3kernels.attn_res.triton_kernels import (
    attn_res_gradient_kernel,
    attn_res_kernel,
    attn_res_sum_parts_kernel,
)
from k3kernels.linear.triton import INTERPRETED

UNIT = 16  # elements; strides of a width that is a multiple of it are told to the compiler as multiples of it
BLOCK, MIN_BLOCK = 1024, 128  # columns; the smallest one has 4 elements for each thread of a warp
MAX_WARPS = 8
# Not the GPU's number of multiprocessors: the sums over tokens would depend on it. Two and one of an H200's 132 each.
FORWARD_PROGRAMS, GRADIENT_PROGRAMS = 264, 132
ROWS_AHEAD = 4  # of the forward, on their way into the L2 cache
FETCHING_GPUS = (9, 0)  # compute capability from which rows are fetched ahead
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 32, 64, 4


def attn_res(
    rows: Sequence[Tensor],
    norm_D: Tensor,
    proj_D: Tensor,
    eps: float,
    next_norm_D: Tensor | None = None,
    next_eps: float = 1e-5,
) -> Tensor:
    """`reference.attn_res` and its gradient. All rows bf16 or all fp32, each [T, D]; weights bf16 or fp32.

    Rows whose last dimension is contiguous are read where they lie, if all but the last have one stride (tensors of
    their own, or slices of one bank; the last may have its own) and lie at multiples of 16 bytes; others are copied.
    Raises ValueError for rows of another type or of two types.
    """
    return _apply(None, rows, norm_D, proj_D, eps, next_norm_D, next_eps)


def attn_res_bank(
    bank_TBD: Tensor,
    num_rows: int,
    current_TD: Tensor,
    norm_D: Tensor,
    proj_D: Tensor,
    eps: float,
    next_norm_D: Tensor | None = None,
    next_eps: float = 1e-5,
) -> Tensor:
    """`attn_res` of the bank's first num_rows rows and the current one. The bank's gradient is one tensor [T, B, D],
    written once, with zeros behind num_rows."""
    return _apply(num_rows, (bank_TBD, current_TD), norm_D, proj_D, eps, next_norm_D, next_eps)


def _apply(
    num_rows: int | None,
    sources: Sequence[Tensor],
    norm_D: Tensor,
    proj_D: Tensor,
    eps: float,
    next_norm_D: Tensor | None,
    next_eps: float,
) -> Tensor:
    weights = [x for x in (norm_D, proj_D, next_norm_D) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*weights, *sources)):
        out: Tensor = _AttnRes.apply(num_rows, eps, next_eps, norm_D, proj_D, next_norm_D, *sources)
        return out
    return _forward(_rows(num_rows, sources), norm_D, proj_D, eps, next_norm_D, next_eps, saves=False)[0]


def _rows(num_rows: int | None, sources: Sequence[Tensor]) -> list[Tensor]:
    """Of sources that are the rows themselves, or a bank and the current row."""
    if num_rows is None:
        return list(sources)
    bank_TBD, current_TD = sources
    return [*bank_TBD.unbind(1)[:num_rows], current_TD]


class _AttnRes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, num_rows, eps, next_eps, norm, proj, next_norm, *sources):  # type: ignore[no-untyped-def]
        out, saved = _forward(_rows(num_rows, sources), norm, proj, eps, next_norm, next_eps, saves=True)
        ctx.num_rows = num_rows
        ctx.save_for_backward(saved, norm, proj, next_norm, *sources)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        saved, norm, proj, next_norm, *sources = ctx.saved_tensors  # once: a checkpoint computes again at each access
        needed = ctx.needs_input_grad
        grad_sources = [
            torch.empty(x.shape, dtype=x.dtype, device=x.device) if is_needed else None
            for x, is_needed in zip(sources, needed[6:], strict=True)
        ]
        grad_rows: list[Tensor | None] = grad_sources
        if ctx.num_rows is not None:
            grad_bank, grad_current = grad_sources
            grad_rows = [*([None] * ctx.num_rows), grad_current]
            if grad_bank is not None:
                grad_rows[:-1] = grad_bank.unbind(1)[: ctx.num_rows]
                grad_bank[:, ctx.num_rows :].zero_()
        rows = _rows(ctx.num_rows, sources)
        grad_weights = _gradient(rows, grad_rows, norm, proj, next_norm, grad, saved, any(needed[3:6]))
        return None, None, None, *grad_weights, *grad_sources


def _forward(
    rows: Sequence[Tensor],
    norm_D: Tensor,
    proj_D: Tensor,
    eps: float,
    next_norm_D: Tensor | None,
    next_eps: float,
    saves: bool,
) -> tuple[Tensor, Tensor | None]:
    """The read, and what its gradient needs, fp32 [T, 2 R + 3]."""
    rows, stride, last_stride = _readable(rows)
    T, D = rows[0].shape
    out_TD = torch.empty(T, D, dtype=rows[0].dtype, device=rows[0].device)
    saved = torch.empty(T, 2 * len(rows) + 3, dtype=torch.float32, device=out_TD.device) if saves else None
    if T:
        attn_res_kernel[(min(T, FORWARD_PROGRAMS),)](
            tuple(rows),
            stride,
            last_stride,
            aligned(norm_D),
            aligned(proj_D),
            None if next_norm_D is None else aligned(next_norm_D),
            out_TD,
            saved,
            T,
            eps,
            next_eps,
            P=FORWARD_PROGRAMS,
            AHEAD=ROWS_AHEAD,
            **launch_options(D, out_TD.itemsize),
        )
    return out_TD, saved


def _gradient(
    rows: Sequence[Tensor],
    grad_rows: Sequence[Tensor | None],
    norm_D: Tensor,
    proj_D: Tensor,
    next_norm_D: Tensor | None,
    grad_TD: Tensor,
    saved: Tensor,
    wants_weights: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Writes the gradients of the rows where they are wanted; returns those of the weights."""
    rows, stride, last_stride = _readable(rows)
    norm_D, proj_D = aligned(norm_D), aligned(proj_D)
    T, D = rows[0].shape
    options = launch_options(D, rows[0].itemsize)
    bank_grads = [x for x in grad_rows[:-1] if x is not None]
    num_sums = 1 if next_norm_D is None else 2
    parts = None
    if wants_weights:
        parts = torch.empty(num_sums, GRADIENT_PROGRAMS, D, dtype=torch.float32, device=grad_TD.device)
    if T:
        attn_res_gradient_kernel[(min(T, GRADIENT_PROGRAMS),)](
            tuple(rows),
            stride,
            last_stride,
            tuple(grad_rows),
            bank_grads[0].stride(0) // options["UNIT"] if bank_grads else 0,
            norm_D,
            proj_D,
            None if next_norm_D is None else aligned(next_norm_D),
            aligned(grad_TD),
            saved,
            parts,
            T,
            P=GRADIENT_PROGRAMS,
            **options,
        )
    if parts is None:
        return None, None, None
    grad_norm_D, grad_proj_D = torch.empty_like(norm_D), torch.empty_like(proj_D)
    grad_next_norm_D = None if next_norm_D is None else torch.empty_like(next_norm_D)
    attn_res_sum_parts_kernel[(triton.cdiv(D, SUM_COLUMNS),)](
        parts,
        norm_D,
        proj_D,
        grad_norm_D,
        grad_proj_D,
        grad_next_norm_D,
        min(T, GRADIENT_PROGRAMS),
        D=D,
        P=GRADIENT_PROGRAMS,
        ROWS=SUM_ROWS,
        COLUMNS=SUM_COLUMNS,
        INTERPRETED=INTERPRETED,
        num_warps=SUM_WARPS,
    )
    return grad_norm_D, grad_proj_D, grad_next_norm_D


def launch_options(D: int, itemsize: int) -> dict[str, int | bool]:
    """Of both kernels, set by the width and the size of an element alone."""
    block = min(BLOCK, max(MIN_BLOCK, triton.next_power_of_2(D)))
    num_warps = min(MAX_WARPS, block // MIN_BLOCK)
    can_fetch = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FETCHING_GPUS
    size_bytes = D * itemsize
    return {
        "D": D,
        "BLOCK": block,
        "LANES": 32 * num_warps,
        "UNIT": _unit(D),
        "FETCHED_BYTES": size_bytes if can_fetch and size_bytes % ALIGNMENT == 0 else 0,
        "INTERPRETED": INTERPRETED,
        "num_warps": num_warps,
    }


def _unit(D: int) -> int:
    return UNIT if D % UNIT == 0 else 1


def _readable(rows: Sequence[Tensor]) -> tuple[list[Tensor], int, int]:
    """Rows as the kernels read them, see `attn_res`, and the strides of all but the last and of the last, in units."""
    if {row.dtype for row in rows} not in ({torch.bfloat16}, {torch.float32}):
        found = sorted({str(row.dtype) for row in rows})
        raise ValueError(f"attn_res takes rows all bf16 or all fp32, got {', '.join(found)}: convert them")
    T, D = rows[0].shape
    assert all(row.shape == (T, D) for row in rows), [row.shape for row in rows]
    unit = _unit(D)

    def is_readable(row: Tensor) -> bool:
        return row.stride(1) == 1 and row.stride(0) % unit == 0 and row.data_ptr() % ALIGNMENT == 0

    *bank, last = rows
    if not (all(map(is_readable, bank)) and len({row.stride(0) for row in bank}) <= 1):
        bank = [aligned(row) for row in bank]
    last = last if is_readable(last) else aligned(last)
    return [*bank, last], bank[0].stride(0) // unit if bank else 0, last.stride(0) // unit
