"""The publish stage: what was trained is what is published, what every engine holds, and what a rollout samples from."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from infra import policies
from infra.canary import play_canary, to_text
from infra.config import RunConfig, load
from infra.gc import Keep, collect, live
from infra.ledger import Ledger
from infra.pool import _pools
from infra.serving import NotServed, ServedPolicyError, read_served
from infra.stages import publish as stage
from infra.stages.context import Context, Inputs
from infra.stages.prepare import prepare_run
from infra.stages.publish import publish_step
from infra.stages.record import read_record
from k3core.checkpoint.tensors import from_torch, to_safetensors, weights_sha256
from k3core.rl.trainer import Trainer
from k3core.rollout.engine import K3Engine
from k3core.rollout.protocol import GenerateRequest
from k3core.types import PolicyVersion, Ref, SamplingParams

NOW = datetime(2026, 3, 1, tzinfo=UTC)
Tensors = dict[str, torch.Tensor]
SETTINGS = ("tokenizer.corpus_prompts=80", "publish.full_every=10")


def start(tmp_path: Path, *overrides: str) -> tuple[RunConfig, Inputs]:
    _pools.clear()
    cfg = load("smoke", [f"root={tmp_path}", *SETTINGS, *overrides])
    return cfg, prepare_run(cfg)


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunConfig, Inputs]:
    return start(tmp_path)


@pytest.fixture
def lora_run(tmp_path: Path) -> tuple[RunConfig, Inputs]:
    return start(tmp_path, "train.mode=lora", "train.lora_rank=4")


def first_tensors(cfg: RunConfig) -> Tensors:
    """As the warm start leaves them: without an adapter."""
    return Trainer(cfg.model, cfg.train.optim, None, seed=3).save()[0]


def adapted(cfg: RunConfig, base: Tensors, lora_B: float) -> Tensors:
    """As an update in mode "lora" leaves them: the base, and the adapter with every B set to one value."""
    tensors = Trainer(cfg.model, cfg.train.optim, cfg.train.lora, seed=cfg.seed).save()[0] | base
    return {name: torch.full_like(t, lora_B) if name.endswith("lora_B") else t for name, t in tensors.items()}


def trained(context: Context, step: int, tensors: Mapping[str, torch.Tensor]) -> Ref:
    """What an update leaves, its entry in the ledger included."""
    key = f"{context.cfg.run}/steps/{step:06d}/weights.safetensors"
    outputs = {"weights": context.store.put(key, to_safetensors(from_torch(tensors)))}
    record = context.record("update", step, outputs, {})
    if step:
        result = {"record": {"uri": record.uri, "sha256": record.sha256, "size_bytes": record.size_bytes}}
        Ledger(context.store, context.cfg.run).record(step, f"batch {step}", result)
    return record


def moved(tensors: Tensors, by: float) -> Tensors:
    return {name: t + by if name.endswith("o_proj.weight") else t for name, t in tensors.items()}


def policy_of(context: Context, published: Ref) -> PolicyVersion:
    version = read_record(context.store, published).policy
    assert version is not None
    return version


def served_step(context: Context) -> int:
    served = read_served(context.store, context.cfg.run)
    assert served is not None
    return served.version.step


def logprobs(context: Context, policy: PolicyVersion) -> np.ndarray:
    """Of a fixed history's continuation, as rollouts sample from this version."""
    engine = context.pool.engine_at(policy, context.tokenizer())

    async def generate() -> np.ndarray:
        request = GenerateRequest("s", [5, 6, 7, 8], SamplingParams(max_tokens=6), seed=1)
        try:
            return (await engine.generate(request)).logprobs_T
        finally:
            engine.release("s")

    return asyncio.run(generate())


def test_after_an_update_the_published_digest_is_another_and_the_engine_holds_it(
    run: tuple[RunConfig, Inputs],
) -> None:
    cfg, inputs = run
    context = Context.open(inputs, cfg.root)
    tensors = first_tensors(cfg)
    parent: PolicyVersion | None = None
    for step in range(3):
        record = trained(context, step, moved(tensors, step / 8))
        version = policy_of(context, publish_step(inputs, cfg.root, record, parent))
        held = from_torch(context.pool.engine_at(version, context.tokenizer()).served_tensors())
        assert weights_sha256(held) == version.weights_sha256 == weights_sha256(from_torch(moved(tensors, step / 8)))
        assert parent is None or parent.weights_sha256 != version.weights_sha256
        assert served_step(context) == step
        parent = version
    served = read_served(context.store, cfg.run)
    assert served is not None
    assert [(ack.engine, ack.sha256) for ack in served.acks] == [("embedded", parent.weights_sha256 if parent else "")]


def test_an_adapter_with_a_known_b_changes_the_logprobs_that_are_served(lora_run: tuple[RunConfig, Inputs]) -> None:
    cfg, inputs = lora_run
    context = Context.open(inputs, cfg.root)
    base = first_tensors(cfg)
    versions = [policy_of(context, publish_step(inputs, cfg.root, trained(context, 0, base), None))]
    for step, lora_B in ((1, 0.0), (2, 0.5)):
        record = trained(context, step, adapted(cfg, base, lora_B))
        versions.append(policy_of(context, publish_step(inputs, cfg.root, record, versions[-1])))
    assert [version.kind for version in versions] == ["base", "adapter", "adapter"]
    assert len({version.weights_sha256 for version in versions}) == 3
    found = [logprobs(context, version) for version in versions]
    assert np.array_equal(found[0], found[1]), "a B of zeros changes nothing"
    assert not np.array_equal(found[1], found[2])


def test_an_engine_that_never_gets_the_adapter_is_found_at_the_first_update(
    lora_run: tuple[RunConfig, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sync pushes the frozen base: it looks like staleness, and is not."""
    cfg, inputs = lora_run
    context = Context.open(inputs, cfg.root)
    base = first_tensors(cfg)
    version = policy_of(context, publish_step(inputs, cfg.root, trained(context, 0, base), None))
    real = K3Engine.load

    def load_without_adapter(
        engine: K3Engine, step: int, tensors: Mapping[str, torch.Tensor], base_sha256: str | None = None
    ) -> None:
        without = {name: torch.zeros_like(t) if "lora" in name else t for name, t in tensors.items()}
        real(engine, step, without, base_sha256=base_sha256)

    monkeypatch.setattr(K3Engine, "load", load_without_adapter)
    record = trained(context, 1, adapted(cfg, base, 0.5))
    with pytest.raises(ServedPolicyError, match=r"step 1 .*1 of 1 engines failed: engine embedded: .*other weights"):
        publish_step(inputs, cfg.root, record, version)
    assert served_step(context) == 0


def test_an_update_that_moved_the_frozen_base_is_refused(lora_run: tuple[RunConfig, Inputs]) -> None:
    cfg, inputs = lora_run
    context = Context.open(inputs, cfg.root)
    base = first_tensors(cfg)
    version = policy_of(context, publish_step(inputs, cfg.root, trained(context, 0, base), None))
    record = trained(context, 1, adapted(cfg, moved(base, 0.5), 0.5))
    with pytest.raises(ServedPolicyError, match="step 1 of run 'smoke' changed tensors outside its adapter"):
        publish_step(inputs, cfg.root, record, version)


class Node:
    """A resident engine, reached by URL. `error` is what it answers with."""

    asked: list[tuple[str, int]]
    errors: Mapping[str, Exception]

    def __init__(self, url: str) -> None:
        self.url = url

    def load(self, inputs: Inputs, root: str, policy: PolicyVersion) -> str:
        del inputs, root
        Node.asked.append((self.url, policy.step))
        if self.url in Node.errors:
            raise Node.errors[self.url]
        return policy.weights_sha256

    def canary(self, inputs: Inputs, root: str, policy: PolicyVersion) -> str:
        return to_text(play_canary(Context.open(inputs, root), policy))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    Node.asked, Node.errors = [], {}
    monkeypatch.setattr(stage, "Resident", Node)
    return ("http://a:1", "http://b:1", "http://c:1")


def test_a_version_that_a_node_missed_is_not_served_and_no_later_one_stands_on_it(
    run: tuple[RunConfig, Inputs], nodes: tuple[str, ...]
) -> None:
    cfg, inputs = run
    context = Context.open(inputs, cfg.root)
    tensors = first_tensors(cfg)
    records = [trained(context, step, moved(tensors, step / 8)) for step in range(3)]
    first = policy_of(context, publish_step(inputs, cfg.root, records[0], None, nodes))
    Node.errors = {"http://b:1": ConnectionError("no route")}
    with pytest.raises(NotServed, match="1 of 3 engines failed: engine http://b:1: ConnectionError: no route"):
        publish_step(inputs, cfg.root, records[1], first, nodes)
    assert served_step(context) == 0
    # A flow that goes on all the same: the next delta stands on what all three hold.
    missed = policies.read_version(context.store, cfg.run, 1)
    Node.errors = {}
    second = policy_of(context, publish_step(inputs, cfg.root, records[2], missed, nodes))
    assert (second.kind, second.parent) == ("delta", 0)
    assert weights_sha256(policies.load(context.store, second)) == weights_sha256(from_torch(moved(tensors, 2 / 8)))
    assert served_step(context) == 2


def test_a_retry_of_the_stage_asks_only_the_node_that_is_missing(
    run: tuple[RunConfig, Inputs], nodes: tuple[str, ...]
) -> None:
    cfg, inputs = run
    record = trained(Context.open(inputs, cfg.root), 0, first_tensors(cfg))
    Node.errors = {"http://c:1": TimeoutError("slow")}
    with pytest.raises(NotServed):
        publish_step(inputs, cfg.root, record, None, nodes)
    Node.errors = {}
    Node.asked.clear()
    publish_step(inputs, cfg.root, record, None, nodes)
    assert Node.asked == [("http://c:1", 0)]


def test_a_replay_of_an_old_step_publishes_and_serves_nothing(
    run: tuple[RunConfig, Inputs], nodes: tuple[str, ...]
) -> None:
    """As when the results of the tasks are lost and the flow goes through its steps again, also after gc."""
    cfg, inputs = run
    context = Context.open(inputs, cfg.root)
    tensors = first_tensors(cfg)
    records = [trained(context, step, moved(tensors, step / 8)) for step in range(4)]
    published: list[Ref] = []
    for record in records:
        parent = policy_of(context, published[-1]) if published else None
        published.append(publish_step(inputs, cfg.root, record, parent, nodes))
    Node.asked.clear()
    now = live(context.store, cfg.run, Keep(last=1), NOW).garbage
    assert {item.key.rpartition("/")[2] for item in now} == {"weights.safetensors"}
    collect(context.store, live(context.store, cfg.run, Keep(last=1), NOW), NOW)
    for step, record in enumerate(records):
        parent = policy_of(context, published[step - 1]) if step else None
        assert publish_step(inputs, cfg.root, record, parent, nodes) == published[step]
    assert Node.asked == []
    assert served_step(context) == 3
