"""What ends a run, and after how many bad steps: the decisions between the stages, with scripted stages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flows.gates
import flows.stages
from flows.gates import DriftTooLarge, check_drift
from flows.stages import MostlyTruncated, NothingToLearn, PolicyStandsStill, Stages, TooManyVetoes
from infra.config import PoolsConfig, RunConfig, TasksConfig, load
from infra.stages.context import Inputs
from infra.stages.record import StageRecord, write_record
from infra.store import Store
from infra.task_settings import Patience
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

    def configured(task: Any, *_: Any, **__: Any) -> Callable[..., Ref]:
        return lambda **_arguments: scripts[task.name].pop(0)

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


def test_a_stage_runs_where_the_flow_is_unless_its_pool_is_named(cfg: RunConfig) -> None:
    here, arguments = stages(cfg)._task(flows.stages.rollout, policy=version(0, "a"), attempt=0)
    assert here.name == "rollout"
    assert arguments["root"] == cfg.root

    on_pools = replace(cfg, pools=PoolsConfig(rollout="gpu-rollout"), tasks=TasksConfig(rollout_retries=7))
    there, remote = stages(on_pools)._task(flows.stages.rollout, policy=version(0, "a"), attempt=0)
    assert there.name == "stage_on_pool"
    assert (remote["stage"], remote["pool"]) == ("rollout", "gpu-rollout")
    assert there.retries == 7
    assert there.timeout_seconds is None, "its flow run has the time-out, and may have to wait for a slot"
    still_here, _ = stages(on_pools)._task(flows.stages.update, policy=version(0, "a"), score=NOWHERE, optimizer=None)
    assert still_here.name == "update"


def test_each_stage_has_its_own_retries_and_time_out_and_else_the_common_ones() -> None:
    tasks = TasksConfig(retries=1, timeout_s=10.0, update_timeout_s=99.0)
    assert tasks.of("update") == Patience(1, 1.0, 99.0)
    assert tasks.of("score") == Patience(1, 1.0, 10.0)


def test_drift_over_its_bound_ends_a_run_that_nobody_can_answer_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(flows.gates, "emit_event", lambda event, **_: said.append(event))
    monkeypatch.setattr(flows.gates, "create_markdown_artifact", lambda text, **_: said.append(text))
    measured = record("update", 3, metrics={"drift/numeric/abs_max": 2e-3})
    check_drift(measured, None, 1.0)
    check_drift(measured, 3e-3, 1.0)
    assert said == []
    with pytest.raises(DriftTooLarge, match=r"step 3: .* 2\.00e-03 nat .* gates\.max_drift 1\.00e-03"):
        check_drift(measured, 1e-3, 1.0)
    assert said[0] == "k3.drift.breached"
    assert "gates.max_drift" in said[1]
