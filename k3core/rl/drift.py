"""Train-rollout drift at equal weights: how far the trainer's logprobs are from the engine's."""

from __future__ import annotations

import numpy as np


def drift(trainer_logprobs_M: np.ndarray, rollout_logprobs_M: np.ndarray) -> dict[str, float]:
    """Per-token means of Schulman's k3 in both directions and quantiles of |difference|; no clamping.

    Tokens are drawn from the engine (mu). k3(mu||pi) = r - 1 - log r with r = pi/mu is unbiased for them; the other
    direction is the importance-weighted estimate r log r - (r - 1). Empty input gives an empty dict, not zeros.
    """
    if len(trainer_logprobs_M) == 0:
        return {}
    delta = trainer_logprobs_M.astype(np.float64) - rollout_logprobs_M.astype(np.float64)
    ratio_minus_1 = np.expm1(delta)
    p50, p99 = np.quantile(np.abs(delta), [0.5, 0.99])
    return {
        "drift/k3_rollout_trainer": float(np.mean(ratio_minus_1 - delta)),
        "drift/k3_trainer_rollout": float(np.mean((1 + ratio_minus_1) * delta - ratio_minus_1)),
        "drift/abs_p50": float(p50),
        "drift/abs_p99": float(p99),
        "drift/abs_max": float(np.abs(delta).max()),
    }
