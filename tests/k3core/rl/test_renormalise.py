"""The trainer's logprobs over recorded supports are the engine's behaviour logprobs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3core.rl.renormalise import head_supported_logprobs, supported_logprobs
from k3core.rollout.sampling import sample, sequence_generator
from k3core.types import SamplingParams

D, V, M = 16, 257, 64
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.02),
)
Supports = list[np.ndarray | None]


def by_head(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    tokens_M: Tensor,
    temperature: float,
    supports: Supports,
    block_rows: int = 256,
) -> Tensor:
    def head(hidden_BD: Tensor) -> Tensor:
        return F.linear(hidden_BD, weight_VD)

    V = len(weight_VD)
    return head_supported_logprobs(hidden_MD, head, [weight_VD], V, tokens_M, temperature, supports, block_rows)


def hidden_and_head(rows: int = M, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, D, generator=generator).to(dtype), torch.randn(V, D, generator=generator).to(dtype)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_at_equal_logits_the_ratio_is_exactly_one(sampling: SamplingParams) -> None:
    hidden_MD, weight_VD = hidden_and_head()
    logits_MV = F.linear(hidden_MD, weight_VD)
    draws = sample(logits_MV, [sampling] * M, [sequence_generator(4, m).random() for m in range(M)])
    got_M = supported_logprobs(logits_MV, draws.tokens_N, sampling.temperature, draws.supports)
    assert torch.equal(got_M, draws.logprobs_N)
    for block_rows in (1, 7, 32, 256):
        head_M = by_head(hidden_MD, weight_VD, draws.tokens_N, sampling.temperature, list(draws.supports), block_rows)
        torch.testing.assert_close(head_M, draws.logprobs_N, rtol=0, atol=1e-5)


def test_without_the_support_the_ratio_is_biased() -> None:
    hidden_MD, weight_VD = hidden_and_head()
    logits_MV = F.linear(hidden_MD, weight_VD)
    draws = sample(logits_MV, [SAMPLINGS[2]] * M, [sequence_generator(4, m).random() for m in range(M)])
    whole_M = supported_logprobs(logits_MV, draws.tokens_N, 0.7, [None] * M)
    assert (whole_M < draws.logprobs_N).all()
    assert (draws.logprobs_N - whole_M).max() > 0.02


def test_rows_with_and_without_a_support_mix() -> None:
    logits_MV = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log().expand(3, -1)
    supports: Supports = [None, np.array([1, 2], np.int32), np.array([2], np.int32)]
    got_M = supported_logprobs(logits_MV, torch.tensor([2, 2, 2]), 1.0, supports)
    torch.testing.assert_close(got_M.exp(), torch.tensor([0.3, 0.6, 1.0], dtype=torch.float64))


def test_gradients_are_those_of_finite_differences() -> None:
    hidden_MD, weight_VD = hidden_and_head(5, torch.float64)
    hidden_MD, weight_VD = hidden_MD[:, :4].clone().requires_grad_(), weight_VD[:9, :4].clone().requires_grad_()
    tokens_M = torch.tensor([0, 3, 8, 2, 5])
    supports: Supports = [None, np.array([1, 3, 8]), np.array([8]), np.array([0, 2]), None]

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        return by_head(hidden, weight, tokens_M, 0.7, supports, block_rows=2)

    assert torch.autograd.gradcheck(head, (hidden_MD, weight_VD))
    assert torch.autograd.gradcheck(head, (hidden_MD, weight_VD.detach()))
    assert torch.autograd.gradcheck(head, (hidden_MD.detach(), weight_VD))
    logits_MV = F.linear(hidden_MD, weight_VD).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: supported_logprobs(z, tokens_M, 0.7, supports), (logits_MV,))


def test_tokens_outside_the_support_get_no_gradient() -> None:
    logits_MV = torch.randn(2, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    supports: Supports = [np.array([1, 4]), np.array([3])]
    supported_logprobs(logits_MV, torch.tensor([4, 3]), 0.9, supports).sum().backward()
    assert logits_MV.grad is not None
    assert logits_MV.grad[0].nonzero().flatten().tolist() == [1, 4]
    assert (logits_MV.grad[1] == 0).all()


def test_values_are_those_of_the_head_without_gradients_whether_they_are_wanted_or_not() -> None:
    """A head may multiply in another order where autograd watches; the first ratio must not see that."""
    hidden_MD, weight_VD = hidden_and_head(8)
    trained_VD = nn.Parameter(weight_VD)

    def head(hidden_BD: Tensor) -> Tensor:
        return F.linear(hidden_BD, trained_VD) * (1.5 if torch.is_grad_enabled() else 1.0)

    arguments = (head, [trained_VD], V, torch.arange(8), 1.0, [np.arange(9)] * 8, 4)
    watched_M = head_supported_logprobs(hidden_MD.requires_grad_(), *arguments)
    with torch.no_grad():
        assert torch.equal(watched_M, head_supported_logprobs(hidden_MD, *arguments))
    watched_M.sum().backward()
    assert trained_VD.grad is not None
    assert hidden_MD.grad is not None


def test_no_rows_are_no_logprobs() -> None:
    hidden_MD, weight_VD = hidden_and_head()
    assert by_head(hidden_MD[:0], weight_VD, torch.zeros(0).long(), 1.0, []).shape == (0,)
    assert supported_logprobs(torch.zeros(0, 5), torch.zeros(0).long(), 1.0, []).shape == (0,)


@pytest.mark.parametrize(
    ("token", "temperature", "supports", "message"),
    [
        (0, 0.0, [None], "temperature 0.0: "),
        (0, 1.0, [], "0 supports for 1 tokens"),
        (0, 1.0, [np.array([0, 6])], "ids 0 to 6, the vocabulary 6 tokens"),
        (0, 1.0, [np.array([1, 2])], "row 0: token 0 is not in the support"),
    ],
)
def test_what_does_not_fit_is_refused(token: int, temperature: float, supports: Supports, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        supported_logprobs(torch.zeros(1, 6), torch.tensor([token]), temperature, supports)
