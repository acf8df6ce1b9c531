"""The fused step of KDA against the definitions of its parts, and drafts: verified, committed in part, rolled back."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from k3kernels.kda import kda_gate, kda_recurrent, l2_norm
from k3kernels.kda.step import TAPS, StepPool, StepWeights, kda_steps
from k3kernels.rms_norm.reference import gated_rms_norm
from k3kernels.short_conv.reference import short_conv

DEVICE = torch.device("cpu")  # in Triton's interpreter
N, W, H, K, SLOTS, SCALE = 3, 4, 2, 16, 6, 0.25
SLOT_IDS = (4, 0, 2)
LIMIT = 2e-6


@dataclass(frozen=True)
class Case:
    qkv: Tensor
    f: Tensor
    b: Tensor
    gate: Tensor
    weights: StepWeights
    states: Tensor
    windows: Tensor
    bound: float | None

    def pool(self) -> StepPool:
        return StepPool(self.states.clone(), self.windows.clone())

    def run(self, pool: StepPool, tokens: slice, lengths: list[int], slots: tuple[int, ...] = SLOT_IDS, **options):
        inputs = (x[:, tokens].contiguous() for x in (self.qkv, self.f, self.b, self.gate))
        where = (torch.tensor(x, dtype=torch.int32) for x in (slots, lengths))
        return kda_steps(*inputs, self.weights, pool, *where, self.bound, SCALE, **options)


def case(bound: float | None = -5.0) -> Case:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weights = StepWeights(randn(TAPS, 3, H, K), randn(H), randn(H, K), randn(K))
    tokens = (randn(N, W, 3, H, K), 2 * randn(N, W, H, K), randn(N, W, H), randn(N, W, H, K))
    return Case(*tokens, weights, randn(SLOTS, H, K, K), randn(SLOTS, TAPS - 1, 3, H, K), bound)


def defined(each: Case, n: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """y [length, H, K], state and window of sequence n, in fp64."""
    w, slot = each.weights, SLOT_IDS[n]
    assert w.taps is not None
    assert w.norm_V is not None
    rows = torch.cat([each.windows[slot], each.qkv[n, :length]]).double()
    taps = w.taps.double().reshape(TAPS, -1).T
    convolved = short_conv(rows.flatten(1)[None], taps).view(1, length, 3, H, K)
    q, k, v = convolved.unbind(2)
    g = kda_gate(each.f[n : n + 1, :length].double(), w.A_log_H.double(), w.dt_bias_HK.double(), each.bound)
    beta = each.b[n : n + 1, :length].double().sigmoid()
    o, state = kda_recurrent(l2_norm(q), l2_norm(k), v, g, beta, each.states[slot : slot + 1].double(), SCALE)
    y = gated_rms_norm(o[0], each.gate[n, :length].double(), w.norm_V.double(), w.norm_eps)
    return y, state[0], rows[length:]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("bound", [-5.0, None])
def test_outputs_states_and_windows_are_those_of_the_parts(bound: float | None) -> None:
    each, lengths = case(bound), [4, 1, 3]
    pool = each.pool()
    y = each.run(pool, slice(0, W), lengths)
    for n, length in enumerate(lengths):
        wanted_y, wanted_state, wanted_window = defined(each, n, length)
        assert relative(y[n, :length], wanted_y) < LIMIT
        assert relative(pool.states[SLOT_IDS[n]], wanted_state) < LIMIT
        assert torch.equal(pool.windows[SLOT_IDS[n]].double(), wanted_window)
        assert not y[n, length:].any()


def test_tokens_in_one_call_and_in_single_steps_have_the_same_bits() -> None:
    each = case()
    together, apart = each.pool(), each.pool()
    whole = each.run(together, slice(0, W), [W] * N)
    steps = [each.run(apart, slice(t, t + 1), [1] * N) for t in range(W)]
    assert torch.equal(whole, torch.cat(steps, 1))
    assert torch.equal(together.states, apart.states)
    assert torch.equal(together.windows, apart.windows)


@pytest.mark.parametrize("accepted", range(W + 1))
def test_a_draft_is_verified_without_a_write_and_any_part_of_it_committed_to_the_bits_of_single_steps(
    accepted: int,
) -> None:
    each = case()
    pool, stepped = each.pool(), each.pool()
    y = each.run(pool, slice(0, W), [W] * N, writes=False)
    assert torch.equal(pool.states, each.states)
    assert torch.equal(pool.windows, each.windows)
    assert each.run(pool, slice(0, W), [accepted] * N, has_outputs=False) is None
    steps = [each.run(stepped, slice(t, t + 1), [1] * N) for t in range(accepted)]
    assert torch.equal(pool.states, stepped.states)
    assert torch.equal(pool.windows, stepped.windows)
    assert all(torch.equal(y[:, t], step[:, 0]) for t, step in enumerate(steps))


def test_a_sequence_without_a_slot_or_without_tokens_gets_zeros_and_changes_nothing() -> None:
    each = case()
    pool = each.pool()
    y = each.run(pool, slice(0, W), [2, 0, 2], slots=(-1, 0, 2))
    assert not y[:2].any()
    untouched = [0, 1, 3, 4, 5]
    assert torch.equal(pool.states[untouched], each.states[untouched])
    assert torch.equal(pool.windows[untouched], each.windows[untouched])
    assert not torch.equal(pool.states[2], each.states[2])


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch() -> None:
    each = case()
    pool, alone = each.pool(), each.pool()
    y = each.run(pool, slice(0, W), [W] * N)
    only = each.run(alone, slice(0, W), [0, W, 0])
    assert torch.equal(only[1], y[1])
    assert torch.equal(alone.states[SLOT_IDS[1]], pool.states[SLOT_IDS[1]])


def test_convolved_inputs_give_o_itself() -> None:
    each = case()
    weights = StepWeights(None, each.weights.A_log_H, each.weights.dt_bias_HK, None)
    pool = StepPool(each.states.clone(), None)
    where = (torch.tensor(x, dtype=torch.int32) for x in (SLOT_IDS, [W] * N))
    o = kda_steps(each.qkv, each.f, each.b, None, weights, pool, *where, each.bound, SCALE)
    q, k, v = (x.double() for x in each.qkv.unbind(2))
    g = kda_gate(each.f.double(), weights.A_log_H.double(), weights.dt_bias_HK.double(), each.bound)
    states = each.states[list(SLOT_IDS)].double()
    wanted, after = kda_recurrent(l2_norm(q), l2_norm(k), v, g, each.b.double().sigmoid(), states, SCALE)
    assert o is not None
    assert relative(o, wanted) < LIMIT
    assert relative(pool.states[list(SLOT_IDS)], after) < LIMIT
