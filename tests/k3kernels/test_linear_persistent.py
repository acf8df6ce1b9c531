"""The batch-invariant GEMM for many rows: its definition, and the bits that the GEMM for few rows gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels.linear import persistent, reference
from k3kernels.linear import triton as fused
from k3kernels.linear.triton import Tile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
# Interpreted, a step's products are added up first: there block_k changes bits, on a GPU it does not.
TILES = [Tile(64, 128, 2, 64, 8, 3), Tile(64, 64, 1, 64, 4, 3)]
OUTPUTS = [torch.bfloat16, torch.float32]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, torch.bfloat16)


@pytest.fixture
def small_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "LARGE", TILES[0])
    monkeypatch.setattr(persistent, "MIN_ROWS", 100)
    monkeypatch.setattr(persistent, "_programs", lambda _: 2)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("out_dtype", OUTPUTS)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 8, 8), (64, 128, 64), (130, 264, 72), (200, 136, 104)])
def test_the_product_equals_its_definition_off_the_tile_sizes(tile, out_dtype, M, N, K):
    x, w = randn(M, K), randn(N, K, seed=1)
    got, want = persistent.multiply(x, w, out_dtype, tile), reference.linear(x.double(), w.double())
    assert got.dtype == out_dtype
    bound = want.abs() * torch.finfo(out_dtype).eps + K**1.5 * torch.finfo(torch.float32).eps
    assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("out_dtype", OUTPUTS)
def test_a_row_has_the_bits_that_the_other_kernel_gives_it(tile, out_dtype):
    x, w = randn(200, 104), randn(136, 104, seed=1)
    got = persistent.multiply(x, w, out_dtype, tile)
    assert torch.equal(fused.multiply(x, w, out_dtype, fused.pick_tile(200, 136, 104, x.dtype)), got)
    for start, end in ((0, 1), (77, 79), (60, 190)):
        alone = fused.multiply(x[start:end], w, out_dtype, fused.pick_tile(end - start, 136, 104, x.dtype))
        assert torch.equal(alone, got[start:end])


@pytest.mark.usefixtures("small_tile")
def test_many_rows_are_multiplied_by_it_and_few_are_not(monkeypatch):
    calls = []
    original = persistent.multiply
    monkeypatch.setattr(persistent, "multiply", lambda *a: calls.append(len(a[0])) or original(*a))
    x, w = randn(150, 40), randn(136, 40, seed=1)
    together = fused.multiply(x, w)
    assert torch.equal(fused.multiply(x[:9], w), together[:9])
    assert calls == [150]


@pytest.mark.usefixtures("small_tile")
def test_rows_that_tma_cannot_read_are_left_to_the_other_kernel():
    x, w = randn(150, 48), randn(136, 48, seed=1)
    assert persistent.is_for(x, w, torch.bfloat16)
    assert persistent.is_for(x[:, :33], w[:, :33], torch.bfloat16)  # rows are 96 bytes apart, whatever their length
    assert not persistent.is_for(x[:, 1:], w[:, 1:], torch.bfloat16)
    assert not persistent.is_for(x[:, :36].contiguous(), w[:, :36].contiguous(), torch.bfloat16)
    assert not persistent.is_for(x, w[:133], torch.bfloat16)
    assert not persistent.is_for(x[:99], w, torch.bfloat16)
    assert not persistent.is_for(x.float(), w.float(), torch.float32)
    assert fused.multiply(x[:, 1:], w[:, 1:]).isfinite().all()


@pytest.mark.usefixtures("small_tile")
def test_fewer_tiles_than_multiprocessors_are_left_to_the_other_kernel(monkeypatch):
    x, w = randn(150, 48), randn(136, 48, seed=1)  # 3 x 2 tiles
    for programs, expected in ((6, True), (7, False)):
        monkeypatch.setattr(persistent, "_programs", lambda _, programs=programs: programs)
        assert persistent.is_for(x, w, torch.bfloat16) is expected


@pytest.mark.usefixtures("small_tile")
def test_rows_longer_than_what_is_multiplied_are_read_to_its_end_alone():
    x, w = randn(150, 48), randn(136, 48, seed=1)
    x[:, 33:], w[:, 33:] = torch.nan, torch.nan
    got = fused.multiply(x[:, :33], w[:, :33])
    assert torch.equal(got, fused.multiply(x[:, :33], w[:, :33], tile=fused.pick_tile(150, 136, 33, x.dtype)))
    assert got.isfinite().all()


@pytest.mark.usefixtures("small_tile")
def test_gradients_are_those_of_the_product():
    x, w = randn(150, 40).requires_grad_(), randn(136, 40, seed=1).requires_grad_()
    along = randn(150, 136, seed=2)
    got = torch.autograd.grad(fused.linear(x, w), (x, w), along)
    for a, b in zip(got, (along @ w, along.T @ x), strict=True):
        torch.testing.assert_close(a, b)
