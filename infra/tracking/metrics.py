"""Every metric once, with its meaning; what is not listed here cannot be logged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import get_args

from k3core.types import StopReason

NONFINITE = "tracking/nonfinite"
CRITERION = "eval_criterion/"
EVALUATION = ("eval/", CRITERION)  # what compares two policies: measured on the frozen suite

_MAX_KEY = 250

DRIFT_KINDS = {
    "numeric": "of the tokens that the trainer's own weights drew",
    "stale": "of the tokens that other weights drew",
}
DIFFERENCES = {
    "tokens": "how many there are",
    "differing_tokens": "how many fp32 logprobs of engine and trainer are not equal",
    "k3_rollout_trainer": "k3 estimate of KL(engine || trainer), nat per token",
    "k3_trainer_rollout": "k3 estimate of KL(trainer || engine), nat per token",
    "abs_mean": "mean |logprob difference|, nat",
    "abs_p50": "median |logprob difference|, nat",
    "abs_p99": "99th percentile of |logprob difference|, nat",
    "abs_max": "largest |logprob difference|, nat",
}

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "rollout/reward": "mean reward of the graded trajectories",
        "rollout/fraction": "mean weighted share of passed criteria",
        "rollout/all_pass": "share of graded trajectories that pass every criterion",
        "rollout/turns": "mean turns of a trajectory",
        "rollout/tool_calls": "mean tool calls of a trajectory",
        "rollout/tokens": "mean length of a trajectory in tokens, context included",
        "rollout/truncated_fraction": "share of trajectories that a limit on turns, tokens or time ended",
        "rollout/infra_error_fraction": "share of trajectories lost to our own failures; never graded",
        "rollout/seconds": "wall-clock seconds of the rollout stage",
        "rollout/tokens_per_s": "sampled tokens per wall-clock second",
        **{f"stop/{reason}": f"share of trajectories that stopped with '{reason}'" for reason in get_args(StopReason)},
        "groups/kept": "groups that reach the loss",
        "groups/zero_variance_all_pass": "groups left out because every trajectory passed everything",
        "groups/zero_variance_all_fail": "groups left out because every trajectory got the lowest reward",
        "groups/zero_variance_other": "groups left out because all rewards are equal and in between",
        "groups/ungraded": "groups left out because too few trajectories have a grade",
        "groups/ungraded_trajectories": "trajectories without a grade, which took no part",
        "gspo/loss": "clipped surrogate, mean over sequences",
        "gspo/ratio_mean": "mean sequence ratio of policy to old policy",
        "gspo/ratio_max": "largest sequence ratio",
        "gspo/clip_fraction": "share of sequences whose gradient the clip removed",
        "gspo/dual_clip_fraction": "share of sequences under the dual clip (negative advantage, large ratio)",
        "gspo/masked_token_fraction": "share of tokens that the loss does not see",
        "gspo/tis_mean": "mean truncated importance weight, trainer against engine",
        "gspo/tis_clip_fraction": "share of importance weights at their bound",
        "train/grad_norm": "global gradient norm before clipping",
        "train/learning_rate": "learning rate of the step",
        "train/vetoed_steps": "optimizer steps refused because of a non-finite loss or gradient",
        "train/tokens": "tokens through forward and backward",
        "train/seconds": "wall-clock seconds of the update stage",
        **{
            f"drift/{kind}/{name}": f"{meaning}, {tokens}"
            for kind, tokens in DRIFT_KINDS.items()
            for name, meaning in DIFFERENCES.items()
        },
        "drift/route_missing_fraction": "share of tokens and layers without a recorded expert choice",
        "staleness/mean": "mean policy steps between sampling a trajectory and training on it",
        "staleness/max": "most policy steps between sampling a trajectory and training on it",
        "publish/bytes_payload": "bytes written for this version",
        "publish/bytes_full": "bytes of the whole weights",
        "publish/changed_fraction": "share of weight elements whose bits changed",
        "publish/canary_tokens": "tokens that the engine sampled before the version was visible, compared with the trainer",
        "publish/canary_differing": "of these, how many fp32 logprobs of engine and trainer are not equal",
        "publish/canary_max_abs": "largest |logprob difference| among them, nat",
        "publish/seconds": "wall-clock seconds of the publish stage",
        "eval/reward": "mean reward over the prompts of the suite",
        "eval/reward_stderr": "its standard error, clustered by prompt",
        "eval/fraction": "mean weighted share of passed criteria over prompts",
        "eval/all_pass": "share of samples that pass every criterion, mean over prompts",
        "eval/all_pass_stderr": "its standard error, clustered by prompt",
        "eval_criterion/<title>": "share of samples that pass this criterion",
        "tracking/nonfinite": "metrics of this step that were NaN or infinite; the tag k3.nonfinite/<step> names them",
    }
)


def check_listed(name: str) -> None:
    """Raises ValueError for a metric without a meaning."""
    if name not in METRICS and not (name.startswith(CRITERION) and len(name) > len(CRITERION)):
        raise ValueError(f"metric {name!r} is not listed in infra.tracking.METRICS: add it there with its meaning")


def by_importance(name: str) -> tuple[int, str]:
    """Sorts what a person compares first to the front: MLflow's pages begin with what was logged first."""
    areas = ("eval/reward", "eval/", CRITERION, "rollout/", "gspo/", "train/")
    return next((n for n, area in enumerate(areas) if name.startswith(area)), len(areas)), name


def metric_key(name: str) -> str:
    """Criterion ids are written by people: what MLflow refuses in a key becomes '-'."""
    return re.sub(r"[^\w\-. :/]", "-", name)[:_MAX_KEY]
