"""The short convolution with SiLU of packed sequences, with a gradient: each direction is one pass over memory.

A program has ROWS tokens of BLOCK channels and takes one token after the other: what a convolution needs of the tokens
before stays in registers, and so do the unfinished gradients of inputs, so that every value is read and written once.
The sum before SiLU is computed again for the gradient. A token's results have the same bits wherever it lies: sums are
written as fused multiply-adds, of which a compiler has no choice. The taps' gradients are sums of parts, one a program,
which depend on nothing but the tokens; equal calls give equal bits.
"""

# Triton knows tuples that grow by +, and no unpacking.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc, var-annotated"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.alignment import aligned
from k3kernels.linear.triton import INTERPRETED, _round_to
from k3kernels.packing import Packing

ROWS = 128  # tokens of a program: a multiple of AHEAD
BLOCK_BYTES = 2048  # of a token, for a program at most
BYTES_PER_WARP = 512  # 16 a thread
AHEAD = 4  # tokens that are on their way while as many are computed: at least J - 1


@triton.jit
def _pick(ptrs, part):  # type: ignore[no-untyped-def]
    ptr = ptrs[0]
    for s in tl.static_range(1, len(ptrs)):
        ptr = tl.where(part == s, ptrs[s], ptr)
    return ptr


@triton.jit
def _is_in(columns, BLOCK: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Known to be all where blocks fill the width."""
    if W % BLOCK == 0:
        return tl.full(columns.shape, True, tl.int1)
    return columns < W


@triton.jit
def _load_rows(ptrs, start, end, is_in, STRIDE: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows from `start` on that lie before `end`, as they are in memory."""
    ptrs += start.to(tl.int64) * STRIDE
    rows = ()
    for i in tl.static_range(COUNT):
        rows = rows + (tl.load(ptrs + i * STRIDE, mask=is_in & (start + i < end), other=0.0),)
    return rows


@triton.jit
def _load_positions(ptr, start, T, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of COUNT tokens in their sequences; behind the last token is the first one of a sequence."""
    ptr += start
    positions = ()
    for i in tl.static_range(COUNT):
        positions = positions + (tl.load(ptr + i, mask=start + i < T, other=0).to(tl.int32),)
    return positions


@triton.jit
def _load_window(ptrs, position, start, is_in, STRIDE: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The COUNT inputs before `start`, fp32, zeros before its sequence."""
    ptrs += start.to(tl.int64) * STRIDE
    rows = ()
    for i in tl.static_range(COUNT):
        back = COUNT - i
        x = tl.load(ptrs - back * STRIDE, mask=is_in & (position >= back), other=0.0)
        rows = rows + (x.to(tl.float32),)
    return rows


@triton.jit
def _load_taps(ptrs, is_in, P: tl.constexpr, J: tl.constexpr):  # type: ignore[no-untyped-def]
    taps = ()
    for j in tl.static_range(J):
        taps = taps + (tl.load(ptrs + j * P, mask=is_in, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _zeros(COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = ()
    for _ in tl.static_range(COUNT):
        rows = rows + (tl.zeros([BLOCK], tl.float32),)
    return rows


@triton.jit
def _sigmoid(x, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Without the instructions by which the compiler's own exponential and quotient keep numbers below 2^-126."""
    if INTERPRETED:
        return 1 / (1 + tl.exp(-x))
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 e;
        mul.f32 e, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 e, e;
        add.f32 e, e, 0f3F800000;
        rcp.approx.ftz.f32 $0, e;
        }""",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _convolve(window, taps):  # type: ignore[no-untyped-def]
    """Before SiLU; window: of J rows, the token's own is the last."""
    y = window[0] * taps[0]
    for j in tl.static_range(1, len(taps)):
        y = tl.fma(window[j], taps[j], y)
    return y


@triton.jit(do_not_specialize=["T"])
def short_conv_train_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    taps_ptr,
    position_ptr,
    y_ptrs,
    T,
    W: tl.constexpr,
    J: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """x [T, P] with P = len(y_ptrs) W, taps [J, P], position [T], each y [T, W]."""
    P: tl.constexpr = len(y_ptrs) * W
    BLOCKS: tl.constexpr = (W + BLOCK - 1) // BLOCK
    first = (tl.program_id(0) // (len(y_ptrs) * BLOCKS)) * ROWS
    part = (tl.program_id(0) // BLOCKS) % len(y_ptrs)
    columns = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    is_in = _is_in(columns, BLOCK, W)
    x_ptrs = x_ptr + (part * W + columns)
    y_ptrs = _pick(y_ptrs, part) + columns
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    end = tl.minimum(first + ROWS, T)
    taps = _load_taps(taps_ptr + part * W + columns, is_in, P, J)
    rows_ahead = _load_rows(x_ptrs, first, end, is_in, P, AHEAD)
    positions_ahead = _load_positions(position_ptr, first, T, AHEAD)
    window = _load_window(x_ptrs, positions_ahead[0], first, is_in, P, J - 1)
    for step in range(tl.cdiv(end - first, AHEAD)):
        start = first + step * AHEAD
        rows, positions = rows_ahead, positions_ahead
        rows_ahead = _load_rows(x_ptrs, start + AHEAD, end, is_in, P, AHEAD)
        positions_ahead = _load_positions(position_ptr, start + AHEAD, T, AHEAD)
        out_ptrs = y_ptrs + start.to(tl.int64) * W
        for i in tl.static_range(AHEAD):
            if positions[i] == 0:
                window = _zeros(J - 1, BLOCK)
            window = window + (rows[i].to(tl.float32),)
            z = _convolve(window, taps)
            y = _round_to(z * _sigmoid(z, INTERPRETED), dtype, INTERPRETED)
            tl.store(out_ptrs + i * W, y, mask=is_in & (start + i < end))
            window = window[1:]


@triton.jit
def _store_last(  # type: ignore[no-untyped-def]
    ptrs, unfinished, num_taken, start, end, is_in, STRIDE: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Where a sequence ends before token `start`: the gradients of its last inputs of which the program has taken any."""
    ptrs += start.to(tl.int64) * STRIDE
    for i in tl.static_range(len(unfinished)):
        back = len(unfinished) - i
        grad = _round_to(unfinished[i], ptrs.dtype.element_ty, INTERPRETED)
        tl.store(ptrs - back * STRIDE, grad, mask=is_in & (num_taken >= back) & (start - back < end))


@triton.jit
def _gradient_before_silu(z, grad_y, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    sigmoid = _sigmoid(z, INTERPRETED)
    return grad_y * (sigmoid * tl.fma(z, 1 - sigmoid, 1.0))


@triton.jit
def _add_products(sums, rows, x):  # type: ignore[no-untyped-def]
    new = ()
    for i in tl.static_range(len(sums)):
        new = new + (tl.fma(rows[i], x, sums[i]),)
    return new


@triton.jit(do_not_specialize=["T"])
def short_conv_gradient_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    taps_ptr,
    position_ptr,
    grad_y_ptrs,
    grad_x_ptr,
    parts_ptr,
    T,
    W: tl.constexpr,
    J: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The shapes of `short_conv_train_kernel`, and parts [programs of a channel, J, P] fp32 of the taps' gradients.

    An input's gradient is finished J - 1 tokens later: till then, or till its sequence ends, it stays in registers. A
    program also takes the J - 1 tokens behind its own, for its last inputs alone.
    """
    P: tl.constexpr = len(grad_y_ptrs) * W
    BLOCKS: tl.constexpr = (W + BLOCK - 1) // BLOCK
    index = tl.program_id(0) // (len(grad_y_ptrs) * BLOCKS)
    first = index * ROWS
    part = (tl.program_id(0) // BLOCKS) % len(grad_y_ptrs)
    columns = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    channels = part * W + columns
    is_in = _is_in(columns, BLOCK, W)
    x_ptrs, grad_x_ptrs = x_ptr + channels, grad_x_ptr + channels
    grad_y_ptrs = _pick(grad_y_ptrs, part) + columns
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    end, behind = tl.minimum(first + ROWS, T), tl.minimum(first + ROWS + J - 1, T)
    taps = _load_taps(taps_ptr + channels, is_in, P, J)
    rows_ahead = _load_rows(x_ptrs, first, behind, is_in, P, AHEAD)
    grads_ahead = _load_rows(grad_y_ptrs, first, behind, is_in, W, AHEAD)
    positions_ahead = _load_positions(position_ptr, first, T, AHEAD)
    window = _load_window(x_ptrs, positions_ahead[0], first, is_in, P, J - 1)
    unfinished, sums = _zeros(J - 1, BLOCK), _zeros(J, BLOCK)
    num_taken = 0  # of the sequence's tokens, by this program
    for step in range(ROWS // AHEAD):
        start = first + step * AHEAD
        rows, grads, positions = rows_ahead, grads_ahead, positions_ahead
        rows_ahead = _load_rows(x_ptrs, start + AHEAD, behind, is_in, P, AHEAD)
        grads_ahead = _load_rows(grad_y_ptrs, start + AHEAD, behind, is_in, W, AHEAD)
        positions_ahead = _load_positions(position_ptr, start + AHEAD, T, AHEAD)
        out_ptrs = grad_x_ptrs + start.to(tl.int64) * P
        for i in tl.static_range(AHEAD):
            if positions[i] == 0:
                _store_last(grad_x_ptrs, unfinished, num_taken, start + i, end, is_in, P, INTERPRETED)
                window, unfinished = _zeros(J - 1, BLOCK), _zeros(J - 1, BLOCK)
                num_taken = 0
            window = window + (rows[i].to(tl.float32),)
            grad_z = _gradient_before_silu(_convolve(window, taps), grads[i].to(tl.float32), INTERPRETED)
            sums = _add_products(sums, window, grad_z)
            window = window[1:]
            unfinished = _add_products(unfinished, taps, grad_z) + (taps[J - 1] * grad_z,)
            num_taken += 1
            grad_x = _round_to(unfinished[0], dtype, INTERPRETED)
            tl.store(out_ptrs + (i - (J - 1)) * P, grad_x, mask=is_in & (num_taken >= J))
            unfinished = unfinished[1:]
    out_ptrs = grad_x_ptrs + (first + ROWS).to(tl.int64) * P
    for i in tl.static_range(J - 1):
        if positions_ahead[i] == 0:
            _store_last(grad_x_ptrs, unfinished, num_taken, first + ROWS + i, end, is_in, P, INTERPRETED)
            window, unfinished = _zeros(J - 1, BLOCK), _zeros(J - 1, BLOCK)
            num_taken = 0
        window = window + (rows_ahead[i].to(tl.float32),)
        grad_z = _gradient_before_silu(_convolve(window, taps), grads_ahead[i].to(tl.float32), INTERPRETED)
        window = window[1:]
        unfinished = _add_products(unfinished, taps, grad_z) + (taps[J - 1] * grad_z,)
        num_taken += 1
        grad_x = _round_to(unfinished[0], dtype, INTERPRETED)
        tl.store(out_ptrs + (i - (J - 1)) * P, grad_x, mask=is_in & (num_taken >= J))
        unfinished = unfinished[1:]
    for j in tl.static_range(J):
        tl.store(parts_ptr + (index * J + j).to(tl.int64) * P + channels, sums[j], mask=is_in)


def short_conv_train(x_TP: Tensor, taps_PJ: Tensor, packing: Packing, num_parts: int) -> tuple[Tensor, ...]:
    """`reference.short_conv` of each sequence from its start, in num_parts tensors [T, P / num_parts], contiguous each.

    x_TP bf16 or fp32, whose rows are the packing's; taps_PJ fp32 or bf16. Sums are fp32, with one rounding to x's type.
    J is from 2 to AHEAD + 1. Raises ValueError for another type of x.
    """
    (T, P), J = x_TP.shape, taps_PJ.shape[1]
    assert packing.num_tokens == T, (packing.num_tokens, T)
    assert taps_PJ.shape[0] == P, (taps_PJ.shape, P)
    assert P % num_parts == 0, (P, num_parts)
    assert 2 <= J <= AHEAD + 1, J
    if x_TP.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"the short convolution's kernel takes bf16 or fp32, got {x_TP.dtype}: convert it")
    parts: tuple[Tensor, ...] = _ShortConv.apply(x_TP, taps_PJ, packing.pos_T, num_parts)
    return parts


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, taps, positions, num_parts):  # type: ignore[no-untyped-def]
        T, P = x.shape
        x, taps = aligned(x), aligned(taps.T)
        options = launch_options(P // num_parts, x.itemsize)
        ys = tuple(torch.empty(T, P // num_parts, dtype=x.dtype, device=x.device) for _ in range(num_parts))
        if T:
            short_conv_train_kernel[grid(T, num_parts, options)](x, taps, positions, ys, T, J=len(taps), **options)
        ctx.save_for_backward(x, taps, positions)
        return ys

    @staticmethod
    def backward(ctx, *grad_ys):  # type: ignore[no-untyped-def]
        x, taps, positions = ctx.saved_tensors  # once: under activation checkpointing each access computes it again
        (T, P), J = x.shape, len(taps)
        options = launch_options(P // len(grad_ys), x.itemsize)
        grads = tuple(aligned(grad) for grad in grad_ys)
        grad_x = torch.empty_like(x)
        parts = torch.empty(triton.cdiv(T, ROWS), J, P, dtype=torch.float32, device=x.device)
        if T:
            short_conv_gradient_kernel[grid(T, len(grads), options)](
                x, taps, positions, grads, grad_x, parts, T, J=J, **options
            )
        return grad_x, parts.sum(0).T.to(taps.dtype), None, None


def grid(T: int, num_parts: int, options: dict[str, int | bool]) -> tuple[int]:
    return (triton.cdiv(T, ROWS) * num_parts * triton.cdiv(options["W"], options["BLOCK"]),)


def launch_options(width: int, itemsize: int) -> dict[str, int | bool]:
    """Of both kernels, set by a part's width and the size of an element alone."""
    block = min(BLOCK_BYTES // itemsize, triton.next_power_of_2(width))
    num_warps = max(1, block * itemsize // BYTES_PER_WARP)
    sizes = {"W": width, "ROWS": ROWS, "BLOCK": block, "AHEAD": AHEAD}
    return sizes | {"INTERPRETED": INTERPRETED, "num_warps": num_warps}
