from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows import bench_rollout
from flows.bench_rollout import Measured, measure_rollout
from infra.config import RunConfig, load


def small(tmp_path: Path) -> RunConfig:
    settings = ("warm_start.steps=1", "tokenizer.corpus_prompts=40", "environment.max_turn_tokens=16")
    return load("smoke", [f"root={tmp_path}", "rollout.prompts_per_step=3", "rollout.group_size=2", *settings])


def test_both_ways_give_equal_trajectories_and_their_speeds_are_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure_rollout(small(tmp_path), 2, 2, tmp_path) == 0
    written = json.loads((tmp_path / "rollout.json").read_text())
    assert [(m["processes"], m["repeat"]) for m in written["measured"]] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert all(m["tokens_per_s"] == m["tokens"] / m["seconds"] > 0 for m in written["measured"])
    speed_up = written["speed_up"]
    assert 0 < speed_up["lowest"] <= speed_up["median"] <= speed_up["highest"]
    assert written["is_equal"]
    assert "bit for bit" in capsys.readouterr().out


def test_other_trajectories_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_rollout, "_published", lambda _: (None, None))

    def fake(_context: None, _policy: None, processes: int, repeat: int, group_size: int) -> Measured:
        return Measured(processes, repeat, 6.0 / processes, 10 * group_size, f"{repeat if processes == 1 else 0}")

    monkeypatch.setattr(bench_rollout, "_rollout", fake)
    assert measure_rollout(small(tmp_path), 3, 2, tmp_path) == 1
    out = capsys.readouterr().out
    assert "speed-up 3.00, from 3.00 to 3.00" in out
    assert "the trajectories differ" in out
