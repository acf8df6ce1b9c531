"""Routed experts on a GPU without a wait for it: a CUDA graph can hold a layer, and a token's bits are its own.

Token-slot pairs are bucketed by expert (`linear.triton`). One kernel multiplies by w1 and w3 and activates, one
multiplies by w2, one weighs and adds the k results of a token in slot order. Every sum has one order, set by its length
alone; there are no atomic adds. Rounds where the reference does: gate, up, the activation (SiLU's value and its product
with up, both), w2's product, and the weighted sum once. tanh and sigmoid are within a few units of fp32's last place.

Without LoRA, packed matrices, gradients and a check of the routes: a slot with an expert below 0 adds nothing, and a
token with one beyond E becomes NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.linear.triton import (
    INTERPRETED,
    Buckets,
    _round_to,
    _sums,
    _tile_of_group,
    bucket,
    check_types,
    grouped_linear,
    launch_options,
    max_tiles,
    pick_grouped_tile,
    rows_of,
)
from k3kernels.situ.triton import _activate, kind_of

COMBINED_COLUMNS = 1024  # of one program


@triton.jit(do_not_specialize=["beta", "linear_beta"])
def gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w1_ptr,
    w3_ptr,
    h_ptr,
    order_ptr,
    edges_ptr,
    F,
    R,
    stride_x,
    beta,
    linear_beta,
    E: tl.constexpr,
    BE: tl.constexpr,
    SLOTS: tl.constexpr,
    KIND: tl.constexpr,
    BM: tl.constexpr,
    SLICE: tl.constexpr,
    PARTS: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """h = act(w1_e x, w3_e x), sorted by expert. Pair p is token p // SLOTS. PARTS is 1: the other half is w3's."""
    num_n = tl.cdiv(F, SLICE * PARTS)
    expert, first, end = _tile_of_group(edges_ptr, tl.program_id(0) // num_n, E, BE, BM)
    if expert >= E:
        return
    places = first + tl.arange(0, BM)
    is_row = places < end
    tokens = tl.load(order_ptr + tl.where(is_row, places, first)) // SLOTS
    columns = (tl.program_id(0) % num_n) * SLICE + tl.arange(0, SLICE)
    w_offsets = (expert.to(tl.int64) * F + tl.where(columns < F, columns, 0))[None, :] * R
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * stride_x
    gate, up = _sums(x_ptrs, is_row, w1_ptr + w_offsets, w3_ptr + w_offsets, R, True, BK, EVEN_K, INTERPRETED)
    h = _activate(gate, up, beta, linear_beta, KIND, h_ptr.dtype.element_ty, INTERPRETED)
    h_ptrs = h_ptr + places.to(tl.int64)[:, None] * F + columns[None, :]
    rounded = _round_to(h, h_ptr.dtype.element_ty, INTERPRETED)
    tl.store(h_ptrs, rounded, mask=is_row[:, None] & (columns < F)[None, :])


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    experts_ptr,
    weights_ptr,
    out_ptr,
    R,
    E: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out_t = sum over slots s of weight_ts y_ts, in fp32 and in slot order, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(SLOTS):
        pair = token * SLOTS + slot
        expert = tl.load(experts_ptr + pair)
        weight = tl.load(weights_ptr + pair)
        is_there = (columns < R) & (expert >= 0) & (expert < E)
        y = tl.load(y_ptr + pair * R + columns, mask=is_there, other=0.0).to(tl.float32)
        total += tl.where(expert < E, weight, float("nan")) * y
    tl.store(out_ptr + token * R + columns, _round_to(total, out_ptr.dtype.element_ty, INTERPRETED), mask=columns < R)


def moe_experts(
    x_TR: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    w1_EFR: Tensor,
    w3_EFR: Tensor,
    w2_ERF: Tensor,
    situ_betas: tuple[float, float | None] | None,
) -> Tensor:
    """`reference.moe_experts` for stacked bf16 or fp32 matrices, contiguous, without autograd.

    experts_Tk int32 or int64. Raises ValueError for other types.
    """
    check_types(x_TR, w1_EFR, w3_EFR, w2_ERF)
    if not (w1_EFR.is_contiguous() and w3_EFR.is_contiguous() and w2_ERF.is_contiguous()):
        raise ValueError(
            "moe_experts takes contiguous stacks of matrices: call .contiguous() once, when they are loaded"
        )
    (T, R), k, E = x_TR.shape, experts_Tk.shape[1], w1_EFR.shape[0]
    out_TR = torch.empty(T, R, dtype=x_TR.dtype, device=x_TR.device)
    if T == 0:
        return out_TR
    experts_Tk = experts_Tk.contiguous()
    buckets = bucket(experts_Tk.flatten(), E)
    h_PF = gate_up(x_TR, buckets, k, w1_EFR, w3_EFR, situ_betas)
    y_PR = torch.empty(T * k, R, dtype=x_TR.dtype, device=x_TR.device)
    grouped_linear(h_PF, w2_ERF, buckets, y_PR, in_order=True)
    combine_kernel[(T, -(-R // COMBINED_COLUMNS))](
        y_PR,
        experts_Tk,
        weights_Tk.float().contiguous(),
        out_TR,
        R,
        E=E,
        SLOTS=k,
        BLOCK=COMBINED_COLUMNS,
        INTERPRETED=INTERPRETED,
    )
    return out_TR


def gate_up(
    x_TR: Tensor,
    buckets: Buckets,
    num_slots: int,
    w1_EFR: Tensor,
    w3_EFR: Tensor,
    situ_betas: tuple[float, float | None] | None,
) -> Tensor:
    """act(w1_e x, w3_e x) [T num_slots, F], rows in the buckets' order."""
    E, F, R = w1_EFR.shape
    num_pairs = buckets.order_P.numel()
    tile = pick_grouped_tile(num_pairs // E, F, R, x_TR.dtype, parts=1)
    x_TR = rows_of(x_TR)
    h_PF = torch.empty(num_pairs, F, dtype=x_TR.dtype, device=x_TR.device)
    beta, linear_beta = (0.0, None) if situ_betas is None else situ_betas
    gate_up_kernel[(max_tiles(num_pairs, E, tile.block_m) * -(-F // tile.slice),)](
        x_TR,
        w1_EFR,
        w3_EFR,
        h_PF,
        buckets.order_P,
        buckets.edges,
        F,
        R,
        x_TR.stride(0),
        float(beta),
        float(linear_beta or 0.0),
        E=E,
        BE=triton.next_power_of_2(E),
        SLOTS=num_slots,
        KIND=kind_of(situ_betas),
        **launch_options(tile, R),
    )
    return h_PF
