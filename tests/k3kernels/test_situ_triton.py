"""The gated activations' kernel against its definitions, and a token's bits alone and in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels.situ import reference
from k3kernels.situ.train import gated_activation_train
from k3kernels.situ.triton import gated_activation, situ

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
TYPES = [torch.float32, torch.bfloat16]
BETAS = [None, (4.0, None), (4.0, 25.0)]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def definition(gate: Tensor, up: Tensor, betas: tuple[float, float | None] | None) -> Tensor:
    return torch.nn.functional.silu(gate) * up if betas is None else reference.situ(gate, up, *betas)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize(("T", "F"), [(1, 1), (3, 100), (2, 1025)])
def test_the_activation_equals_its_definition(dtype, betas, T, F):
    """fp32: 32 units in the last place, of exp, tanh and their products; bf16: a neighbour at each of two roundings."""
    gate, up = randn(T, F, dtype=dtype) * 5, randn(T, F, dtype=dtype, seed=1) * 20
    got = gated_activation(gate, up, betas)
    assert got.dtype == dtype
    units = 32 if dtype == torch.float32 else 2
    torch.testing.assert_close(got, definition(gate, up, betas), rtol=units * torch.finfo(dtype).eps, atol=1e-30)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("betas", BETAS)
def test_gradients_equal_the_definitions_for_halves_of_one_product_too(dtype, betas):
    both = (randn(3, 2 * 1030, dtype=dtype) * 5).requires_grad_()
    grad = randn(3, 1030, dtype=dtype, seed=2)

    def gradient(op, x: Tensor) -> Tensor:
        return torch.autograd.grad(op(x[:, :1030], x[:, 1030:], betas), x, grad.to(x.dtype))[0]

    got, want = gradient(gated_activation_train, both), gradient(definition, both.double())
    assert got.dtype == dtype
    assert float((got.double() - want).norm() / want.norm()) < (1e-5 if dtype == torch.float32 else 4e-3)


def test_bf16_silu_is_rounded_before_the_product():
    gate, up = randn(64, 64, dtype=torch.bfloat16), randn(64, 64, dtype=torch.bfloat16, seed=1)
    once = (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16()
    got, want = gated_activation(gate, up, None), definition(gate, up, None)
    assert (got != want).float().mean() < 0.01 < (once != want).float().mean()


@pytest.mark.filterwarnings("ignore:overflow")  # of exp, to the infinity that is meant; a GPU says nothing
@pytest.mark.parametrize("betas", BETAS)
def test_inputs_of_every_size_stay_finite_and_small_ones_keep_their_digits(betas):
    gate = torch.tensor([[0.0, 1e-20, -1e-6, 1e-3, 0.9, -80.0, 300.0, -3e4, 3e4]], device=DEVICE)
    up = torch.full_like(gate, 1e-5)
    got = gated_activation(gate, up, betas)
    torch.testing.assert_close(got.double(), definition(gate.double(), up.double(), betas), rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("betas", BETAS)
def test_a_token_has_the_same_bits_alone_and_in_any_batch(dtype, betas):
    gate, up = randn(23, 77, dtype=dtype), randn(23, 77, dtype=dtype, seed=1)
    together = gated_activation(gate, up, betas)
    for start, end in ((0, 1), (22, 23), (3, 9)):
        assert torch.equal(gated_activation(gate[start:end], up[start:end], betas), together[start:end])


def test_the_halves_of_one_product_are_read_where_they_are():
    both = randn(5, 2 * 40)
    gate, up = both.chunk(2, 1)
    assert torch.equal(situ(gate, up, 4.0, 25.0), situ(gate.contiguous(), up.contiguous(), 4.0, 25.0))


def test_two_types_are_refused():
    with pytest.raises(ValueError, match="bf16 or fp32"):
        gated_activation(randn(2, 8), randn(2, 8).bfloat16(), None)
