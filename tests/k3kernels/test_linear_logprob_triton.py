"""The log-probability's kernels against whole logits, their ways to a gradient against each other, rows alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import k3kernels.linear_logprob as op
from k3kernels.dispatch import batch_invariant
from k3kernels.linear_logprob import eager, reference
from k3kernels.linear_logprob import triton as fused
from k3kernels.linear_logprob.lent import lent_blocks
from k3kernels.linear_logprob.triton import Tile, linear_logprob_and_entropy
from k3kernels.linear_logprob.wide import add_product_in_fp32

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
TYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cpu" else [torch.bfloat16]
TILE = Tile(16, 16, 16, 4, 1, 1, 2, False) if DEVICE.type == "cpu" else fused.TILE
# Rows, words and width: one of each, full tiles, neither, more tiles than programs and several blocks that are lent.
SHAPES = [(1, 1, 8), (16, 32, 16), (5, 33, 24), (35, 70, 24)]
TEMPERATURE = 0.7
KEPT = ["all", "some", "none"]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile's rows of exponentials at a time."""
    monkeypatch.setattr(fused, "AHEAD", 1)


@pytest.fixture
def set_kept(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, int], None]:
    """set_kept(what, M, V): logits from forward to backward: all, or a tile's words and others in the memory of the weight's
    gradient, or none. But for all there are more blocks."""

    def set_block(what: str, M: int, V: int) -> None:
        monkeypatch.setattr(fused, "LENT_WORDS", TILE.block_n)
        monkeypatch.setattr(fused, "BLOCK", {"all": M * V, "some": M * TILE.block_n, "none": 1}[what])

    return set_block


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


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize(("M", "V", "D"), SHAPES)
def test_values_and_the_gradients_of_hidden_and_weight_are_those_of_whole_logits(
    dtype, kept, M, V, D, set_kept
) -> None:
    set_kept(kept, M, V)
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


def nearly_certain() -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, token) in bf16: 1 - p goes down to 1e-4, which bf16 does not tell from 0."""
    M, V, D = 5, 33, 16
    hidden, weight, token = made(M, D) * 0.2, made(V, D, seed=1), torch.full((M,), 7, device=DEVICE)
    hidden[:, 0], weight[:, 0] = torch.linspace(8, 13, M), token[0] == torch.arange(V, device=DEVICE)
    rest = 1 - exact(hidden.bfloat16(), weight.bfloat16(), token)[0].exp()
    assert ((rest > 5e-5) & (rest < 2e-2)).all()
    return hidden.bfloat16().requires_grad_(), weight.bfloat16(), token


@pytest.mark.parametrize("kept", ["ahead", *KEPT])
def test_where_a_token_is_nearly_certain_its_small_gradient_is_as_exact_as_any(kept, set_kept) -> None:
    hidden, weight, token = nearly_certain()
    if kept != "ahead":
        set_kept(kept, len(hidden), len(weight))
        weight.requires_grad_()
    got, want = run(hidden, weight, token)[0], exact(hidden, weight, token)[0]
    for a, b in zip(*(torch.autograd.grad(x.sum(), hidden)[0] for x in (got, want)), strict=True):
        assert_near(a, b, torch.bfloat16)


@pytest.mark.parametrize("kept", KEPT)
def test_where_a_word_is_nearly_certain_the_gradient_of_the_small_entropy_is_as_exact_as_any(kept, set_kept) -> None:
    """log p + entropy, of which the gradient is made, is as small as 1e-3 for this word, and is not lost in rounding."""
    hidden, weight, token = nearly_certain()
    set_kept(kept, len(hidden), len(weight))
    got, want = run(hidden, weight, token, with_entropy=True)[1], exact(hidden, weight, token)[1]
    for a, b in zip(*(torch.autograd.grad(x.sum(), hidden)[0] for x in (got, want)), strict=True):
        assert_near(a, b, torch.bfloat16)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("trains_head", [False, True])
def test_entropy_and_its_gradient_are_those_of_the_whole_distribution(dtype, kept, trains_head, set_kept) -> None:
    M, V, D = 19, 41, 24
    set_kept(kept, M, V)
    hidden, weight, token = made(M, D, dtype=dtype).requires_grad_(), made(V, D, seed=1, dtype=dtype), tokens(M, V)
    leaves = [hidden, weight.requires_grad_()] if trains_head else [hidden]
    got, want = run(hidden, weight, token, 2.0, with_entropy=True), exact(hidden, weight, token, 2.0)
    assert (want[1] > 0).all()
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=2e-6)
    losses = (weighted(logprob) + 3 * weighted(entropy.flip(0)) for logprob, entropy in (got, want))
    for a, b in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        assert_near(a, b, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kept", ["all", "some"])
def test_a_second_backward_pass_through_one_graph_gives_the_gradients_again(dtype, kept, set_kept) -> None:
    """The first has written over what forward kept."""
    M, V, D = 19, 41, 24
    set_kept(kept, M, V)
    leaves = [made(M, D, dtype=dtype).requires_grad_(), made(V, D, seed=1, dtype=dtype).requires_grad_()]
    token = tokens(M, V)
    loss, want_loss = (
        (weighted(logprob) - entropy.sum())
        for logprob, entropy in (run(*leaves, token, with_entropy=True), exact(*leaves, token))
    )
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    copies = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss, leaves)
    for grad, copy, again, want in zip(first, copies, second, torch.autograd.grad(want_loss, leaves), strict=True):
        assert torch.equal(grad, copy)
        assert_near(grad, want, dtype)
        assert_near(again, want, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_logprob_has_the_same_bits_with_a_gradient_and_without_and_in_every_piece(dtype, monkeypatch) -> None:
    M, V, D = 19, 33, 24
    hidden, weight, token = made(M, D, dtype=dtype), made(V, D, seed=1, dtype=dtype), tokens(M, V)
    alone, _ = run(hidden, weight, token)
    ahead, _ = run(hidden.clone().requires_grad_(), weight, token)
    again, _ = run(hidden, weight.clone().requires_grad_(), token)
    with_entropy, _ = run(hidden, weight, token, with_entropy=True)
    with_its_gradient, _ = run(hidden.clone().requires_grad_(), weight, token, with_entropy=True)
    monkeypatch.setattr(fused, "AHEAD", 1)
    monkeypatch.setattr(fused, "BLOCK", M * TILE.block_n)
    in_pieces, _ = run(hidden.clone().requires_grad_(), weight, token)
    one_kept, _ = run(hidden, weight.clone().requires_grad_(), token)
    for other in (ahead, again, with_entropy, with_its_gradient, in_pieces, one_kept):
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
@pytest.mark.parametrize("scale", [90.0, -90.0, 1e5, -1e5])
def test_logits_far_apart_neither_overflow_nor_vanish(dtype, scale, set_kept) -> None:
    """Tiles of one row whose exponentials have units of their own, and a word that has nearly all probability; those that
    have none, past fp16, give neither logprob nor entropy a gradient that is not a number."""
    hidden = torch.eye(3, 16).to(DEVICE, dtype)
    weight = made(40, 16, dtype=dtype)
    weight[35] = scale
    weight[36] = scale
    token = torch.tensor([35, 0, 36], device=DEVICE)
    leaf = hidden.clone().requires_grad_()
    want, want_entropy = exact(leaf, weight, token)
    want_grads = [torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in (want, want_entropy)]
    for way in ("ahead", "all", "none"):
        if way != "ahead":
            set_kept(way, len(hidden), len(weight))
        logprob, entropy = run(leaf, weight.requires_grad_(way != "ahead"), token, with_entropy=way != "ahead")
        torch.testing.assert_close(logprob, want, rtol=1e-6, atol=4e-6)
        for x, want_grad in zip((logprob, entropy) if way != "ahead" else (logprob,), want_grads, strict=False):
            assert_near(torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0], want_grad, dtype)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kept", ["ahead", "all", "none"])
def test_a_number_that_is_not_finite_reaches_every_result_of_its_row_alone(bad, kept, set_kept) -> None:
    hidden, weight = made(20, 16, dtype=TYPES[-1]), made(33, 16, seed=1, dtype=TYPES[-1])
    hidden[17, 4] = bad
    leaf = hidden.requires_grad_()
    if kept != "ahead":
        set_kept(kept, 20, 33)
        weight.requires_grad_()
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


@pytest.mark.parametrize("M", [1, 7, 20, 31, 200, 5000])
@pytest.mark.parametrize(("V", "D", "n"), [(64, 20, 4), (61, 7, 4), (16, 20, 16), (10, 20, 16)])
def test_a_block_in_the_gradients_memory_lies_behind_the_rows_that_are_written_until_it_is_used_up(M, V, D, n) -> None:
    gradient = torch.empty(V, D)
    start, end = gradient.data_ptr(), gradient.data_ptr() + gradient.nbytes
    blocks = lent_blocks(gradient, M, n, V)
    for i, block in enumerate(blocks):
        assert block.shape == (M, n)
        assert start + (i + 1) * n * D * 4 <= block.data_ptr() <= end - block.nbytes
        assert i == 0 or block.data_ptr() == blocks[i - 1].data_ptr() + block.nbytes
    one_more = (len(blocks) + 1) * n
    assert one_more * D + M * n > V * D or n * D + one_more * M > V * D
    assert len(lent_blocks(gradient, M, n, 1)) == min(len(blocks), 1)


def test_lent_memory_becomes_the_weights_gradient_and_no_other_is_made(set_kept, allocations) -> None:
    M, V, D = 32, 5 * TILE.block_n, 16
    set_kept("some", M, V)
    hidden, weight = (made(n, D, dtype=TYPES[0]).requires_grad_() for n in (M, V))
    logprob, _ = run(hidden, weight, tokens(M, V))
    lent = logprob.grad_fn.saved_tensors[-1]
    place = lent.data_ptr()
    del lent
    with allocations:
        logprob.sum().backward()
    assert weight.grad.data_ptr() == place
    assert allocations.peak_bytes < weight.nbytes


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


@pytest.mark.parametrize("dtype", TYPES)
def test_a_product_is_added_where_the_sums_are(dtype) -> None:
    a, b, sums = made(9, 16, dtype=dtype), made(16, 24, dtype=dtype), made(9, 24, seed=1)
    before, place = sums.double(), sums.data_ptr()
    add_product_in_fp32(sums, a, b)
    assert sums.data_ptr() == place
    torch.testing.assert_close(sums.double(), before + a.double() @ b.double(), rtol=0, atol=1e-5)


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
