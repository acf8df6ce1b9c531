"""Who decides whether a criterion is met, and what happens when nobody can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, get_args

from k3core.rewards.rubric import Criterion, RewardConfig, aggregate, parse_criteria
from k3core.types import TRUNCATED, CriterionResult, Prompt, Score, Trajectory, Verdict


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    reasoning: str


class Judge(Protocol):
    """Called once a criterion, with the text of that criterion's own deliverables by file name."""

    @property
    def id(self) -> str:
        """Changes whenever verdicts could: model, prompt, version."""

    def judge(self, criterion: Criterion, deliverables: Mapping[str, str]) -> Judgement: ...


class RuleJudge:
    """Evaluates `Criterion.check` on one deliverable of lines `field value`, split at the first space.

    {"field": "value", "equals": "45"}   the field occurs exactly once and has exactly this value
    {"fields": ["file", "value"]}        the file has exactly these lines' fields, each once, and nothing else
    A check that is missing or that it does not know: abstained.
    """

    id = "rule/1"

    def judge(self, criterion: Criterion, deliverables: Mapping[str, str]) -> Judgement:
        if len(deliverables) != 1:
            return Judgement("abstained", f"a check reads one deliverable, not {len(deliverables)}")
        ((name, text),) = deliverables.items()
        match criterion.check:
            case {"field": str(field), "equals": str(expected), **rest} if not rest:
                return _check_field(name, text, field, expected)
            case {"fields": [*fields], **rest} if not rest and all(isinstance(field, str) for field in fields):
                return _check_fields(name, text, fields)
            case _:
                return Judgement("abstained", f"no check that {self.id} knows: {criterion.check}")


def _parse_lines(text: str) -> list[tuple[str, str]]:
    """One final newline is no line; a line without a space is a field with an empty value."""
    fields = [line.partition(" ") for line in text.removesuffix("\n").split("\n")]
    return [(field, value) for field, _, value in fields]


def _check_field(name: str, text: str, field: str, expected: str) -> Judgement:
    values = [value for key, value in _parse_lines(text) if key == field]
    if len(values) != 1:
        return Judgement("fail", f"{name} has {len(values)} lines `{field}`")
    return Judgement("pass" if values[0] == expected else "fail", f"{name} has `{field} {values[0]}`")


def _check_fields(name: str, text: str, expected: list[str]) -> Judgement:
    lines = _parse_lines(text)
    if sorted(field for field, _ in lines) == sorted(expected) and all(value for _, value in lines):
        return Judgement("pass", f"{name} has the lines asked for")
    return Judgement("fail", f"{name} must have exactly the lines {', '.join(expected)}")


def grade(prompt: Prompt, trajectory: Trajectory, judge: Judge, cfg: RewardConfig) -> Score:
    """Grade what the trajectory delivered. An episode that failed for our own reasons is not graded at all.

    Of a truncated episode the criteria and the fraction say what its files deserve; cfg.unfinished decides about
    value and all_pass.
    """
    assert trajectory.prompt_id == prompt.id, f"{trajectory.prompt_id} is no trajectory of {prompt.id}"
    if trajectory.stop_reason == "infrastructure_error":
        return Score(None, None, None, (), "infrastructure_error")
    criteria = parse_criteria(prompt.hidden["criteria"], where=prompt.id)
    results = [_result(criterion, trajectory.deliverables, judge) for criterion in criteria]
    score = aggregate(results, criteria, cfg)
    if score.value is None or trajectory.stop_reason not in TRUNCATED or cfg.unfinished == "graded":
        return score
    flagged = tuple(
        replace(result, reasoning=f"{result.reasoning}; episode cut short: {trajectory.stop_reason}")
        for result in score.criteria
    )
    return replace(score, value=0.0, all_pass=False, criteria=flagged)


def _result(criterion: Criterion, delivered: Mapping[str, str], judge: Judge) -> CriterionResult:
    names = criterion.deliverables or tuple(delivered)
    missing = [name for name in names if name not in delivered]
    if missing or not names:
        return _on(criterion, Judgement("fail", f"not delivered: {missing[0] if missing else 'anything'}"))
    try:
        judgement = judge.judge(criterion, {name: delivered[name] for name in names})
    except Exception as error:  # whatever a judge raises, it gave no verdict; that is recorded, never a number
        return _on(criterion, Judgement("infrastructure_error", f"judge {judge.id}: {type(error).__name__}: {error}"))
    if not isinstance(judgement, Judgement) or judgement.verdict not in get_args(Verdict):
        # A judge's own bug: a bare True or "PASS" must not be read as a pass or a fail.
        return _on(criterion, Judgement("infrastructure_error", f"judge {judge.id}: no verdict: {judgement!r}"))
    return _on(criterion, judgement)


def _on(criterion: Criterion, judgement: Judgement) -> CriterionResult:
    return CriterionResult(criterion.id, criterion.title, judgement.verdict, judgement.reasoning)
