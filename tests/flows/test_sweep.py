"""A grid of runs: what is refused before anything starts, what runs beside what, and how it is told in the end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import Completed, Crashed, Running, State
from rich.console import Console

import flows.sweep
from flows.cli import main
from flows.sweep import report, run_deployed, run_here, table
from infra.config import ConfigError
from infra.records import encode
from infra.stages.record import StageRecord, stage_key, write_record
from infra.store import Store
from infra.sweep import Estimate, Outcome, Point, against, outcome_of, parse_grid, points, ranked
from k3core.types import EvalReport, SamplingParams

GRID = {"train.learning_rate": ["1e-4", "5e-4"], "seed": ["0", "1"]}


def made(root: Path, *overrides: str, grid: dict[str, list[str]] = GRID, name: str | None = "s") -> list[Point]:
    return points("smoke", [f"root={root}", "steps=2", *overrides], grid, name)


def test_commas_within_brackets_and_quotes_belong_to_a_value() -> None:
    assert parse_grid(["seed=0, 1", "train.lora_targets=['q_proj','k_proj'],['o_proj']", 'run.x="a,b",c']) == {
        "seed": ["0", "1"],
        "train.lora_targets": ["['q_proj','k_proj']", "['o_proj']"],
        "run.x": ['"a,b"', "c"],
    }


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "--grid: what is to be varied?"),
        (["--grid", "seed"], "--grid seed: expected KEY=VALUE,VALUE"),
        (["--grid", "seed=0,,1"], "--grid seed=0,,1: an empty value"),
        (["--grid", "seed=0,0"], "--grid seed=0,0: a value occurs twice"),
        (["--grid", "seed=0", "--grid", "seed=1"], "--grid seed: given twice"),
        (["--grid", "run=a,b"], "--grid run: the runs of a sweep are named by their values"),
        (["--grid", "train.learning_rat=1e-4,2e-4"], "train.learning_rat: unknown key (did you mean learning_rate?)"),
        (["--grid", "seed=0,-1"], "seed: must be >= 0, got -1"),
        (["--grid", "seed=0,1", "--name", "a b"], "--name a b: letters, digits"),
        (["--grid", "seed=0,1", "--parallel", "0"], "k3 sweep: Invalid value for '--parallel'"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_starts_nothing(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "smoke", f"root={tmp_path}/runs", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(line)
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_every_combination_is_a_run_named_by_its_values_and_tagged(tmp_path: Path) -> None:
    found = made(tmp_path, 'tracking.tags=["owner=me"]')
    assert [point.cfg.run for point in found] == ["s-1e-4-0", "s-1e-4-1", "s-5e-4-0", "s-5e-4-1"]
    assert [(point.cfg.train.learning_rate, point.cfg.seed) for point in found] == [
        (1e-4, 0), (1e-4, 1), (5e-4, 0), (5e-4, 1),
    ]  # fmt: skip
    assert {point.cfg.tracking.tags for point in found} == {("owner=me", "k3.sweep=s")}
    assert found[1].label == "learning_rate=1e-4 seed=1"
    assert points("smoke", (), {"seed": ["3"]}, None)[0].cfg.run == "smoke-3"


def test_values_that_a_name_cannot_tell_apart_get_numbers(tmp_path: Path) -> None:
    grid = {"train.lora_targets": ["['q_proj','k_proj']", "['q_proj', 'k_proj', 'q_proj']", "[\"q_proj','k_proj\"]"]}
    names = [point.cfg.run for point in made(tmp_path, "train.mode=lora", grid=grid)]
    assert len(set(names)) == 3
    assert names[0] == "s-q_proj_k_proj"


def test_each_problem_is_said_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        made(tmp_path, grid={"seed": ["0", "1", "2"], "gspo.clip_hihg": ["0.1"]})
    assert len(refusal.value.problems) == 1


def use_script(monkeypatch: pytest.MonkeyPatch, script: Callable[[Point], str]) -> None:
    """Each point's child runs `script(point)` instead of a training."""
    monkeypatch.setattr(flows.sweep, "train_command", lambda _config, point: [sys.executable, "-c", script(point)])


def test_a_failed_run_does_not_end_the_others_and_its_last_line_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(point: Point) -> str:
        ends = "import sys; print('k3: out of luck', file=sys.stderr); sys.exit(1)" if point.cfg.seed == 0 else ""
        return f"print('step   1/2  reward 0.1  | eval 0.2')\n{ends}"

    use_script(monkeypatch, script)
    found = made(tmp_path)
    assert dict(run_here("smoke", found, 2, tmp_path)) == {0: "k3: out of luck", 1: None, 2: "k3: out of luck", 3: None}
    assert "s-5e-4-1: step   1/2  reward 0.1  | eval 0.2" in capsys.readouterr().out
    assert "out of luck" in (tmp_path / "s-1e-4-0.log").read_text()


def test_no_more_than_so_many_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"import os, time; t = time.time(); time.sleep(0.3); print(t, time.time(), file=open(f'{tmp_path}/{{os.getpid()}}.t', 'w'))"
    use_script(monkeypatch, lambda _: script)
    assert [error for _, error in run_here("smoke", made(tmp_path), 2, tmp_path)] == [None] * 4
    spans = [tuple(map(float, file.read_text().split())) for file in tmp_path.glob("*.t")]
    assert len(spans) == 4
    assert max(sum(a <= start < b for a, b in spans) for start, _ in spans) <= 2


def test_a_sweep_that_is_ended_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(point: Point) -> str:
        if point.cfg.seed == 1:
            return ""
        return f"import os, time; open('{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(600)"

    use_script(monkeypatch, script)
    with closing(run_here("smoke", made(tmp_path, grid={"seed": ["0", "1"]}), 2, tmp_path)) as ended:
        assert next(ended) == (1, None)
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def evaluation(run: str, step: int, rewards: Sequence[float | None], suite: str = "a") -> EvalReport:
    by_prompt: dict[str, tuple[float | None, ...]] = {f"p{n}": (value,) for n, value in enumerate(rewards)}
    return EvalReport(
        run, step, "policy", suite * 64, SamplingParams(), by_prompt, by_prompt,
        dict.fromkeys(by_prompt, (None,)), {}, {"finished": len(rewards)}, 1.0,
    )  # fmt: skip


def store_evaluation(point: Point, report: EvalReport) -> None:
    store = Store(point.cfg.root)
    ref = store.put(stage_key(report.run, report.step, "evaluate.zst"), encode(report))
    write_record(store, StageRecord("evaluate", report.run, report.step, {"report": ref}, {}, 1.0, 1_000))


def test_the_outcome_is_the_first_and_the_last_evaluation_of_the_store(tmp_path: Path) -> None:
    (point,) = made(tmp_path, grid={"seed": ["0"]})
    assert "no evaluation of step 0" in str(outcome_of(point).error)
    store_evaluation(point, evaluation("s-0", 0, [0.0, 0.2]))
    assert "no evaluation of step 2" in str(outcome_of(point).error)
    store_evaluation(point, evaluation("s-0", 2, [0.4, 0.8]))
    outcome = outcome_of(point)
    assert outcome.before == Estimate(pytest.approx(0.1), pytest.approx(0.1))  # type: ignore[arg-type]
    assert outcome.after == Estimate(pytest.approx(0.6), pytest.approx(0.2))  # type: ignore[arg-type]


def test_an_evaluation_without_grades_is_a_failure_and_no_number(tmp_path: Path) -> None:
    (point,) = made(tmp_path, grid={"seed": ["0"]})
    store_evaluation(point, evaluation("s-0", 0, [0.0, 0.2]))
    store_evaluation(point, evaluation("s-0", 2, [None, None]))
    outcome = outcome_of(point)
    assert (outcome.after, outcome.report) == (None, None)
    assert "0 prompts with a reward grade" in str(outcome.error)


def outcomes(root: Path) -> list[Outcome]:
    """The second is best, the third was evaluated on another suite, the fourth failed."""
    a, b, c, d = made(root)
    before = Estimate(0.1, 0.01)
    return [
        Outcome(a, before, Estimate(0.2, 0.02), evaluation(a.cfg.run, 2, [0.1, 0.3, 0.2])),
        Outcome(b, before, Estimate(0.4, 0.02), evaluation(b.cfg.run, 2, [0.3, 0.5, 0.4])),
        Outcome(c, before, Estimate(0.3, 0.02), evaluation(c.cfg.run, 2, [0.3, 0.3, 0.3], "b")),
        Outcome(d, error="k3: out of luck"),
    ]


def test_the_best_comes_first_and_failures_last(tmp_path: Path) -> None:
    order = [outcome.point.cfg.run for outcome in ranked(outcomes(tmp_path))]
    assert order == ["s-1e-4-1", "s-5e-4-0", "s-1e-4-0", "s-5e-4-1"]


def test_the_difference_is_paired_where_the_suites_agree(tmp_path: Path) -> None:
    first, best, other, failed = outcomes(tmp_path)
    difference = against(best, first, 0.95)
    assert not isinstance(difference, str)
    assert difference.difference == pytest.approx(-0.2)
    assert against(best, other, 0.95) == "another suite"
    assert against(best, failed, 0.95) == "no evaluation"
    assert best.report is not None
    warmer = replace(best, report=replace(best.report, sampling=SamplingParams(0.5)))
    assert against(best, warmer, 0.95) == "other sampling"


def test_the_table_says_failed_where_a_number_would_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=120).print(table(ranked(outcomes(tmp_path)), "s"))
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["1e-4", "1", "0.100 ± 0.010", "0.400 ± 0.020", "", ""],
        ["5e-4", "0", "0.100 ± 0.010", "0.300 ± 0.020", "another suite", ""],
        ["1e-4", "0", "0.100 ± 0.010", "0.200 ± 0.020", "-0.200", "[-0.200, -0.200]"],
        ["5e-4", "1", "failed", "", "", ""],
    ]


def test_the_report_draws_a_picture_and_names_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flows.sweep, "compare_runs", lambda *_: "http://127.0.0.1:5000/#/compare-runs?runs=...")
    assert report(outcomes(tmp_path), "s", tmp_path) == 1
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "failed:  s-5e-4-1: k3: out of luck" in said
    assert "# then http://127.0.0.1:5000/#/compare-runs" in said
    assert report(outcomes(tmp_path)[:3], "s", tmp_path) == 0


class FakeServer:
    """Runs become final in the order in which they were submitted, one a question."""

    def __init__(self, ends: dict[str, State[Any]]) -> None:
        self.ends, self.submitted, self.most = ends, list[str](), 0
        self.going: list[str] = []

    def submit(self, cfg: Any, tags: Sequence[str]) -> SimpleNamespace:
        assert tags == ["k3.sweep=s"]
        self.submitted.append(cfg.run)
        self.going.append(cfg.run)
        self.most = max(self.most, len(self.going))
        return SimpleNamespace(id=f"00000000-0000-0000-0000-{len(self.submitted) - 1:012}")

    def read_flow_run(self, identity: Any) -> SimpleNamespace:
        run = self.submitted[int(str(identity)[-12:])]
        if run != self.going[0]:
            return SimpleNamespace(state=Running())
        self.going.remove(run)
        return SimpleNamespace(state=self.ends.get(run, Completed()))

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_on_work_pools_a_crashed_run_is_shown_as_crashed_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer({"s-1e-4-1": Crashed(message="node lost")})
    monkeypatch.setattr(flows.sweep, "get_client", lambda **_: server)
    monkeypatch.setattr(flows.sweep, "submit", server.submit)
    monkeypatch.setattr(flows.sweep, "POLL_S", 0.0)
    ended = dict(run_deployed(made(tmp_path), "s", 2, {}))
    assert ended == {0: None, 1: "Crashed: node lost", 2: None, 3: None}
    assert server.submitted == [point.cfg.run for point in made(tmp_path)]
    assert server.most == 2


def test_the_command_of_a_point_is_one_that_a_person_could_type(tmp_path: Path) -> None:
    point = made(tmp_path)[0]
    command = flows.sweep.train_command("smoke", point)
    assert command[1:5] == ["-m", "flows.cli", "train", "smoke"]
    assert json.dumps(command[5:]) == json.dumps(
        [f"root={tmp_path}", "steps=2", "train.learning_rate=1e-4", "seed=0", "run=s-1e-4-0",
         'tracking.tags=["k3.sweep=s"]']
    )  # fmt: skip
