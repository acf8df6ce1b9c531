"""A product with one LoRA pair, and a product with a wide result: values and gradients against their definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels.linear.low_rank import lora_linear, wide_output

# relative errors: fp32 by the order of its sums, bf16 by its roundings
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def with_gradients(run, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def assert_near(got: list[Tensor], want: list[Tensor], limit: float) -> None:
    for g, w in zip(got, want, strict=True):
        assert float((g.double() - w).norm() / w.norm()) < limit


@pytest.mark.parametrize("shape", [(7,), (2, 3)])
@pytest.mark.parametrize("dtype", LIMITS)
def test_the_branch_is_added_to_the_product_and_every_factor_has_its_gradient(dtype, shape):
    x, W, A, B = randn(*shape, 24, seed=0), randn(40, 24, seed=1), randn(5, 24, seed=2), randn(40, 5, seed=3)
    grad = randn(*shape, 40, seed=4)
    got = with_gradients(lambda *x: lora_linear(*x, 0.7), [x.to(dtype), W.to(dtype), A, B], grad)
    exact = [x.to(dtype).double(), W.to(dtype).double(), A.double(), B.double()]
    want = with_gradients(lambda x, W, A, B: x @ W.T + 0.7 * (x @ A.T) @ B.T, exact, grad)
    assert_near(got, want, LIMITS[dtype])
    assert [g.dtype for g in got] == [dtype, dtype, dtype, torch.float32, torch.float32]


def test_a_frozen_matrix_has_no_gradient():
    W = randn(40, 24, seed=1)
    B = randn(40, 5, seed=3).requires_grad_()
    lora_linear(randn(7, 24, seed=0), W, randn(5, 24, seed=2), B, 1.0).sum().backward()
    assert B.grad is not None
    assert W.grad is None


def test_logits_of_narrow_factors_are_not_rounded_and_their_gradient_keeps_16_bits():
    x, W, grad = randn(7, 24, seed=0).bfloat16(), randn(40, 24, seed=1).bfloat16(), randn(7, 40, seed=4)
    got = with_gradients(wide_output, [x, W], grad)
    want = with_gradients(lambda x, W: x @ W.T, [x.double(), W.double()], grad.double())
    assert got[0].dtype == torch.float32
    assert_near(got[:1], want[:1], 1e-6)
    assert_near(got[1:], [w.bfloat16().double() for w in want[1:]], 1e-3)  # one rounding, but for ties
