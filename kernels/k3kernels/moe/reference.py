"""LatentMoE's router and experts. The selection bias chooses, it never weighs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.dtypes import at_least_fp32
from k3kernels.moe.matrices import NO_LORA, ExpertLora, LoraPair, Matrices
from k3kernels.situ.reference import situ

FP8_MAX = 448.0  # e4m3's largest


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
    w1_EFR: Matrices,
    w3_EFR: Matrices,
    w2_ERF: Matrices,
    situ_betas: tuple[float, float | None] | None,
    lora: ExpertLora = NO_LORA,
) -> Tensor:
    """sum_k weight_k expert_k(x), weights applied after the down projection, summed in at least fp32, rounded once.

    The sum runs in slot order. situ_betas are SiTU's (beta, linear_beta); None is SiLU (Kimi-Linear).
    """
    wide = at_least_fp32(x_TR.dtype)
    T, k = experts_Tk.shape
    y_TkR = x_TR.new_zeros(T, k, x_TR.shape[1])
    for e in range(w1_EFR.shape[0]):
        token, slot = (experts_Tk == e).nonzero(as_tuple=True)
        x_eR = x_TR[token]
        gate_eF, up_eF = _project(x_eR, w1_EFR[e], lora[0], e), _project(x_eR, w3_EFR[e], lora[1], e)
        h_eF = F.silu(gate_eF) * up_eF if situ_betas is None else situ(gate_eF, up_eF, *situ_betas)
        y_TkR = y_TkR.index_put((token, slot), _project(h_eF, w2_ERF[e], lora[2], e))
    out_TR = torch.zeros_like(x_TR, dtype=wide)
    for s in range(k):
        out_TR = out_TR + weights_Tk[:, s, None].to(wide) * y_TkR[:, s].to(wide)
    return out_TR.to(x_TR.dtype)


def moe_experts_fp8(
    x_TR: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    w1_EFR: Tensor,
    w3_EFR: Tensor,
    w2_ERF: Tensor,
    situ_betas: tuple[float, float | None] | None,
    hidden: float | None,
) -> Tensor:
    """`moe_experts` with its products in e4m3, of rows and matrices of x's type, and its gradients, straight through.

    Rows have a scale each, matrices one an output channel (backward an input channel, common to w1 and w3); h has the scale
    `hidden`, or is rounded and has one a row where that is None. Rounded to x's type are gate, up, SiLU, y, and backward the
    gradients of h, gate and up, the latter two before they are quantised.
    """
    wide = at_least_fp32(x_TR.dtype)
    T, k = experts_Tk.shape
    y_TkR = torch.zeros(T, k, x_TR.shape[1], dtype=wide, device=x_TR.device)
    for e in range(w1_EFR.shape[0]):
        token, slot = (experts_Tk == e).nonzero(as_tuple=True)
        ones_P = torch.ones_like(token, dtype=wide)
        gate_up = Fp8Product.apply(x_TR[token], torch.cat((w1_EFR[e], w3_EFR[e])), ones_P, None).to(x_TR.dtype)
        gate_eF, up_eF = gate_up.to(wide).chunk(2, -1)
        if situ_betas is None:
            silu_eF = F.silu(gate_eF)
            h_eF = (silu_eF + (silu_eF.to(x_TR.dtype) - silu_eF).detach()) * up_eF
        else:
            h_eF = situ(gate_eF, up_eF, *situ_betas)
        y_eR = Fp8Product.apply(h_eF, w2_ERF[e], weights_Tk[token, slot].to(wide), hidden)
        y_TkR = y_TkR.index_put((token, slot), y_eR)
    out_TR = torch.zeros_like(x_TR, dtype=wide)
    for s in range(k):
        out_TR = out_TR + y_TkR[:, s]
    return out_TR.to(x_TR.dtype)


class Fp8Product(torch.autograd.Function):
    """weight round(q(x) q(w)^T) of rows and their weights, wide; x has this scale, or is rounded and has one a row.

    Backward, of a row's gradient g: d = round(q(g) q(w^T)^T) is x's before the weight, and x . d the weight's own; w's is
    g^T round(weight x), which nothing quantises.
    """

    @staticmethod
    def forward(ctx, x, w, weight, scale):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, w, weight)
        y = quantised(x.to(w.dtype) if scale is None else x, scale) @ quantised(w).T
        return weight[:, None] * y.to(w.dtype)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        x, w, weight = ctx.saved_tensors
        d = (quantised(g) @ quantised(w.T).T).to(w.dtype).to(g.dtype)
        grad_w = g.T @ (weight[:, None] * x).to(w.dtype).to(g.dtype)
        return (weight[:, None] * d).to(x.dtype), grad_w.to(w.dtype), (x.to(w.dtype) * d).sum(-1), None


def quantised(x: Tensor, scale: float | None = None) -> Tensor:
    """x as e4m3 represents it, wide: with this scale, beyond whose 448 is 448, or with one a row, of its largest value."""
    x = x.to(at_least_fp32(x.dtype))
    scales = x.abs().amax(-1, keepdim=True) / FP8_MAX if scale is None else torch.full_like(x[..., :1], scale)
    divided = x / torch.where(scales == 0, 1, scales)
    return divided.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype) * scales


def _project(x: Tensor, weight_OI: Tensor, lora: LoraPair | None, e: int) -> Tensor:
    """x W^T, rounded, plus scale (x A^T) B^T: A and B in x's type, x A^T rounded, the rest in at least fp32."""
    y = x @ weight_OI.T
    if lora is None:
        return y
    wide = at_least_fp32(x.dtype)
    z = x @ lora.A_ErI[e].to(x.dtype).T
    return (y.to(wide) + lora.scale * (z.to(wide) @ lora.B_EOr[e].to(x.dtype).to(wide).T)).to(x.dtype)
