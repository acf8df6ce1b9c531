"""The update stage: applied once, refused with another batch, the same bits cold or warm."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from infra import policies
from infra.config import RunConfig, load
from infra.ledger import Ledger
from infra.pool import Pool, _pools
from infra.records import decode, encode
from infra.stages import update as stage
from infra.stages.context import Context, Inputs
from infra.stages.prepare import prepare_run
from infra.stages.record import read_record, write_record
from infra.stages.rollout import rollout_step
from infra.stages.update import update_step
from infra.store import Store
from k3core.checkpoint.tensors import from_safetensors, from_torch
from k3core.rl.trainer import Trainer
from k3core.types import PolicyVersion, Ref, SamplingParams, Score, ScoredGroup, Trajectory


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    return load("smoke", [f"root={tmp_path}", "tokenizer.corpus_prompts=80"])


@pytest.fixture
def inputs(cfg: RunConfig) -> Inputs:
    _pools.clear()
    return prepare_run(cfg)


@pytest.fixture
def policy(cfg: RunConfig) -> PolicyVersion:
    weights, _ = Trainer(cfg.model, cfg.train.optim, cfg.train.lora, seed=3).save()
    base = {name: tensor for name, tensor in weights.items() if "lora" not in name}
    version, _ = policies.publish(Store(cfg.root), cfg.run, 0, from_torch(base), None, 10, 3, {})
    return version


def trajectory(cfg: RunConfig, prompt: str, sample: int, seed: int) -> Trajectory:
    rng = np.random.default_rng(seed)
    T, layers, k = 20, len(cfg.model.moe_layers), cfg.model.num_experts_per_token
    mask_T = np.arange(T) >= 8
    routes = np.stack([rng.permutation(cfg.model.num_experts)[:k] for _ in range(T * layers)]).reshape(T, layers, k)
    routes[-1] = 255
    return Trajectory(
        prompt, sample, seed,
        tokens_T=rng.integers(0, 256, T).astype(np.int32),
        loss_mask_T=mask_T,
        rollout_logprobs_T=np.where(mask_T, -6.0, 0.0).astype(np.float32),
        routed_experts_TLk=routes.astype(np.uint8),
        policy_step_T=np.where(mask_T, 0, -1).astype(np.int32),
            routed_layers=cfg.model.routed_layers,
        sampling=SamplingParams(), stop_reason="finished", num_turns=1, num_tool_calls=1,
    )  # fmt: skip


def scored(cfg: RunConfig, inputs: Inputs, *, seed: int = 0) -> Ref:
    """A score record with two groups that have variance and one trajectory lost to an infrastructure error."""
    groups = []
    for g in range(2):
        members = tuple(trajectory(cfg, f"prompt-{g}", n, seed + 10 * g + n) for n in range(3))
        lost = dataclasses.replace(
            members[2],
            loss_mask_T=np.zeros(20, dtype=bool), rollout_logprobs_T=np.zeros(20, dtype=np.float32),
            routed_experts_TLk=np.zeros((20, 0, 0), dtype=np.uint8), stop_reason="infrastructure_error", error="disk full",
        )  # fmt: skip
        scores = (
            Score(1.0, 1.0, True, ()),
            Score(0.0, 0.0, False, ()),
            Score(None, None, None, (), "infrastructure_error"),
        )
        groups.append(ScoredGroup(f"prompt-{g}", (*members[:2], lost), scores))
    context = Context.open(inputs, cfg.root)
    ref = context.store.put(f"{cfg.run}/steps/000000/groups-{seed}.zst", encode(groups))
    return context.record("score", 0, {"groups": ref}, {}, name=f"score-{seed}")


def weights_of(cfg: RunConfig, record: Ref) -> str:
    return read_record(Store(cfg.root), record).outputs["weights"].sha256


def test_a_retry_finds_the_step_applied_and_returns_its_record(
    cfg: RunConfig, inputs: Inputs, policy: PolicyVersion
) -> None:
    score = scored(cfg, inputs)
    first = update_step(inputs, cfg.root, policy, score, None)
    assert update_step(inputs, cfg.root, policy, score, None) == first
    assert len(Ledger(Store(cfg.root), cfg.run).entries(9)) == 1


def test_another_batch_for_an_applied_step_is_refused(cfg: RunConfig, inputs: Inputs, policy: PolicyVersion) -> None:
    update_step(inputs, cfg.root, policy, scored(cfg, inputs), None)
    with pytest.raises(ValueError, match="applied step 1 to batch"):
        update_step(inputs, cfg.root, policy, scored(cfg, inputs, seed=50), None)


def test_a_crash_between_the_optimizer_step_and_its_entry_applies_the_step_once(
    cfg: RunConfig, inputs: Inputs, policy: PolicyVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = scored(cfg, inputs)

    class Crashing(Ledger):
        def record(self, *_args: object) -> dict[str, object]:
            raise OSError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(stage, "Ledger", Crashing)
        with pytest.raises(OSError, match="power cut"):
            update_step(inputs, cfg.root, policy, score, None)
    # The same process goes on: its trainer holds weights that are no version, and must not step from them.
    again = update_step(inputs, cfg.root, policy, score, None)
    _pools.clear()
    cold = load("smoke", [f"root={cfg.root}-cold", "tokenizer.corpus_prompts=80"])
    cold_inputs = prepare_run(cold)
    weights = policies.load(Store(cfg.root), policy)
    cold_policy, _ = policies.publish(Store(cold.root), cold.run, 0, weights, None, 10, 3, {})
    undisturbed = update_step(cold_inputs, cold.root, cold_policy, scored(cold, cold_inputs), None)
    assert weights_of(cfg, again) == weights_of(cold, undisturbed)


def test_a_cold_process_steps_to_the_same_bits_as_a_warm_one(
    cfg: RunConfig, inputs: Inputs, policy: PolicyVersion
) -> None:
    store = Store(cfg.root)
    first = read_record(store, update_step(inputs, cfg.root, policy, scored(cfg, inputs), None))
    raw = from_safetensors(store.get(first.outputs["weights"]))
    second, _ = policies.publish(store, cfg.run, 1, raw, policy, 10, 3, {})
    score = dataclasses.replace(read_record(store, scored(cfg, inputs, seed=70)), step=1)
    score_ref = write_record(store, score, "score-next")
    warm = update_step(inputs, cfg.root, second, score_ref, first.outputs["optimizer"])
    warm_weights = weights_of(cfg, warm)
    (Path(cfg.root) / cfg.run / "ledger" / "000002.json").unlink()
    _pools.clear()
    cold = update_step(inputs, cfg.root, second, score_ref, first.outputs["optimizer"])
    assert weights_of(cfg, cold) == warm_weights


def test_the_first_update_measures_drift_over_every_sampled_token_and_skips_lost_episodes(
    cfg: RunConfig, inputs: Inputs, policy: PolicyVersion
) -> None:
    record = read_record(Store(cfg.root), update_step(inputs, cfg.root, policy, scored(cfg, inputs), None))
    assert record.metrics["drift/numeric/abs_max"] > 0
    assert record.metrics["staleness/max"] == 0


def test_in_mode_lora_the_base_stays_and_the_adapter_moves(tmp_path: Path) -> None:
    _pools.clear()
    cfg = load("smoke", [f"root={tmp_path}", "train.mode=lora", "train.lora_rank=4", "tokenizer.corpus_prompts=80"])
    inputs = prepare_run(cfg)
    base, _ = Trainer(cfg.model, cfg.train.optim, None, seed=3).save()
    store = Store(cfg.root)
    policy, _ = policies.publish(store, cfg.run, 0, from_torch(base), None, 10, 3, {})
    record = read_record(store, update_step(inputs, cfg.root, policy, scored(cfg, inputs), None))
    after = from_safetensors(store.get(record.outputs["weights"]))
    assert all(after[name] == raw for name, raw in from_torch(base).items())
    assert any(np.frombuffer(after[name].data, np.float32).any() for name in after if name.endswith("lora_B"))


def test_the_pool_loads_only_what_is_not_there(cfg: RunConfig, inputs: Inputs, policy: PolicyVersion) -> None:
    context = Context.open(inputs, cfg.root)
    pool: Pool = context.pool
    tokenizer = context.tokenizer()
    pool.engine_at(policy, tokenizer)
    pool.engine_at(policy, tokenizer)
    pool.trainer_at(policy, None)
    pool.trainer_at(policy, None)
    assert pool.loads == {"trainer": 1, "engine": 1}


def test_what_the_engine_drew_from_a_cut_distribution_reaches_the_trainer_bit_for_bit(tmp_path: Path) -> None:
    """Through the store: settings, engine, episodes, records, batches, trainer."""
    _pools.clear()
    cut = ["rollout.temperature=0.7", "rollout.top_p=0.9", "rollout.top_k=40", "rollout.min_p=0.01"]
    cfg = load("smoke", [f"root={tmp_path}", "tokenizer.corpus_prompts=80", "environment.max_turn_tokens=12", *cut])
    inputs = prepare_run(cfg)
    weights, _ = Trainer(cfg.model, cfg.train.optim, cfg.train.lora, seed=3).save()
    store = Store(cfg.root)
    policy, _ = policies.publish(store, cfg.run, 0, from_torch(weights), None, 10, 3, {})
    drawn = read_record(store, rollout_step(inputs, cfg.root, policy, 0)).outputs["trajectories"]
    trajectories = decode(store.get(drawn), tuple[Trajectory, ...], drawn.uri)
    assert any(t.supports is not None and t.supports.counts_T.any() for t in trajectories)
    groups = []
    for start in range(0, len(trajectories), cfg.rollout.group_size):
        members = trajectories[start : start + cfg.rollout.group_size]
        scores = tuple(Score(float(n % 2), float(n % 2), bool(n % 2), ()) for n in range(len(members)))
        groups.append(ScoredGroup(members[0].prompt_id, members, scores))
    ref = store.put(f"{cfg.run}/steps/000000/groups.zst", encode(groups))
    score = Context.open(inputs, cfg.root).record("score", 0, {"groups": ref}, {}, name="score")
    metrics = read_record(store, update_step(inputs, cfg.root, policy, score, None)).metrics
    assert metrics["drift/numeric/tokens"] == sum(t.loss_mask_T.sum() for t in trajectories)
    assert metrics["drift/numeric/differing_tokens"] == metrics["drift/numeric/abs_max"] == 0
    assert metrics["gspo/tis_mean"] == 1
    assert not [name for name in metrics if name.startswith("drift/stale/")]
