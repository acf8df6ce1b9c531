from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.report import (
    MAY_BE_NONE,
    SUMMARY,
    ReportData,
    Transcript,
    plot_comparison,
    plot_curve,
    readable,
    render_html,
    signed,
    write_report,
)
from k3core.eval.compare import compare, prompt_differences
from k3core.types import EvalReport, SamplingParams

EPISODE = (
    '<|open|>message role="user"<|sep|>What is the limit?<|close|>message<|sep|><|end_of_msg|>'
    '<|open|>message role="tool" tool="grep" index="1"<|sep|>playbook.md:4: <script>alert("x")</script> & more'
    "<|close|>message<|sep|><|end_of_msg|>"
)


def evaluation(step: int, mean: float, label: str = "policy") -> EvalReport:
    rng = np.random.default_rng(step)
    rewards = {f"p{i}": tuple(float(v) for v in np.clip(rng.normal(mean, 0.1, 2), 0, 1)) for i in range(12)}
    return EvalReport(
        run="run-1",
        step=step,
        label=label,
        suite_sha256="a" * 64,
        sampling=SamplingParams(),
        rewards=rewards,
        fractions=rewards,
        all_pass={prompt: tuple(value > 0.55 for value in row) for prompt, row in rewards.items()},
        criteria_pass_rate={"C-001": mean, "cites $4 & <b>law</b>": mean / 2},
        stop_reasons={"finished": 20, "max_turns": 4},
        mean_turns=4.5,
    )


def summary() -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(SUMMARY, 1)
    return values | {
        "versions": {"torch": "2.13.0"},
        "seconds_by_stage": {"rollout": 80.5, "update": 60.0},
        "weights_sha256": "c" * 64,
        "bytes_full": 2_000_000,
        "control_reward_after": None,
        "expert_only_reward_after": None,
    }


def report_data(**changes: Any) -> ReportData:
    data = ReportData(
        title="A run",
        summary=summary(),
        evals=[evaluation(20, 0.6), evaluation(0, 0.3)],
        control=[evaluation(20, 0.31, "control")],
        expert_only=[evaluation(20, 0.65, "expert only")],
        history={
            step: {
                "rollout/reward": 0.3 + step / 100,
                "drift/numeric/k3_rollout_trainer": 1e-9 * step,
                "staleness/mean": 0.0,
                "publish/bytes_payload": 1.2e6,
            }
            for step in range(1, 21)
        },
        before=Transcript("p3", 0, EPISODE, 0.1),
        after=Transcript("p3", 20, EPISODE, None),
        commands={"MLflow": "mlflow ui --backend-store-uri sqlite:///mlflow.db"},
    )
    return dataclasses.replace(data, **changes)


class Page(HTMLParser):
    """Collects every attribute that can make a browser fetch, and the text outside style sheets."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.targets += [
            value or "" for name, value in attrs if name.split(":")[-1] in {"src", "href", "srcset", "data"}
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_json_is_the_summary_and_has_exactly_its_keys(tmp_path: Path) -> None:
    json_path, html_path = write_report(report_data(), tmp_path / "out")
    assert json.loads(json_path.read_text()) == summary()
    assert html_path.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.html", "report.json"]


@pytest.mark.parametrize("key", sorted(SUMMARY))
def test_a_missing_key_and_a_none_are_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match=rf"missing keys \['{key}'\]"):
        report_data(summary={k: v for k, v in summary().items() if k != key})
    if key in MAY_BE_NONE:
        report_data(summary=summary() | {key: None})
    else:
        with pytest.raises(ValueError, match=rf"\['{key}'\] must have a value"):
            report_data(summary=summary() | {key: None})


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"unknown keys \['reward_afterwards'\]"):
        report_data(summary=summary() | {"reward_afterwards": 1})


def test_a_nan_in_the_summary_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_report(report_data(summary=summary() | {"reward_after": math.nan}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_write_that_fails_leaves_the_old_report_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(report_data(), tmp_path)
    before = (tmp_path / "report.json").read_text()

    def full_disk(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_report(report_data(summary=summary() | {"seed": 9}), tmp_path)
    assert (tmp_path / "report.json").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_the_page_needs_no_other_file_and_no_network() -> None:
    html = render_html(report_data())
    page = Page(html)
    assert page.tags.count("svg") == 8
    assert page.targets, "the plots refer to their own markers"
    assert all(target.startswith("#") for target in page.targets)
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    assert not re.search(r"url\((?!#)|@import|https?:", html)


def test_every_reference_inside_the_page_has_one_target() -> None:
    html = render_html(report_data())
    ids = re.findall(r'\sid="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"', html)) | set(re.findall(r"url\(#([^)]*)\)", html)) <= set(ids)


def test_what_a_model_or_a_person_wrote_is_escaped() -> None:
    html = render_html(report_data(title="<b>bold</b>"))
    assert "<script" not in html
    assert "<b>bold" not in html
    assert "<b>law" not in html
    assert Page(html).text.count('<script>alert("x")</script> & more') == 2
    assert "cites $4 & <b>law</b>" in Page(html).text


def test_the_headline_shows_before_and_after_in_order_of_step_with_the_paired_interval() -> None:
    text = " ".join(Page(render_html(report_data())).text.split())
    first, last = evaluation(0, 0.3), evaluation(20, 0.6)
    paired = compare(first, last, "reward")
    assert f"{paired.mean_a:.3f} → {paired.mean_b:.3f}" in text
    assert f"95 % interval {signed(paired.ci_low)} to {signed(paired.ci_high)}" in text
    assert "The policy improved" in text


def test_no_change_and_a_loss_are_called_so() -> None:
    same = render_html(report_data(evals=[evaluation(0, 0.3), dataclasses.replace(evaluation(0, 0.3), step=20)]))
    assert "No clear change" in same
    assert "The policy got worse" in render_html(report_data(evals=[evaluation(0, 0.6), evaluation(20, 0.3)]))


def test_a_metric_that_was_not_a_number_is_named() -> None:
    history = {1: {"rollout/reward": 0.3}, 2: {"rollout/reward": math.nan, "train/grad_norm": math.inf}}
    assert "step 2 (rollout/reward, train/grad_norm)" in render_html(report_data(history=history))
    assert "Not every metric was a number" not in render_html(report_data())


def test_a_run_without_arms_and_without_history_still_has_a_page() -> None:
    html = render_html(report_data(control=[], expert_only=[], history={}))
    assert html.count("Not recorded in this run.") == 4
    assert "control arm, which" not in html


def test_another_suite_in_an_arm_is_refused() -> None:
    other = dataclasses.replace(evaluation(20, 0.3, "control"), suite_sha256="b" * 64)
    with pytest.raises(ValueError, match="evaluate both on one suite"):
        render_html(report_data(control=[other]))


def test_the_page_is_the_same_bytes_for_the_same_data() -> None:
    assert render_html(report_data()) == render_html(report_data())


def test_the_pictures_are_png_files(tmp_path: Path) -> None:
    data = report_data()
    plot_curve(data, tmp_path / "curve.png")
    a, b = data.evals[1], data.evals[0]
    plot_comparison(compare(a, b, "reward"), prompt_differences(a, b, "reward"), tmp_path / "comparison.png")
    for name in ("curve.png", "comparison.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_numbers_read_well() -> None:
    assert signed(-0.0084) == "−0.008"
    assert readable(None) == "not measured"
    assert readable({"rollout": 80.5, "update": 1234567}) == "rollout 80.5, update 1,234,567"
    assert readable(2.10e-9) == "2.1e-09"
