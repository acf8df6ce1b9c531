"""The batch-invariant GEMM against its definition, and rows alone against rows in a batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels import linear as linear_op
from k3kernels.linear import reference
from k3kernels.linear import triton as fused

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
TYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def assert_near(got: Tensor, want_wide: Tensor, length: int) -> None:
    """A sum of `length` terms of size 1 in fp32, and one rounding to got's type."""
    want = want_wide.double()
    bound = want.abs() * torch.finfo(got.dtype).eps + length * torch.finfo(torch.float32).eps * length**0.5
    assert ((got.double() - want).abs() <= bound).all(), (got.double() - want).abs().max()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 1, 1), (1, 65, 63), (7, 17, 130), (63, 64, 64), (65, 130, 33)])
def test_the_product_equals_its_definition_off_the_tile_sizes(dtype, M, N, K):
    x, w = randn(M, K, dtype=dtype), randn(N, K, dtype=dtype, seed=1)
    got = fused.multiply(x, w)
    assert got.dtype == dtype
    assert_near(got, reference.linear(x.double(), w.double()), K)


def test_bf16_logits_come_out_in_fp32_unrounded():
    x, w = randn(5, 100, dtype=torch.bfloat16), randn(70, 100, dtype=torch.bfloat16, seed=1)
    got = fused.multiply(x, w, torch.float32)
    assert got.dtype == torch.float32
    assert_near(got, reference.linear(x.double(), w.double()), 100)
    assert torch.equal(got.bfloat16(), fused.multiply(x, w))


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_that_do_not_lie_next_to_each_other_are_read_where_they_are(dtype):
    x, w = randn(9, 80, dtype=dtype), randn(33, 80, dtype=dtype, seed=1)
    want = fused.multiply(x[:, 3:60].contiguous(), w[:, 3:60].contiguous())
    assert torch.equal(fused.multiply(x[:, 3:60], w[:, 3:60]), want)
    transposed = x[:, 3:60].T.contiguous().T
    assert torch.equal(fused.multiply(transposed, w[:, 3:60]), want)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype):
    x, w = randn(140, 96, dtype=dtype), randn(70, 96, dtype=dtype, seed=1)
    together = fused.multiply(x, w)
    for start, end in ((0, 1), (77, 78), (3, 20), (60, 130)):
        assert torch.equal(fused.multiply(x[start:end], w), together[start:end])


def test_every_tile_that_may_be_picked_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(fused, "FULL_GPU", 1)
    x, w = randn(300, 96, dtype=torch.bfloat16), randn(200, 96, dtype=torch.bfloat16, seed=1)
    together = fused.multiply(x, w)
    tiles = {fused.pick_tile(M, 200, 96, torch.bfloat16) for M in range(1, 4096)}
    assert len(tiles) > 2
    for tile in tiles:
        assert torch.equal(fused.multiply(x, w, tile=tile), together)


def test_gradients_are_those_of_the_product():
    x, w = randn(7, 20).requires_grad_(), randn(9, 20, seed=1).requires_grad_()
    along = randn(7, 9, seed=2)
    got = torch.autograd.grad((fused.linear(x, w) * along).sum(), (x, w))
    want = torch.autograd.grad((x @ w.T * along).sum(), (x, w))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_an_fp32_product_of_bf16_has_bf16_gradients():
    x, w = (randn(n, 20, dtype=torch.bfloat16).requires_grad_() for n in (7, 9))
    grads = torch.autograd.grad(fused.linear(x, w, torch.float32).sum(), (x, w))
    assert [g.dtype for g in grads] == [torch.bfloat16] * 2


def test_no_rows_give_no_rows():
    assert fused.multiply(randn(0, 20), randn(9, 20)).shape == (0, 9)


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="bf16 or fp32"):
        fused.multiply(randn(2, 20).half(), randn(9, 20).half())


def test_on_a_cpu_the_op_is_its_definition():
    x, w = torch.randn(3, 20), torch.randn(4, 20)
    assert torch.equal(linear_op.linear(x, w), reference.linear(x, w))


@pytest.mark.parametrize("limit", [0, 4096])
@pytest.mark.parametrize(("num_rows", "num_groups"), [(1, 1), (7, 3), (129, 5), (200, 70)])
def test_rows_are_bucketed_stably_and_those_of_no_group_drop_out(monkeypatch, limit, num_rows, num_groups):
    monkeypatch.setattr(fused, "MAX_PAIRWISE", limit)
    group_P = torch.randint(-1, num_groups + 1, (num_rows,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    buckets = fused.bucket(group_P, num_groups)
    edges = buckets.edges.tolist()
    for group in range(num_groups):
        rows = buckets.order_P[edges[group] : edges[group + 1]].tolist()
        assert rows == (group_P == group).nonzero().flatten().tolist()


def test_the_grid_has_room_for_every_division_of_rows_into_groups():
    generator = torch.Generator().manual_seed(0)
    for num_rows, num_groups in ((1, 8), (65, 2), (300, 7), (130, 64)):
        for spread in (1, 4, num_groups):
            groups = torch.randint(0, min(spread, num_groups), (num_rows,), generator=generator)
            tiles = (torch.bincount(groups, minlength=num_groups) + 63) // 64
            assert tiles.sum() <= fused.max_tiles(num_rows, num_groups, 64)
