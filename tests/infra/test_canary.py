"""The publish gate: numbers that are not the trainer's keep a version invisible, and the place where they arise is named."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

import k3core.model.kda
from infra.canary import (
    MAX_NEW,
    NUM_PROMPTS,
    NumericDrift,
    canary_prompts,
    from_text,
    play_canary,
    sample_canary,
    to_text,
)
from infra.config import load
from infra.pool import OwnEngine, _pools
from infra.resident import server as server_module
from infra.resident.client import TOKEN
from infra.resident.server import app
from infra.serving import read_served
from infra.stages.context import Context
from infra.stages.prepare import prepare_run
from infra.stages.publish import publish_step
from infra.stages.record import read_record
from infra.tracking import METRICS
from k3core.checkpoint.tensors import from_torch, to_safetensors
from k3core.errors import RunError
from k3core.model.state import SlotState
from k3core.parity import Played
from k3core.rl.trainer import Trainer
from k3core.types import PolicyVersion, Ref
from k3kernels.kda import kda_aligned_step

BROKEN = "layers.1.self_attn.q_proj.weight"


@dataclass
class Run:
    """A run with versions of random weights, one a step."""

    context: Context

    def publish(self, step: int) -> PolicyVersion:
        version = read_record(self.context.store, self.publish_again(self.trained(step))).policy
        assert version is not None
        return version

    def publish_again(self, trained: Ref, engines: tuple[str, ...] = ()) -> Ref:
        return publish_step(self.context.inputs, self.context.cfg.root, trained, None, engines)

    def trained(self, step: int) -> Ref:
        cfg, store = self.context.cfg, self.context.store
        tensors = Trainer(cfg.model, cfg.train.optim, cfg.train.lora, seed=step).save()[0]
        if cfg.train.lora and step:  # an adapter on the frozen base of step 0
            base = Trainer(cfg.model, cfg.train.optim, None, seed=0).save()[0]
            tensors |= base
            tensors = {name: torch.full_like(t, 0.1) if name.endswith("lora_B") else t for name, t in tensors.items()}
        elif cfg.train.lora:
            tensors = Trainer(cfg.model, cfg.train.optim, None, seed=0).save()[0]
        key = f"{cfg.run}/steps/{step:06d}/weights.safetensors"
        return self.context.record("update", step, {"weights": store.put(key, to_safetensors(from_torch(tensors)))}, {})

    @property
    def served_step(self) -> int:
        served = read_served(self.context.store, self.context.cfg.run)
        assert served is not None
        return served.version.step


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    def started(*overrides: str) -> Run:
        _pools.clear()
        cfg = load("smoke", [f"root={tmp_path}", "tokenizer.corpus_prompts=80", *overrides])
        return Run(Context.open(prepare_run(cfg), cfg.root))

    yield started
    _pools.clear()


def break_weights(monkeypatch: pytest.MonkeyPatch, by: float = 0.5) -> None:
    """After the engine has acknowledged a version, by the digest of what it then held."""
    real = OwnEngine.load

    def load_and_break(own: OwnEngine, version: PolicyVersion) -> str:
        found = real(own, version)
        own.pool.engine_at(version, own.tokenizer).served_tensors()[BROKEN].mul_(1 + by)
        return found

    monkeypatch.setattr(OwnEngine, "load", load_and_break)


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_a_healthy_engine_computes_the_trainers_bits_in_every_version(start: Callable[..., Run], mode: str) -> None:
    run = start(f"train.mode={mode}")
    for step in (0, 1):
        metrics = read_record(run.context.store, run.publish_again(run.trained(step))).metrics
        assert run.served_step == step
        assert metrics["publish/canary_tokens"] > NUM_PROMPTS * MAX_NEW
        assert metrics["publish/canary_differing"] == metrics["publish/canary_max_abs"] == 0
        assert {name for name in metrics if "canary" in name} <= set(METRICS)


def test_the_canary_is_the_same_every_time_and_has_a_batch_and_a_cache_hit(start: Callable[..., Run]) -> None:
    run = start()
    version = run.publish(0)
    engine = run.context.pool.engine_at(version, run.context.tokenizer())
    prompts = canary_prompts(run.context, engine.max_length)
    assert len(prompts) == NUM_PROMPTS
    first, second = sample_canary(engine, prompts, 0), sample_canary(engine, prompts, 0)
    assert [each.tokens for each in first] == [each.tokens for each in second]
    assert all(each.generation.num_cached > 0 for each in first[NUM_PROMPTS:])


def test_canary_turns_fit_into_the_shortest_episodes(start: Callable[..., Run]) -> None:
    run = start()
    assert {len(prompt) for prompt in canary_prompts(run.context, 40)} <= set(range(1, 40 - 2 * MAX_NEW))


def test_an_engine_whose_weights_broke_after_it_acknowledged_them_stops_the_version_in_every_try(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    run.publish(0)
    break_weights(monkeypatch)
    trained = run.trained(1)
    message = (
        r"step 1: \d+ of \d+ canary logprobs of engine embedded differ by up to \S+ nat; first at layers\.1\.self_attn\.q_proj \(output\), "
        rf"of other weights \({re.escape(BROKEN)}\); publish\.max_numeric_drift allows 0"
    )
    for _ in range(2):
        with pytest.raises(NumericDrift, match=f"^{message}$"):
            run.publish_again(trained)
        assert run.served_step == 0
    assert issubclass(NumericDrift, RunError), "which no task tries again"


def test_an_operation_that_decodes_otherwise_stops_the_first_version_though_every_digest_is_right(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slightly(*args: Any) -> Any:
        return kda_aligned_step(*args) * (1 + 2**-20)

    monkeypatch.setattr(k3core.model.kda, "kda_aligned_step", slightly)
    run = start()
    with pytest.raises(NumericDrift, match=r"first at layers\.0\.self_attn \(attention core before o_proj\); publish"):
        run.publish(0)
    assert read_served(run.context.store, run.context.cfg.run) is None


def test_a_cached_state_that_comes_back_changed_is_told_from_a_wrong_operation(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = SlotState.restore

    def restore_another(state: SlotState, checkpoint: int, slot: int, length: int) -> None:
        restore(state, checkpoint, slot, length)
        state.slots.states_NLHKV[slot] *= 1.01

    monkeypatch.setattr(SlotState, "restore", restore_another)
    with pytest.raises(NumericDrift, match="when this process computes them again from nothing: look at that engine"):
        start().publish(0)


def test_without_the_gate_there_is_no_canary_and_no_trainer_is_asked(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("publish.max_numeric_drift=none")
    break_weights(monkeypatch)
    metrics = read_record(run.context.store, run.publish_again(run.trained(0))).metrics
    assert run.served_step == 0
    assert not any("canary" in name for name in metrics)
    assert run.context.pool.loads["trainer"] == 0


def test_a_drift_below_the_limit_passes(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = start("publish.max_numeric_drift=0.5")
    break_weights(monkeypatch, by=1e-4)
    metrics = read_record(run.context.store, run.publish_again(run.trained(0))).metrics
    assert run.served_step == 0
    assert 0 < metrics["publish/canary_differing"] <= metrics["publish/canary_tokens"]
    assert 0 < metrics["publish/canary_max_abs"] < 0.5


@pytest.fixture
def resident_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A resident engine of this process, over a real connection."""
    monkeypatch.setenv(TOKEN, "a-secret")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app("engine"), port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)


def test_engines_elsewhere_sample_a_canary_too_and_all_are_counted(
    start: Callable[..., Run], resident_url: str
) -> None:
    run = start()
    one = read_record(run.context.store, run.publish_again(run.trained(0), (resident_url,))).metrics
    assert run.served_step == 0
    assert one["publish/canary_tokens"] > NUM_PROMPTS * MAX_NEW
    assert one["publish/canary_differing"] == one["publish/canary_max_abs"] == 0
    alias = resident_url.replace("127.0.0.1", "localhost")
    two = read_record(run.context.store, run.publish_again(run.trained(1), (resident_url, alias))).metrics
    assert two["publish/canary_tokens"] > one["publish/canary_tokens"]


def test_an_engine_elsewhere_that_computes_other_numbers_stops_the_version_and_is_named(
    start: Callable[..., Run], resident_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def numbers_of_another_machine(*args: Any) -> list[Played]:
        return [
            replace(each, generation=replace(each.generation, raw_logprobs_T=each.generation.raw_logprobs_T * 1.001))
            for each in play_canary(*args)
        ]

    monkeypatch.setattr(server_module, "play_canary", numbers_of_another_machine)
    run = start()
    with pytest.raises(
        NumericDrift, match=rf"of engine {resident_url} differ by .*that engine's prefix cache, or at its"
    ):
        run.publish_again(run.trained(0), (resident_url,))
    assert read_served(run.context.store, run.context.cfg.run) is None


def test_the_place_is_named_where_an_engine_elsewhere_has_an_operation_that_decodes_otherwise(
    start: Callable[..., Run], resident_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(k3core.model.kda, "kda_aligned_step", lambda *args: kda_aligned_step(*args) * (1 + 2**-20))
    run = start()
    with pytest.raises(NumericDrift, match=r"first at layers\.0\.self_attn \(attention core before o_proj\); publish"):
        run.publish_again(run.trained(0), (resident_url,))


def test_a_canary_comes_back_from_its_text_bit_for_bit(start: Callable[..., Run]) -> None:
    run = start()
    played = play_canary(run.context, run.publish(0))
    for mine, theirs in zip(played, from_text(to_text(played)), strict=True):
        assert list(theirs.request.tokens) == list(mine.request.tokens)
        for name in ("tokens_T", "logprobs_T", "raw_logprobs_T", "policy_step_T", "routed_experts_TLk"):
            a, b = getattr(theirs.generation, name), getattr(mine.generation, name)
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()
        assert theirs.generation.routed_layers == mine.generation.routed_layers
