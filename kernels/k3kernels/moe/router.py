"""LatentMoE's router on a GPU: a token's experts and weights in one program, and the logits' gradient in another.

Weights are those of the current logits whoever chose the experts, in the same arithmetic: with an engine's logits a
trainer that replays its routes (arXiv 2510.11370) has the bits of its weights too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _scores_of(logits_ptr, experts, is_slot, E: tl.constexpr, RENORMALIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """sigmoid of a token's logits at its slots, NaN for an expert that there is not, and what their weights divide by."""
    is_one = is_slot & (experts >= 0) & (experts < E)
    scores = _sigmoid(tl.load(logits_ptr + experts, mask=is_one, other=0.0).to(tl.float32))
    scores = tl.where(is_one | (is_slot == 0), scores, float("nan"))
    divisor = tl.sum(tl.where(is_slot, scores, 0.0), 0) + 1e-20 if RENORMALIZE else 1.0
    return scores, divisor


@triton.jit(do_not_specialize=["scale"])
def route_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    bias_ptr,
    replay_ptr,
    experts_ptr,
    weights_ptr,
    scale,
    E: tl.constexpr,
    BE: tl.constexpr,
    SLOTS: tl.constexpr,
    BS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """One token. Scores become integers of the same order, followed by the expert's number, lower ones first: so a slot
    is one maximum. A NaN is the largest of all, as in torch."""
    GONE: tl.constexpr = -(1 << 63)
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BE)
    logits = tl.load(logits_ptr + token * E + experts, mask=experts < E, other=0.0).to(tl.float32)
    score = _sigmoid(logits) + tl.load(bias_ptr + experts, mask=experts < E, other=0.0).to(tl.float32)
    bits = tl.where(score == score, score, float("inf")).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    keys = tl.where(experts < E, ordered * BE + (BE - 1 - experts), GONE)
    slots = tl.arange(0, BS)
    chosen = tl.zeros([BS], tl.int64)
    for slot in range(SLOTS):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, GONE, keys)
        chosen = tl.where(slots == slot, BE - 1 - (best & (BE - 1)), chosen)
    is_slot = slots < SLOTS
    if replay_ptr is not None:
        replayed = tl.load(replay_ptr + token * SLOTS + slots, mask=is_slot, other=-1).to(tl.int64)
        chosen = tl.where(replayed < 0, chosen, replayed)
    scores, divisor = _scores_of(logits_ptr + token * E, chosen, is_slot, E, RENORMALIZE)
    tl.store(experts_ptr + token * SLOTS + slots, chosen, mask=is_slot)
    tl.store(weights_ptr + token * SLOTS + slots, scores / divisor * scale, mask=is_slot)


@triton.jit(do_not_specialize=["scale"])
def route_gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    experts_ptr,
    grad_ptr,
    grad_logits_ptr,
    scale,
    E: tl.constexpr,
    BE: tl.constexpr,
    SLOTS: tl.constexpr,
    BS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """One token's whole row of the logits' gradient; an expert in two of its slots gets the sum, in slot order.

    w = scale p / s with s = sum p, so dL/dp = scale / s (g - sum(g p) / s), and dp/dlogit = p (1 - p).
    """
    token = tl.program_id(0).to(tl.int64)
    columns, slots = tl.arange(0, BE), tl.arange(0, BS)
    is_slot = slots < SLOTS
    chosen = tl.load(experts_ptr + token * SLOTS + slots, mask=is_slot, other=-1)
    grad = tl.load(grad_ptr + token * SLOTS + slots, mask=is_slot, other=0.0)
    scores, divisor = _scores_of(logits_ptr + token * E, chosen, is_slot, E, RENORMALIZE)
    if RENORMALIZE:
        grad -= tl.sum(tl.where(is_slot, grad * scores, 0.0), 0) / divisor
    of_slot = grad / divisor * scale * scores * (1 - scores)
    row = tl.zeros([BE], tl.float32)
    for slot in range(SLOTS):
        expert = tl.sum(tl.where(slots == slot, chosen, 0), 0)
        row += tl.where(columns == expert, tl.sum(tl.where(slots == slot, of_slot, 0.0), 0), 0.0)
    tl.store(grad_logits_ptr + token * E + columns, row, mask=columns < E)


def route(
    logits_TE: Tensor,
    selection_bias_E: Tensor,
    k: int,
    renormalize: bool,
    scale: float,
    replay_Tk: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.route`: experts [T, k] int64, best first and equal scores by number; weights fp32, with a gradient.

    logits fp32. Kept for it are the logits and the experts, with a replay as without. A replayed expert beyond E makes its
    token's weights NaN. Raises ValueError for more than E slots and for other types and shapes.
    """
    T, E = logits_TE.shape
    if logits_TE.dtype != torch.float32 or not 0 < k <= E:
        raise ValueError(
            f"route takes fp32 logits and 1 to {E} slots, got {logits_TE.dtype} and {k}: convert or choose less"
        )
    if replay_Tk is not None and (replay_Tk.shape != (T, k) or replay_Tk.dtype.is_floating_point):
        raise ValueError(f"route replays integers {(T, k)}, got {replay_Tk.dtype} {tuple(replay_Tk.shape)}")
    experts_Tk, weights_Tk = _Route.apply(
        logits_TE, selection_bias_E, k, renormalize and k > 1, float(scale), replay_Tk
    )
    return experts_Tk, weights_Tk


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE, bias_E, k, renormalize, scale, replay_Tk):  # type: ignore[no-untyped-def]
        T, E = logits_TE.shape
        logits_TE = logits_TE.contiguous()
        experts_Tk = torch.empty(T, k, dtype=torch.int64, device=logits_TE.device)
        weights_Tk = torch.empty(T, k, dtype=torch.float32, device=logits_TE.device)
        if T:
            route_kernel[(T,)](
                logits_TE,
                bias_E.contiguous(),
                None if replay_Tk is None else replay_Tk.contiguous(),
                experts_Tk,
                weights_Tk,
                scale,
                **_options(E, k, renormalize),
            )
        ctx.save_for_backward(logits_TE, experts_Tk)
        ctx.rule = renormalize, scale
        ctx.mark_non_differentiable(experts_Tk)
        return experts_Tk, weights_Tk

    @staticmethod
    def backward(ctx: Any, _: Tensor, grad_Tk: Tensor):  # type: ignore[no-untyped-def]
        logits_TE, experts_Tk = ctx.saved_tensors
        renormalize, scale = ctx.rule
        (T, E), k = logits_TE.shape, experts_Tk.shape[1]
        grad_TE = torch.empty_like(logits_TE)
        if T:
            route_gradient_kernel[(T,)](
                logits_TE, experts_Tk, grad_Tk.contiguous(), grad_TE, scale, **_options(E, k, renormalize)
            )
        return grad_TE, None, None, None, None, None


def _options(E: int, k: int, renormalize: bool) -> dict[str, int]:
    """Of both kernels alike, so that they add the scores alike."""
    block = triton.next_power_of_2(E)
    sizes = {"E": E, "BE": block, "SLOTS": k, "BS": triton.next_power_of_2(k), "RENORMALIZE": renormalize}
    return {**sizes, "num_warps": 1 if block <= 256 else 4}
