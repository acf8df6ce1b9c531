"""KDA in aligned chunks on the CPU: the token recurrence, and one token's bits in a whole pass, in pieces, in decoding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels.dtypes import wider
from k3kernels.kda import CHUNK, ChunkRows, kda_aligned, kda_aligned_from, kda_aligned_step, kda_recurrent, l2_norm
from k3kernels.kda.aligned import Places
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
    # What is behind the seen rows weighs nothing, whatever it is, if it is finite.
    seen = ChunkRows(*(torch.full((2 * N, H, CHUNK, K), 1e9, dtype=wider(dtype)) for _ in range(4)))
    active = torch.ones(2 * N, dtype=torch.bool)
    for t in range(L):
        places = Places.of(torch.full((2 * N,), t), active, H, K)
        o = kda_aligned_step(*(x[:, t] for x in twice), state, seen, places, bound, SCALE)
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


def test_who_takes_no_part_in_a_step_goes_on_with_the_same_bits() -> None:
    inputs = rows(torch.float32, -5.0)
    want = kda_aligned(*inputs, empty_state(torch.float32), -5.0, SCALE)
    state = empty_state(torch.float32)
    seen = ChunkRows(*(torch.full((N, H, CHUNK, K), 1e9, dtype=torch.float64) for _ in range(4)))
    position_N, numbers_N = torch.zeros(N, dtype=torch.long), torch.arange(N)
    generator = torch.Generator().manual_seed(1)
    while int(position_N.min()) < CHUNK + 2:
        is_active_N = (torch.rand(N, generator=generator) < 0.2) & (position_N < L)
        if not is_active_N.any():
            continue
        places = Places.of(position_N, is_active_N, H, K)
        n = places.num
        token = [x[numbers_N, position_N.clamp(max=L - 1)][:n] for x in inputs]
        o = kda_aligned_step(*token, state[:n], seen.of(slice(n)), places, -5.0, SCALE)
        active = is_active_N.nonzero().squeeze(-1)
        assert torch.equal(o[active], want[active, position_N[active]])
        position_N += is_active_N


@pytest.mark.parametrize(("heads", "width", "num"), [(4, 24, 6), (2, 8, 6), (1, 8, 8), (3, 5, 32)])
def test_a_step_ends_behind_the_last_active_sequence_where_its_numbers_fill_whole_vectors(
    heads: int, width: int, num: int
) -> None:
    is_active_N = torch.zeros(64, dtype=torch.bool)
    is_active_N[[1, 5]] = True
    places = Places.of(torch.zeros(64, dtype=torch.long), is_active_N, heads, width)
    assert places.num == num
    assert num * heads * width % 32 == 0
