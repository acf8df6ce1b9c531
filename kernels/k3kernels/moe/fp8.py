"""Routed experts forward in fp8: e4m3 with a scale a row of activations and a scale an output channel of each matrix.

Rows are quantised once a token, while they are copied to their places. h leaves the product of gate and up in e4m3 where one
scale for all of it is known beforehand; else it comes in bf16 and gets a scale a row in a pass of its own. The products add
in the tensor cores' own accumulators ("fast accumulation"). Without gradients: those are `fp8_train.py`'s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

import torch
import triton
from torch import Tensor

from k3kernels.linear.triton import INTERPRETED, rows_of
from k3kernels.moe import grouped
from k3kernels.moe.fp8_kernels import GROUP, gated_fp8_kernel, quantise_rows_kernel, stage_fp8_kernel
from k3kernels.moe.grouped import Betas, GroupedTile, Scaled, Schedule, Tiles
from k3kernels.moe.pairs import Pairs, combine, sort_pairs
from k3kernels.moe.reference import FP8_MAX
from k3kernels.situ.triton import kind_of

ROWS: Final = "rows"
Hidden = float | Literal["rows"] | None  # how h is scaled: `moe_experts_fp8`

_ROWS = GroupedTile(128, 256, 128, 8, 4, is_flat=True)  # twice as deep as bf16's: a value has half the bytes
FP8_TILES = Tiles(replace(_ROWS, columns=128, is_flat=False), _ROWS, _ROWS, _ROWS, _ROWS)


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


def quantise_matrices(*stacks_ENK: Tensor) -> Scaled:
    """A matrix of every expert, with a scale for each output channel; several beside each other are one of all their columns
    [E, N, K1 + K2 ..]. Once, where they are loaded, or once an optimizer step; an expert at a time."""
    E, N, _ = stacks_ENK[0].shape
    K, device = sum(w.shape[2] for w in stacks_ENK), stacks_ENK[0].device
    values = torch.empty(E, N, K, dtype=torch.float8_e4m3fn, device=device)
    scale_EN = torch.empty(E, N, dtype=torch.float32, device=device)
    for e in range(E):
        w_NK = torch.cat([w[e].detach().float() for w in stacks_ENK], 1)
        scale_EN[e] = w_NK.abs().amax(-1) / FP8_MAX
        values[e].copy_(w_NK / scale_EN[e].clamp(min=torch.finfo(torch.float32).tiny)[:, None])
    return Scaled(values, scale_EN)


def quantise_gated(w1_EFR: Tensor, w3_EFR: Tensor) -> Scaled:
    """Both as the product of gate and up takes them, [E, 2G, R]: 64 rows of w1 and the same of w3 in turn. G is F rounded up
    to 64s, with rows of zeros."""
    (E, F, R), group = w1_EFR.shape, GROUP.value
    G = triton.cdiv(F, group) * group
    values = torch.zeros(E, 2 * G, R, dtype=torch.float8_e4m3fn, device=w1_EFR.device)
    scale = torch.zeros(E, 2 * G, dtype=torch.float32, device=w1_EFR.device)
    for i, w_EFR in enumerate((w1_EFR, w3_EFR)):
        one = quantise_matrices(w_EFR)
        rows = torch.arange(F, device=w1_EFR.device)
        rows = rows // group * (2 * group) + i * group + rows % group
        values.view(torch.uint8)[:, rows] = one.values.view(torch.uint8)
        scale[:, rows] = one.scale
    return Scaled(values, scale)


def hidden_scale(situ_betas: Betas) -> float | None:
    """h's scale in e4m3 where h has a bound: SiTU's, beta times linear_beta, becomes the largest value. None where it has
    none."""
    beta, linear_beta = situ_betas or (None, None)
    return None if beta is None or linear_beta is None else beta * linear_beta / FP8_MAX


def resolved(hidden: Hidden, situ_betas: Betas) -> float | None:
    """The scale of all of h; None where each row gets its own."""
    if hidden == ROWS:
        return None
    scale = hidden_scale(situ_betas) if hidden is None else float(hidden)
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"h's scale is {scale}: give one above 0, or 'rows'")
    return scale


def check_rows(x_TR: Tensor, F: int, R: int) -> None:
    """Raises ValueError for what fp8 experts do not take."""
    if x_TR.dtype != torch.bfloat16 or F % 16 or R % 16:
        raise ValueError(
            f"fp8 experts take bf16 rows and widths that are multiples of 16, got {x_TR.dtype}, {F} and {R}: "
            "convert or pad"
        )


def gate_up(
    xs: Scaled,
    w13: Scaled,
    F: int,
    schedule: Schedule,
    betas: Betas,
    scale: float | None,
    tile: GroupedTile,
    keeps: bool,
) -> tuple[Tensor | None, Tensor | None, Scaled]:
    """gate and up [P, F] in bf16 (None where not kept), and h in e4m3 with this scale, or with one a row where None."""
    (P, R), device = xs.values.shape, xs.values.device
    h_PF = torch.empty(P, F, dtype=torch.bfloat16 if scale is None else torch.float8_e4m3fn, device=device)
    gate_PF, up_PF = (torch.empty(P, F, dtype=torch.bfloat16, device=device) if keeps else None for _ in range(2))
    gated_fp8_kernel[schedule.grid(tile, F)](
        *grouped._descriptors(tile.depth, (xs.values, tile.rows), (w13.values, 2 * tile.columns)),
        *(xs.scale, w13.scale),
        *(h_PF if gate_PF is None else gate_PF, h_PF if up_PF is None else up_PF, h_PF),
        *(schedule.table(tile), schedule.pairs.edges, F, R, *grouped._numbers(betas), 1 / (scale or 1.0)),
        KIND=kind_of(betas),
        KEEPS=keeps,
        **grouped._options(tile),
    )
    return gate_PF, up_PF, quantise_rows(h_PF, schedule.pairs) if scale is None else Scaled(h_PF, scale)


def moe_experts_fp8(
    x_TR: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    w13: Scaled,
    w2: Scaled,
    situ_betas: Betas,
    tiles: Tiles = FP8_TILES,
    hidden: Hidden = None,
) -> Tensor:
    """`reference.moe_experts_fp8` [T, R] in bf16, of bf16 x, w13 of `quantise_gated` and w2 of `quantise_matrices`; without
    autograd.

    hidden: the scale of h in e4m3, one for all of it; "rows": a scale a row, in a pass of its own; None: the scale that the
    activation's bound gives (`hidden_scale`), or "rows" where it has none, as SiLU. With a scale s, values beyond 448 s
    become that, which a bound excludes; relative precision is e4m3's down to s / 64, and what is below s / 1024 becomes 0:
    at K3's bound of 100 those are 3.5e-3 and 2.2e-4. So a row of which nothing is above that adds nothing, where "rows"
    would keep it.

    A slot with an expert below 0 adds nothing, a token with one beyond E becomes NaN. Raises ValueError for an x that is
    not bf16, for widths that are not multiples of 16, and for a scale that is not above 0.
    """
    E, R, F = w2.values.shape
    check_rows(x_TR, F, R)
    scale = resolved(hidden, situ_betas)
    if experts_Tk.numel() == 0:
        return torch.zeros_like(x_TR)
    pairs = sort_pairs(experts_Tk, E)
    schedule = Schedule(pairs)
    xs = stage_fp8(x_TR, pairs)
    h = gate_up(xs, w13, F, schedule, situ_betas, scale, tiles.gated, keeps=False)[2]
    del xs
    return combine(grouped.rows_product(h, w2, schedule, tiles.down), weights_Tk, pairs)
