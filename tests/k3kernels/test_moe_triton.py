"""Routed experts without a wait for the device, against their definition, and a token alone against it in a batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels.linear import triton as linear_triton
from k3kernels.moe import triton as fused
from k3kernels.moe.reference import moe_experts as moe_experts_ref

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
TYPES = [torch.float32, torch.bfloat16]
ACTIVATIONS = [None, (4.0, None), (4.0, 25.0)]
E, R, F, K = 5, 72, 50, 2


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def matrices(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (E, F, R), (E, F, R), (E, R, F)
    w1, w3, w2 = (randn(*shape, dtype=dtype, seed=i) * (2 * shape[2] ** -0.5) for i, shape in enumerate(shapes))
    return w1, w3, w2


def routed(T: int, num_experts: int = E) -> tuple[Tensor, Tensor]:
    """Expert 1 is chosen by nobody."""
    scores = torch.rand(T, num_experts, generator=torch.Generator().manual_seed(T))
    scores[:, 1] = -1
    weights_Tk, experts_Tk = scores.topk(K)
    return experts_Tk.to(DEVICE), weights_Tk.to(DEVICE)


def assert_near(got: Tensor, want: Tensor) -> None:
    """Sums of R terms run in another order; in bf16 a value may round to its neighbour at each of four roundings."""
    units = 4 if got.dtype == torch.bfloat16 else R
    atol = units * torch.finfo(got.dtype).eps * want.abs().max().item()
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("betas", ACTIVATIONS)
@pytest.mark.parametrize("T", [1, 7, 90])
def test_the_kernels_equal_the_definition(dtype, betas, T):
    x, w, routes = randn(T, R, dtype=dtype), matrices(dtype), routed(T)
    got = fused.moe_experts(x, *routes, *w, betas)
    want = moe_experts_ref(x, *routes, *w, betas)
    assert got.dtype == dtype
    assert_near(got, want)


@pytest.mark.parametrize("betas", ACTIVATIONS)
def test_in_bf16_most_values_have_the_definitions_bits(betas):
    x, w, routes = randn(40, R, dtype=torch.bfloat16), matrices(torch.bfloat16), routed(40)
    is_same = fused.moe_experts(x, *routes, *w, betas) == moe_experts_ref(x, *routes, *w, betas)
    assert is_same.float().mean() > 0.98


@pytest.mark.parametrize("dtype", TYPES)
def test_a_token_has_the_same_bits_alone_and_in_any_batch(dtype):
    T = 100
    x, w, (experts, weights) = randn(T, R, dtype=dtype), matrices(dtype), routed(T)
    together = fused.moe_experts(x, experts, weights, *w, (4.0, 25.0))
    for rows in (slice(0, 1), slice(99, 100), slice(5, 12), slice(20, 90)):
        assert torch.equal(fused.moe_experts(x[rows], experts[rows], weights[rows], *w, (4.0, 25.0)), together[rows])
    order = torch.randperm(T, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    shuffled = fused.moe_experts(x[order], experts[order], weights[order], *w, (4.0, 25.0))
    assert torch.equal(shuffled, together[order])


def test_all_tokens_may_choose_the_same_experts():
    T = 130
    x, w = randn(T, R), matrices(torch.float32)
    experts = torch.tensor([[3, 0]], device=DEVICE).expand(T, 2)
    weights = torch.full((T, 2), 0.5, device=DEVICE)
    got = fused.moe_experts(x, experts, weights, *w, None)
    assert_near(got, moe_experts_ref(x, experts, weights, *w, None))


def test_large_batches_are_sorted_to_the_same_bits(monkeypatch):
    x, w, routes = randn(20, R), matrices(torch.float32), routed(20)
    want = fused.moe_experts(x, *routes, *w, None)
    monkeypatch.setattr(linear_triton, "MAX_PAIRWISE", 0)
    assert torch.equal(fused.moe_experts(x, *routes, *w, None), want)


def test_a_slot_without_an_expert_adds_nothing_and_an_unknown_expert_makes_its_token_nan():
    x, w, (experts, weights) = randn(6, R), matrices(torch.float32), routed(6)
    whole = fused.moe_experts(x, experts, weights, *w, None)
    experts[2], experts[4, 1] = -1, E
    got = fused.moe_experts(x, experts, weights, *w, None)
    assert torch.equal(got[2], torch.zeros_like(got[2]))
    assert got[4].isnan().all()
    others = [0, 1, 3, 5]
    assert torch.equal(got[others], whole[others])


def test_slots_are_added_in_their_order():
    """1 + 2^-24 - 1 in fp32 depends on it."""
    x = torch.ones(1, 1, device=DEVICE)
    ones = torch.ones(3, 1, 1, device=DEVICE)
    w2 = torch.tensor([1.0, 2.0**-24, -1.0], device=DEVICE).view(3, 1, 1)
    up = ones / torch.nn.functional.silu(x)
    weights = torch.ones(1, 3, device=DEVICE)
    forward = fused.moe_experts(x, torch.tensor([[0, 1, 2]], device=DEVICE), weights, ones, up, w2, None)
    other = fused.moe_experts(x, torch.tensor([[0, 2, 1]], device=DEVICE), weights, ones, up, w2, None)
    assert forward.item() == 0
    assert other.item() == pytest.approx(2.0**-24)


def test_no_tokens_give_no_rows():
    experts, weights = torch.zeros(0, 2, dtype=torch.int64, device=DEVICE), torch.zeros(0, 2, device=DEVICE)
    assert fused.moe_experts(randn(0, R), experts, weights, *matrices(torch.float32), None).shape == (0, R)


def test_matrices_that_are_not_contiguous_are_refused():
    w1, w3, w2 = matrices(torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        fused.moe_experts(randn(2, R), *routed(2), w1, w3, w2.mT.contiguous().mT, None)
