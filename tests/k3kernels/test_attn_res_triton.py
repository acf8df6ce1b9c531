"""The Attention Residual kernels against their definition, forward and gradient, in both layouts of the rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels.attn_res import eager, reference
from k3kernels.attn_res import triton as kernels
from k3kernels.attn_res.triton import attn_res, attn_res_bank

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
TYPES = [torch.float32, torch.bfloat16]
EPS, NEXT_EPS = 1e-5, 1e-3
SHAPES = [(1, 2, 5), (2, 1, 64), (5, 4, 100), (9, 3, 160), (3, 2, 1100)]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def row_values(R: int, T: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    return [randn(T, D, dtype=dtype, seed=r) * (r + 1) for r in range(R)]


def weights(D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and query for scores of size 1 to 3, so that each row counts, and the next norm."""
    return randn(D, dtype=dtype, seed=31), randn(D, dtype=dtype, seed=32) * 2 * D**-0.5, randn(D, dtype=dtype, seed=33)


def bank_of(rows: list[Tensor], num_unused: int = 2) -> Tensor:
    """Token-major, with NaN in the rows that are not read."""
    unused = [torch.full_like(rows[0], torch.nan)] * num_unused
    return torch.stack([*rows[:-1], *unused], 1)


def read(form, rows: list[Tensor], norm: Tensor, proj: Tensor, next_norm: Tensor | None) -> Tensor:
    if form is not reference:
        return form.attn_res(rows, norm, proj, EPS, next_norm, NEXT_EPS)
    if next_norm is None:
        return reference.attn_res_mix(rows, norm, proj, EPS)
    return reference.attn_res_norm(rows, norm, proj, EPS, next_norm, NEXT_EPS)


def with_gradients(form, rows: list[Tensor], params: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    rows, params = [x.detach().requires_grad_() for x in rows], [x.detach().requires_grad_() for x in params]
    out = read(form, rows, *params[:2], params[2] if len(params) == 3 else None)
    return out.detach(), list(torch.autograd.grad(out, [*rows, *params], grad))


def bank_with_gradients(rows: list[Tensor], params: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    """As `with_gradients`; the rows' gradients are the bank's [T, B, D] and the current row's."""
    sources = [bank_of(rows).requires_grad_(), rows[-1].detach().requires_grad_()]
    params = [x.detach().requires_grad_() for x in params]
    next_norm = params[2] if len(params) == 3 else None
    out = attn_res_bank(sources[0], len(rows) - 1, sources[1], *params[:2], EPS, next_norm, NEXT_EPS)
    return out.detach(), list(torch.autograd.grad(out, [*sources, *params], grad))


def assert_near(got: Tensor, want: Tensor) -> None:
    """One rounding of the result's type, and fp32 sums inside."""
    scale = want.abs().max().item()
    rounding = torch.finfo(got.dtype).eps if got.dtype == torch.bfloat16 else 0
    torch.testing.assert_close(got.double(), want, rtol=rounding, atol=4e-6 * scale)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("R", "T", "D"), SHAPES)
@pytest.mark.parametrize("form", [kernels, eager])
def test_the_read_and_every_gradient_equal_the_definition(form, dtype, R, T, D, is_fused):
    rows, params, grad = row_values(R, T, D, dtype), weights(D, dtype)[: 2 + is_fused], randn(T, D, dtype=dtype, seed=9)
    out, grads = with_gradients(form, rows, params, grad)
    want_out, want_grads = with_gradients(
        reference, [row.double() for row in rows], tuple(x.double() for x in params), grad.double()
    )
    assert out.dtype == dtype
    assert_near(out, want_out)
    for got, want in zip(grads, want_grads, strict=True):
        assert got.dtype == dtype
        if want.abs().max() > 1e-12:  # of a single row, whose weight is 1, the query has no gradient
            assert_near(got, want)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("R", "T", "D"), [(1, 2, 16), (3, 5, 64), (9, 2, 96), (4, 3, 33)])
def test_a_bank_gives_the_bits_of_separate_rows_and_one_gradient_with_zeros_behind_them(dtype, R, T, D, is_fused):
    rows, params, grad = row_values(R, T, D, dtype), weights(D, dtype)[: 2 + is_fused], randn(T, D, dtype=dtype, seed=9)
    out, grads = with_gradients(kernels, rows, params, grad)
    bank_out, (grad_bank, grad_current, *grad_params) = bank_with_gradients(rows, params, grad)
    assert torch.equal(bank_out, out)
    assert grad_bank.is_contiguous()
    assert torch.equal(grad_bank[:, R - 1 :], torch.zeros_like(grad_bank[:, R - 1 :]))
    for r in range(R - 1):
        assert torch.equal(grad_bank[:, r], grads[r])
    assert torch.equal(grad_current, grads[R - 1])
    assert all(torch.equal(a, b) for a, b in zip(grad_params, grads[R:], strict=True))


def test_rows_of_a_bank_are_read_where_they_lie():
    bank_TBD, current_TD = randn(3, 4, 64, dtype=torch.bfloat16), randn(3, 64, dtype=torch.bfloat16)
    rows = [*bank_TBD.unbind(1)[:3], current_TD]
    read_rows, stride, last_stride = kernels._readable(rows)
    assert [row.data_ptr() for row in read_rows] == [row.data_ptr() for row in rows]
    assert (stride * kernels.UNIT, last_stride * kernels.UNIT) == (4 * 64, 64)


def test_a_read_and_its_gradient_allocate_their_results_and_little_else(allocations):
    T, B, D = 6, 3, 1024
    bank_TBD, current_TD = randn(T, B, D).requires_grad_(), randn(T, D).requires_grad_()
    norm, proj, next_norm = (x.requires_grad_() for x in weights(D, torch.float32))
    with allocations:
        out = attn_res_bank(bank_TBD, B, current_TD, norm, proj, EPS, next_norm, NEXT_EPS)
        torch.autograd.grad(out, [bank_TBD, current_TD, norm, proj, next_norm], out.detach())
    parts = 2 * kernels.GRADIENT_PROGRAMS * D
    assert allocations.peak_bytes - 4 * parts <= 4 * T * D * (1 + B + 1) + 4 * (T * (2 * (B + 1) + 3) + 3 * D)


def test_rows_of_any_layout_give_the_same_result():
    rows, (norm, proj, next_norm) = row_values(3, 4, 48, torch.float32), weights(48, torch.float32)
    want = attn_res(rows, norm, proj, EPS, next_norm, NEXT_EPS)
    odd = [rows[0].T.contiguous().T, torch.cat([rows[1], rows[1]], 1)[:, :48], rows[2].clone()]
    assert torch.equal(attn_res(odd, norm, proj, EPS, next_norm, NEXT_EPS), want)


def test_scores_far_beyond_the_range_of_exp_give_the_one_row_that_wins():
    rows, (norm, _, _) = row_values(3, 2, 32, torch.float32), weights(32, torch.float32)
    rows[1] = norm.expand(2, -1) * 2
    torch.testing.assert_close(attn_res(rows, torch.ones_like(norm), 1e4 * norm, EPS), rows[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_token_has_the_same_bits_alone_and_in_any_batch(monkeypatch, dtype):
    monkeypatch.setattr(kernels, "FORWARD_PROGRAMS", 4)  # so that programs take several tokens
    monkeypatch.setattr(kernels, "GRADIENT_PROGRAMS", 4)
    rows, params, grad = row_values(6, 21, 77, dtype), weights(77, dtype), randn(21, 77, dtype=dtype, seed=9)
    out, grads = with_gradients(kernels, rows, params, grad)
    for start, end in ((0, 1), (20, 21), (3, 9)):
        part, part_grads = with_gradients(kernels, [row[start:end] for row in rows], params, grad[start:end])
        assert torch.equal(part, out[start:end])
        for r in range(6):
            assert torch.equal(part_grads[r], grads[r][start:end])


def test_programs_that_take_several_tokens_sum_the_weights_gradients_of_all(monkeypatch):
    monkeypatch.setattr(kernels, "GRADIENT_PROGRAMS", 5)
    rows, params, grad = row_values(3, 13, 40, torch.float32), weights(40, torch.float32), randn(13, 40, seed=9)
    _, grads = with_gradients(kernels, rows, params, grad)
    _, again = with_gradients(kernels, rows, params, grad)
    doubles = [row.double() for row in rows], tuple(x.double() for x in params), grad.double()
    _, want = with_gradients(reference, *doubles)
    for got, same, exact in zip(grads, again, want, strict=True):
        assert torch.equal(got, same)
        assert_near(got, exact)


def test_what_wants_no_gradient_gets_none_and_changes_no_other():
    rows, params, grad = row_values(3, 4, 48, torch.float32), weights(48, torch.float32), randn(4, 48, seed=9)
    _, (_, want, _, *_) = with_gradients(kernels, rows, params, grad)
    wanted = rows[1].detach().requires_grad_()
    out = attn_res([rows[0], wanted, rows[2]], *params[:2], EPS, params[2], NEXT_EPS)
    out.backward(grad)
    assert torch.equal(wanted.grad, want)
    assert all(x.grad is None for x in (rows[0], rows[2], *params))


def test_without_a_gradient_the_bits_are_the_same():
    rows, params = row_values(3, 4, 48, torch.bfloat16), weights(48, torch.bfloat16)
    want = with_gradients(kernels, rows, params, rows[0])[0]
    with torch.no_grad():
        assert torch.equal(read(kernels, rows, *params), want)


def test_the_mix_is_not_rounded_before_the_norm():
    """Rows that nearly cancel: rounded to bf16, their mix would lose most of its digits."""
    D = 64
    row = randn(2, D, dtype=torch.bfloat16)
    rows = [row, (randn(2, D, seed=5) * 0.01 - row.float()).bfloat16(), row * 0.01]
    zero, one = torch.zeros(D, dtype=torch.bfloat16), torch.ones(D, dtype=torch.bfloat16)
    exact = reference.attn_res_norm([x.double() for x in rows], one.double(), zero.double(), EPS, one.double(), EPS)
    for form in (kernels, eager):
        assert_near(form.attn_res(rows, one, zero, EPS, one, EPS), exact)


def test_no_tokens_give_no_tokens_and_no_gradient():
    rows, params = [randn(0, 8)] * 2, weights(8, torch.float32)
    out, grads = with_gradients(kernels, rows, params, randn(0, 8))
    assert out.shape == (0, 8)
    assert [x.shape for x in grads] == [(0, 8), (0, 8), (8,), (8,), (8,)]
    assert all(not x.any() for x in grads)


def test_rows_of_two_types_are_refused():
    with pytest.raises(ValueError, match=r"bfloat16.*float32"):
        attn_res([randn(2, 8), randn(2, 8).bfloat16()], randn(8), randn(8), EPS)
