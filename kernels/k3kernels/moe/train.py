"""Routed experts forward and backward, in kernels: every gradient, nothing that waits for the device, no atomic adds.

Kept for the backward pass are gate and up of each pair and the inputs as they came; rows in the experts' order, h and the
result's rows are made again. A pair's weight is applied to h instead of its result's gradient, so that gradient is staged
as it is, and the weight's own gradient, grad . w2_e h = (w2_e^T grad) . h, falls out of the product that is needed anyway.

Forward rounds where the reference does; tanh and sigmoid are of the accuracy that bf16 sees. Backward rounds once a tensor:
the gradients of gate and up, weight h, a pair's input gradient, and the results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.linear.triton import check_types
from k3kernels.moe import grouped, hopper
from k3kernels.moe.grouped import OURS, Betas, Products, Schedule, Tiles, pick_tiles
from k3kernels.moe.pairs import Pairs, combine, of_pairs, sort_pairs, stage, unstage

FEW_ROWS = 256  # of an expert on average: matrices take longer to read than to multiply, which `hopper` does sooner


def takes(*matrices: object) -> bool:
    """Whether `moe_experts_train` can run: contiguous stacks, of widths that are multiples of 16 bytes, where there is TMA:
    on Hopper or newer."""
    return all(
        isinstance(w, Tensor)
        and w.is_contiguous()
        and all(n * w.element_size() % 16 == 0 for n in w.shape[1:])
        and (not w.is_cuda or torch.cuda.get_device_capability(w.device) >= (9, 0))
        for w in matrices
    )


def moe_experts_train(
    x_TR: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    w1_EFR: Tensor,
    w3_EFR: Tensor,
    w2_ERF: Tensor,
    situ_betas: Betas,
    products: Products | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """`reference.moe_experts` [T, R] with the gradients of x, weights and the three matrices that require one.

    x and the matrices bf16 or fp32, experts an integer type; R and F multiples of 16 bytes. A slot with an expert below 0
    adds nothing, a token with one beyond E becomes NaN. Raises ValueError for other types, widths and layouts.
    """
    check_types(x_TR, w1_EFR, w3_EFR, w2_ERF)
    matrices = (w1_EFR, w3_EFR, w2_ERF)
    if not all(w.is_contiguous() for w in matrices):
        raise ValueError("moe_experts_train takes contiguous stacks of matrices: call .contiguous() on them once")
    step = 16 // x_TR.element_size()
    if w1_EFR.shape[1] % step or w1_EFR.shape[2] % step:
        raise ValueError(
            f"moe_experts_train takes widths that are multiples of {step}, got {tuple(w1_EFR.shape[1:])}: pad"
        )
    if x_TR.shape[0] == 0 or experts_Tk.shape[1] == 0:
        return x_TR * (0 * (weights_Tk.sum() + sum(w.sum() for w in matrices))).to(x_TR.dtype)
    rows_per_expert = experts_Tk.numel() // w1_EFR.shape[0]
    tiles = tiles or pick_tiles(rows_per_expert, x_TR.dtype)
    pairs = sort_pairs(experts_Tk, w1_EFR.shape[0])
    if products is None:
        is_few = rows_per_expert <= FEW_ROWS and x_TR.dtype == torch.bfloat16 and hopper.takes(matrices)
        products = hopper.in_training(pairs) if is_few else OURS
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (x_TR, weights_Tk, *matrices)):
        return _forward(x_TR, weights_Tk, *matrices, pairs, situ_betas, products, tiles, False)[0]
    out: Tensor = _Experts.apply(x_TR, weights_Tk, *matrices, pairs, situ_betas, products, tiles)
    return out


def _forward(
    x_TR: Tensor,
    weights_Tk: Tensor,
    w1_EFR: Tensor,
    w3_EFR: Tensor,
    w2_ERF: Tensor,
    pairs: Pairs,
    betas: Betas,
    products: Products,
    tiles: Tiles,
    keeps: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out [T, R], and gate and up [P, F] where they are kept."""
    schedule = Schedule(pairs)
    xs_PR = stage(x_TR, pairs)
    if products.gated is None:
        gate_PF, up_PF, h_PF = grouped.gate_up(xs_PR, w1_EFR, w3_EFR, schedule, betas, tiles.gated, keeps)
    else:
        gate_PF, up_PF, h_PF = products.gated(xs_PR, w1_EFR, w3_EFR, pairs, betas, keeps)
    del xs_PR
    if products.down is None:
        ys_PR = grouped.rows_product(h_PF, w2_ERF, schedule, tiles.down)
    else:
        ys_PR = products.down(h_PF, w2_ERF, pairs)
    del h_PF
    return combine(ys_PR, weights_Tk, pairs), gate_PF, up_PF


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, w1, w3, w2, pairs, betas, products, tiles):  # type: ignore[no-untyped-def]
        out, gate, up = _forward(x, weights, w1, w3, w2, pairs, betas, products, tiles, True)
        ctx.save_for_backward(x, weights, w1, w3, w2, gate, up)
        ctx.pairs, ctx.betas, ctx.products, ctx.tiles = pairs, betas, products, tiles
        return out

    @staticmethod
    def backward(ctx, grad_TR):  # type: ignore[no-untyped-def]
        x, weights, w1, w3, w2, gate, up = ctx.saved_tensors
        pairs, products, tiles = ctx.pairs, ctx.products, ctx.tiles
        needs_x, needs_weights, needs_w1, needs_w3, needs_w2 = ctx.needs_input_grad[:5]
        schedule = Schedule(pairs)

        def weights_gradient(y: Tensor, x: Tensor | None) -> Tensor:
            assert x is not None
            if products.weights is not None:
                return products.weights(y, x, pairs)
            return grouped.weights_gradient(y, x, pairs, tiles.weights)

        grad_PR = stage(grad_TR, pairs)
        if products.hidden is None:
            grad_h = grouped.inputs_gradient(grad_PR, w2, schedule, tiles.hidden)
        else:
            grad_h = products.hidden(grad_PR, w2, pairs)
        hidden = grouped.activate_backward(grad_h, weights, gate, up, pairs, ctx.betas)
        del grad_h
        grad_gate, grad_up = hidden.gate_PF, hidden.up_PF
        grad_w2 = weights_gradient(grad_PR, hidden.weighted_h_PF) if needs_w2 else None
        grad_weights = of_pairs(hidden.weights_P, pairs).to(weights.dtype) if needs_weights else None
        del hidden, grad_PR
        xs_PR = stage(x, pairs) if needs_w1 or needs_w3 else None
        grad_w1 = weights_gradient(grad_gate, xs_PR) if needs_w1 else None
        grad_w3 = weights_gradient(grad_up, xs_PR) if needs_w3 else None
        del xs_PR
        grad_x = None
        if needs_x:
            if products.inputs is None:
                grad_xs = grouped.inputs_gradient(grad_gate, w1, schedule, tiles.inputs, (grad_up, w3))
            else:
                grad_xs = products.inputs(grad_gate, w1, grad_up, w3, pairs)
            grad_x = unstage(grad_xs, pairs)
        return grad_x, grad_weights, grad_w1, grad_w3, grad_w2, None, None, None, None
