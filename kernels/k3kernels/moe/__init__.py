"""LatentMoE: router and experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from k3kernels.dispatch import is_batch_invariant, uses_kernel
from k3kernels.moe import eager, reference
from k3kernels.moe.matrices import NO_LORA as NO_LORA
from k3kernels.moe.matrices import ExpertLora as ExpertLora
from k3kernels.moe.matrices import LoraPair as LoraPair
from k3kernels.moe.matrices import Matrices as Matrices
from k3kernels.moe.matrices import PackedMatrices as PackedMatrices
from k3kernels.two_forms import forward_and_gradient

FEW_ROWS = 16  # of an expert on average, up to which matrices are streamed through small tiles


def route(
    logits_TE: Tensor,
    selection_bias_E: Tensor,
    k: int,
    renormalize: bool,
    scale: float,
    replay_Tk: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the reference. Computed again under activation checkpointing, with the first pass's experts as replay_Tk, a
    layer keeps what it kept the first time."""
    rule = (selection_bias_E, k, renormalize, scale, replay_Tk)
    if not uses_kernel(logits_TE):
        return reference.route(logits_TE, *rule)
    from k3kernels.moe import router  # where there is no GPU, Triton need not be installed

    return router.route(logits_TE, *rule)


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
    """See the reference.

    On a GPU stacked matrices without LoRA are multiplied in kernels: forward and backward in bf16 (`train`), by `triton`
    forward where bits must not depend on the batch, rows are few or fp32. MXFP4 and LoRA pairs are `frozen`'s, in bf16 and
    where bits may depend on the batch. What no kernel takes is computed eagerly.
    """
    matrices = (w1_EFR, w3_EFR, w2_ERF)
    stacked = tuple(w for w in matrices if isinstance(w, Tensor))
    is_plain = len(stacked) == len(matrices) and lora == NO_LORA
    if not uses_kernel(x_TR) or (is_batch_invariant() and not is_plain):
        return eager.moe_experts(x_TR, experts_Tk, weights_Tk, *matrices, situ_betas, lora)
    from k3kernels.moe import frozen, train, triton  # where there is no GPU, Triton need not be installed

    if is_plain:
        takes_bf16 = x_TR.dtype == torch.bfloat16 and train.takes(*matrices)
        is_training = torch.is_grad_enabled() and any(x.requires_grad for x in (x_TR, weights_Tk, *stacked))
        has_many = experts_Tk.numel() > FEW_ROWS * w1_EFR.shape[0]
        if takes_bf16 and not is_batch_invariant() and (is_training or has_many):
            w1, w3, w2 = stacked
            return train.moe_experts_train(x_TR, experts_Tk, weights_Tk, w1, w3, w2, situ_betas)

        def form(run: Callable[..., Tensor], x: Tensor, weights: Tensor, *stacked: Tensor) -> Tensor:
            return run(x, experts_Tk, weights, *stacked, situ_betas)

        gradient = train.moe_experts_train if takes_bf16 else eager.moe_experts
        forms = (partial(form, triton.moe_experts), partial(form, gradient))
        return forward_and_gradient(*forms, x_TR, weights_Tk, *stacked)
    if not (torch.is_grad_enabled() and any(w.requires_grad for w in stacked)) and frozen.takes(x_TR, matrices):
        return frozen.moe_experts_frozen(x_TR, experts_Tk, weights_Tk, *matrices, situ_betas, lora)
    return eager.moe_experts(x_TR, experts_Tk, weights_Tk, *matrices, situ_betas, lora)
