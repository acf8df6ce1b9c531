"""What ends a run, and after how many bad steps: the decisions between the stages, with scripted stages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import flows.stages
from flows.stages import MostlyTruncated, NothingToLearn, PolicyStandsStill, Stages, TooManyVetoes
from infra.config import RunConfig, load
from infra.stages.context import Inputs
from infra.stages.record import StageRecord, write_record
from infra.store import Store
from k3core.types import PolicyVersion, Ref

NOWHERE = Ref("file:///nowhere", "0" * 64, 0)


def version(step: int, weights: str) -> PolicyVersion:
    return PolicyVersion("smoke", step, "delta", NOWHERE, weights, step - 1)


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    return load("smoke", [f"root={tmp_path}"])


@pytest.fixture
def script(cfg: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Iterable[StageRecord]], None]:
    """script(stage, records): the stage's task hands out these records, one a call."""
    store = Store(cfg.root)
    scripts: dict[str, list[Ref]] = {}

    def configured(task: Any, *_: Any) -> Callable[..., Ref]:
        return lambda *_args: scripts[task.name].pop(0)

    monkeypatch.setattr(flows.stages, "configured", configured)

    def hand_out(stage: str, records: Iterable[StageRecord]) -> None:
        scripts[stage] = [write_record(store, r, f"{stage}-{n}") for n, r in enumerate(records)]

    return hand_out


def record(stage: str, step: int = 0, **fields: Any) -> StageRecord:
    values: dict[str, Any] = {"outputs": {}, "metrics": {}, "notes": {}, "policy": None, **fields}
    return StageRecord(stage, "smoke", step, seconds=1.0, finished_ms=int(time.time() * 1000), **values)


def stages(cfg: RunConfig) -> Stages:
    return Stages(cfg, Inputs(NOWHERE, NOWHERE))


def rollout(truncated: float) -> StageRecord:
    return record("rollout", metrics={"rollout/truncated_fraction": truncated, "stop/max_tokens": truncated})


def scores(kept: int) -> StageRecord:
    return record("score", metrics={"groups/kept": kept, "groups/zero_variance_all_fail": 8 - kept})


def test_a_batch_without_variance_is_drawn_again_and_not_stepped_on(cfg: RunConfig, script: Any) -> None:
    script("rollout", [rollout(0), rollout(0)])
    script("score", [scores(0), scores(3)])
    run = stages(cfg)
    _, chosen = run.rollout_and_score(version(0, "a"))
    assert chosen.uri.endswith("score-1.json")


def test_three_batches_without_variance_end_the_run_and_name_the_settings(cfg: RunConfig, script: Any) -> None:
    script("rollout", [rollout(0)] * 3)
    script("score", [scores(0)] * 3)
    with pytest.raises(NothingToLearn, match=r"rollout\.group_size or rollout\.prompts_per_step"):
        stages(cfg).rollout_and_score(version(0, "a"))


def test_mostly_truncated_episodes_end_the_run_and_name_the_limits(cfg: RunConfig, script: Any) -> None:
    script("rollout", [rollout(0.9)] * 3)
    script("score", [scores(3)] * 3)
    run = stages(cfg)
    run.rollout_and_score(version(0, "a"))
    run.rollout_and_score(version(1, "b"))
    with pytest.raises(MostlyTruncated, match=r"90% of the episodes .*environment\.max_turn_tokens"):
        run.rollout_and_score(version(2, "c"))


def test_one_good_batch_forgives_the_truncated_ones_before_it(cfg: RunConfig, script: Any) -> None:
    script("rollout", [rollout(0.9), rollout(0.9), rollout(0.1), rollout(0.9), rollout(0.9)])
    script("score", [scores(3)] * 5)
    run = stages(cfg)
    for step in range(5):
        run.rollout_and_score(version(step, "a"))


def update(step: int, vetoes: str) -> StageRecord:
    return record("update", step, notes={"vetoes": vetoes})


def test_vetoed_updates_in_a_row_end_the_run(cfg: RunConfig, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script("update", [update(n, "the loss is nan") for n in (1, 2, 3)])
    run = stages(cfg)
    run.update(version(0, "a"), NOWHERE, None)
    run.update(version(1, "a"), NOWHERE, None)
    with pytest.raises(TooManyVetoes, match=r"3 updates in a row .*the loss is nan.*train\.learning_rate"):
        run.update(version(2, "a"), NOWHERE, None)
    assert "the loss is nan" in capsys.readouterr().out


def test_a_good_update_starts_the_count_of_vetoes_again(cfg: RunConfig, script: Any) -> None:
    script("update", [update(1, "nan"), update(2, "nan"), update(3, ""), update(4, "nan"), update(5, "nan")])
    run = stages(cfg)
    for step in range(5):
        run.update(version(step, "a"), NOWHERE, None)


def published(step: int, weights: str) -> StageRecord:
    return record("publish", step, policy=version(step, weights))


def test_a_policy_that_stands_still_for_two_updates_ends_the_run(cfg: RunConfig, script: Any) -> None:
    script("publish", [published(1, "a"), published(2, "a")])
    run = stages(cfg)
    run.publish(NOWHERE, version(0, "a"))
    with pytest.raises(PolicyStandsStill, match="steps 1 and 2 serve the same bytes"):
        run.publish(NOWHERE, version(1, "a"))


def test_a_vetoed_update_is_not_taken_for_one_that_does_not_reach_the_policy(cfg: RunConfig, script: Any) -> None:
    script("update", [update(1, "nan"), update(2, "nan")])
    script("publish", [published(1, "a"), published(2, "a")])
    run = stages(cfg)
    for step in (0, 1):
        run.update(version(step, "a"), NOWHERE, None)
        run.publish(NOWHERE, version(step, "a"))


def test_evaluation_takes_place_first_every_so_often_and_last(cfg: RunConfig, script: Any) -> None:
    cfg = dataclasses.replace(cfg, steps=7, evaluate=dataclasses.replace(cfg.evaluate, every=3))
    script("evaluate", [record("evaluate")] * 8)
    run = stages(cfg)
    assert [step for step in range(8) if run.evaluate(version(step, "a")) is not None] == [0, 3, 6, 7]
