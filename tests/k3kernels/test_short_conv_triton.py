"""The fused convolution and gates against their definitions; one token's bits whole, in pieces, in batches, decoding."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from k3kernels.kda.reference import kda_gate, l2_norm
from k3kernels.kda.triton import INACTIVE, UNKEPT, KdaWork, decode_work, prefill_work
from k3kernels.short_conv import reference
from k3kernels.short_conv import triton as fused
from k3kernels.short_conv.triton import kda_gates, short_conv_packed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
TYPES = [torch.float32, torch.bfloat16]
L, H, K, J = 37, 2, 24, 4
P = 3 * H * K


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def taps(width: int = J) -> Tensor:
    return randn(width, P, seed=9) * 0.5


def new_windows(dtype: torch.dtype = torch.float32, num_slots: int = 4, width: int = J) -> Tensor:
    """With NaN everywhere: what was not written must not be read."""
    return torch.full((num_slots, width - 1, P), torch.nan, dtype=dtype, device=DEVICE)


def run(x: Tensor, windows: Tensor, work: KdaWork, max_length: int, checkpoints: Tensor | None = None) -> Tensor:
    """[T, 3, H, K]."""
    return torch.stack(short_conv_packed(x, taps(windows.shape[1] + 1), windows, work, H, max_length, checkpoints), 1)


def prefill(x: Tensor, windows: Tensor, position: int = 0, slot: int = 1) -> Tensor:
    return run(x, windows, prefill_work([len(x)], [position], [slot], [], DEVICE), len(x))


def decode(x: Tensor, windows: Tensor, slots: list[int], positions: list[int]) -> Tensor:
    where = torch.tensor([slots, positions], dtype=torch.int32, device=DEVICE)
    return run(x, windows, decode_work(where[0], where[1]), 1)


def definition(x: Tensor, width: int = J) -> Tensor:
    """[T, 3, H, K] of one sequence from its start."""
    padded = torch.cat([x.new_zeros(width - 1, P), x])[None]
    q, k, v = reference.short_conv(padded, taps(width).T.to(at_least(x)))[0].unflatten(-1, (3, H, K)).unbind(1)
    return torch.stack([l2_norm(q), l2_norm(k), v], 1)


def at_least(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@pytest.mark.parametrize("width", [2, 4])
def test_a_sequence_equals_the_definition(width):
    x = randn(L, P)
    got = prefill(x, new_windows(width=width))
    torch.testing.assert_close(got.double(), definition(x.double(), width), rtol=1e-5, atol=1e-6)


def test_bf16_is_rounded_where_the_definition_rounds():
    """SiLU's value to a neighbour at most, and the normalised one too: 2 units in the last place."""
    x = randn(L, P, dtype=torch.bfloat16)
    got, want = prefill(x, new_windows(torch.bfloat16)), definition(x)
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-6)
    assert (got != want).float().mean() < 0.01


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("edges", [[0, 1, 2, 3, 5, 16, 33, 34, 37], [0, 17, 37], [0, 36, 37]])
def test_pieces_give_a_token_the_bits_of_the_whole(dtype, edges):
    x = randn(L, P, dtype=dtype)
    windows, other = new_windows(dtype), new_windows(dtype)
    whole = prefill(x, windows)
    pieces = [prefill(x[a:b], other, position=a) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(other[1], windows[1])
    assert torch.equal(windows[1], x[L - (J - 1) :])
    assert windows[[0, 2, 3]].isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
def test_decoding_gives_a_token_the_bits_of_a_prefill(dtype):
    x = randn(8, P, dtype=dtype)
    windows = new_windows(dtype)
    tokens = [decode(x[p : p + 1], windows, [2], [p]) for p in range(8)]
    assert torch.equal(torch.cat(tokens), prefill(x, new_windows(dtype)))
    assert torch.equal(windows[2], x[-(J - 1) :])


def test_sequences_in_one_call_do_not_see_each_other_and_may_stand_in_any_order():
    lengths, slots = [5, 20, 1, 18], [3, 0, UNKEPT, 2]
    x = [randn(length, P, seed=n) for n, length in enumerate(lengths)]
    alone = [prefill(rows, new_windows()) for rows in x]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        work = prefill_work([lengths[n] for n in order], [0] * 4, [slots[n] for n in order], [], DEVICE)
        windows = new_windows()
        got = run(torch.cat([x[n] for n in order]), windows, work, 20)
        assert torch.equal(got, torch.cat([alone[n] for n in order]))
        assert torch.equal(windows[0], x[1][-3:])
        assert windows[1].isnan().all()


def test_decoding_batches_of_any_size_give_the_same_bits_and_inactive_ones_change_nothing():
    x = randn(6, P, seed=4)
    before = randn(8, J - 1, P, seed=5)
    slots, positions = [4, 1, INACTIVE, 7, 0, 2], [9, 1, 3, 2, 0, 16]
    windows = before.clone()
    together = decode(x, windows, slots, positions)
    assert together[2].eq(0).all()
    for n in (0, 1, 3, 4, 5):
        one = before.clone()
        assert torch.equal(decode(x[n : n + 1], one, [slots[n]], [positions[n]]), together[n : n + 1])
        assert torch.equal(one[slots[n]], windows[slots[n]])
    untouched = [3, 5, 6]
    assert torch.equal(windows[untouched], before[untouched])
    assert torch.equal(windows[0], torch.cat([torch.zeros_like(x[:2]), x[4:5]]))


def test_a_checkpoint_is_the_window_of_the_prefix_that_ends_there():
    x = randn(40, P)
    checkpoints, windows = new_windows(num_slots=3), new_windows()
    prefill(x[:15], windows)
    work = prefill_work([25], [15], [1], [(0, 16, 2), (0, 32, 0)], DEVICE)
    run(x[15:], windows, work, 25, checkpoints)
    assert torch.equal(checkpoints[2], x[13:16])
    assert torch.equal(checkpoints[0], x[29:32])
    assert checkpoints[1].isnan().all()
    other = new_windows()
    prefill(x[:15], other)
    run(x[15:], other, work, 25)
    assert torch.equal(other[1], windows[1])
    assert other[[0, 2, 3]].isnan().all()


def test_slots_may_lie_apart():
    x = randn(20, P)
    apart, windows, checkpoints = new_windows(width=9), new_windows(), new_windows(num_slots=8)
    work = prefill_work([20], [0], [1], [(0, 16, 2)], DEVICE)
    want = run(x, windows, work, 20)
    assert torch.equal(run(x, apart[:, 2 : J + 1], work, 20, checkpoints[::2]), want)
    assert torch.equal(apart[1, 2 : J + 1], windows[1])
    assert torch.equal(checkpoints[4], x[13:16])
    assert int(apart.isfinite().sum()) == windows[1].numel()


def test_heads_that_do_not_fill_a_program_are_those_that_do(monkeypatch):
    x = randn(9, P)
    whole = prefill(x, new_windows())
    monkeypatch.setattr(fused, "TILE", 128)
    assert torch.equal(prefill(x, new_windows()), whole)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bound", [-5.0, None])
def test_the_gates_equal_their_definition(dtype, bound):
    """To a 50000th of each value, also where it is as small as e^-60: a GPU's exp(x) is as far off as x."""
    f, b = randn(5, H * K, dtype=dtype) * 20, randn(5, H, dtype=dtype, seed=1) * 3
    A_log, dt_bias = randn(H, seed=2), randn(H * K, seed=3)
    g, beta = kda_gates(f, b, A_log, dt_bias, bound)
    want = kda_gate(f.double().view(5, H, K), A_log.double(), dt_bias.double().view(H, K), bound)
    torch.testing.assert_close(g.double(), want, rtol=2e-5, atol=1e-35)
    torch.testing.assert_close(beta.double(), torch.sigmoid(b.double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_a_tokens_gates_have_the_same_bits_alone_and_in_any_batch(bound):
    f, b, A_log, dt_bias = randn(9, H * K), randn(9, H), randn(H, seed=2), randn(H * K, seed=3)
    together = kda_gates(f, b, A_log, dt_bias, bound)
    for n in (0, 4, 8):
        alone = kda_gates(f[n : n + 1], b[n : n + 1], A_log, dt_bias, bound)
        assert all(torch.equal(x, y[n : n + 1]) for x, y in zip(alone, together, strict=True))


def test_no_tokens_give_no_tokens():
    assert prefill(randn(0, P), new_windows()).shape == (0, 3, H, K)
    assert [x.shape for x in kda_gates(randn(0, H * K), randn(0, H), randn(H), randn(H * K), None)] == [
        (0, H, K),
        (0, H),
    ]
