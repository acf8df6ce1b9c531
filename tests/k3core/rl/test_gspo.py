"""gspo_loss against the paper (arXiv 2507.18071) worked by hand, in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from k3core.rl.gspo import GspoConfig, gspo_loss

PLAIN = GspoConfig(clip_low=0.2, clip_high=0.5, dual_clip=None, mask_ratio_above=None, tis_cap=None)
EVERYTHING = GspoConfig(clip_low=0.2, clip_high=0.5, dual_clip=3.0, mask_ratio_above=8.0, tis_cap=2.0)


@dataclass
class Case:
    policy_T: Tensor
    old_T: Tensor
    rollout_T: Tensor
    advantages_N: Tensor
    mask_T: Tensor
    seq_T: Tensor

    def of(self, index_T: Tensor) -> Case:
        """The same sequences made of these tokens, in this order."""
        return replace(
            self,
            policy_T=self.policy_T[index_T],
            old_T=self.old_T[index_T],
            rollout_T=self.rollout_T[index_T],
            mask_T=self.mask_T[index_T],
            seq_T=self.seq_T[index_T],
        )


def case(log_ratios: list[list[float]], advantages: list[float]) -> Case:
    """One sequence a list of log(policy / old); the engine agrees with the trainer."""
    lengths = torch.tensor([len(row) for row in log_ratios])
    log_ratio_T = torch.tensor([x for row in log_ratios for x in row], dtype=torch.float64)
    old_T = torch.linspace(-3, -0.5, len(log_ratio_T), dtype=torch.float64)
    return Case(
        policy_T=old_T + log_ratio_T,
        old_T=old_T,
        rollout_T=old_T.clone(),
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        mask_T=torch.ones(len(old_T), dtype=torch.bool),
        seq_T=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
    )


def random_case(seed: int) -> Case:
    """Seven sequences of 1 to 12 tokens with context in between; ratios on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (7,), generator=generator)
    seq_T = torch.repeat_interleave(torch.arange(7), lengths)
    noise = torch.randn(3, len(seq_T), dtype=torch.float64, generator=generator)
    shift_N = torch.randn(7, dtype=torch.float64, generator=generator)
    old_T = -2 + 0.3 * noise[0]
    return Case(
        policy_T=old_T + shift_N[seq_T] + noise[1],
        old_T=old_T,
        rollout_T=old_T + 0.5 * noise[2],
        advantages_N=torch.randn(7, dtype=torch.float64, generator=generator),
        mask_T=torch.rand(len(seq_T), generator=generator) < 0.7,
        seq_T=seq_T,
    )


def run(c: Case, cfg: GspoConfig, num_sequences: int | None = None) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss, its gradient by policy logprob, metrics."""
    policy_T = c.policy_T.clone().requires_grad_()
    n = num_sequences or len(c.advantages_N)
    loss, metrics = gspo_loss(policy_T, c.old_T, c.rollout_T, c.advantages_N, c.mask_T, c.seq_T, n, cfg)
    loss.backward()
    assert policy_T.grad is not None
    return loss.detach(), policy_T.grad, {name: float(value) for name, value in metrics.items()}


def close(a: Tensor | float, b: Tensor | float, tolerance: float = 1e-12) -> bool:
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    return a.shape == b.shape and bool(torch.isfinite(a).all()) and float((a - b).abs().max()) <= tolerance


def test_two_sequences_of_3_and_30_tokens_follow_the_formula() -> None:
    s_short, s_long = math.exp((0.3 - 0.1 + 0.1) / 3), math.exp(-0.05)
    c = case([[0.3, -0.1, 0.1], [0.1, -0.2] * 15], [2.0, -0.5])
    loss, gradient_T, _ = run(c, PLAIN)
    assert close(loss, -(s_short * 2.0 + s_long * -0.5) / 2)
    assert close(gradient_T[:3], torch.full((3,), -s_short * 2.0 / 3 / 2, dtype=torch.float64))
    assert close(gradient_T[3:], torch.full((30,), s_long * 0.5 / 30 / 2, dtype=torch.float64))


def test_a_long_sequence_weighs_no_more_than_a_short_one() -> None:
    _, gradient_T, _ = run(case([[0.0] * 3, [0.0] * 30], [1.0, 1.0]), PLAIN)
    assert close(gradient_T[:3].sum(), gradient_T[3:].sum())


@pytest.mark.parametrize("seed", range(5))
def test_padding_changes_nothing_whatever_stands_in_it(seed: int) -> None:
    c = random_case(seed)
    loss, gradient_T, metrics = run(c, EVERYTHING)
    junk = torch.tensor([float("nan"), float("inf"), float("-inf"), 50.0, -1e30], dtype=torch.float64).repeat(20)
    padded = Case(
        torch.cat([c.policy_T, junk]),
        torch.cat([c.old_T, junk.flip(0)]),
        torch.cat([c.rollout_T, junk.roll(2)]),
        c.advantages_N,
        torch.cat([c.mask_T, torch.zeros(100, dtype=torch.bool)]),
        torch.cat([c.seq_T, torch.full((100,), 3)]),
    )
    padded_loss, padded_gradient_T, padded_metrics = run(padded, EVERYTHING)
    assert close(padded_loss, loss)
    assert close(padded_gradient_T, torch.cat([gradient_T, torch.zeros(100, dtype=torch.float64)]))
    assert padded_metrics == pytest.approx(metrics, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_tokens_and_of_sequences_changes_nothing(seed: int) -> None:
    c = random_case(seed)
    loss, gradient_T, _ = run(c, EVERYTHING)
    generator = torch.Generator().manual_seed(seed)
    tokens, sequences = (torch.randperm(n, generator=generator) for n in (len(c.seq_T), 7))
    shuffled = c.of(tokens)
    shuffled = replace(shuffled, seq_T=sequences.argsort()[shuffled.seq_T], advantages_N=c.advantages_N[sequences])
    shuffled_loss, shuffled_gradient_T, _ = run(shuffled, EVERYTHING)
    assert close(shuffled_loss, loss)
    assert close(shuffled_gradient_T, gradient_T[tokens])


@pytest.mark.parametrize("seed", range(5))
def test_microbatches_add_up_to_the_whole_batch(seed: int) -> None:
    c = random_case(seed)
    loss, gradient_T, metrics = run(c, EVERYTHING)
    parts = []
    for first, last in ((0, 1), (1, 4), (4, 7)):
        part = c.of(((c.seq_T >= first) & (c.seq_T < last)).nonzero().squeeze(-1))
        part = replace(part, seq_T=part.seq_T - first, advantages_N=c.advantages_N[first:last])
        parts.append(run(part, EVERYTHING, num_sequences=7))
    assert close(sum(part[0] for part in parts), loss)
    assert close(torch.cat([part[1] for part in parts]), gradient_T)
    sums = {name: sum(part[2][name] for part in parts) for name in metrics if name != "ratio_max"}
    assert sums | {"ratio_max": max(part[2]["ratio_max"] for part in parts)} == pytest.approx(metrics, abs=1e-12)


def test_at_equal_logprobs_the_gradient_is_reinforce() -> None:
    c = random_case(0)
    c = replace(c, policy_T=c.old_T.clone(), rollout_T=c.old_T.clone())
    _, gradient_T, metrics = run(c, EVERYTHING)
    logprobs_T = c.old_T.clone().requires_grad_()
    returns = [
        advantage * logprobs_T[(c.seq_T == n) & c.mask_T].mean()
        for n, advantage in enumerate(c.advantages_N)
        if ((c.seq_T == n) & c.mask_T).any()
    ]
    (-torch.stack(returns).sum() / 7).backward()
    assert logprobs_T.grad is not None
    assert close(gradient_T, logprobs_T.grad)
    assert metrics["ratio_max"] == 1.0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dual_clip", [None, 1.6])
def test_the_gradient_is_that_of_finite_differences(seed: int, dual_clip: float | None) -> None:
    c = random_case(seed)
    cfg = replace(EVERYTHING, dual_clip=dual_clip, tis_cap=None)

    def loss(policy_T: Tensor) -> Tensor:
        return gspo_loss(policy_T, c.old_T, c.rollout_T, c.advantages_N, c.mask_T, c.seq_T, 7, cfg)[0]

    assert torch.autograd.gradcheck(loss, c.policy_T.clone().requires_grad_(), eps=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", range(10))
def test_the_token_form_is_the_sequence_form_in_value_and_gradient(seed: int) -> None:
    c = random_case(seed)
    policy_T = c.policy_T.clone().requires_grad_()
    surrogates = []
    for n, A in enumerate(c.advantages_N):  # eq. 5 as it is printed, one sequence after the other
        own = (c.seq_T == n) & c.mask_T
        if own.any():
            s = (policy_T[own] - c.old_T[own]).mean().exp()
            surrogates.append(torch.minimum(s * A, s.clamp(0.8, 1.5) * A))
    expected = -torch.stack(surrogates).sum() / 7
    expected.backward()
    loss, gradient_T, _ = run(c, PLAIN)
    assert policy_T.grad is not None
    assert close(loss, expected.detach())
    assert close(gradient_T, policy_T.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "is_clipped"),
    [
        (1.6, 1.0, 1.5, True),
        (1.6, -1.0, -1.6, False),
        (1.4, 1.0, 1.4, False),  # beyond 1 + clip_low: the bounds are not the same
        (0.7, 1.0, 0.7, False),
        (0.7, -1.0, -0.8, True),
        (0.85, -1.0, -0.85, False),
    ],
)
def test_the_clip_stops_a_good_sequence_above_and_a_bad_one_below(
    ratio: float, advantage: float, surrogate: float, is_clipped: bool
) -> None:
    loss, gradient_T, metrics = run(case([[math.log(ratio)] * 4], [advantage]), PLAIN)
    assert close(loss, -surrogate)
    assert close(gradient_T, torch.full((4,), 0.0 if is_clipped else -ratio * advantage / 4, dtype=torch.float64))
    assert metrics["num_clipped"] == is_clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "has_gradient"),
    [(5.0, -2.0, -6.0, False), (2.9, -2.0, -5.8, True), (5.0, 2.0, 3.0, False), (0.1, -2.0, -1.6, False)],
)
def test_the_dual_clip_bounds_the_loss_of_negative_advantages_only(
    ratio: float, advantage: float, surrogate: float, has_gradient: bool
) -> None:
    loss, gradient_T, metrics = run(case([[math.log(ratio)] * 2], [advantage]), replace(PLAIN, dual_clip=3.0))
    assert close(loss, -surrogate)
    assert bool(gradient_T.any()) is has_gradient
    assert metrics["num_dual_clipped"] == (ratio > 3 and advantage < 0)


def test_a_token_of_high_ratio_leaves_the_sum_and_the_denominator() -> None:
    c = case([[math.log(10.0), 0.1, 0.2], [math.log(0.01), 0.0]], [1.0, 1.0])
    loss, gradient_T, metrics = run(c, replace(PLAIN, mask_ratio_above=8.0))
    s, low = math.exp(0.15), 0.1  # decided before the mean; a low ratio is no high one
    assert close(loss, -(s + low) / 2)
    assert close(gradient_T, torch.tensor([0, -s / 2 / 2, -s / 2 / 2, -low / 2 / 2, -low / 2 / 2], dtype=torch.float64))
    assert metrics["num_masked_tokens"] == 1
    assert metrics["num_tokens"] == 5


def test_a_ratio_that_overflows_is_a_high_one() -> None:
    c = case([[0.0, 0.1, 0.2]], [1.0])
    c.old_T[0] = float("-inf")
    loss, gradient_T, _ = run(c, EVERYTHING)
    assert close(loss, -math.exp(0.15))
    assert close(gradient_T, torch.tensor([0, -math.exp(0.15) / 2, -math.exp(0.15) / 2], dtype=torch.float64))


def test_a_fully_masked_sequence_adds_neither_gradient_nor_nan() -> None:
    c = case([[3.0, 4.0], [0.1, 0.1]], [5.0, 1.0])
    loss, gradient_T, metrics = run(c, replace(PLAIN, mask_ratio_above=8.0))
    assert close(loss, -math.exp(0.1) / 2)
    assert close(gradient_T, torch.tensor([0, 0, -math.exp(0.1) / 4, -math.exp(0.1) / 4], dtype=torch.float64))
    assert (metrics["num_sequences"], metrics["ratio_sum"]) == (1, pytest.approx(math.exp(0.1)))

    loss, gradient_T, metrics = run(replace(c, mask_T=torch.zeros(4, dtype=torch.bool)), EVERYTHING)
    assert close(loss, 0.0)
    assert not gradient_T.any()
    assert metrics["num_sequences"] == 0


@pytest.mark.parametrize("where", ["policy_T", "old_T", "rollout_T"])
def test_a_logprob_that_is_nan_makes_the_loss_nan(where: str) -> None:
    for tokens in (slice(0, 1), slice(0, 2)):  # one token of a sequence, all of them
        c = case([[0.0, 0.0], [0.0] * 3], [1.0, -1.0])
        getattr(c, where)[tokens] = float("nan")
        assert math.isnan(run(c, EVERYTHING)[0])


def test_the_importance_weight_multiplies_after_the_clip_and_is_capped() -> None:
    c = case([[math.log(1.6)] * 2, [0.0] * 2], [1.0, 1.0])
    w = torch.tensor([1.25, 0.5, 1.5, 7.0], dtype=torch.float64)
    c.rollout_T = c.old_T - w.log()
    loss, gradient_T, metrics = run(c, replace(PLAIN, tis_cap=2.0))
    assert close(loss, -(1.5 * (1.25 + 0.5) / 2 + (1.5 + 2.0) / 2) / 2)
    assert close(gradient_T, torch.tensor([0, 0, -1.5 / 4, -2.0 / 4], dtype=torch.float64))
    assert metrics["tis_sum"] == pytest.approx(1.25 + 0.5 + 1.5 + 2.0)
    assert metrics["num_tis_clipped"] == 1


def test_only_the_policy_receives_a_gradient() -> None:
    c = random_case(1)
    old_T, rollout_T = c.old_T.clone().requires_grad_(), c.rollout_T.clone().requires_grad_()
    policy_T = c.policy_T.clone().requires_grad_()
    loss, _ = gspo_loss(policy_T, old_T, rollout_T, c.advantages_N, c.mask_T, c.seq_T, 7, EVERYTHING)
    loss.backward()
    assert policy_T.grad is not None
    assert policy_T.grad.any()
    assert old_T.grad is None
    assert rollout_T.grad is None


def test_drift_between_engine_and_trainer_is_never_taken_for_staleness() -> None:
    """The engine is 0.5 nat off on every token: ten times what the clip allows, and nothing is clipped or masked."""
    c = case([[0.0] * 5, [0.0] * 9], [1.0, -1.0])
    c.rollout_T = c.old_T + torch.where(c.seq_T == 0, 0.5, -0.5)
    _, gradient_T, metrics = run(c, GspoConfig(clip_low=0.05, clip_high=0.05, mask_ratio_above=1.2, tis_cap=2.0))
    assert (metrics["ratio_max"], metrics["ratio_sum"]) == (1.0, 2.0)
    assert metrics["num_clipped"] == metrics["num_masked_tokens"] == 0
    assert close(gradient_T[:5], torch.full((5,), -math.exp(-0.5) / 5 / 2, dtype=torch.float64))


def test_metrics_are_counts_of_what_happened() -> None:
    rows = [[math.log(1.6)] * 2, [math.log(1.6)] * 2, [math.log(0.7)] * 3, [math.log(4.0)], [3.0, 0.0], [3.0], [-1.0]]
    _, _, metrics = run(case(rows, [1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 0.0]), EVERYTHING)
    assert metrics == pytest.approx(
        {
            "num_sequences": 6,  # the sixth is masked
            "num_tokens": 12,
            "loss": -(1.5 - 1.6 - 0.8 - 3.0 + 1.0) / 7,
            "ratio_sum": 1.6 + 1.6 + 0.7 + 4.0 + 1.0 + math.exp(-1),
            "ratio_max": 4.0,
            "num_clipped": 2,  # the first and the third; without an advantage nothing is clipped away
            "num_dual_clipped": 1,
            "num_masked_tokens": 2,
            "tis_sum": 12,
            "num_tis_clipped": 0,
        },
        abs=1e-12,
    )
