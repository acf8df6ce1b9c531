"""From verdicts on criteria to a score."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from k3core.types import CriterionResult, Score


@dataclass(frozen=True, slots=True)
class Criterion:
    """One thing that is asked of the deliverables (file names; empty means everything that was delivered).

    weight: below 0 is a penalty, which applies when the criterion passes.
    critical: if any criterion of a rubric is, `all_pass` asks only for those; else for all.
    check: what a RuleJudge evaluates; None leaves the criterion to a model.
    requires: ids of earlier criteria without which a pass does not count.
    """

    id: str
    title: str
    match_criteria: str
    deliverables: tuple[str, ...]
    weight: float = 1.0
    critical: bool = False
    sources: tuple[str, ...] = ()
    check: dict[str, Any] | None = None
    requires: tuple[str, ...] = ()


_CRITERION = TypeAdapter(Criterion)


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """value = (1 - all_pass_weight) * fraction + all_pass_weight * all_pass.

    unfinished: an episode that a limit cut short gets value 0 and no all_pass ("zero"), or what its files deserve
    ("graded"). Either way its stop reason is counted.
    """

    all_pass_weight: float = field(
        default=0.2, metadata={"description": "weight of passing every criterion, against the share of criteria"}
    )
    unfinished: Literal["zero", "graded"] = field(
        default="zero", metadata={"description": "what an episode gets that a limit cut short"}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.all_pass_weight <= 1:
            raise ValueError(f"reward.all_pass_weight: must lie in 0..1, not {self.all_pass_weight}")
        if self.unfinished not in ("zero", "graded"):
            raise ValueError(f'reward.unfinished: must be "zero" or "graded", not {self.unfinished!r}')


def parse_criteria(rows: Sequence[Mapping[str, Any]], where: str) -> tuple[Criterion, ...]:
    """Rows as JSON has them; keys that are not ours are ignored. Raises ValueError naming `where`, row and key."""
    criteria: list[Criterion] = []
    for n, row in enumerate(rows):
        try:
            criterion = _CRITERION.validate_json(json.dumps(row), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(("", *(str(part) for part in first["loc"])))
            raise ValueError(f"{where}: criteria[{n}]{key}: {first['msg']}") from None
        seen = {earlier.id for earlier in criteria}
        if criterion.id in seen:
            raise ValueError(f"{where}: criteria[{n}].id: {criterion.id} occurs twice")
        if not seen.issuperset(criterion.requires):
            raise ValueError(f"{where}: criteria[{n}].requires: must name criteria above it")
        criteria.append(criterion)
    if not any(criterion.weight > 0 for criterion in criteria):
        raise ValueError(f"{where}: criteria: none has a positive weight")
    return tuple(criteria)


def aggregate(results: Sequence[CriterionResult], criteria: Sequence[Criterion], cfg: RewardConfig) -> Score:
    """One result a criterion, in order. A single missing verdict leaves the score without a value."""
    assert [result.id for result in results] == [criterion.id for criterion in criteria]
    verdicts = {result.verdict for result in results}
    if "infrastructure_error" in verdicts:
        return Score(None, None, None, tuple(results), "infrastructure_error")
    if "abstained" in verdicts:
        return Score(None, None, None, tuple(results), "abstained")

    counted: dict[str, CriterionResult] = {}
    for result, criterion in zip(results, criteria, strict=True):
        lacking = [other for other in criterion.requires if counted[other].verdict == "fail"]
        if result.verdict == "pass" and lacking:
            result = replace(result, verdict="fail", reasoning=f"{result.reasoning}; counts only with {lacking[0]}")
        counted[criterion.id] = result

    earned = sum(criterion.weight for criterion in criteria if counted[criterion.id].verdict == "pass")
    fraction = max(0.0, earned) / sum(criterion.weight for criterion in criteria if criterion.weight > 0)
    decisive = [criterion for criterion in criteria if criterion.critical] or criteria
    all_pass = all((counted[criterion.id].verdict == "pass") == (criterion.weight >= 0) for criterion in decisive)
    value = (1 - cfg.all_pass_weight) * fraction + cfg.all_pass_weight * all_pass
    return Score(value, fraction, all_pass, tuple(counted.values()))
