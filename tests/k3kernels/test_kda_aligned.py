"""KDA in aligned chunks on the CPU: the token recurrence, and one token's bits in a whole pass, in pieces, in decoding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels.dtypes import wider
from k3kernels.kda import CHUNK, ChunkRows, kda_aligned, kda_aligned_from, kda_aligned_step, kda_recurrent, l2_norm
from k3kernels.kda.reference import kda_gate
from k3kernels.two_forms import forward_and_gradient

N, L, H, K = 32, 5 * CHUNK, 4, 24
SCALE = K**-0.5
TYPES = [torch.float32, torch.bfloat16]
BOUNDS = [-5.0, None]


def rows(dtype: torch.dtype, bound: float | None) -> list[Tensor]:
    """q, k, v, g, beta; gates reach their bound."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, f = (torch.randn(N, L, H, K, generator=generator) for _ in range(4))
    g = kda_gate(6 * f, torch.zeros(H), torch.zeros(H, K), bound)
    assert bound is None or g.min() < 0.999 * bound
    return [l2_norm(q).to(dtype), l2_norm(k).to(dtype), v.to(dtype), g, torch.rand(N, L, H, generator=generator)]


def empty_state(dtype: torch.dtype) -> Tensor:
    return torch.zeros(N, H, K, K, dtype=wider(dtype))


def full(number: int) -> Tensor:
    return torch.full((N,), number)


@pytest.mark.parametrize("bound", BOUNDS)
def test_aligned_chunks_equal_the_token_recurrence(bound: float | None) -> None:
    inputs = [x.double() for x in rows(torch.float32, bound)]
    want, _ = kda_recurrent(*inputs, empty_state(torch.float64), SCALE)
    got = kda_aligned(*inputs, empty_state(torch.float64), bound, SCALE)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cuts", [[1, 2, 15, 16, 17, 40, 79], [33], [5, 6, 7, 8], [16, 32, 48]])
def test_any_pieces_give_the_bits_of_the_whole_pass(dtype: torch.dtype, bound: float | None, cuts: list[int]) -> None:
    inputs = rows(dtype, bound)
    want = kda_aligned(*inputs, empty_state(dtype), bound, SCALE)
    state, seen = empty_state(dtype), None
    for start, end in zip([0, *cuts], [*cuts, L], strict=True):
        num_seen = start % CHUNK
        length = -(-(num_seen + end - start) // CHUNK) * CHUNK
        piece = [torch.zeros(N, length, *x.shape[2:], dtype=x.dtype) for x in inputs]
        for part, x in zip(piece, inputs, strict=True):
            part[:, num_seen : num_seen + end - start] = x[:, start:end]
        o, state, seen, _ = kda_aligned_from(*piece, state, seen, full(num_seen), full(end - start), bound, SCALE)
        assert torch.equal(o[:, num_seen : num_seen + end - start], want[:, start:end]), (start, end)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("dtype", TYPES)
def test_decoding_gives_the_bits_of_the_whole_pass_in_a_batch_of_any_size(
    dtype: torch.dtype, bound: float | None
) -> None:
    inputs = rows(dtype, bound)
    want = kda_aligned(*inputs, empty_state(dtype), bound, SCALE)
    twice = [torch.cat([x.flip(0), x]) for x in inputs]
    state = torch.cat([empty_state(dtype)] * 2)
    seen = ChunkRows(*(torch.full((2 * N, H, CHUNK, K), torch.nan, dtype=wider(dtype)) for _ in range(4)))
    active = torch.ones(2 * N, dtype=torch.bool)
    for t in range(L):
        place = torch.full((2 * N,), t % CHUNK)
        o = kda_aligned_step(*(x[:, t] for x in twice), state, seen, place, active, bound, SCALE)
        assert torch.equal(o[N:], want[:, t]), t
        assert torch.equal(o[:N].flip(0), want[:, t]), t


def test_a_value_of_one_form_has_the_gradient_of_the_other() -> None:
    x, y, frozen = (torch.randn(5, requires_grad=needs) for needs in (True, True, False))
    out = forward_and_gradient(lambda a, b, c: a * b + c, lambda a, b, c: 3 * a * b * c, x, y, frozen)
    assert torch.equal(out, (x * y + frozen).detach())
    of_x, of_y = torch.autograd.grad(out.sum(), (x, y))
    torch.testing.assert_close(of_x, 3 * y * frozen)
    torch.testing.assert_close(of_y, 3 * x * frozen)
    with torch.no_grad():
        assert not forward_and_gradient(lambda a: a + 1, lambda a: a, x).requires_grad
