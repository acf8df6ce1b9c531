"""The norms' kernels and their gradients against the definitions, and a row's bits alone and in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels.alignment import aligned
from k3kernels.rms_norm import reference
from k3kernels.rms_norm import triton as fused

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
TYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 7, 24, 128, 1000, 1100]  # below, at and above what one program's tile holds
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def assert_near(got: Tensor, want: Tensor, roundings: int) -> None:
    """fp32: 8 units in the last place; bf16: a neighbour at each rounding, where fp32's last place decides."""
    units = 8 if got.dtype == torch.float32 else roundings
    torch.testing.assert_close(got, want, rtol=units * torch.finfo(got.dtype).eps, atol=1e-30)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("D", WIDTHS)
def test_the_norm_equals_its_definition(dtype, D):
    x, weight = randn(5, D, dtype=dtype), randn(D, dtype=dtype, seed=1)
    got = fused.rms_norm(x, weight, EPS)
    assert got.dtype == dtype
    assert_near(got, reference.rms_norm(x, weight, EPS), 2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("V", WIDTHS)
def test_the_gated_norm_equals_its_definition(dtype, V):
    o, gate, weight = randn(3, 3, V), randn(3, 3, V, dtype=dtype, seed=1), randn(V, seed=2)
    got = fused.gated_rms_norm(o, gate, weight, EPS)
    assert got.dtype == dtype
    assert_near(got, reference.gated_rms_norm(o, gate, weight, EPS), 1)


def test_bf16_is_rounded_before_the_weight():
    x, weight = randn(64, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16, seed=1)
    once = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS) * weight.float()
    got, want = fused.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS)
    assert (got != want).float().mean() < 0.01 < (once.bfloat16() != want).float().mean()


def test_fp32_weights_are_not_rounded_to_the_rows_type():
    x, weight = randn(5, 100, dtype=torch.bfloat16), randn(100, seed=1)
    assert_near(fused.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), 2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("D", WIDTHS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype, D):
    x, gate, weight = randn(37, D, dtype=dtype), randn(37, D, dtype=dtype, seed=3), randn(D, dtype=dtype, seed=1)
    together, gated = fused.rms_norm(x, weight, EPS), fused.gated_rms_norm(x, gate, weight, EPS)
    for start, end in ((0, 1), (36, 37), (3, 20)):
        assert torch.equal(fused.rms_norm(x[start:end], weight, EPS), together[start:end])
        assert torch.equal(fused.gated_rms_norm(x[start:end], gate[start:end], weight, EPS), gated[start:end])


def test_short_rows_share_a_program_and_long_ones_have_many_threads():
    assert fused.launch_options(128)["ROWS"] == 8
    assert fused.launch_options(7168)["ROWS"] == 1
    assert fused.launch_options(7168)["num_warps"] == fused.MAX_WARPS


def test_rows_that_do_not_lie_next_to_each_other_are_those_of_their_copy():
    x, weight = randn(9, 80), randn(57, seed=1)
    assert torch.equal(fused.rms_norm(x[:, 3:60], weight, EPS), fused.rms_norm(x[:, 3:60].contiguous(), weight, EPS))


def test_a_kernel_sees_all_rows_at_multiples_of_16_bytes_and_copies_no_others():
    x = randn(4, 7)
    assert aligned(x) is x
    assert aligned(x[1:]).data_ptr() % 16 == 0
    assert torch.equal(aligned(x[1:]), x[1:])


def gradients(norm, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(norm(*leaves, EPS), leaves, grad))


def assert_gradients_of_exact_arithmetic(got: list[Tensor], want: list[Tensor]) -> None:
    """Each rounded once; fp32 sums over rows and columns."""
    for x, exact in zip(got, want, strict=True):
        error = (x.double() - exact).norm() / exact.norm()
        assert error < (3e-3 if x.dtype == torch.bfloat16 else 1e-6), (x.shape, float(error))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("D", WIDTHS[1:])
def test_the_norms_gradient_is_that_of_its_definition(dtype, D):
    inputs, grad = [randn(37, D, dtype=dtype), randn(D, dtype=dtype, seed=1)], randn(37, D, dtype=dtype, seed=2)
    want = gradients(reference.rms_norm, [x.double() for x in inputs], grad.double())
    got = gradients(fused.rms_norm, inputs, grad)
    assert [x.dtype for x in got] == [dtype] * 2
    assert_gradients_of_exact_arithmetic(got, want)


@pytest.mark.parametrize("o_dtype", TYPES)
@pytest.mark.parametrize("gate_dtype", TYPES)
@pytest.mark.parametrize("V", [24, 128, 1100])
def test_the_gated_norms_gradient_is_that_of_its_definition(o_dtype, gate_dtype, V):
    inputs = [randn(7, 3, V, dtype=o_dtype), randn(7, 3, V, dtype=gate_dtype, seed=1), randn(V, seed=2)]
    grad = randn(7, 3, V, dtype=gate_dtype, seed=3)
    want = gradients(reference.gated_rms_norm, [x.double() for x in inputs], grad.double())
    got = gradients(fused.gated_rms_norm, inputs, grad)
    assert [x.dtype for x in got] == [o_dtype, gate_dtype, torch.float32]
    assert_gradients_of_exact_arithmetic(got, want)


def test_fewer_programs_than_tiles_take_them_in_turns(monkeypatch):
    """37 rows in tiles of 8 for 2 programs: the same rows' bits, and the weight's sum to rounding."""
    inputs, grad = [randn(37, 128), randn(37, 128, seed=1), randn(128, seed=2)], randn(37, 128, seed=3)
    many = gradients(fused.gated_rms_norm, inputs, grad)
    monkeypatch.setattr(fused, "GRADIENT_WARPS", 2 * fused.launch_options(128)["num_warps"])
    few = gradients(fused.gated_rms_norm, inputs, grad)
    assert torch.equal(few[0], many[0])
    assert torch.equal(few[1], many[1])
    torch.testing.assert_close(few[2], many[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("D", [24, 128, 1100])
def test_a_rows_gradient_has_the_same_bits_alone_and_in_any_batch_and_in_every_run(dtype, D):
    x, gate, weight = randn(37, D, dtype=dtype), randn(37, D, dtype=dtype, seed=3), randn(D, dtype=dtype, seed=1)
    grad = randn(37, D, dtype=dtype, seed=4)
    for norm, rows in ((fused.rms_norm, [x]), (fused.gated_rms_norm, [x, gate])):
        together = gradients(norm, [*rows, weight], grad)
        again = gradients(norm, [*rows, weight], grad)
        assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True))
        for start, end in ((0, 1), (36, 37), (3, 20)):
            alone = gradients(norm, [*(each[start:end] for each in rows), weight], grad[start:end])
            assert all(torch.equal(a, b[start:end]) for a, b in zip(alone[:-1], together[:-1], strict=True))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_gradient_that_does_not_lie_in_rows_is_that_of_its_copy(dtype):
    """As that of a sum is: one number for all."""
    inputs, grad = [randn(9, 128, dtype=dtype), randn(128, seed=1)], randn(1, 1, dtype=dtype).expand(9, 128)
    got, want = gradients(fused.rms_norm, inputs, grad), gradients(fused.rms_norm, inputs, grad.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_no_rows_have_a_gradient_of_no_rows_and_none_for_the_weight():
    grad_x, grad_weight = gradients(fused.rms_norm, [randn(0, 20), randn(20)], randn(0, 20))
    assert grad_x.shape == (0, 20)
    assert grad_weight.eq(0).all()


def test_no_rows_give_no_rows():
    assert fused.rms_norm(randn(0, 20), randn(20), EPS).shape == (0, 20)
    assert fused.gated_rms_norm(randn(0, 2, 20), randn(0, 2, 20), randn(20), EPS).shape == (0, 2, 20)


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="bf16 or fp32"):
        fused.rms_norm(randn(2, 20).half(), randn(20), EPS)
