from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3core.envs.contracts import generate
from k3core.rewards.rubric import Criterion, RewardConfig, aggregate, parse_criteria
from k3core.types import CriterionResult, Score, Verdict

CFG = RewardConfig()
CONTRACT = parse_criteria(generate(0, 0, "train").hidden["criteria"], where="test")


def criterion(id: str, **fields: Any) -> Criterion:
    return Criterion(**{"id": id, "title": id, "match_criteria": "", "deliverables": ("memo.md",), **fields})


def score(criteria: tuple[Criterion, ...] | list[Criterion], *verdicts: Verdict, cfg: RewardConfig = CFG) -> Score:
    results = [CriterionResult(c.id, c.title, v, "why") for c, v in zip(criteria, verdicts, strict=True)]
    return aggregate(results, criteria, cfg)


def test_the_value_mixes_fraction_and_all_pass_as_worked_by_hand() -> None:
    three = [criterion("a", weight=1), criterion("b", weight=2), criterion("c", weight=5)]
    got = score(three, "pass", "pass", "fail")
    assert (got.fraction, got.all_pass) == (3 / 8, False)
    assert got.value == pytest.approx(0.8 * 3 / 8)
    assert score(three, "pass", "pass", "pass").value == 1.0
    assert score(three, "fail", "fail", "fail").value == 0.0
    assert score(three, "pass", "pass", "fail", cfg=RewardConfig(all_pass_weight=0.5)).value == 0.5 * 3 / 8


def test_a_contract_memo_about_the_wrong_file_earns_only_its_delivery() -> None:
    got = score(CONTRACT, "fail", "pass", "pass", "pass", "pass", "pass")
    assert [result.verdict for result in got.criteria] == ["fail"] * 5 + ["pass"]
    assert got.value == pytest.approx(0.8 / 6)
    assert got.criteria[1].reasoning == "why; counts only with C-001"


def test_the_right_verdict_for_a_wrong_value_does_not_count() -> None:
    got = score(CONTRACT, "pass", "pass", "fail", "pass", "pass", "pass")
    assert [result.verdict for result in got.criteria] == ["pass", "pass", "fail", "fail", "pass", "pass"]


@pytest.mark.parametrize("broken", range(6))
def test_one_missing_verdict_leaves_no_number_anywhere(broken: int) -> None:
    for verdict in ("abstained", "infrastructure_error"):
        verdicts: list[Verdict] = ["pass"] * 6
        verdicts[broken] = verdict
        got = score(CONTRACT, *verdicts)
        assert (got.value, got.fraction, got.all_pass, got.reason) == (None, None, None, verdict)
        assert got.criteria[broken].verdict == verdict


def test_our_own_fault_is_the_reason_even_beside_an_abstention() -> None:
    got = score(CONTRACT, "abstained", "infrastructure_error", *["fail"] * 4)
    assert got.reason == "infrastructure_error"


def test_critical_criteria_alone_decide_all_pass_and_none_gives_nothing_away() -> None:
    marked = [criterion("a", critical=True), criterion("b")]
    assert score(marked, "pass", "fail").all_pass is True
    assert score(marked, "fail", "pass").all_pass is False
    unmarked = [criterion("a"), criterion("b")]
    assert score(unmarked, "pass", "fail").all_pass is False


def test_a_penalty_takes_away_but_never_below_zero() -> None:
    criteria = [criterion("a", weight=2), criterion("bad", weight=-5), criterion("c", weight=2)]
    assert score(criteria, "pass", "fail", "pass").value == 1.0
    assert score(criteria, "pass", "pass", "pass").value == 0.0
    assert score([criteria[0], criterion("bad", weight=-1)], "pass", "pass").fraction == 0.5
    assert score([criteria[0], criterion("bad", weight=-1)], "pass", "pass").all_pass is False


@given(verdicts=st.lists(st.sampled_from(["pass", "fail"]), min_size=6, max_size=6), index=st.integers(0, 5))
def test_one_more_pass_never_lowers_the_value(verdicts: list[Verdict], index: int) -> None:
    before = score(CONTRACT, *verdicts)
    verdicts[index] = "pass"
    after = score(CONTRACT, *verdicts)
    assert before.value is not None
    assert after.value is not None
    assert 0 <= before.value <= after.value <= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": 1}, r"x: criteria\[0\]\.id: Input should be a valid string"),
        ({"critical": "false"}, r"x: criteria\[0\]\.critical: Input should be a valid boolean"),
        ({"critical": 1}, r"x: criteria\[0\]\.critical: Input should be a valid boolean"),
        ({"weight": True}, r"x: criteria\[0\]\.weight: "),
        ({"weight": 0}, "x: criteria: none has a positive weight"),
        ({"requires": ["C-001"]}, r"x: criteria\[0\]\.requires: must name criteria above it"),
        ({"match_criteria": None}, r"x: criteria\[0\]\.match_criteria: Input should be a valid string"),
    ],
)
def test_wrong_criteria_are_refused_naming_the_key(changes: dict[str, Any], message: str) -> None:
    row = {"id": "C-001", "title": "t", "match_criteria": "m", "deliverables": ["memo.md"], **changes}
    with pytest.raises(ValueError, match=message):
        parse_criteria([row], where="x")


def test_wrong_reward_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reward\.all_pass_weight"):
        RewardConfig(all_pass_weight=1.5)
    with pytest.raises(ValueError, match=r"reward\.unfinished"):
        RewardConfig(unfinished="drop")  # type: ignore[arg-type]
