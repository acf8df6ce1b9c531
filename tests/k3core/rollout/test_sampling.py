"""What is drawn follows the distribution that is reported."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from k3core.rollout.sampling import draw, sampling_logprobs, sequence_generator
from k3core.types import SamplingParams

NUM_DRAWS = 4000
LOGITS_V = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5], dtype=torch.float64)  # descending: 0, 7, 1, 2, …


def distribution(params: SamplingParams, logits_V: Tensor = LOGITS_V) -> Tensor:
    return sampling_logprobs(logits_V.unsqueeze(0), [params])[0].exp()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=0.7, top_k=5, top_p=0.9),
    ],
)
def test_frequencies_follow_the_reported_distribution(params: SamplingParams) -> None:
    logprobs_NV = sampling_logprobs(LOGITS_V.expand(NUM_DRAWS, -1).clone(), [params] * NUM_DRAWS)
    generator = sequence_generator(5)
    drawn_N = draw(logprobs_NV, [generator.random() for _ in range(NUM_DRAWS)])
    counts_V = torch.bincount(drawn_N, minlength=len(LOGITS_V)).double()
    expected_V = logprobs_NV[0].exp() * NUM_DRAWS
    possible_V = expected_V > 0
    assert counts_V[~possible_V].sum() == 0
    chi_square = ((counts_V - expected_V)[possible_V].square() / expected_V[possible_V]).sum()
    freedom = int(possible_V.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_temperature_divides_the_logits() -> None:
    torch.testing.assert_close(distribution(SamplingParams(temperature=0.7)), torch.softmax(LOGITS_V / 0.7, 0))


def test_top_k_keeps_the_k_likeliest_and_renormalises() -> None:
    p_V = torch.softmax(LOGITS_V, 0)
    want_V = torch.where(torch.isin(torch.arange(8), torch.tensor([0, 7, 1])), p_V, 0)
    torch.testing.assert_close(distribution(SamplingParams(top_k=3)), want_V / want_V.sum())
    torch.testing.assert_close(distribution(SamplingParams(top_k=99)), p_V)


def test_top_p_keeps_the_fewest_tokens_that_hold_that_much() -> None:
    logits_V = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()
    for top_p, kept in ((0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 2, 3]), (0.91, [0, 1, 2, 3])):
        assert distribution(SamplingParams(top_p=top_p), logits_V).nonzero().flatten().tolist() == kept, top_p


def test_top_p_is_measured_among_the_top_k() -> None:
    logits_V = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()
    want_V = torch.tensor([0, 1.0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(
        distribution(SamplingParams(top_k=2, top_p=0.55), logits_V), want_V
    )  # 0.4 of 0.7 is 0.57


def test_a_tiny_top_p_is_greedy_and_certain() -> None:
    logprobs_NV = sampling_logprobs(LOGITS_V.unsqueeze(0), [SamplingParams(top_p=1e-9)])
    assert draw(logprobs_NV, [0.999]).tolist() == [0]
    assert logprobs_NV[0, 0] == 0.0


def test_each_row_has_its_own_parameters() -> None:
    params = [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_k=1)]
    together_NV = sampling_logprobs(LOGITS_V.expand(3, -1).clone(), params)
    for row_V, p in zip(together_NV, params, strict=True):
        assert torch.equal(row_V, sampling_logprobs(LOGITS_V.unsqueeze(0), [p])[0])


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_no_draw_lands_on_a_token_of_probability_zero(u: float) -> None:
    for seed in range(50):
        p_V = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        p_V[[0, 3, 5, 6]] = 0
        token = int(draw((p_V / p_V.sum()).log().unsqueeze(0), [u]))
        assert p_V[token] > 0


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    logprobs_NV = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64).log().expand(5, -1)
    assert draw(logprobs_NV, [0.0, 0.24, 0.26, 0.74, 0.76]).tolist() == [0, 0, 1, 1, 2]


def test_a_stream_depends_on_its_seed_alone() -> None:
    a, b, c = sequence_generator(2**64 - 1), sequence_generator(2**64 - 1), sequence_generator(2**64 - 2)
    interleaved = [(a.random(), c.random()) for _ in range(5)]
    assert [pair[0] for pair in interleaved] == [b.random() for _ in range(5)]
    assert np.std([x - y for x, y in interleaved]) > 0.01
