"""GSPO (arXiv 2507.18071): a sequence-level ratio, clipped on both sides, averaged over sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GspoConfig:
    """clip_low/clip_high: the sequence ratio is kept in [1-low, 1+high].

    dual_clip: for negative advantages the loss is bounded by dual_clip * |advantage|; None is off.
    mask_ratio_above: tokens whose policy/old ratio exceeds it leave the sum and the denominator; None is off.
    tis_cap: upper bound of the truncated importance weight old/rollout; None is off.
    """

    clip_low: float = field(default=0.01, metadata={"description": "the sequence ratio is kept above 1 - this"})
    clip_high: float = field(default=0.015, metadata={"description": "the sequence ratio is kept below 1 + this"})
    dual_clip: float | None = field(
        default=None, metadata={"description": "bound of the loss for negative advantages, in units of the advantage"}
    )
    mask_ratio_above: float | None = field(
        default=8.0, metadata={"description": "tokens whose ratio exceeds it take no part"}
    )
    tis_cap: float | None = field(
        default=2.0, metadata={"description": "upper bound of the importance weight, trainer against engine"}
    )


def gspo_loss(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    advantages_N: Tensor,
    loss_mask_T: Tensor,
    seq_T: Tensor,
    num_sequences: int,
    cfg: GspoConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Minus the clipped surrogate, summed over these sequences and divided by `num_sequences` (eq. 5, GSPO-token form).

    With l_t = policy - old over the kept tokens of sequence i, s_i = exp(mean_t l_t); each kept token contributes
    w_t min(s_i A_i, clip(s_i) A_i) / |y_i| with the gradient s_i A_i w_t grad log pi_t / |y_i|. Kept: in the mask and
    not above mask_ratio_above, which is decided first, so |y_i| counts kept tokens only. w_t = min(old/rollout, cap)
    corrects engine against trainer at equal weights; it is no part of the ratio, so it is never clipped as staleness.
    num_sequences is the optimizer step's, so micro-batches add up; a sequence without kept tokens adds no gradient.
    The metrics are sums and counts, to be added over micro-batches; `gspo/ratio_max` is to be maximised.
    """
    N = advantages_N.shape[0]
    with torch.no_grad():
        log_ratio_T = policy_logprobs_T - old_logprobs_T
        kept_T = loss_mask_T
        if cfg.mask_ratio_above is not None:
            kept_T = kept_T & ~(log_ratio_T.exp() > cfg.mask_ratio_above)  # a NaN is kept: the loss must show it
        count_N = _sum_by_sequence(kept_T.to(log_ratio_T.dtype), seq_T, N)
        has_tokens_N = count_N > 0
        ratio_N = (_sum_by_sequence(torch.where(kept_T, log_ratio_T, 0.0), seq_T, N) / count_N.clamp(min=1)).exp()
        tis_T = torch.ones_like(log_ratio_T)
        if cfg.tis_cap is not None:
            tis_T = (old_logprobs_T - rollout_logprobs_T).exp().clamp(max=cfg.tis_cap)

    # s_i carries the value, each kept token's own logprob carries the gradient; what is not kept is never multiplied,
    # so that an infinity there (padding, an underflowed probability) reaches neither.
    ratio_T = ratio_N[seq_T] * torch.where(kept_T, policy_logprobs_T - policy_logprobs_T.detach(), 0.0).exp()
    advantage_T = advantages_N[seq_T]
    surrogate_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * advantage_T)
    if cfg.dual_clip is not None:
        bounded_T = torch.maximum(surrogate_T, cfg.dual_clip * advantage_T)
        surrogate_T = torch.where(advantage_T < 0, bounded_T, surrogate_T)
    per_token_T = torch.where(kept_T, tis_T * surrogate_T, 0.0) / count_N.clamp(min=1)[seq_T]
    loss = -per_token_T.sum() / num_sequences

    with torch.no_grad():
        above_N, below_N = ratio_N > 1 + cfg.clip_high, ratio_N < 1 - cfg.clip_low
        clipped_N = ((advantages_N > 0) & above_N | (advantages_N < 0) & below_N) & has_tokens_N
        dual_N = torch.zeros_like(clipped_N)
        if cfg.dual_clip is not None:
            dual_N = (advantages_N < 0) & (ratio_N > cfg.dual_clip) & has_tokens_N
        metrics = {
            "num_sequences": has_tokens_N.sum(),
            "num_tokens": loss_mask_T.sum(),
            "loss": loss.detach(),
            "ratio_sum": ratio_N[has_tokens_N].sum(),
            "ratio_max": ratio_N[has_tokens_N].max() if has_tokens_N.any() else ratio_N.new_zeros(()),
            "num_clipped": clipped_N.sum(),
            "num_dual_clipped": dual_N.sum(),
            "num_masked_tokens": (loss_mask_T & ~kept_T).sum(),
            "tis_sum": tis_T[loss_mask_T].sum(),
            "num_tis_clipped": (tis_T[loss_mask_T] == (cfg.tis_cap or float("inf"))).sum(),
        }
    return loss, metrics


def _sum_by_sequence(x_T: Tensor, seq_T: Tensor, N: int) -> Tensor:
    return x_T.new_zeros(N).index_add(0, seq_T, x_T)
