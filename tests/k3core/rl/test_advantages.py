from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from k3core.rl.advantages import group_advantages
from k3core.types import Score, ScoredGroup, Trajectory

MakeGroup = Callable[..., ScoredGroup]


@pytest.fixture
def make_group(make_trajectory: Callable[..., Trajectory]) -> MakeGroup:
    """A group of these values; all_pass is a value of 1. None is a trajectory that nobody could grade."""

    def make(*values: float | None) -> ScoredGroup:
        trajectories = tuple(make_trajectory(seed) for seed in range(len(values)))
        scores = [
            Score(None, None, None, (), "infrastructure_error") if v is None else Score(v, v, v == 1, ())
            for v in values
        ]
        return ScoredGroup("prompt", trajectories, tuple(scores))

    return make


def counts(**changed: int) -> dict[str, int]:
    names = ("kept", "zero_variance_all_pass", "zero_variance_all_fail", "zero_variance_other", "ungraded")
    return dict.fromkeys((*names, "ungraded_trajectories"), 0) | changed


def test_an_advantage_is_the_distance_from_the_groups_mean(make_group: MakeGroup) -> None:
    result = group_advantages([make_group(0.0, 1.0, 0.5, 0.1), make_group(0.2, 0.4)], normalize_std=False)
    assert [item.advantage for item in result.kept] == pytest.approx([-0.4, 0.6, 0.1, -0.3, -0.1, 0.1])
    assert result.counts == counts(kept=2)


def test_a_normalised_advantage_is_in_population_standard_deviations(make_group: MakeGroup) -> None:
    kept = group_advantages([make_group(0.0, 0.0, 1.0, 0.0)], normalize_std=True).kept
    std = math.sqrt(0.25 * 0.75)
    assert [item.advantage for item in kept] == pytest.approx([-0.25 / std, -0.25 / std, 0.75 / std, -0.25 / std])


def test_a_trajectory_that_nobody_graded_takes_no_part_and_is_no_zero(make_group: MakeGroup) -> None:
    group = make_group(1.0, None, 0.0, 0.5, None)
    result = group_advantages([group], normalize_std=False)
    assert [item.trajectory for item in result.kept] == [group.trajectories[i] for i in (0, 2, 3)]
    assert [item.advantage for item in result.kept] == pytest.approx([0.5, -0.5, 0.0])
    assert result.counts == counts(kept=1, ungraded_trajectories=2)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ((1.0, 1.0, None), "zero_variance_all_pass"),
        ((0.0, 0.0, 0.0), "zero_variance_all_fail"),
        ((0.4, 0.4), "zero_variance_other"),
        ((0.1 + 0.2, 0.3), "zero_variance_other"),  # equal rewards that were added up in another order
        ((1.0, None), "ungraded"),
        ((None, None), "ungraded"),
    ],
)
def test_a_group_that_teaches_nothing_is_left_out_and_counted_by_kind(
    make_group: MakeGroup, values: tuple[float | None, ...], kind: str
) -> None:
    teaching = make_group(0.0, 1.0)
    result = group_advantages([make_group(*values), teaching], normalize_std=True)
    assert [item.trajectory for item in result.kept] == list(teaching.trajectories)
    assert result.counts == counts(kept=1, ungraded_trajectories=values.count(None)) | {kind: 1}


def test_a_batch_without_variance_keeps_nothing(make_group: MakeGroup) -> None:
    result = group_advantages([make_group(1.0, 1.0), make_group(0.0, 0.0)], normalize_std=True)
    assert result.kept == ()
    assert result.counts == counts(zero_variance_all_pass=1, zero_variance_all_fail=1)


def test_a_group_whose_scores_do_not_match_its_trajectories_is_refused(make_group: MakeGroup) -> None:
    group = make_group(0.0, 1.0)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        group_advantages([ScoredGroup("prompt", group.trajectories[:1], group.scores)], normalize_std=True)
