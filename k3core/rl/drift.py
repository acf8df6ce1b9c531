"""Train-rollout drift, split by cause: numeric at equal weights, stale where older weights drew the token."""

from __future__ import annotations

import numpy as np


def drift(
    trainer_logprobs_M: np.ndarray, rollout_logprobs_M: np.ndarray, policy_step_M: np.ndarray, policy_step: int
) -> dict[str, float]:
    """`differences` of the tokens that the trainer's own weights drew, under "drift/numeric/", and of all others, under
    "drift/stale/". A kind without tokens is absent.

    trainer_logprobs_M are those of version `policy_step`, before any optimizer step; policy_step_M the version that drew
    each token. Stale differences are numeric ones and those of the weights together.
    """
    is_current_M = policy_step_M == policy_step
    return {
        f"drift/{kind}/{name}": value
        for kind, of in (("numeric", is_current_M), ("stale", ~is_current_M))
        for name, value in differences(trainer_logprobs_M[of], rollout_logprobs_M[of]).items()
    }


def differences(trainer_logprobs_M: np.ndarray, rollout_logprobs_M: np.ndarray) -> dict[str, float]:
    """Per-token means of Schulman's k3 in both directions, mean and quantiles of |difference| in nat, and how many
    tokens there are and differ as fp32; no clamping. Empty input gives an empty dict, not zeros.

    Tokens are drawn from the engine (mu). k3(mu||pi) = r - 1 - log r with r = pi/mu is unbiased for them; the other
    direction is the importance-weighted estimate r log r - (r - 1).
    """
    if len(trainer_logprobs_M) == 0:
        return {}
    delta = trainer_logprobs_M.astype(np.float64) - rollout_logprobs_M.astype(np.float64)
    ratio_minus_1 = np.expm1(delta)
    p50, p99 = np.quantile(np.abs(delta), [0.5, 0.99])
    differs_M = trainer_logprobs_M.astype(np.float32) != rollout_logprobs_M.astype(np.float32)
    return {
        "tokens": float(len(delta)),
        "differing_tokens": float(differs_M.sum()),
        "k3_rollout_trainer": float(np.mean(ratio_minus_1 - delta)),
        "k3_trainer_rollout": float(np.mean((1 + ratio_minus_1) * delta - ratio_minus_1)),
        "abs_mean": float(np.abs(delta).mean()),
        "abs_p50": float(p50),
        "abs_p99": float(p99),
        "abs_max": float(np.abs(delta).max()),
    }
