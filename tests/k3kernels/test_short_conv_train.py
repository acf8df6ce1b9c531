"""The packed convolution and its gradient against their definition; a token's bits depend on its sequence alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels.packing import Packing
from k3kernels.short_conv import reference, train
from k3kernels.short_conv.train import short_conv_train

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
TYPES = [torch.float32, torch.bfloat16]
ROWS = train.ROWS if DEVICE.type == "cuda" else 16  # tokens of a program
W, J = 24, 4
P = 3 * W
# The last ones start and end at, before and behind a program's edges, whose windows and halves reach over them.
PACKINGS = [(1,), (2,), (3, 1), (1, 2, 3, 1, 1, 9, 2), (ROWS,), (ROWS - 1, 1, 1, 5), (ROWS - 2, 4, 2), (5, 2 * ROWS, 3)]


@pytest.fixture(autouse=True)
def short_programs(monkeypatch):
    """The interpreter takes a millisecond and more for each token of a program."""
    monkeypatch.setattr(train, "ROWS", ROWS)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def taps(width: int = J, channels: int = P) -> Tensor:
    return randn(channels, width, seed=9) * 0.5


def definition(x_TP: Tensor, taps_PJ: Tensor, lengths: tuple[int, ...]) -> Tensor:
    rows = [torch.cat([x.new_zeros(taps_PJ.shape[1] - 1, x.shape[1]), x])[None] for x in x_TP.split(lengths)]
    return torch.cat([reference.short_conv(row, taps_PJ)[0] for row in rows])


def convolve(x: Tensor, taps_PJ: Tensor, lengths: tuple[int, ...], num_parts: int = 3) -> Tensor:
    parts = short_conv_train(x, taps_PJ, Packing(lengths, DEVICE), num_parts)
    assert all(part.is_contiguous() for part in parts)
    return torch.cat(parts, 1)


def gradients(form, x: Tensor, taps_PJ: Tensor, lengths: tuple[int, ...], grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [each.detach().requires_grad_() for each in (x, taps_PJ)]
    return torch.autograd.grad(form(*leaves, lengths), leaves, grad)


def run(x: Tensor, lengths: tuple[int, ...], grad: Tensor, num_parts: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """y and the gradients of x and of the taps."""
    leaves = [each.detach().requires_grad_() for each in (x, taps())]
    y = convolve(*leaves, lengths, num_parts)
    return y.detach(), *torch.autograd.grad(y, leaves, grad)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("lengths", PACKINGS)
def test_packed_sequences_equal_the_definition_of_each_from_its_start(dtype, lengths):
    """fp32 to 4 units in the last place of a sum's terms; bf16 to a neighbour, where fp32's last place decides."""
    x = randn(sum(lengths), P, dtype=dtype)
    got, want = convolve(x, taps(), lengths), definition(x, taps(), lengths)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got, want, rtol=4 * torch.finfo(torch.float32).eps if dtype == torch.float32 else 8e-3, atol=1e-6
    )
    if dtype == torch.bfloat16:
        assert (got != want).float().mean() < 0.01


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU's multiply-add rounds once")
def test_sums_have_the_definitions_order():
    """Seen where SiLU returns what it is given."""
    x, weights = randn(40, P) + 40, taps().abs() + 0.5
    assert torch.equal(convolve(x, weights, (7, 33)), definition(x, weights, (7, 33)))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("lengths", PACKINGS)
def test_gradients_are_those_of_exact_arithmetic_rounded_once(dtype, lengths):
    x, grad = randn(sum(lengths), P, dtype=dtype), randn(sum(lengths), P, dtype=dtype, seed=1)
    got = gradients(convolve, x, taps(), lengths, grad)
    want = gradients(definition, x.double(), taps().double(), lengths, grad.double())
    assert [each.dtype for each in got] == [dtype, torch.float32]
    for each, exact in zip(got, want, strict=True):
        error = (each.double() - exact).norm() / exact.norm()
        assert error < (3e-3 if each.dtype == torch.bfloat16 else 1e-6), float(error)


@pytest.mark.parametrize("width", [2, 3, 5])
def test_other_numbers_of_taps_have_the_definitions_values_and_gradients(width):
    lengths = (1, 6, ROWS - 4, 9)
    x, grad = randn(sum(lengths), P), randn(sum(lengths), P, seed=1)
    torch.testing.assert_close(convolve(x, taps(width), lengths), definition(x, taps(width), lengths))
    got, want = (gradients(form, x, taps(width), lengths, grad) for form in (convolve, definition))
    for each, exact in zip(got, want, strict=True):
        torch.testing.assert_close(each, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_sequence_has_the_same_bits_alone_and_at_any_place_of_a_batch(dtype):
    lengths = (2, 7, ROWS - 11, 1, 3, ROWS + 13, 5)
    x, grad = randn(sum(lengths), P, dtype=dtype), randn(sum(lengths), P, dtype=dtype, seed=1)
    y, grad_x, _ = run(x, lengths, grad)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        alone = run(x[rows], (length,), grad[rows])
        assert torch.equal(alone[0], y[rows])
        assert torch.equal(alone[1], grad_x[rows])
        start += length


@pytest.mark.parametrize("dtype", TYPES)
def test_equal_calls_give_equal_bits(dtype):
    lengths = (2, 2 * ROWS, 5)
    x, grad = randn(sum(lengths), P, dtype=dtype), randn(sum(lengths), P, dtype=dtype, seed=1)
    first, second = (run(x, lengths, grad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_is_not_a_number_in_one_sequence_reaches_no_other():
    lengths = (3, ROWS - 4, 2, 1, 6)
    x, grad = randn(sum(lengths), P), randn(sum(lengths), P, seed=1)
    y, grad_x, _ = run(x, lengths, grad)
    for n, rows in enumerate(torch.arange(sum(lengths)).split(lengths)):
        wrong_x, wrong_grad = x.clone(), grad.clone()
        wrong_x[rows], wrong_grad[rows] = torch.nan, torch.inf
        others = [t for t in range(sum(lengths)) if t not in rows]
        wrong = run(wrong_x, lengths, wrong_grad)
        assert torch.equal(wrong[0][others], y[others]), n
        assert torch.equal(wrong[1][others], grad_x[others]), n


@pytest.mark.parametrize(("num_parts", "block_bytes"), [(1, 2048), (2, 2048), (3, 64), (3, 32)])
def test_parts_and_blocks_of_channels_of_any_width_give_the_same_bits(monkeypatch, num_parts, block_bytes):
    lengths = (5, ROWS)
    x, grad = randn(sum(lengths), P), randn(sum(lengths), P, seed=1)
    want = run(x, lengths, grad)
    monkeypatch.setattr(train, "BLOCK_BYTES", block_bytes)
    got = run(x, lengths, grad, num_parts)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_rows_that_do_not_lie_next_to_each_other_are_those_of_their_copy():
    x, grad = randn(9, 2 * P)[:, 5 : 5 + P], randn(9, 1).expand(9, P)
    got, want = run(x, (4, 5), grad), run(x.contiguous(), (4, 5), grad.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_taps_of_the_rows_type_have_a_gradient_of_that_type():
    x, grad = randn(9, P, dtype=torch.bfloat16), randn(9, P, dtype=torch.bfloat16, seed=1)
    narrow = taps().bfloat16()
    assert torch.equal(convolve(x, narrow, (9,)), convolve(x, narrow.float(), (9,)))
    _, got = gradients(convolve, x, narrow, (9,), grad)
    assert torch.equal(got, gradients(convolve, x, narrow.float(), (9,), grad)[1].bfloat16())


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="bf16 or fp32"):
        short_conv_train(randn(2, P).double(), taps(), Packing((2,), DEVICE), 3)
