"""LatentMoE: router and experts."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from k3kernels.dispatch import uses_kernel
from k3kernels.moe import eager, reference
from k3kernels.moe.matrices import NO_LORA as NO_LORA
from k3kernels.moe.matrices import ExpertLora as ExpertLora
from k3kernels.moe.matrices import LoraPair as LoraPair
from k3kernels.moe.matrices import Matrices as Matrices
from k3kernels.moe.matrices import PackedMatrices as PackedMatrices
from k3kernels.two_forms import forward_and_gradient


def route(
    logits_TE: Tensor,
    selection_bias_E: Tensor,
    k: int,
    renormalize: bool,
    scale: float,
    replay_Tk: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    if replay_Tk is not None or not uses_kernel(logits_TE):
        return reference.route(logits_TE, selection_bias_E, k, renormalize, scale, replay_Tk)
    from k3kernels.moe import triton  # where there is no GPU, Triton need not be installed

    rule = (selection_bias_E, k, renormalize, scale)
    experts_Tk, weights_Tk = triton.route(logits_TE.detach(), *rule)

    def gradient(logits_TE: Tensor) -> Tensor:
        return reference.route(logits_TE, *rule, experts_Tk)[1]

    return experts_Tk, forward_and_gradient(lambda _: weights_Tk, gradient, logits_TE)


def moe_experts(
    x_TR: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    w1_EFR: Matrices,
    w3_EFR: Matrices,
    w2_ERF: Matrices,
    situ_betas: tuple[float, float | None] | None,
    lora: ExpertLora = NO_LORA,
) -> Tensor:
    """See the reference. The kernel takes stacked matrices without LoRA; others are computed eagerly."""
    matrices = (w1_EFR, w3_EFR, w2_ERF)
    if not uses_kernel(x_TR) or lora != NO_LORA or not all(isinstance(w, Tensor) for w in matrices):
        return eager.moe_experts(x_TR, experts_Tk, weights_Tk, *matrices, situ_betas, lora)
    from k3kernels.moe import triton

    def form(run: object, x: Tensor, weights: Tensor, *matrices: Tensor) -> Tensor:
        assert callable(run)
        out: Tensor = run(x, experts_Tk, weights, *matrices, situ_betas)
        return out

    forms = (partial(form, triton.moe_experts), partial(form, eager.moe_experts))
    return forward_and_gradient(*forms, x_TR, weights_Tk, *(w for w in matrices if isinstance(w, Tensor)))
