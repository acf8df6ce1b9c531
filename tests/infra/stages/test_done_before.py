"""A stage that was done before, on this machine or another, is found by its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.config import load
from infra.stages.context import Context
from infra.stages.prepare import prepare_run
from infra.stages.rollout import rollout_step
from k3core.errors import IntegrityError
from k3core.types import PolicyVersion, Ref

PRUNED = Ref("file:///pruned/manifest.json", "0" * 64, 1)
POLICY = PolicyVersion("again", 0, "base", PRUNED, "1" * 64, None)


def test_a_rollout_of_the_same_version_is_found_without_the_weights_that_gc_took(tmp_path: Path) -> None:
    cfg = load("smoke", [f"root={tmp_path}", "run=again"])
    inputs = prepare_run(cfg)
    context = Context.open(inputs, cfg.root)
    read = {"policy": POLICY.weights, "tokenizer": inputs.tokenizer}
    first = context.record("rollout", 0, {}, {"rollout/tokens": 1.0}, name="rollout-0", inputs=read)
    assert rollout_step(inputs, cfg.root, POLICY, 0) == first


@pytest.mark.parametrize("changed", ["policy", "attempt"])
def test_another_version_or_another_attempt_is_other_work(tmp_path: Path, changed: str) -> None:
    cfg = load("smoke", [f"root={tmp_path}", "run=again"])
    inputs = prepare_run(cfg)
    other = Ref("file:///other/manifest.json", "2" * 64, 1)
    read = {"policy": other if changed == "policy" else POLICY.weights, "tokenizer": inputs.tokenizer}
    Context.open(inputs, cfg.root).record("rollout", 0, {}, {}, name="rollout-0", inputs=read)
    with pytest.raises(IntegrityError, match="missing"):  # it loads the weights, which are not there
        rollout_step(inputs, cfg.root, POLICY, 1 if changed == "attempt" else 0)
