"""Routed experts forward in fp8: e4m3 with a scale a row of activations and a scale an output channel of each matrix.

Rows are quantised once a token, while they are copied to their places; h, which comes in bf16, in a pass of its own. The
products add in the tensor cores' own accumulators ("fast accumulation"). Without gradients.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from k3kernels.linear.triton import INTERPRETED, rows_of
from k3kernels.moe import grouped
from k3kernels.moe.grouped import Betas, GroupedTile, Scaled, Schedule, Tiles
from k3kernels.moe.pairs import Pairs, combine, sort_pairs

FP8_MAX = 448.0
_ROWS = GroupedTile(128, 256, 128, 8, 4)  # twice as deep as bf16's: a value has half the bytes
FP8_TILES = Tiles(replace(_ROWS, columns=128), _ROWS, _ROWS, _ROWS, _ROWS)


@triton.jit
def _to_e4m3(x, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """To nearest even; Triton's interpreter cuts off, so there the bits that remain are rounded before."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).to(tl.float32, bitcast=True)
        tiny = (x + 24576.0) - 24576.0  # whose last place is 2^-9, as that of values below 2^-6
        x = tl.where(tl.abs(x) < 0.015625, tiny, normal)
    return x.to(tl.float8e4nv)


@triton.jit
def _quantised(x, MAX: tl.constexpr, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """e4m3 values and the scale of one row; a row of zeros has scale 0, one with a NaN is all NaN."""
    peak = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 0)
    scale = tl.where(peak < float("inf"), peak / MAX, float("nan"))
    return _to_e4m3(x / tl.where(scale > 0, scale, 1.0), INTERPRETED), scale


@triton.jit
def stage_fp8_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    inverse_ptr,
    xs_ptr,
    scale_ptr,
    R,
    stride_x,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A token's row, quantised, and its scale to the places of its pairs."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * stride_x + columns, mask=columns < R, other=0.0).to(tl.float32)
    values, scale = _quantised(x, MAX, INTERPRETED)
    for slot in tl.static_range(SLOTS):
        place = tl.load(inverse_ptr + token * SLOTS + slot).to(tl.int64)
        tl.store(xs_ptr + place * R + columns, values, mask=(columns < R) & (place >= 0))
        tl.store(scale_ptr + place, scale, mask=place >= 0)


@triton.jit
def quantise_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    edges_ptr,
    values_ptr,
    scale_ptr,
    K,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The rows that have an expert."""
    row = tl.program_id(0)
    if row >= tl.load(edges_ptr + E):
        return
    columns = tl.arange(0, BLOCK)
    places = row.to(tl.int64) * K + columns
    x = tl.load(x_ptr + places, mask=columns < K, other=0.0).to(tl.float32)
    values, scale = _quantised(x, MAX, INTERPRETED)
    tl.store(values_ptr + places, values, mask=columns < K)
    tl.store(scale_ptr + row, scale)


def stage_fp8(x_TR: Tensor, pairs: Pairs) -> Scaled:
    """`pairs.stage` of quantised rows."""
    T, R = x_TR.shape
    P, device, x_TR = T * pairs.num_slots, x_TR.device, rows_of(x_TR)
    xs_PR = torch.empty(P, R, dtype=torch.float8_e4m3fn, device=device)
    scale_P = torch.empty(P, dtype=torch.float32, device=device)
    stage_fp8_kernel[(T,)](
        *(x_TR, pairs.inverse_P, xs_PR, scale_P, R, x_TR.stride(0)),
        SLOTS=pairs.num_slots,
        BLOCK=triton.next_power_of_2(R),
        MAX=FP8_MAX,
        INTERPRETED=INTERPRETED,
    )
    return Scaled(xs_PR, scale_P)


def quantise_rows(x_PK: Tensor, pairs: Pairs) -> Scaled:
    """Sorted rows [P, K]; those without an expert are not written."""
    (P, K), device = x_PK.shape, x_PK.device
    values_PK = torch.empty(P, K, dtype=torch.float8_e4m3fn, device=device)
    scale_P = torch.empty(P, dtype=torch.float32, device=device)
    quantise_rows_kernel[(P,)](
        *(x_PK, pairs.edges, values_PK, scale_P, K),
        E=pairs.num_experts,
        BLOCK=triton.next_power_of_2(K),
        MAX=FP8_MAX,
        INTERPRETED=INTERPRETED,
    )
    return Scaled(values_PK, scale_P)


def quantise_matrices(w_ENK: Tensor) -> Scaled:
    """A matrix of every expert, with a scale for each output channel; once, where they are loaded."""
    values = torch.empty(w_ENK.shape, dtype=torch.float8_e4m3fn, device=w_ENK.device)
    scale_EN = w_ENK.abs().amax(-1).float() / FP8_MAX
    for w_NK, scale_N, out_NK in zip(w_ENK, scale_EN.clamp(min=torch.finfo(torch.float32).tiny), values, strict=True):
        out_NK.copy_(w_NK.float() / scale_N[:, None])
    return Scaled(values, scale_EN)


def moe_experts_fp8(
    x_TR: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    w1_EFR: Scaled,
    w3_EFR: Scaled,
    w2_ERF: Scaled,
    situ_betas: Betas,
    tiles: Tiles = FP8_TILES,
) -> Tensor:
    """`reference.moe_experts` [T, R] in bf16, of bf16 x and matrices of `quantise_matrices`; without autograd.

    A slot with an expert below 0 adds nothing, a token with one beyond E becomes NaN. Raises ValueError for an x that is
    not bf16 and for widths that are not multiples of 16.
    """
    E, F, R = w1_EFR.values.shape
    if x_TR.dtype != torch.bfloat16 or F % 16 or R % 16:
        raise ValueError(
            f"moe_experts_fp8 takes bf16 rows and widths that are multiples of 16, got {x_TR.dtype}, {F} and {R}: "
            "convert or pad"
        )
    if experts_Tk.numel() == 0:
        return torch.zeros_like(x_TR)
    pairs = sort_pairs(experts_Tk, E)
    schedule = Schedule(pairs)
    xs = stage_fp8(x_TR, pairs)
    h_PF = grouped.gate_up(xs, w1_EFR, w3_EFR, schedule, situ_betas, tiles.gated, keeps=False)[2]
    h = quantise_rows(h_PF, pairs)
    del xs, h_PF
    return combine(grouped.rows_product(h, w2_ERF, schedule, tiles.down), weights_Tk, pairs)
