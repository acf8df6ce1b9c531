"""Experts whose matrices are not trained: output and gradients against the definition, MXFP4 and LoRA included.

On a CPU the products are loops over experts (the kernel is CUDA C++ for Hopper: kernels/bench/check_moe.py compares it).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from k3kernels.moe.frozen import moe_experts_frozen
from k3kernels.moe.grouped import activate
from k3kernels.moe.hopper import LowRank
from k3kernels.moe.matrices import NO_LORA, LoraPair, PackedMatrices
from k3kernels.moe.pairs import sort_pairs
from k3kernels.moe.reference import moe_experts as moe_experts_ref
from k3kernels.moe.row_tiles import row_tiles
from k3kernels.mxfp4 import pack

E, R, F, K, RANK = 3, 64, 96, 2, 5
BETAS = (4.0, 25.0)
MAX_SHARED_BYTES = 227 << 10


class LoopProducts:
    """`hopper.Products`, an expert after the other."""

    def __init__(self, pairs) -> None:
        self.pairs = pairs
        edges = pairs.edges.tolist()
        self.spans = list(itertools.pairwise(edges))

    def gated(self, x, w1, w3, betas, _, low_rank=None):
        lows = [None, None] if low_rank is None else [LowRank(low_rank.z[m:], low_rank.factors[m:]) for m in range(2)]
        gate, up = (self.product(x, w, low) for w, low in zip((w1, w3), lows, strict=True))
        return gate, up, activate(gate, up, self.pairs, betas)

    def product(self, x, w, low_rank=None):
        y = x.new_full((len(x), w.shape[1]), float("nan"))
        for e, (i, j) in enumerate(self.spans):
            y[i:j] = x[i:j] @ w[e].T
            if low_rank is not None:
                y[i:j] += low_rank.z[0][i:j] @ low_rank.factors[0][e].T
        return y

    def inputs_gradient(self, ys, matrices, low_rank=None):
        x = ys[0].new_full((len(ys[0]), matrices[0].shape[2]), float("nan"))
        for e, (i, j) in enumerate(self.spans):
            x[i:j] = sum(y[i:j] @ w[e] for y, w in zip(ys, matrices, strict=True))
            for m in range(len(ys) if low_rank is not None else 0):
                x[i:j] += low_rank.z[m][i:j] @ low_rank.factors[m][e]
        return x


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pair(seed: int, outer: int, inner: int, rank: int = RANK) -> LoraPair:
    A, B = randn(E, rank, inner, seed=seed) / inner**0.5, randn(E, outer, rank, seed=seed + 1) / rank**0.5
    return LoraPair(A.requires_grad_(), B.requires_grad_(), 0.5)


def matrices_of(kind: str) -> list:
    shapes = ((E, F, R), (E, F, R), (E, R, F))
    dense = [randn(*shape, seed=i) / shape[2] ** 0.5 for i, shape in enumerate(shapes)]
    return dense if kind == "dense" else [PackedMatrices(*pack(w), torch.float32) for w in dense]


LORA = {
    "none": lambda: NO_LORA,
    "all": lambda: (pair(10, F, R), pair(20, F, R), pair(30, R, F)),
    "w1 only": lambda: (pair(10, F, R), None, None),
    "ranks differ": lambda: (pair(10, F, R, 70), pair(20, F, R, 3), None),
    "w2 only": lambda: (None, None, pair(30, R, F)),
}


@pytest.mark.parametrize("lora", LORA)
@pytest.mark.parametrize("kind", ["dense", "mxfp4"])
def test_output_and_gradients_are_the_definitions(kind: str, lora: str) -> None:
    experts = torch.tensor([[0, 2], [2, 0], [0, 2], [2, 2], [0, -1], [2, 0], [0, 2]])  # nobody chooses expert 1
    pairs = LORA[lora]()
    factors = [x for p in pairs if p is not None for x in (p.A_ErI, p.B_EOr)]
    x, weights = randn(7, R, seed=3).requires_grad_(), randn(7, K, seed=4).abs().requires_grad_()
    grad = randn(7, R, seed=5)

    def run(op, **options) -> list[Tensor]:
        out = op(x, experts, weights, *matrices_of(kind), BETAS, pairs, **options)
        return [out, *torch.autograd.grad(out, [x, weights, *factors], grad)]

    got, want = run(moe_experts_frozen, products_of=LoopProducts), run(moe_experts_ref)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=2e-5, atol=1e-5)


def test_only_what_requires_a_gradient_has_one() -> None:
    experts = torch.tensor([[0, 2], [1, 0]])
    x = randn(2, R, seed=3)
    pairs = (None, None, pair(30, R, F))
    out = moe_experts_frozen(x, experts, torch.ones(2, K), *matrices_of("dense"), None, pairs, products_of=LoopProducts)
    out.sum().backward()
    assert pairs[2].B_EOr.grad is not None
    assert x.grad is None


@pytest.mark.parametrize("max_rows", [160, 176])
@pytest.mark.parametrize("counts", [(0, 1, 0), (160, 161, 2401), (5, 0, 479), (16, 17, 15), (0, 0, 0)])
def test_tiles_cover_every_row_once_and_none_is_larger_than_a_block(counts: tuple[int, ...], max_rows: int) -> None:
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    pairs = sort_pairs(experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(0))][:, None], E)
    covered = []
    tiles = row_tiles(pairs, max_rows).tolist()
    for expert, first, rows in tiles:
        assert rows <= max_rows
        assert rows == 0 or pairs.edges[expert] <= first <= first + rows <= pairs.edges[expert + 1]
        covered += range(first, first + rows)
    assert covered == list(range(sum(counts)))
    sizes = [rows for _, _, rows in tiles]
    assert sizes == [*filter(None, sizes), *[0] * sizes.count(0)], "a block that finds no rows ends"
