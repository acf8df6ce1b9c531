"""The aligned KDA kernel against the token recurrence, and one token's bits in a whole pass, in pieces and in decoding."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from k3kernels.kda import kda_recurrent
from k3kernels.kda.triton import (
    INACTIVE,
    UNKEPT,
    KdaPool,
    decode_work,
    empty_pool,
    kda_aligned_packed,
    prefill_work,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
L, H, K, V, SCALE = 40, 2, 16, 32, 0.25
BOUND = -5.0


@cache
def rows(length: int = L, bound: float | None = BOUND, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q, k, v, g, beta of one sequence; without a bound, gates fall to -30."""
    generator = torch.Generator().manual_seed(length)

    def randn(*shape: int) -> Tensor:
        return torch.randn(length, H, *shape, generator=generator)

    q, k, v = torch.nn.functional.normalize(randn(K), dim=-1), torch.nn.functional.normalize(randn(K), dim=-1), randn(V)
    g = (bound or -30.0) * torch.sigmoid(2 * randn(K) - 1)
    return tuple(x.to(DEVICE) for x in (q.to(dtype), k.to(dtype), v.to(dtype), g, torch.sigmoid(randn())))


def new_pool(num_slots: int = 4, dtype: torch.dtype = torch.float32, wide: torch.dtype = torch.float32) -> KdaPool:
    """With NaN everywhere: what was not written must not be read."""
    pool = empty_pool(num_slots, H, K, V, dtype, wide, DEVICE)
    for x in (pool.state, pool.k, pool.G, pool.u):
        x.fill_(torch.nan)
    return pool


def run(inputs, pool: KdaPool, work, **options) -> Tensor:
    return kda_aligned_packed(*inputs, pool, work, SCALE, **options)


def prefill(inputs, pool: KdaPool, position: int = 0, slot: int = 1, **options) -> Tensor:
    return run(inputs, pool, prefill_work([len(inputs[0])], [position], [slot], [], DEVICE), **options)


def decode(inputs, pool: KdaPool, slots: list[int], positions: list[int]) -> Tensor:
    where = torch.tensor([slots, positions], dtype=torch.int32, device=DEVICE)
    return run(inputs, pool, decode_work(where[0], where[1]))


def cut(inputs, start: int, end: int) -> tuple[Tensor, ...]:
    return tuple(x[start:end] for x in inputs)


@cache
def whole() -> tuple[Tensor, KdaPool]:
    pool = new_pool()
    return prefill(rows(), pool), pool


def assert_same_pool(got: KdaPool, want: KdaPool, slot: int = 1, num_rows: int = L % 16) -> None:
    assert torch.equal(got.state[slot], want.state[slot])
    for a, b in ((got.k, want.k), (got.G, want.G), (got.u, want.u)):
        assert torch.equal(a[slot, :num_rows], b[slot, :num_rows])


@pytest.mark.parametrize(
    ("bound", "dtype", "wide", "tolerance"),
    [
        (BOUND, torch.float32, torch.float32, 1e-5),
        (None, torch.float32, torch.float32, 1e-5),
        (BOUND, torch.float32, torch.float64, 1e-6),
        (BOUND, torch.bfloat16, torch.float32, 2e-2),  # the interpreter's stores of bf16 do not round to nearest
    ],
)
def test_the_kernel_equals_the_token_recurrence_in_fp64(bound, dtype, wide, tolerance):
    inputs = rows(bound=bound, dtype=dtype)
    double = [x.double().unsqueeze(0) for x in inputs]
    zero = torch.zeros(1, H, K, V, dtype=torch.float64, device=DEVICE)
    want, _ = kda_recurrent(*double, zero, SCALE)
    pool = new_pool(dtype=dtype, wide=wide)
    got = prefill(inputs, pool)
    torch.testing.assert_close(got.double(), want[0], atol=tolerance, rtol=tolerance)
    _, state = kda_recurrent(*(x[:, :32] for x in double), zero, SCALE)
    torch.testing.assert_close(pool.state[1].double(), state[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("end", range(1, L))
def test_any_cut_into_two_pieces_changes_no_bit(end):
    want, want_pool = whole()
    pool = new_pool()
    got = torch.cat([prefill(cut(rows(), 0, end), pool), prefill(cut(rows(), end, L), pool, end)])
    assert torch.equal(got, want)
    assert_same_pool(pool, want_pool)


@pytest.mark.parametrize("prompt", [0, 7, 15, 16, 31])
def test_decoding_after_a_prompt_gives_the_bits_of_the_whole_pass(prompt):
    want, want_pool = whole()
    pool = new_pool()
    got = [prefill(cut(rows(), 0, prompt), pool)] if prompt else []
    got += [decode(cut(rows(), p, p + 1), pool, [1], [p]) for p in range(prompt, L)]
    assert torch.equal(torch.cat(got), want)
    assert_same_pool(pool, want_pool)


def test_sequences_in_a_batch_get_the_bits_that_they_get_alone():
    lengths, slots = [5, 40, 17], [3, 0, UNKEPT]
    pool = new_pool()
    packed = tuple(torch.cat(x) for x in zip(*(rows(length) for length in lengths), strict=True))
    got = run(packed, pool, prefill_work(lengths, [0, 0, 0], slots, [], DEVICE))
    for length, o in zip(lengths, got.split(lengths), strict=True):
        assert torch.equal(o, prefill(rows(length), new_pool()))
    assert torch.equal(pool.state[0], whole()[1].state[1])
    assert pool.state[[1, 2]].isnan().all()


def test_an_inactive_sequence_gets_zeros_and_changes_nothing():
    want, _ = whole()
    pool = new_pool()
    prefill(cut(rows(), 0, 15), pool, slot=2)
    pair = tuple(torch.cat([x[3:4] * torch.nan, x[15:16]]) for x in rows())
    got = decode(pair, pool, [INACTIVE, 2], [15, 15])
    assert torch.equal(got[1], want[15])
    assert (got[0] == 0).all()
    assert pool.state[[0, 1, 3]].isnan().all()


def test_states_are_emitted_where_they_are_wanted():
    checkpoints = torch.full((3, H, K, V), torch.nan, device=DEVICE)
    work = prefill_work([L, L], [0, 0], [0, UNKEPT], [(1, 16, 2), (0, 32, 0)], DEVICE)
    pool = new_pool()
    run(tuple(torch.cat([x, x]) for x in rows()), pool, work, checkpoints=checkpoints)
    early = new_pool()
    prefill(cut(rows(), 0, 16), early)
    assert torch.equal(checkpoints[2], early.state[1])
    assert torch.equal(checkpoints[0], pool.state[0])
    assert checkpoints[1].isnan().all()
    with pytest.raises(ValueError, match="multiple of 16"):
        prefill_work([L], [0], [0], [(0, 24, 0)], DEVICE)
