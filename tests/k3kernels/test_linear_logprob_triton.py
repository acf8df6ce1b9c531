"""The log-probability's kernels against whole logits, their two ways to a gradient against each other, rows alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import k3kernels.linear_logprob as op
from k3kernels.dispatch import batch_invariant
from k3kernels.linear_logprob import eager, reference
from k3kernels.linear_logprob import triton as fused
from k3kernels.linear_logprob.triton import Tile, linear_logprob_and_entropy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
TYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cpu" else [torch.bfloat16]
TILE = Tile(16, 16, 16, 4, 1, 1, 2, False) if DEVICE.type == "cpu" else fused.TILE
# Rows, words and width: one of each, full tiles, neither, and more tiles than programs.
SHAPES = [(1, 1, 8), (16, 32, 16), (5, 33, 24), (35, 34, 40)]
TEMPERATURE = 0.7


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile's rows of exponentials, and a tile's words of gradients, at a time."""
    monkeypatch.setattr(fused, "AHEAD", 1)
    monkeypatch.setattr(fused, "BLOCK", 1)


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    gen = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=gen).to(DEVICE, dtype)


def tokens(M: int, V: int) -> Tensor:
    return torch.randint(V, (M,), generator=torch.Generator().manual_seed(7)).to(DEVICE)


def weighted(value_M: Tensor) -> Tensor:
    return (value_M * torch.linspace(-1, 2, len(value_M), device=value_M.device)).sum()


def run(hidden: Tensor, weight: Tensor, token: Tensor, temperature: float = 1.0, with_entropy: bool = False):
    return linear_logprob_and_entropy(hidden, weight, token, temperature, with_entropy, TILE)


def exact(hidden: Tensor, weight: Tensor, token: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """In fp64, but for the results' own fp32."""
    hidden, weight = hidden.double(), weight.double()
    return (
        reference.linear_logprob(hidden, weight, token, temperature),
        reference.linear_entropy(hidden, weight, temperature),
    )


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """A whole tensor, by its norm: fp32 sums, or a few roundings to bf16."""
    limit = {torch.float32: 2e-6, torch.bfloat16: 5e-3}[dtype]
    assert got.dtype == dtype
    error = float((got.double() - want.double()).norm())
    assert error <= limit * float(want.double().norm()) + 1e-12, error


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("M", "V", "D"), SHAPES)
def test_values_and_the_gradients_of_hidden_and_weight_are_those_of_whole_logits(dtype, M, V, D) -> None:
    hidden, weight, token = made(M, D, dtype=dtype), made(V, D, seed=1, dtype=dtype), tokens(M, V)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    got, entropy = run(*leaves, token, TEMPERATURE)
    assert got.dtype == torch.float32
    assert not entropy.any()
    want, _ = exact(hidden, weight, token, TEMPERATURE)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=4e-6)
    grads = zip(torch.autograd.grad(weighted(got), leaves), torch.autograd.grad(weighted(want), leaves), strict=True)
    for a, b in grads:
        assert_near(a, b, dtype)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("M", "V", "D"), SHAPES)
def test_the_gradient_taken_ahead_is_that_of_whole_logits(dtype, M, V, D) -> None:
    hidden, weight, token = made(M, D, dtype=dtype).requires_grad_(), made(V, D, seed=1, dtype=dtype), tokens(M, V)
    got, want = run(hidden, weight, token, TEMPERATURE)[0], exact(hidden, weight, token, TEMPERATURE)[0]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=4e-6)
    (grad,), (want_grad,) = (torch.autograd.grad(weighted(x), hidden) for x in (got, want))
    assert_near(grad, want_grad, dtype)


@pytest.mark.parametrize("trains_head", [False, True])
def test_where_a_token_is_nearly_certain_its_small_gradient_is_as_exact_as_any(trains_head) -> None:
    """1 - p goes down to 1e-4, which bf16 does not tell from 0."""
    M, V, D = 5, 33, 16
    hidden, weight, token = made(M, D) * 0.2, made(V, D, seed=1), torch.full((M,), 7, device=DEVICE)
    hidden[:, 0], weight[:, 0] = torch.linspace(8, 13, M), token[0] == torch.arange(V, device=DEVICE)
    hidden, weight = hidden.bfloat16().requires_grad_(), weight.bfloat16()
    got, want = run(hidden, weight.requires_grad_(trains_head), token)[0], exact(hidden, weight, token)[0]
    rest = 1 - want.detach().exp()
    assert ((rest > 5e-5) & (rest < 2e-2)).all()
    for a, b in zip(*(torch.autograd.grad(x.sum(), hidden)[0] for x in (got, want)), strict=True):
        assert_near(a, b, torch.bfloat16)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("trains_head", [False, True])
def test_entropy_and_its_gradient_are_those_of_the_whole_distribution(dtype, trains_head) -> None:
    M, V, D = 19, 41, 24
    hidden, weight, token = made(M, D, dtype=dtype).requires_grad_(), made(V, D, seed=1, dtype=dtype), tokens(M, V)
    leaves = [hidden, weight.requires_grad_()] if trains_head else [hidden]
    got, want = run(hidden, weight, token, 2.0, with_entropy=True), exact(hidden, weight, token, 2.0)
    assert (want[1] > 0).all()
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=2e-6)
    losses = (weighted(logprob) + 3 * weighted(entropy.flip(0)) for logprob, entropy in (got, want))
    for a, b in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        assert_near(a, b, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_logprob_has_the_same_bits_with_a_gradient_and_without_and_in_every_piece(dtype, monkeypatch) -> None:
    M, V, D = 19, 33, 24
    hidden, weight, token = made(M, D, dtype=dtype), made(V, D, seed=1, dtype=dtype), tokens(M, V)
    alone, _ = run(hidden, weight, token)
    ahead, _ = run(hidden.clone().requires_grad_(), weight, token)
    again, _ = run(hidden, weight.clone().requires_grad_(), token)
    monkeypatch.setattr(fused, "AHEAD", 1)
    in_pieces, _ = run(hidden.clone().requires_grad_(), weight, token)
    with_entropy, _ = run(hidden, weight, token, with_entropy=True)
    for other in (ahead, again, in_pieces, with_entropy):
        assert torch.equal(alone, other.detach())


@pytest.mark.parametrize("dtype", TYPES)
def test_a_rows_bits_do_not_depend_on_the_batch(dtype) -> None:
    M, V, D = 35, 33, 24
    hidden, weight, token = made(M, D, dtype=dtype), made(V, D, seed=1, dtype=dtype), tokens(M, V)
    together = run(hidden, weight, token, with_entropy=True)
    for start, stop in ((0, 1), (15, 33), (34, 35)):
        some = run(hidden[start:stop], weight, token[start:stop], with_entropy=True)
        for part, whole in zip(some, together, strict=True):
            assert torch.equal(part, whole[start:stop])


@pytest.mark.parametrize("dtype", TYPES)
def test_a_token_outside_the_vocabulary_is_not_a_number_and_gives_its_row_the_gradient_of_the_sum_alone(dtype) -> None:
    hidden, weight = made(4, 16, dtype=dtype), made(33, 16, seed=1, dtype=dtype)
    token = torch.tensor([33, -1, 3, 47], device=DEVICE)  # 47 is a column of the last tile, but no word
    grads = []
    for form in (run, lambda *x: eager.linear_logprob_and_entropy(*x, with_entropy=False)):
        leaf = hidden.clone().requires_grad_()
        logprob, _ = form(leaf, weight, token)
        assert logprob.isnan().tolist() == [True, True, False, True]
        grads += torch.autograd.grad(logprob.nan_to_num().sum() * 0 + logprob.sum(), leaf)
    assert_near(*grads, dtype)


@pytest.mark.parametrize("trains_head", [False, True])
def test_no_rows_give_no_logprobs_and_zero_gradients(trains_head) -> None:
    hidden, weight = made(0, 16, dtype=torch.bfloat16).requires_grad_(), made(33, 16, dtype=torch.bfloat16)
    leaves = [hidden, weight.requires_grad_()] if trains_head else [hidden]
    logprob, entropy = run(hidden, weight, tokens(0, 33))
    assert logprob.shape == entropy.shape == (0,)
    for leaf, grad in zip(leaves, torch.autograd.grad(logprob.sum(), leaves), strict=True):
        assert grad.shape == leaf.shape
        assert not grad.any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", [90.0, -90.0, 1e4, -1e4])
def test_logits_far_apart_neither_overflow_nor_vanish(dtype, scale) -> None:
    """Tiles of one row whose exponentials have units of their own, and a word that has nearly all probability."""
    hidden = torch.eye(3, 16).to(DEVICE, dtype)
    weight = made(40, 16, dtype=dtype)
    weight[35] = scale
    weight[36] = scale
    token = torch.tensor([35, 0, 36], device=DEVICE)
    results = []
    for trains_head in (False, True):  # ahead, again
        leaf = hidden.clone().requires_grad_()
        logprob, _ = run(leaf, weight.clone().requires_grad_(trains_head), token)
        results.append(torch.autograd.grad(logprob.sum(), leaf)[0])
    leaf = hidden.clone().requires_grad_()
    want, _ = exact(leaf, weight, token)
    torch.testing.assert_close(logprob.detach(), want.detach(), rtol=1e-6, atol=4e-6)
    (want_grad,) = torch.autograd.grad(want.sum(), leaf)
    for grad in results:
        assert_near(grad, want_grad, dtype)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_reaches_every_result_of_its_row_alone(bad) -> None:
    hidden, weight = made(20, 16, dtype=TYPES[-1]), made(33, 16, seed=1, dtype=TYPES[-1])
    hidden[17, 4] = bad
    leaf = hidden.requires_grad_()
    logprob, _ = run(leaf, weight, tokens(20, 33))
    want = [row == 17 for row in range(20)]
    assert logprob.isnan().tolist() == want
    (grad,) = torch.autograd.grad(logprob.sum(), leaf)
    assert (~grad.isfinite()).any(1).tolist() == want
    assert run(hidden.detach(), weight, tokens(20, 33), with_entropy=True)[1].isnan().tolist() == want


def test_rows_that_tma_cannot_read_where_they_lie_are_copied() -> None:
    wide = made(9, 50, dtype=torch.bfloat16)
    weight, token = made(33, 16, dtype=torch.bfloat16), tokens(9, 33)
    for hidden in (wide[:, 3:19], wide.T[2:11, :9].repeat(1, 2)[:, :16], wide[:, ::3][:, :16]):
        assert torch.equal(run(hidden, weight, token)[0], run(hidden.contiguous(), weight, token)[0])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="whose tiles are as large as these logits")
def test_only_blocks_are_held(allocations, monkeypatch) -> None:
    monkeypatch.setattr(fused, "AHEAD", 16 * 160)
    monkeypatch.setattr(fused, "BLOCK", 48 * 32)
    M, V, D = 48, 160, 16
    hidden, weight, token = made(M, D).requires_grad_(), made(V, D, seed=1).requires_grad_(), tokens(M, V)
    logits_bytes = 4 * M * V
    with allocations:
        run(hidden, weight, token)[0].sum().backward()
    gradients_bytes = 4 * (M + V) * D
    assert allocations.peak_bytes < gradients_bytes + logits_bytes / 2
    with type(allocations)() as ahead:
        run(hidden, weight.detach(), token)[0].sum().backward()
    assert ahead.peak_bytes < gradients_bytes + logits_bytes / 2


def test_the_model_gets_the_kernels_for_a_plain_head_unless_engines_repeat_its_bits(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(op, "uses_kernel", lambda *_: True)  # as on a GPU
    monkeypatch.setattr(fused, "takes", lambda *x: x[2] > 0)
    monkeypatch.setattr(fused, "linear_logprob_and_entropy", lambda *x: calls.append(x) or run(*x[:3], *x[3:]))
    hidden, weight, token = made(3, 16, dtype=TYPES[-1]), made(20, 16, seed=1, dtype=TYPES[-1]), tokens(3, 20)
    branch = (torch.zeros(3, 2, device=DEVICE), made(20, 2))
    with batch_invariant(False):
        got = op.linear_logprob(hidden, weight, token, TEMPERATURE)
        assert calls == [(hidden, weight, token, TEMPERATURE, False)]
        torch.testing.assert_close(got, op.linear_logprob(hidden, weight, token, TEMPERATURE, branch))
        op.linear_logprob(hidden, weight, token, -1.0)
    with batch_invariant():
        op.linear_logprob(hidden, weight, token)
    assert len(calls) == 1
