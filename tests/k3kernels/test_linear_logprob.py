"""The head in blocks of tokens and vocabulary against whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k3kernels.linear_logprob import eager, linear_logprob, linear_logprob_and_entropy, reference, wide, wide_logits

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 words of the vocabulary and 5 rows at a time, at width 13."""
    monkeypatch.setattr(wide, "MAX_WEIGHT", 52)
    monkeypatch.setattr(eager, "MAX_LOGITS", 20)


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, std: float = 1.0) -> Tensor:
    return (std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype).requires_grad_()


def tokens(M: int, V: int) -> Tensor:
    return torch.randint(V, (M,), generator=torch.Generator().manual_seed(7))


def weighted(value_M: Tensor) -> Tensor:
    return (value_M * torch.linspace(-1, 2, len(value_M))).sum()


def tolerance(dtype: torch.dtype) -> float:
    """Of a gradient: one rounding to its type, of a sum that has another order."""
    return {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("M", "V"), [(1, 1), (1, 9), (5, 4), (6, 61), (23, 8)])
def test_blocks_equal_whole_logits_in_value_and_both_gradients(
    dtype: torch.dtype, temperature: float, M: int, V: int
) -> None:
    hidden_MD, weight_VD, tokens_M = made(M, 13, dtype=dtype), made(V, 13, seed=1, dtype=dtype), tokens(M, V)
    got_M = linear_logprob(hidden_MD, weight_VD, tokens_M, temperature)
    want_M = reference.linear_logprob(hidden_MD, weight_VD, tokens_M, temperature)
    assert got_M.dtype == torch.float32
    torch.testing.assert_close(got_M, want_M, rtol=0, atol=1e-6)
    got = torch.autograd.grad(weighted(got_M), (hidden_MD, weight_VD))
    want = torch.autograd.grad(weighted(want_M), (hidden_MD, weight_VD))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=tolerance(dtype), atol=tolerance(dtype))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
def test_entropy_is_that_of_the_whole_distribution_and_so_is_its_gradient(dtype: torch.dtype) -> None:
    hidden_MD, weight_VD, tokens_M = made(11, 13, dtype=dtype), made(61, 13, seed=1, dtype=dtype), tokens(11, 61)
    logprob_M, entropy_M = linear_logprob_and_entropy(hidden_MD, weight_VD, tokens_M, 0.8)
    want_M = reference.linear_entropy(hidden_MD, weight_VD, 0.8)
    assert (want_M > 0).all()
    torch.testing.assert_close(entropy_M, want_M, rtol=0, atol=2e-6)
    whole_M = reference.linear_logprob(hidden_MD, weight_VD, tokens_M, 0.8)
    got = torch.autograd.grad(weighted(logprob_M) + weighted(entropy_M.flip(0)), (hidden_MD, weight_VD))
    want = torch.autograd.grad(weighted(whole_M) + weighted(want_M.flip(0)), (hidden_MD, weight_VD))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=10 * tolerance(dtype), atol=10 * tolerance(dtype))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_low_rank_branch_equals_the_head_with_its_product_added(temperature: float) -> None:
    hidden_MD, weight_VD, tokens_M = made(11, 13), made(61, 13, seed=1), tokens(11, 61)
    A_rD, B_Vr = made(3, 13, seed=2), made(61, 3, seed=3)
    branch = (2.0 * hidden_MD @ A_rD.T, B_Vr)
    merged_VD = weight_VD + 2.0 * B_Vr @ A_rD
    torch.testing.assert_close(wide_logits(hidden_MD, weight_VD, branch), hidden_MD @ merged_VD.T, rtol=0, atol=1e-12)
    got_M = linear_logprob(hidden_MD, weight_VD, tokens_M, temperature, branch)
    want_M = reference.linear_logprob(hidden_MD, merged_VD, tokens_M, temperature)
    torch.testing.assert_close(got_M, want_M, rtol=0, atol=1e-6)
    inputs = (hidden_MD, weight_VD, A_rD, B_Vr)
    for a, b in zip(
        torch.autograd.grad(weighted(got_M), inputs), torch.autograd.grad(weighted(want_M), inputs), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.usefixtures("small_blocks")
def test_gradients_are_those_of_finite_differences() -> None:
    """In fp64, but for the result, which is fp32: so the step is wide and the tolerance too."""
    hidden_MD, weight_VD, tokens_M = made(2, 13), made(9, 13, seed=1), tokens(2, 9)
    (gradient_MD,) = torch.autograd.grad(linear_logprob(hidden_MD, weight_VD, tokens_M).sum(), hidden_MD)
    for m, d in ((0, 0), (1, 12)):
        step_MD = torch.zeros_like(hidden_MD)
        step_MD[m, d] = 1e-2
        up, down = (
            linear_logprob(hidden_MD.detach() + sign * step_MD, weight_VD, tokens_M).double().sum() for sign in (1, -1)
        )
        assert gradient_MD[m, d].item() == pytest.approx(float((up - down).detach()) / 2e-2, abs=2e-3)


@pytest.mark.usefixtures("small_blocks")
def test_every_place_of_a_token_within_a_block_is_found() -> None:
    weight_VD = made(10, 13, seed=1).detach()
    hidden_MD = made(1, 13).detach().expand(10, 13)
    torch.testing.assert_close(linear_logprob(hidden_MD, weight_VD, torch.arange(10)).exp().sum(), torch.tensor(1.0))


def test_only_what_requires_a_gradient_gets_one() -> None:
    frozen_VD, hidden_MD = made(61, 13, seed=1).detach(), made(5, 13)
    linear_logprob(hidden_MD, frozen_VD, tokens(5, 61)).sum().backward()
    assert hidden_MD.grad is not None
    assert frozen_VD.grad is None
    fixed_MD, weight_VD = hidden_MD.detach(), frozen_VD.clone().requires_grad_()
    linear_logprob(fixed_MD, weight_VD, tokens(5, 61)).sum().backward()
    assert weight_VD.grad is not None


def test_no_rows_give_no_logprobs_and_zero_gradients() -> None:
    hidden_MD, weight_VD = made(0, 13), made(61, 13, seed=1)
    logprobs_M = linear_logprob(hidden_MD, weight_VD, tokens(0, 61))
    assert logprobs_M.shape == (0,)
    logprobs_M.sum().backward()
    assert weight_VD.grad is not None
    assert not weight_VD.grad.any()


@pytest.mark.usefixtures("small_blocks")
def test_a_token_outside_the_vocabulary_is_not_a_number() -> None:
    logprobs_M = linear_logprob(made(3, 13), made(10, 13, seed=1), torch.tensor([10, -1, 3]))
    assert logprobs_M.isnan().tolist() == [True, True, False]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_large_logits_neither_overflow_nor_vanish(scale: float) -> None:
    hidden_MD = torch.eye(3, dtype=torch.float32).requires_grad_()
    weight_VD = torch.tensor([[0.0] * 3] * 9 + [[scale] * 3])
    tokens_M = torch.tensor([9, 0, 9])
    logprobs_M = linear_logprob(hidden_MD, weight_VD, tokens_M)
    torch.testing.assert_close(logprobs_M, reference.linear_logprob(hidden_MD, weight_VD, tokens_M), rtol=0, atol=1e-6)
    logprobs_M.sum().backward()
    assert hidden_MD.grad is not None
    assert hidden_MD.grad.isfinite().all()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_reaches_every_logprob_of_its_row_alone(bad: float) -> None:
    hidden_MD, weight_VD = made(3, 13).detach(), made(10, 13, seed=1)
    hidden_MD[1, 4] = bad
    assert linear_logprob(hidden_MD, weight_VD, tokens(3, 10)).isnan().tolist() == [False, True, False]


def test_the_same_call_gives_the_same_bits_with_and_without_a_gradient() -> None:
    """Old and new logprobs of an unchanged policy are equal, so the first ratio is exactly 1."""
    hidden_MD, weight_VD, tokens_M = (
        made(9, 13, dtype=torch.bfloat16),
        made(61, 13, dtype=torch.bfloat16),
        tokens(9, 61),
    )
    with torch.no_grad():
        old_M = linear_logprob(hidden_MD, weight_VD, tokens_M)
    assert torch.equal(old_M, linear_logprob(hidden_MD, weight_VD, tokens_M))


def peak_of(allocations: Any, run: Callable[..., Tensor], *args: Any) -> int:
    with allocations:
        run(*args).sum().backward()
    return allocations.peak_bytes


def test_blocks_are_what_is_held_and_whole_logits_are_not(monkeypatch: pytest.MonkeyPatch, allocations: Any) -> None:
    """The bound is far below one [M, V] of the logits' type, and the unchunked pass is seen to exceed it."""
    monkeypatch.setattr(wide, "MAX_WEIGHT", 1 << 16)
    monkeypatch.setattr(eager, "MAX_LOGITS", 1 << 18)
    M, V, D = 600, 30_000, 16
    hidden_MD, weight_VD = made(M, D, dtype=torch.float32), made(V, D, seed=1, dtype=torch.float32)
    whole_bytes, tokens_M = 8 * M * V, tokens(M, V)
    bound = whole_bytes // 8
    assert peak_of(allocations, linear_logprob, hidden_MD, weight_VD, tokens_M) < bound
    assert peak_of(type(allocations)(), reference.linear_logprob, hidden_MD, weight_VD, tokens_M) > whole_bytes


def test_a_frozen_head_is_never_copied(monkeypatch: pytest.MonkeyPatch, allocations: Any) -> None:
    monkeypatch.setattr(wide, "MAX_WEIGHT", 1 << 12)
    hidden_MD, weight_VD = made(8, 64, dtype=torch.bfloat16), made(4096, 64, seed=1, dtype=torch.bfloat16).detach()
    bytes_of_head = 2 * weight_VD.numel()
    assert peak_of(allocations, linear_logprob, hidden_MD, weight_VD, tokens(8, 4096)) < bytes_of_head / 2


def test_32768_tokens_with_5_percent_trained_over_163840_words_stay_far_under_1_5_gib(allocations: Any) -> None:
    """A narrow head, since logits do not depend on its width; `k3 bench logprob` measures a real one by the process's
    memory."""
    hidden_TD = made(32_768, 4, dtype=torch.bfloat16).detach()
    target_M = torch.arange(1, 32_768, 20)
    weight_VD = made(163_840, 4, seed=1, dtype=torch.bfloat16).detach()
    one_of_all_logits = 4 * len(target_M) * len(weight_VD)
    with allocations:
        hidden_MD = hidden_TD.index_select(0, target_M - 1).requires_grad_()
        linear_logprob(hidden_MD, weight_VD, tokens(len(target_M), len(weight_VD))).sum().backward()
    assert allocations.peak_bytes < one_of_all_logits / 3
    assert allocations.peak_bytes < 0.4 * 2**30


@pytest.mark.usefixtures("small_blocks")
def test_where_bf16_operands_are_multiplied_into_fp32_only_dlogit_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, here by converting inside the product."""
    operands: set[torch.dtype] = set()

    def matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        operands.update((a.dtype, b.dtype))
        return a.to(dtype) @ b.to(dtype)

    hidden_MD, weight_VD = (made(n, 13, seed=n, dtype=torch.bfloat16) for n in (11, 61))
    want_M = reference.linear_logprob(hidden_MD, weight_VD, tokens(11, 61), 0.7)
    want = torch.autograd.grad(weighted(want_M), (hidden_MD, weight_VD))
    monkeypatch.setattr(wide, "has_wide_output", lambda x, weight: x.dtype == weight.dtype)
    monkeypatch.setattr(eager, "matmul", matmul)
    got_M = linear_logprob(hidden_MD, weight_VD, tokens(11, 61), 0.7)
    torch.testing.assert_close(got_M, want_M, rtol=0, atol=2e-6)
    got = torch.autograd.grad(weighted(got_M), (hidden_MD, weight_VD))
    assert operands == {torch.bfloat16}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_blocks_equal_the_definition(dtype: torch.dtype) -> None:
    """bf16 operands are multiplied into fp32 as they are, against the CPU's converted ones."""
    M, V, D = 70, 5000, 256
    hidden_MD, weight_VD = made(M, D, dtype=dtype), made(V, D, seed=1, dtype=dtype, std=D**-0.5)
    want_M = reference.linear_logprob(hidden_MD, weight_VD, tokens(M, V), 0.7)
    want = torch.autograd.grad(weighted(want_M), (hidden_MD, weight_VD))
    on_gpu = [x.detach().cuda().requires_grad_() for x in (hidden_MD, weight_VD)]
    got_M = linear_logprob(*on_gpu, tokens(M, V).cuda(), 0.7)
    torch.testing.assert_close(got_M.cpu(), want_M, rtol=0, atol=5e-6)
    got = torch.autograd.grad((got_M * torch.linspace(-1, 2, M, device="cuda")).sum(), on_gpu)
    for a, b in zip(got, want, strict=True):
        scale = b.float().abs().max()
        assert ((a.cpu().float() - b.float()).abs().max() / scale) < (1e-6 if dtype == torch.float32 else 1e-2)
