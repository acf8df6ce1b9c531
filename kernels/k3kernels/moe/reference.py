"""LatentMoE's router and experts. The selection bias chooses, it never weighs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.situ.reference import situ


def route(
    logits_TE: Tensor,
    selection_bias_E: Tensor,
    k: int,
    renormalize: bool,
    scale: float,
    replay_Tk: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chosen experts [T, k] and their weights [T, k], fp32.

    p = sigmoid(logits); the k largest of p + bias are chosen; their weights are p alone, renormalised and scaled.
    replay_Tk (router replay, arXiv 2510.11370) imposes recorded experts; a row of it below 0 has none and chooses
    for itself. Weights always come from the current logits, so gradients reach the router.
    """
    p_TE = torch.sigmoid(logits_TE)
    experts_Tk = torch.topk(p_TE.detach() + selection_bias_E, k, dim=-1).indices
    if replay_Tk is not None:
        experts_Tk = torch.where(replay_Tk < 0, experts_Tk, replay_Tk)
    weights_Tk = p_TE.gather(1, experts_Tk)
    if renormalize and k > 1:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20)
    return experts_Tk, weights_Tk * scale


def moe_experts(
    x_TR: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    w1_EFR: Tensor,
    w3_EFR: Tensor,
    w2_ERF: Tensor,
    situ_betas: tuple[float, float | None] | None,
) -> Tensor:
    """sum_k weight_k expert_k(x), weights applied after the down projection, summed in at least fp32, rounded once.

    situ_betas are SiTU's (beta, linear_beta); None is SiLU (Kimi-Linear).
    """
    wide = torch.promote_types(x_TR.dtype, torch.float32)
    out_TR = torch.zeros_like(x_TR, dtype=wide)
    for e in range(w1_EFR.shape[0]):
        token, slot = (experts_Tk == e).nonzero(as_tuple=True)
        x_eR = x_TR[token]
        gate_eF, up_eF = x_eR @ w1_EFR[e].T, x_eR @ w3_EFR[e].T
        h_eF = F.silu(gate_eF) * up_eF if situ_betas is None else situ(gate_eF, up_eF, *situ_betas)
        y_eR = h_eF @ w2_ERF[e].T
        out_TR = out_TR.index_add(0, token, weights_Tk[token, slot, None].to(wide) * y_eR.to(wide))
    return out_TR.to(x_TR.dtype)
