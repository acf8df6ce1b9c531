"""The router's kernel against its definition: which experts, in which order, with what weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from k3kernels import dispatch, moe
from k3kernels.moe import reference
from k3kernels.moe.router import route

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("T", "E", "k"), [(1, 1, 1), (4, 8, 1), (3, 8, 2), (9, 64, 8), (3, 384, 16), (2, 5, 5)])
def test_experts_and_weights_are_those_of_the_definition(renormalize, T, E, k):
    logits, bias = randn(T, E), randn(E, seed=1) * 0.3
    experts, weights = route(logits, bias, k, renormalize, 2.5)
    want_experts, want_weights = reference.route(logits, bias, k, renormalize, 2.5)
    assert torch.equal(experts, want_experts)
    torch.testing.assert_close(weights, want_weights, rtol=4e-6, atol=0)


def test_the_bias_chooses_and_does_not_weigh():
    logits, bias = torch.tensor([[2.0, 1.0, 0.0]], device=DEVICE), torch.tensor([-1.0, 0.0, 1.0], device=DEVICE)
    experts, weights = route(logits, bias, 2, False, 1.0)
    assert experts.tolist() == [[2, 1]]
    torch.testing.assert_close(weights, torch.sigmoid(logits[:, [2, 1]]), rtol=4e-6, atol=0)


def test_equal_scores_go_to_the_lower_number():
    logits = torch.tensor([[0.0, 3.0, 0.0, 3.0, 0.0, 0.0], [0.0] * 6], device=DEVICE)
    experts, _ = route(logits, torch.zeros(6, device=DEVICE), 4, True, 1.0)
    assert experts.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]


def test_negative_scores_are_ordered_too_and_no_expert_is_chosen_twice():
    bias = torch.tensor([-5.0, -2.0, -torch.inf, -torch.inf, -3.0], device=DEVICE)
    experts, _ = route(torch.zeros(1, 5, device=DEVICE), bias, 5, True, 1.0)
    assert experts.tolist() == [[1, 4, 0, 2, 3]]


@pytest.mark.parametrize("nan", [torch.nan, -torch.nan])
def test_a_nan_of_either_sign_is_chosen_first_and_spoils_the_weights_of_its_token_only(nan):
    logits = randn(3, 8)
    logits[1, 5] = nan
    experts, weights = route(logits, torch.zeros(8, device=DEVICE), 2, True, 1.0)
    assert experts[1, 0] == 5
    assert weights.isnan().any(1).tolist() == [False, True, False]


def test_a_nan_in_the_bias_chooses_its_expert_and_does_not_weigh():
    logits, bias = randn(3, 8), torch.zeros(8, device=DEVICE)
    bias[5] = -torch.nan
    experts, weights = route(logits, bias, 2, True, 1.0)
    assert experts[:, 0].eq(5).all()
    assert weights.isfinite().all()


def test_a_token_has_the_same_bits_alone_and_in_any_batch():
    logits, bias = randn(30, 64), randn(64, seed=1)
    experts, weights = route(logits, bias, 8, True, 2.0)
    for start, end in ((0, 1), (29, 30), (4, 11)):
        got_experts, got_weights = route(logits[start:end], bias, 8, True, 2.0)
        assert torch.equal(got_experts, experts[start:end])
        assert torch.equal(got_weights, weights[start:end])


def test_more_slots_than_experts_are_refused():
    with pytest.raises(ValueError, match="1 to 4 slots"):
        route(randn(2, 4), randn(4), 5, True, 1.0)


def test_a_replay_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"route replays integers \(2, 3\), got torch.int64 \(2, 2\)"):
        route(randn(2, 4), randn(4), 3, True, 1.0, torch.zeros(2, 2, dtype=torch.int64))


def gradient(run, logits: Tensor, *rule: object) -> Tensor:
    logits = logits.detach().requires_grad_()
    _, weights = run(logits, *rule)
    return torch.autograd.grad(weights, logits, randn(*weights.shape, seed=9).to(weights.dtype))[0]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("T", "E", "k"), [(1, 1, 1), (4, 8, 1), (9, 64, 8), (3, 384, 16), (2, 5, 5), (0, 8, 2)])
@pytest.mark.parametrize("is_replayed", [True, False])
def test_gradients_equal_those_of_the_definition_in_fp64(renormalize, T, E, k, is_replayed):
    logits, bias = randn(T, E), randn(E, seed=1) * 0.3
    replay = torch.randint(-1, E, (T, k), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    rule = (bias, k, renormalize, 2.5, replay if is_replayed else None)
    got, want = gradient(route, logits, *rule), gradient(reference.route, logits.double(), *rule)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_an_expert_in_two_slots_gets_the_sum_of_both():
    logits, replay = randn(1, 4), torch.tensor([[2, 2, 0]], device=DEVICE)
    rule = (torch.zeros(4, device=DEVICE), 3, False, 1.0, replay)
    got, want = gradient(route, logits, *rule), gradient(reference.route, logits, *rule)
    assert (got[0] != 0).tolist() == [True, False, True, False]
    torch.testing.assert_close(got, want)


def test_a_replay_of_its_own_choice_gives_the_same_bits():
    logits, bias = randn(20, 64), randn(64, seed=1)
    experts, weights = route(logits, bias, 8, True, 2.0)
    of_two_layers = torch.stack((torch.zeros_like(experts), experts), 1).int()  # rows that do not lie side by side
    again, replayed = route(logits, bias, 8, True, 2.0, of_two_layers[:, 1])
    assert torch.equal(again, experts)
    assert torch.equal(replayed, weights)


def test_a_replayed_row_below_0_chooses_for_itself_and_one_beyond_the_experts_is_nan():
    logits, bias = randn(3, 8), torch.zeros(8, device=DEVICE)
    own, weights = route(logits, bias, 2, True, 1.0)
    replay = torch.tensor([[-1, -1], [3, 8], [5, 1]], device=DEVICE)
    experts, replayed = route(logits, bias, 2, True, 1.0, replay)
    assert torch.equal(experts, torch.stack((own[0], replay[1], replay[2])))
    assert torch.equal(replayed[0], weights[0])
    assert replayed.isnan().any(1).tolist() == [False, True, False]


def test_a_layer_computed_again_with_its_own_experts_has_the_definitions_gradient(monkeypatch):
    monkeypatch.setattr(dispatch, "_is_known", lambda _: True)  # kernels, wherever the tensors lie
    weight, bias, used = randn(6, 8).requires_grad_(), torch.zeros(8, device=DEVICE), []

    def layer(x: Tensor) -> Tensor:
        experts, weights = moe.route(x @ weight, bias, 3, True, 2.0, used[0] if used else None)
        used.append(experts)
        return (weights * torch.arange(3.0, device=DEVICE)).sum()

    x = randn(5, 6)
    with dispatch.batch_invariant(False):
        (again,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False), weight)
    assert len(used) == 2
    _, weights = reference.route(x @ weight, bias, 3, True, 2.0)
    (want,) = torch.autograd.grad((weights * torch.arange(3.0, device=DEVICE)).sum(), weight)
    torch.testing.assert_close(again, want)
