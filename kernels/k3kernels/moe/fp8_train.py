"""Routed experts forward and backward in fp8: the forward and the inputs' gradients in e4m3, the matrices' in bf16.

Forward is `fp8.py`'s; gate and up are kept in bf16. Backward multiplies gradients' rows, with a scale a row, by matrices that
were quantised along their other axis, with a scale an input channel: Hopper's fp8 products sum along both operands' rows.
The gradients of gate and up lie beside each other with one scale for both, so their product with w1 and w3 is one. A pair's
weight is applied behind the product with w2, as in `train.py`, so the result's gradient is quantised once a token.

Straight through: quantising has the gradient 1. The matrices' gradients come from unquantised bf16 rows: of x, of the
result's gradient, of weight h (made again from gate and up) and of the gradients of gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from k3kernels.linear.triton import INTERPRETED
from k3kernels.moe import grouped, hopper
from k3kernels.moe.fp8 import (
    FP8_TILES,
    Hidden,
    check_rows,
    gate_up,
    quantise_gated,
    quantise_matrices,
    resolved,
    stage_fp8,
)
from k3kernels.moe.fp8_kernels import gated_gradient_fp8_kernel
from k3kernels.moe.grouped import Betas, Product, Scaled, Schedule, Tiles, pick_tiles
from k3kernels.moe.pairs import Pairs, combine, of_pairs, sort_pairs, stage, unstage
from k3kernels.moe.reference import FP8_MAX
from k3kernels.moe.train import FEW_ROWS
from k3kernels.situ.triton import kind_of


@dataclass(frozen=True, slots=True)
class Fp8Matrices:
    """The bf16 matrices that are trained, [E, F, R] and [E, R, F], and what they are multiplied as: along their inputs
    forward, along their outputs (w1's and w3's beside each other) backward."""

    w1_EFR: Tensor
    w3_EFR: Tensor
    w2_ERF: Tensor
    forward_w13: Scaled  # of `quantise_gated`
    forward_w2_ERF: Scaled
    backward_w13_ERF: Scaled  # [E, R, 2F]
    backward_w2_EFR: Scaled

    @classmethod
    def of(cls, w1_EFR: Tensor, w3_EFR: Tensor, w2_ERF: Tensor) -> Fp8Matrices:
        """To be made again after each optimizer step."""
        forward = quantise_gated(w1_EFR, w3_EFR), quantise_matrices(w2_ERF)
        backward = quantise_matrices(w1_EFR.mT, w3_EFR.mT), quantise_matrices(w2_ERF.mT)
        return cls(w1_EFR, w3_EFR, w2_ERF, *forward, *backward)


def moe_experts_fp8_train(
    x_TR: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    matrices: Fp8Matrices,
    situ_betas: Betas,
    tiles: Tiles | None = None,
    hidden: Hidden = None,
    weights_product: Product | None = None,
) -> Tensor:
    """`reference.moe_experts_fp8` [T, R] with the gradients of x, weights and the three bf16 matrices that require one.

    x and the matrices bf16, experts an integer type; hidden as of `fp8.moe_experts_fp8`, whose output this has to the bit. A
    slot with an expert below 0 adds nothing, a token with one beyond E becomes NaN. weights_product: another product in bf16
    for the matrices' gradients, as of `grouped.Products`. Raises ValueError for other types, and for widths that are not
    multiples of 16.
    """
    trained = (matrices.w1_EFR, matrices.w3_EFR, matrices.w2_ERF)
    E, F, R = matrices.w1_EFR.shape
    check_rows(x_TR, F, R)
    if any(w.dtype != torch.bfloat16 for w in trained):
        raise ValueError(f"fp8 experts are trained as bf16 matrices, got {[w.dtype for w in trained]}: convert them")
    scale = resolved(hidden, situ_betas)
    if experts_Tk.numel() == 0:
        return x_TR * (0 * (weights_Tk.sum() + sum(w.sum() for w in trained))).to(x_TR.dtype)
    rows_per_expert = experts_Tk.numel() // E
    if tiles is None:
        tiles = replace(FP8_TILES, weights=pick_tiles(rows_per_expert, torch.bfloat16).weights)
    pairs = sort_pairs(experts_Tk, E)
    if weights_product is None and rows_per_expert <= FEW_ROWS and hopper.takes(trained):
        weights_product = hopper.in_training(pairs).weights
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (x_TR, weights_Tk, *trained)):
        return _forward(x_TR, weights_Tk, matrices, pairs, situ_betas, scale, tiles, False)[0]
    out: Tensor = _Experts.apply(x_TR, weights_Tk, *trained, matrices, pairs, situ_betas, scale, tiles, weights_product)
    return out


def _forward(
    x_TR: Tensor,
    weights_Tk: Tensor,
    matrices: Fp8Matrices,
    pairs: Pairs,
    betas: Betas,
    scale: float | None,
    tiles: Tiles,
    keeps: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out [T, R], and gate and up [P, F] where they are kept."""
    schedule, F = Schedule(pairs), matrices.w1_EFR.shape[1]
    xs = stage_fp8(x_TR, pairs)
    gate_PF, up_PF, h = gate_up(xs, matrices.forward_w13, F, schedule, betas, scale, tiles.gated, keeps)
    del xs
    ys_PR = grouped.rows_product(h, matrices.forward_w2_ERF, schedule, tiles.down)
    del h
    return combine(ys_PR, weights_Tk, pairs), gate_PF, up_PF


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, _w1, _w3, _w2, matrices, pairs, betas, scale, tiles, product):  # type: ignore[no-untyped-def]
        out, gate, up = _forward(x, weights, matrices, pairs, betas, scale, tiles, True)
        ctx.save_for_backward(x, weights, gate, up)
        ctx.matrices, ctx.pairs, ctx.betas, ctx.tiles, ctx.product = matrices, pairs, betas, tiles, product
        return out

    @staticmethod
    def backward(ctx, grad_TR):  # type: ignore[no-untyped-def]
        x, weights, gate, up = ctx.saved_tensors
        matrices, pairs, tiles = ctx.matrices, ctx.pairs, ctx.tiles
        needs_x, needs_weights, needs_w1, needs_w3, needs_w2 = ctx.needs_input_grad[:5]
        schedule = Schedule(pairs)

        def weights_gradient(y: Tensor | None, x: Tensor | None) -> Tensor:
            assert x is not None
            assert y is not None
            if ctx.product is not None:
                return ctx.product(y, x, pairs)
            return grouped.weights_gradient(y, x, pairs, tiles.weights)

        grad_h = grouped.rows_product(stage_fp8(grad_TR, pairs), matrices.backward_w2_EFR, schedule, tiles.hidden)
        keeps = needs_w1 or needs_w3 or needs_w2
        hidden = activate_backward(grad_h, weights, gate, up, pairs, ctx.betas, keeps)
        del grad_h, gate, up
        grad_weights = of_pairs(hidden.weights_P, pairs).to(weights.dtype) if needs_weights else None
        grad_x = None
        if needs_x:
            grad_xs = grouped.rows_product(hidden.both, matrices.backward_w13_ERF, schedule, tiles.inputs)
            grad_x = unstage(grad_xs, pairs)
            del grad_xs
        grad_gate, grad_up, weighted_h = hidden.gate_PF, hidden.up_PF, hidden.weighted_h_PF
        del hidden
        grad_w2 = weights_gradient(stage(grad_TR, pairs), weighted_h) if needs_w2 else None
        del weighted_h
        xs_PR = stage(x, pairs) if needs_w1 or needs_w3 else None
        grad_w1 = weights_gradient(grad_gate, xs_PR) if needs_w1 else None
        grad_w3 = weights_gradient(grad_up, xs_PR) if needs_w3 else None
        return grad_x, grad_weights, grad_w1, grad_w3, grad_w2, None, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class HiddenGradient:
    """Sorted rows: gate's gradients beside up's in e4m3 [P, 2F], with a scale a row; both, and weight h, in bf16 [P, F] (None
    where not kept); and by place the gradient of a pair's weight."""

    both: Scaled
    gate_PF: Tensor | None
    up_PF: Tensor | None
    weighted_h_PF: Tensor | None
    weights_P: Tensor


def activate_backward(
    grad_PF: Tensor, weights_Tk: Tensor, gate_PF: Tensor, up_PF: Tensor, pairs: Pairs, betas: Betas, keeps: bool
) -> HiddenGradient:
    """grad_PF: the gradient of h for a result that is not weighted."""
    (P, F), device = gate_PF.shape, gate_PF.device
    both = Scaled(
        torch.empty(P, 2 * F, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(P, dtype=torch.float32, device=device),
    )
    of_gate, of_up, weighted_h = (torch.empty_like(gate_PF) if keeps else None for _ in range(3))
    weights_P = torch.empty(P, dtype=torch.float32, device=device)
    block = triton.next_power_of_2(F)
    gated_gradient_fp8_kernel[(P,)](
        *(grad_PF, weights_Tk.contiguous(), pairs.order_P, gate_PF, up_PF),
        *(both.values, both.scale, of_gate, of_up, weighted_h, weights_P, pairs.edges, F, *grouped._numbers(betas)),
        E=pairs.num_experts,
        KIND=kind_of(betas),
        BLOCK=block,
        MAX=FP8_MAX,
        INTERPRETED=INTERPRETED,
        num_warps=min(16, max(4, block // 256)),  # 8 values a thread, as one load has
    )
    return HiddenGradient(both, of_gate, of_up, weighted_h, weights_P)
