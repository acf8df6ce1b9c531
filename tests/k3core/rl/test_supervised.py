from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from k3core.chat import parse_turn, render_turn, training_texts
from k3core.envs.contracts import ContractsEnvironment
from k3core.envs.demonstrations import mixture
from k3core.envs.environment import Limits
from k3core.model.config import K3Config
from k3core.rl.optim import OptimConfig
from k3core.rl.supervised import Demonstration, demonstration, supervised_step, warmup_cosine
from k3core.rl.trainer import Trainer
from k3core.rollout.episodes import EpisodeSpec, rollout
from k3core.rollout.protocol import GenerateRequest, Generation
from k3core.tokenizer import Tokenizer
from k3core.types import Message, SamplingParams, Trajectory
from k3kernels.packing import Packing


@dataclass
class ScriptedEngine:
    """Says the assistant turns of a conversation one after the other, in canonical tokens."""

    turns: list[list[int]]
    policy_step: int = 0
    histories: list[list[int]] = field(default_factory=list)

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        raise NotImplementedError

    async def generate(self, request: GenerateRequest) -> Generation:
        tokens = self.turns[len(self.histories)]
        self.histories.append(list(request.tokens))
        n = len(tokens)
        return Generation(
            np.array(tokens, np.int32),
            np.zeros(n, np.float32),
            np.zeros(n, np.float32),
            np.zeros(n, np.int32),
            (None,) * n,
            0,
            np.zeros((len(request.tokens) + n - 1, 1, 2), np.uint8),
            ("layers.1.block_sparse_moe",),
            "end_of_turn",
        )

    def release(self, sequence: str) -> None:
        pass


@pytest.fixture
def demonstrations(make_trajectory: Callable[..., Trajectory]) -> list[Demonstration]:
    made = [make_trajectory(seed, turn=1 + seed % 4) for seed in range(6)]
    return [Demonstration(tuple(t.tokens_T.tolist()), tuple(t.loss_mask_T.tolist())) for t in made]


def cross_entropy(trainer: Trainer, demonstrations: list[Demonstration]) -> float:
    """Token by token, each sequence alone, from the whole log softmax."""
    terms = []
    with torch.no_grad():
        for d in demonstrations:
            tokens_T = torch.tensor(d.tokens)
            full_TV = torch.log_softmax(
                trainer.model.logits(trainer.model(tokens_T, Packing((len(d.tokens),))).hidden_TD), -1
            )
            terms += [-float(full_TV[i - 1, d.tokens[i]]) for i in range(len(d.tokens)) if d.loss_mask[i]]
    return math.fsum(terms) / len(terms)


def test_the_loss_is_the_mean_cross_entropy_of_the_assistants_own_tokens(
    cfg: K3Config, demonstrations: list[Demonstration]
) -> None:
    trainer = Trainer(cfg, OptimConfig())
    expected = cross_entropy(trainer, demonstrations)
    step = supervised_step(trainer, demonstrations, microbatch_rows=4, learning_rate=1e-3)
    assert step.loss == pytest.approx(expected, abs=1e-5)
    assert step.result.applied
    assert cross_entropy(trainer, demonstrations) < expected


def test_tokens_without_loss_are_not_learnt(cfg: K3Config) -> None:
    """Only the head's rows say what is predicted: with one trained token, its own row is the only one to be raised."""
    trainer = Trainer(cfg, OptimConfig(beta1=0.0, grad_clip=1e9))
    before = trainer.model.lm_head.weight.detach().clone()
    d = Demonstration((3, 4, 5, 6, 7), (False, False, True, False, False))
    supervised_step(trainer, [d], microbatch_rows=1, learning_rate=1e-3)
    gradient_VD = trainer.optimizer.state()["exp_avg.lm_head.weight"]
    hidden_D = -gradient_VD[5]
    is_raised_V = gradient_VD @ hidden_D < 0
    assert is_raised_V.nonzero().tolist() == [[5]]
    assert not torch.equal(trainer.model.lm_head.weight, before)


def test_microbatches_change_neither_loss_nor_step(cfg: K3Config, demonstrations: list[Demonstration]) -> None:
    def after(rows: int) -> tuple[float, float, dict[str, Tensor]]:
        trainer = Trainer(cfg, OptimConfig(eps=1.0))  # a large eps: the step is smooth where the gradient is near 0
        step = supervised_step(trainer, demonstrations, rows, learning_rate=1.0)
        return step.loss, step.result.grad_norm, trainer.save()[0]

    loss, norm, weights = after(6)
    for rows in (1, 4):
        other_loss, other_norm, other_weights = after(rows)
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert other_norm == pytest.approx(norm, rel=1e-5)
        for name, tensor in weights.items():
            assert torch.allclose(other_weights[name], tensor, rtol=0, atol=1e-5), name


def test_a_step_without_a_trained_token_is_refused(cfg: K3Config) -> None:
    trainer = Trainer(cfg, OptimConfig())
    step = supervised_step(trainer, [Demonstration((1, 2, 3), (False,) * 3)], microbatch_rows=1, learning_rate=1.0)
    assert not step.result.applied
    assert math.isnan(step.loss)


def test_warmup_rises_to_one_and_the_cosine_falls_to_the_floor() -> None:
    factors = [warmup_cosine(step, steps=120, warmup=20, floor=0.1) for step in range(121)]
    assert factors[:20] == pytest.approx([(step + 1) / 20 for step in range(20)])
    assert factors[20] == 1.0
    assert factors[70] == pytest.approx(0.55)
    assert factors[120] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(factors[20:]))
    assert warmup_cosine(0, steps=10, warmup=0, floor=0.0) == 1.0
    assert warmup_cosine(20, steps=20, warmup=20, floor=0.1) == 1.0


@pytest.mark.parametrize("index", range(6))
def test_a_demonstration_has_the_tokens_and_mask_of_the_episode_that_it_shows(index: int) -> None:
    prompt, _, messages = mixture(seed=0, index=index, expert_share=0.5)
    tokenizer = Tokenizer.train(training_texts(messages), vocab_size=300)
    turns = [render_turn(message, tokenizer, thinking=False) for message in messages if message.role == "assistant"]
    engine = ScriptedEngine(turns)
    limits = Limits(max_turns=len(turns), max_turn_tokens=10_000, max_tokens=100_000)
    spec = EpisodeSpec(prompt, 0, 0)
    [trajectory] = asyncio.run(
        rollout(engine, ContractsEnvironment(limits), tokenizer, [spec], SamplingParams(), limits, max_running=1)
    )
    shown = demonstration(messages, tokenizer)
    assert trajectory.stop_reason == "finished"
    assert trajectory.num_turns == len(turns)
    assert shown.tokens == tuple(trajectory.tokens_T.tolist())
    assert shown.loss_mask == tuple(trajectory.loss_mask_T.tolist())


def test_a_demonstrations_trained_spans_are_its_assistant_turns() -> None:
    _, _, messages = mixture(seed=0, index=0, expert_share=1.0)
    tokenizer = Tokenizer.train(training_texts(messages), vocab_size=300)
    shown = demonstration(messages, tokenizer)
    spans: list[list[int]] = [[]]
    for token, is_trained in zip(shown.tokens, shown.loss_mask, strict=True):
        if is_trained:
            spans[-1].append(token)
        elif spans[-1]:
            spans.append([])
    said: list[Message] = [message for message in messages if message.role == "assistant"]
    assert [parse_turn(span, tokenizer, thinking=False) for span in spans] == said
