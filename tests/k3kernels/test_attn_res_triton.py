"""The Attention Residual kernel against its definition, and a token's bits alone and in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels.attn_res import reference
from k3kernels.attn_res.triton import attn_res_mix

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
TYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def inputs(R: int, T: int, D: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """Scores of size 1 to 3, so that each row counts."""
    rows = [randn(T, D, dtype=dtype, seed=r) * (r + 1) for r in range(R)]
    return rows, randn(D, dtype=dtype, seed=31), randn(D, dtype=dtype, seed=32) * 2 * D**-0.5


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("R", "T", "D"), [(1, 2, 5), (2, 3, 64), (5, 4, 100), (10, 3, 700), (17, 1, 33)])
def test_the_mix_equals_its_definition(dtype, R, T, D):
    rows, norm, proj = inputs(R, T, D, dtype)
    got = attn_res_mix(rows, norm, proj, EPS)
    assert got.dtype == dtype
    want = reference.attn_res_mix([row.double() for row in rows], norm.double(), proj.double(), EPS)
    scale = want.abs().max().item()
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=4e-6 * scale)


def test_scores_far_beyond_the_range_of_exp_give_the_one_row_that_wins():
    rows, norm, _ = inputs(3, 2, 32, torch.float32)
    rows[1] = norm.expand(2, -1) * 2
    torch.testing.assert_close(attn_res_mix(rows, torch.ones_like(norm), 1e4 * norm, EPS), rows[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_token_has_the_same_bits_alone_and_in_any_batch(dtype):
    rows, norm, proj = inputs(6, 21, 77, dtype)
    together = attn_res_mix(rows, norm, proj, EPS)
    for start, end in ((0, 1), (20, 21), (3, 9)):
        alone = attn_res_mix([row[start:end] for row in rows], norm, proj, EPS)
        assert torch.equal(alone, together[start:end])


def test_no_tokens_give_no_tokens():
    assert attn_res_mix([randn(0, 8)] * 2, randn(8), randn(8), EPS).shape == (0, 8)


def test_rows_of_two_types_are_refused():
    with pytest.raises(ValueError, match=r"bfloat16.*float32"):
        attn_res_mix([randn(2, 8), randn(2, 8).bfloat16()], randn(8), randn(8), EPS)
