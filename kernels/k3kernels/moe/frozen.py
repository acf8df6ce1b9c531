"""Routed experts whose matrices are not trained, stored as MXFP4 or bf16, with LoRA pairs that are: forward and backward.

The second factor of a pair is multiplied in the product's own accumulator, its scale folded in, so y is rounded once with
both. Kept for the backward pass are gate, up, x A^T, and the factors rounded. A pair's weight is applied to h rather than to its result's
gradient, as in `train`: grad . (w2 h) = (w2^T grad) . h gives the weight's gradient without the result's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.moe import grouped, hopper
from k3kernels.moe.grouped import Betas, GroupedTile
from k3kernels.moe.hopper import DEPTH, LowRank
from k3kernels.moe.matrices import NO_LORA, ExpertLora, Matrices
from k3kernels.moe.pairs import Pairs, combine, of_pairs, sort_pairs, stage, unstage


def takes(x_TR: Tensor, matrices: Sequence[Matrices]) -> bool:
    """Whether `moe_experts_frozen` can run: bf16, and what `hopper` multiplies with."""
    return x_TR.dtype == torch.bfloat16 and hopper.takes(matrices)


def moe_experts_frozen(
    x_TR: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    w1_EFR: Matrices,
    w3_EFR: Matrices,
    w2_ERF: Matrices,
    situ_betas: Betas,
    lora: ExpertLora = NO_LORA,
    products_of: Callable[[Pairs], hopper.Products] = hopper.Products.of,
) -> Tensor:
    """`reference.moe_experts` [T, R], bf16, with the gradients of x, the weights and LoRA's factors, none of the matrices.

    The three are stored alike. A slot with an expert below 0 adds nothing, a token with one beyond E becomes NaN. LoRA's
    factors are rounded to bf16, B after it is scaled; their gradients are sums in fp32, in the factors' type.
    """
    pairs = sort_pairs(experts_Tk, w1_EFR.shape[0])
    factors = [x for pair in lora for x in ((None, None) if pair is None else (pair.A_ErI, pair.B_EOr))]
    scales = [0.0 if pair is None else pair.scale for pair in lora]
    matrices, products = (w1_EFR, w3_EFR, w2_ERF), products_of(pairs)
    out: Tensor = _Experts.apply(x_TR, weights_Tk, *factors, matrices, scales, pairs, products, situ_betas)
    return out


A_GRADIENT, B_GRADIENT = GroupedTile(64, 256, 64, 4, 3), GroupedTile(128, 64, 64, 4, 3)  # one side is the rank


class _Pair:
    """One LoRA pair in x's type, its rank padded with zeros: z = x A^T, and y has z B^T added, B scaled."""

    def __init__(
        self, A_ErI: Tensor, B_EOr: Tensor, scale: float, padded_rank: int, like: Tensor, pairs: Pairs
    ) -> None:
        self.rank, self.scale, self.pairs = A_ErI.shape[1], scale, pairs
        self.dtypes = A_ErI.dtype, B_EOr.dtype
        self.A = A_ErI.to(like.dtype)
        self.B = torch.mul(B_EOr, scale, out=torch.empty_like(B_EOr, dtype=like.dtype))
        if missing := padded_rank - self.rank:
            self.A, self.B = F.pad(self.A, (0, 0, 0, missing)), F.pad(self.B, (0, missing))

    def down(self, x_PI: Tensor) -> Tensor:
        return grouped.torch_product(x_PI, self.A, self.pairs)

    def up_gradient(self, grad_y_PO: Tensor) -> Tensor:
        """z's gradient."""
        return grouped.torch_inputs_gradient(grad_y_PO, self.B, self.pairs)

    def factors_gradient(self, grad_y: Tensor, z: Tensor, grad_z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of A and B, sums in fp32 rounded to the factors' types; zeros where an expert has no rows."""
        tiles = (A_GRADIENT, B_GRADIENT) if x.dtype == torch.bfloat16 else [grouped.pick_tiles(0, x.dtype).weights] * 2
        grad_A = grouped.weights_gradient(grad_z, x, self.pairs, tiles[0], self.dtypes[0])
        grad_B = grouped.weights_gradient(grad_y, z * self.scale, self.pairs, tiles[1], self.dtypes[1])
        return grad_A[:, : self.rank], grad_B[..., : self.rank]


def _stack(
    factors: Sequence[Tensor | None], scales: Sequence[float], shape: Sequence[int], like: Tensor, pairs: Pairs
) -> list[_Pair]:
    """The pairs above a stack of matrices of one shape (E, out, in), A and B of each in turn: none, or one for each, of
    zeros where a matrix has none."""
    As, Bs = factors[::2], factors[1::2]
    ranks = [A.shape[1] for A in As if A is not None]
    if not ranks:
        return []
    E, outer, inner = shape
    padded = -(-max(ranks) // DEPTH) * DEPTH
    return [
        _Pair(
            like.new_zeros(E, 1, inner) if A is None else A,
            like.new_zeros(E, outer, 1) if B is None else B,
            *(scale, padded, like, pairs),
        )
        for A, B, scale in zip(As, Bs, scales, strict=True)
    ]


def _above(stack: list[_Pair], zs: Sequence[Tensor]) -> LowRank | None:
    return LowRank(zs, [pair.B for pair in stack]) if stack else None


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, A1, B1, A3, B3, A2, B2, matrices, scales, pairs, products, betas):  # type: ignore[no-untyped-def]
        w1, w3, w2 = matrices
        wide = _stack((A1, B1, A3, B3), scales[:2], w1.shape, x, pairs)
        down = _stack((A2, B2), scales[2:], w2.shape, x, pairs)
        rows = stage(x, pairs)
        zs = [pair.down(rows) for pair in wide]
        gate, up, h = products.gated(rows, w1, w3, betas, True, _above(wide, zs))
        del rows
        ys = products.product(h, w2, _above(down, [pair.down(h) for pair in down]))
        ctx.save_for_backward(x, weights, gate, up, *zs)
        ctx.rest = matrices, wide, down, pairs, products, betas
        return combine(ys, weights, pairs)

    @staticmethod
    def backward(ctx, grad_TR):  # type: ignore[no-untyped-def]
        x, weights, gate, up, *zs = ctx.saved_tensors
        (w1, w3, w2), wide, down, pairs, products, betas = ctx.rest
        grads: list[Tensor | None] = [None] * 6  # of A1, B1, A3, B3, A2, B2

        def back(stack, grad_ys, matrices):  # type: ignore[no-untyped-def]
            """The gradients of z, and of the rows that went into the stack."""
            grad_zs = [pair.up_gradient(y) for pair, y in zip(stack, grad_ys, strict=bool(stack))]
            low_rank = LowRank(grad_zs, [pair.A for pair in stack]) if stack else None
            return grad_zs, products.inputs_gradient(grad_ys, matrices, low_rank)

        grad_rows = stage(grad_TR, pairs)
        grad_zs, grad_h = back(down, [grad_rows], (w2,))
        hidden = grouped.activate_backward(grad_h, weights, gate, up, pairs, betas)
        grad_ys, h, weights_P = [hidden.gate_PF, hidden.up_PF], hidden.weighted_h_PF, hidden.weights_P
        del grad_h, hidden
        for pair, grad_z in zip(down, grad_zs, strict=True):
            grads[4:] = pair.factors_gradient(grad_rows, pair.down(h), grad_z, h)
        del grad_rows, h

        grad_zs, grad_xs = back(wide, grad_ys, (w1, w3))
        grad_x = unstage(grad_xs, pairs) if ctx.needs_input_grad[0] else None
        del grad_xs
        rows = stage(x, pairs) if wide else x
        for i, (pair, y, z, grad_z) in enumerate(zip(wide, grad_ys if wide else (), zs, grad_zs, strict=True)):
            grads[2 * i : 2 * i + 2] = pair.factors_gradient(y, z, grad_z, rows)
        wanted = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad[2:8], strict=True)]
        grad_weights = of_pairs(weights_P, pairs).to(weights.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weights, *wanted, None, None, None, None, None
