"""Group baselines. Groups that teach nothing are left out and counted by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from k3core.types import ScoredGroup, Trajectory

# Values are sums of weights, so equal ones may differ in the last bits (0.1 + 0.2 and 0.3); dividing that by its own
# standard deviation would turn rounding into advantages of +-1.
SAME_VALUE = 1e-9


@dataclass(frozen=True, slots=True)
class Advantaged:
    """A trajectory with its advantage: what an update consumes."""

    trajectory: Trajectory
    advantage: float


@dataclass(frozen=True, slots=True)
class Advantages:
    """kept: trajectories of groups with variance, in order. counts by kind of group and ungraded trajectories."""

    kept: tuple[Advantaged, ...]
    counts: dict[str, int]


def group_advantages(groups: Sequence[ScoredGroup], normalize_std: bool) -> Advantages:
    """(value - mean) [/ population std] within each group over graded trajectories.

    Ungraded trajectories (value None) take no part in the mean. A group of equal values has no gradient: it leaves the
    sum and the denominator and is counted as zero_variance_all_pass, _all_fail or _other; fewer than two graded
    trajectories count as `ungraded` groups.
    """
    kept: list[Advantaged] = []
    counts: Counter[str] = Counter(
        kept=0, zero_variance_all_pass=0, zero_variance_all_fail=0, zero_variance_other=0, ungraded=0
    )
    counts["ungraded_trajectories"] = sum(score.value is None for group in groups for score in group.scores)
    for group in groups:
        graded = [(t, s) for t, s in zip(group.trajectories, group.scores, strict=True) if s.value is not None]
        values = np.array([s.value for _, s in graded], dtype=np.float64)
        if len(graded) < 2:
            counts["ungraded"] += 1
        elif np.ptp(values) < SAME_VALUE:
            kind = "all_pass" if all(s.all_pass for _, s in graded) else "all_fail" if not values.any() else "other"
            counts[f"zero_variance_{kind}"] += 1
        else:
            counts["kept"] += 1
            advantages = values - values.mean()
            if normalize_std:
                advantages /= values.std()
            kept += [Advantaged(t, float(a)) for (t, _), a in zip(graded, advantages, strict=True)]
    return Advantages(tuple(kept), dict(counts))
