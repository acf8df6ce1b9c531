from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flows import bench_against
from flows.bench_against import Pair, PairError, Turn, compare

BEFORE = [Turn(1, 4.0, 800, ["a"], {"temperature": 1.0}, "w"), Turn(2, 6.0, 600, ["b"], {"temperature": 1.0}, "w")]
NOW = [
    Turn(1, 2.0, 1000, ["a"], {"temperature": 1.0, "min_p": 0.0}, "w"),
    Turn(2, 2.0, 600, ["b"], {"temperature": 1.0, "min_p": 0.0}, "w", other_cores=0.5),
]


def test_a_ratio_is_of_one_attempt_and_the_median_is_over_the_attempts() -> None:
    pair = Pair(BEFORE, NOW)
    assert (pair.speed_up.median, pair.speed_up.lowest, pair.speed_up.highest) == (2.5, 2.0, 3.0)
    assert pair.token_speed_up.median == (500 / 200 + 300 / 100) / 2
    assert pair.fastest == 2.0
    assert str(pair.speed_up) == "2.50, from 2.00 to 3.00"


def test_the_table_has_a_row_for_each_side() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(Pair(BEFORE, NOW).table(("fb0be39", "this tree")))
    rows = [line.split() for line in capture.get().splitlines() if line.strip().startswith(("fb0be39", "this tree"))]
    assert rows == [
        ["fb0be39", "5.00", "4.00", "6.00", "150", "0.00"],
        ["this", "tree", "2.00", "2.00", "2.00", "400", "0.25"],
    ]


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"asked": ["c"]}, "asked"), ({"weights_sha256": "x"}, "weights_sha256"), ({"attempt": 3}, "attempt")],
)
def test_sides_that_did_other_work_are_no_pair(changed: dict[str, object], named: str) -> None:
    with pytest.raises(PairError, match=f"differ in {named}"):
        Pair(BEFORE, [replace(NOW[0], **changed), NOW[1]])  # type: ignore[arg-type]
    with pytest.raises(PairError, match="differ in sampling temperature"):
        Pair(BEFORE, [replace(NOW[0], sampling={"temperature": 0.5}), NOW[1]])


def test_a_revision_that_is_not_there_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"git rev-parse .*no-such-revision: .*whole history"):
        compare("no-such-revision", "smoke", (), None, 1, tmp_path, 0.0)


def test_two_trees_take_turns_on_the_same_prompts_and_too_small_a_speed_up_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against a copy of this very tree: both sides then draw the same tokens."""

    def copied(_revision: str, tree: Path) -> None:
        tree.mkdir()
        for package in ("flows", "infra", "k3core", "kernels", "tasks"):
            (tree / package).symlink_to(bench_against.HERE / package)

    monkeypatch.setattr(bench_against, "_extract", copied)
    monkeypatch.setattr(bench_against, "_git", lambda *_: "fb0be39\n")
    settings = ("warm_start.steps=1", "tokenizer.corpus_prompts=40", "environment.max_turn_tokens=8")
    sizes = ("rollout.prompts_per_step=2", "rollout.group_size=2")
    assert compare("fb0be39", "smoke", (*settings, *sizes), None, 2, tmp_path, at_least=1e9) == 1
    written = json.loads((tmp_path / "rollout_against.json").read_text())
    assert [turn["attempt"] for turn in written["before"]] == [turn["attempt"] for turn in written["now"]] == [1, 2]
    assert [turn["tokens"] for turn in written["before"]] == [turn["tokens"] for turn in written["now"]]
    assert "speed-up" in capsys.readouterr().out


def test_a_side_that_ends_early_is_named() -> None:
    with subprocess.Popen(["false"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.wait()
        with pytest.raises(PairError, match="this tree: its process ended with 1"):
            bench_against.Side("this tree", process).take_turn(0)
