"""What top-k, top-p and min-p drew is trained on as it was drawn: over the tokens that they had kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from k3core.model import model as model_module
from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig
from k3core.model.model import ROWS
from k3core.rl import trainer as trainer_module
from k3core.rl.advantages import Advantaged
from k3core.rl.batch import Batch, make_batch
from k3core.rl.gspo import GspoConfig
from k3core.rl.optim import OptimConfig
from k3core.rl.trainer import Trainer
from k3core.rl.update import UpdateConfig, UpdateResult, update_policy
from k3core.rollout.sampling import sample, sequence_generator
from k3core.types import SamplingParams, Supports, Trajectory
from k3kernels.linear_logprob import wide
from k3kernels.packing import Packing

OPTIM = OptimConfig(learning_rate=1e-2)
HEAD_LORA = LoraConfig(4, 8.0, ("lm_head", "o_proj"))
CONTEXT = list(range(9))
SAMPLINGS = (
    SamplingParams(temperature=0.7, max_tokens=12),
    SamplingParams(temperature=0.7, top_p=0.9, max_tokens=12),
    SamplingParams(top_k=7, max_tokens=12),
    SamplingParams(min_p=0.3, max_tokens=12),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.8, min_p=0.05, max_tokens=12),
)


@torch.no_grad()
def played(trainer: Trainer, sampling: SamplingParams, seed: int) -> Trajectory:
    """Drawn token by token from the model's own logits, as an engine does it."""
    tokens, logprobs, raw_logprobs = list(CONTEXT), [0.0] * len(CONTEXT), [0.0] * len(CONTEXT)
    supports: list[np.ndarray | None] = [None] * len(CONTEXT)
    model, stream = trainer.model, sequence_generator(seed)
    for _ in range(sampling.max_tokens):
        forward = model(torch.tensor(tokens), Packing((len(tokens),)))
        draws = sample(model.logits(forward.hidden_TD[-1:].expand(ROWS, -1))[:1], [sampling], [stream.random()])
        tokens.append(int(draws.tokens_N))
        logprobs.append(float(draws.logprobs_N))
        raw_logprobs.append(float(draws.raw_logprobs_N))
        supports += draws.supports
    routes = forward.routed_experts_TLk.numpy().astype(np.uint8)
    mask_T = np.arange(len(tokens)) >= len(CONTEXT)
    return Trajectory(
        prompt_id="prompt",
        sample=seed,
        seed=seed,
        tokens_T=np.array(tokens, np.int32),
        loss_mask_T=mask_T,
        rollout_logprobs_T=np.array(logprobs, np.float32),
        routed_experts_TLk=np.concatenate([routes, np.full((1, *routes.shape[1:]), 255, np.uint8)]),
        policy_step_T=np.where(mask_T, 0, -1).astype(np.int32),
        sampling=sampling,
        stop_reason="max_turn_tokens",
        num_turns=1,
        num_tool_calls=0,
        routed_layers=model.cfg.routed_layers,
        raw_logprobs_T=np.array(raw_logprobs, np.float32),
        supports=Supports.of_rows(supports),
    )


def update(trainer: Trainer, trajectories: Sequence[Trajectory], policy_step: int = 0) -> UpdateResult:
    kept = [Advantaged(t, (-1.0) ** n) for n, t in enumerate(trajectories)]
    cfg = UpdateConfig(minibatches=1, microbatch_rows=2)
    return update_policy(trainer, kept, cfg, GspoConfig(), seed=0, policy_step=policy_step)


def make_trainer(cfg: K3Config, kind: str) -> Trainer:
    if kind == "full":
        return Trainer(cfg, OPTIM)
    return Trainer(cfg, OPTIM, HEAD_LORA, dtype=torch.float32 if kind == "lora" else torch.bfloat16)


@pytest.fixture(params=["small", "large"])
def head(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """large: the head's weight, and the logits of all rows, are more than is held at a time."""
    if request.param == "large":
        for module in (model_module, wide):
            monkeypatch.setattr(module, "MAX_WEIGHT", 100)
        monkeypatch.setattr(trainer_module, "MAX_LOGITS", 61 * ROWS)
    return str(request.param)


@pytest.mark.parametrize("kind", ["full", "lora", "lora in bf16"])
@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=repr)
@pytest.mark.usefixtures("head")
def test_the_first_logprobs_are_the_rollouts_bit_for_bit(cfg: K3Config, sampling: SamplingParams, kind: str) -> None:
    trainer = make_trainer(cfg, kind)
    trajectories = [played(trainer, sampling, seed) for seed in range(4)]
    assert any(t.supports is not None and t.supports.counts_T.any() for t in trajectories)
    metrics = update(trainer, trajectories).metrics
    assert metrics["drift/numeric/tokens"] == 4 * 12
    assert metrics["drift/numeric/differing_tokens"] == metrics["drift/numeric/abs_max"] == 0
    assert metrics["gspo/tis_mean"] == metrics["gspo/ratio_max"] == metrics["gspo/ratio_mean"] == 1
    assert not [name for name in metrics if name.startswith("drift/stale")]
    assert metrics["train/vetoed_steps"] == 0


@pytest.mark.parametrize("kind", ["full", "lora", "lora in bf16"])
@pytest.mark.usefixtures("head")
def test_the_whole_distribution_is_followed_bit_for_bit_too(cfg: K3Config, kind: str) -> None:
    trainer = make_trainer(cfg, kind)
    metrics = update(trainer, [played(trainer, SAMPLINGS[0], seed) for seed in range(4)]).metrics
    assert metrics["drift/numeric/differing_tokens"] == 0


def test_read_over_the_whole_vocabulary_the_same_trajectories_drift(cfg: K3Config) -> None:
    trainer = make_trainer(cfg, "full")
    played_so = [played(trainer, SAMPLINGS[1], seed) for seed in range(4)]
    misread = [replace(t, sampling=SAMPLINGS[0], supports=None) for t in played_so]
    assert update(trainer, misread).metrics["drift/numeric/abs_mean"] > 0.02


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.usefixtures("head")
def test_the_gradient_is_that_of_the_renormalised_distribution(cfg: K3Config, kind: str) -> None:
    """Against log p = z_token - logsumexp of the kept z, written out row by row."""
    trainer = make_trainer(cfg, kind)
    for name, p in trainer.model.named_parameters():
        if name.endswith("lora_B"):  # so that A has a gradient
            torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(1))
    sampling = SAMPLINGS[4]
    batch = make_batch([played(trainer, sampling, seed) for seed in range(3)], [0.0] * 3, range(3), router_replay=True)
    assert batch.supports_M is not None
    weights_M = torch.linspace(-1, 2, len(batch.target_M))

    def loss(logprobs_M: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return (logprobs_M * weights_M).sum(), {}

    trainer.forward_backward(
        batch.tokens_T, batch.packing, batch.target_M, loss, batch.replay_TLk, batch.temperature, batch.supports_M
    )
    found = gradients(trainer)
    loss(written_out(trainer, batch))[0].backward()
    wanted = gradients(trainer)
    assert found.keys() == wanted.keys()
    assert {name for name in found if "lm_head" in name}
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def written_out(trainer: Trainer, batch: Batch) -> Tensor:
    assert batch.supports_M is not None
    hidden_TD = trainer.model(batch.tokens_T, batch.packing, batch.replay_TLk).hidden_TD
    z_TV = trainer.model.logits(hidden_TD) / batch.temperature
    tokens = batch.tokens_T.tolist()
    rows = []
    for target, support in zip(batch.target_M.tolist(), batch.supports_M, strict=True):
        z_V = z_TV[target - 1]
        kept = z_V if support is None else z_V[torch.from_numpy(support).long()]
        rows.append(z_V[tokens[target]] - kept.logsumexp(0))
    return torch.stack(rows).float()


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """They are dropped."""
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.optimizer.zero_grad()
    return found


def test_tokens_of_an_older_step_are_stale_and_not_drift(cfg: K3Config) -> None:
    trainer = make_trainer(cfg, "full")
    old = [played(trainer, SAMPLINGS[1], seed) for seed in range(2)]
    update(trainer, old)
    new = [
        replace(t, policy_step_T=np.where(t.loss_mask_T, 1, -1))
        for t in (played(trainer, SAMPLINGS[1], 9 + n) for n in range(2))
    ]
    half = replace(new[1], policy_step_T=np.where(np.arange(len(new[1].tokens_T)) < 15, old[0].policy_step_T, 1))
    metrics = update(trainer, [*old, new[0], half], policy_step=1).metrics
    assert metrics["drift/numeric/tokens"] == 12 + 6
    assert metrics["drift/numeric/differing_tokens"] == 0
    assert metrics["drift/stale/tokens"] == 24 + 6
    assert metrics["drift/stale/differing_tokens"] == 24  # the weights that drew `half` are these, whatever it says
    assert metrics["drift/stale/abs_mean"] > 1e-3
