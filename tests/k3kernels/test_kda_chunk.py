"""The chunked KDA kernels against the token recurrence in fp64: outputs, states and every gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from k3kernels.kda import kda_gate, kda_recurrent
from k3kernels.kda.chunk import backward, forward, op
from k3kernels.kda.chunk.op import kda_chunk
from k3kernels.kda.chunk.segments import cut
from k3kernels.kda.chunk.table import ROWS, ChunkTable, Emits, chunk_table

DEVICE = torch.device("cpu")  # in Triton's interpreter; on a GPU kernels/bench/bench_kda.py compares the same
H, K, V, SCALE = 2, 32, 16, 0.3
BOUNDED = -5.0
LIMIT = 5e-5  # fp32 sums of up to 130 tokens; of A_log's gradient, which nearly cancels, too
NAMES = ("q", "k", "v", "f", "b", "A_log", "dt_bias", "initial state")


@pytest.fixture(autouse=True)
def two_blocks_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 key and value channels, so that programs have neighbours."""
    settings = replace(forward.SETTINGS, intra_block_k=16, gradient_block_k=16, inter_block_v=16)
    for module in (forward, backward):
        monkeypatch.setattr(module, "SETTINGS", settings)


@dataclass(frozen=True)
class Problem:
    inputs: tuple[Tensor, ...]
    initial: Tensor
    lengths: tuple[int, ...]

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        return [x.to(dtype).requires_grad_() for x in (*self.inputs, self.initial)]

    def only(self, n: int) -> Problem:
        first = sum(self.lengths[:n])
        rows = slice(first, first + self.lengths[n])
        tokens = tuple(x[rows] for x in self.inputs[:5])
        return Problem((*tokens, *self.inputs[5:]), self.initial[n : n + 1], self.lengths[n : n + 1])


def problem(lengths: tuple[int, ...], gate_spread: float = 2.0) -> Problem:
    generator = torch.Generator().manual_seed(sum(lengths))
    T = sum(lengths)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    f = gate_spread * randn(T, H, K)
    tokens = (randn(T, H, K), randn(T, H, K), randn(T, H, V), f, randn(T, H))
    inputs = (*tokens, torch.rand(H, generator=generator), randn(H, K))
    return Problem(tuple(x.to(DEVICE) for x in inputs), randn(len(lengths), H, K, V).to(DEVICE), lengths)


def run(leaves: list[Tensor], lengths: tuple[int, ...], bound: float | None) -> tuple[Tensor, Tensor]:
    *inputs, initial = leaves
    return kda_chunk(*inputs, chunk_table(lengths, DEVICE), bound, SCALE, initial)


def defined(leaves: list[Tensor], lengths: tuple[int, ...], bound: float | None) -> tuple[Tensor, Tensor]:
    q, k, v, f, b, A_log, dt_bias, initial = leaves
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    g, beta = kda_gate(f, A_log, dt_bias, bound), b.sigmoid()
    outputs, states, first = [], [], 0
    for n, length in enumerate(lengths):
        rows = slice(first, first + length)
        o, S = kda_recurrent(*(x[None, rows] for x in (q, k, v, g, beta)), initial[n : n + 1], SCALE)
        outputs.append(o[0])
        states.append(S[0])
        first += length
    return torch.cat(outputs), torch.stack(states)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


@pytest.mark.parametrize(("lengths", "bound"), [((130,), BOUNDED), ((1, 64, 33), BOUNDED), ((1, 70), None)])
def test_outputs_states_and_gradients_are_those_of_the_recurrence(
    lengths: tuple[int, ...], bound: float | None
) -> None:
    case = problem(lengths)
    mine, exact = case.leaves(torch.float32), case.leaves(torch.float64)
    found, wanted = run(mine, lengths, bound), defined(exact, lengths, bound)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) for x in found]
    for x, y in zip(found, wanted, strict=True):
        assert relative(x, y) < LIMIT
    gradients = torch.autograd.grad(sum((x * w).sum() for x, w in zip(found, weights, strict=True)), mine)
    exactly = torch.autograd.grad(sum((x * w).sum() for x, w in zip(wanted, weights, strict=True)), exact)
    errors = {name: relative(x, y) for name, x, y in zip(NAMES, gradients, exactly, strict=True)}
    assert all(error < LIMIT for error in errors.values()), errors


def test_gates_at_their_bound_lose_nothing_and_overflow_nowhere() -> None:
    """Each token decays by e^-5 then: of a whole chunk by e^-320, which fp32 cannot hold."""
    case = problem((100,), gate_spread=40.0)
    (o, S), (o_exact, S_exact) = (
        call(case.leaves(dtype), case.lengths, BOUNDED)
        for call, dtype in ((run, torch.float32), (defined, torch.float64))
    )
    assert relative(o, o_exact) < LIMIT
    assert relative(S, S_exact) < LIMIT


def test_keys_that_repeat_with_full_strength_and_no_decay_do_not_grow_errors() -> None:
    case = problem((64,))
    q, k, v, f, b, A_log, dt_bias = case.inputs
    inputs = (q, k[:1].expand_as(k).contiguous(), v, torch.full_like(f, -30.0), torch.full_like(b, 9.0), A_log, dt_bias)
    case = replace(case, inputs=inputs)
    o, o_exact = (
        run(case.leaves(torch.float32), (64,), BOUNDED)[0],
        defined(case.leaves(torch.float64), (64,), BOUNDED)[0],
    )
    assert relative(o, o_exact) < 1e-3


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch() -> None:
    case = problem((70, 5, 64))
    o, S = run(case.leaves(torch.float32), case.lengths, BOUNDED)
    for n, rows in enumerate(o.split(case.lengths)):
        alone = case.only(n)
        o_alone, S_alone = run(alone.leaves(torch.float32), alone.lengths, BOUNDED)
        assert torch.equal(rows, o_alone)
        assert torch.equal(S[n], S_alone[0])


def test_a_state_that_is_kept_on_the_way_continues_to_the_same_bits() -> None:
    case = problem((130,))
    *inputs, initial = case.leaves(torch.float32)
    kept = torch.full((3, H, K, V), torch.nan, device=DEVICE)
    table = chunk_table((130,), DEVICE, ((0, 64, 2), (0, 128, 0)))
    o, final = kda_chunk(*inputs, table, BOUNDED, SCALE, initial, kept)
    for position, slot in ((64, 2), (128, 0)):
        rest = [x[position:] for x in inputs[:5]]
        o_rest, final_rest = kda_chunk(
            *rest, *inputs[5:], chunk_table((130 - position,), DEVICE), BOUNDED, SCALE, kept[slot : slot + 1]
        )
        assert torch.equal(o_rest, o[position:])
        assert torch.equal(final_rest, final)
    assert kept[1].isnan().all()


def test_equal_calls_give_equal_gradients_bit_for_bit() -> None:
    case = problem((70,))

    def gradients() -> tuple[Tensor, ...]:
        leaves = case.leaves(torch.float32)
        return torch.autograd.grad(run(leaves, case.lengths, BOUNDED)[0].square().sum(), leaves)

    assert all(torch.equal(x, y) for x, y in zip(gradients(), gradients(), strict=True))


def outputs_and_gradients(case: Problem, emits: Emits, has_initial: bool, has_d_final: bool) -> dict[str, Tensor]:
    """And the states kept by emits. has_d_final: the loss is of the final states too."""
    leaves = case.leaves(torch.float32)[: 8 if has_initial else 7]
    kept = torch.full((len(emits), H, K, V), torch.nan, device=DEVICE) if emits else None
    initial = leaves[7] if has_initial else None
    o, final = kda_chunk(*leaves[:7], chunk_table(case.lengths, DEVICE, emits), BOUNDED, SCALE, initial, kept)
    weighed = (o, final) if has_d_final else (o,)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(DEVICE) for x in weighed]
    found = dict(zip(NAMES, torch.autograd.grad(weighed, leaves, weights), strict=False))
    return found | {"o": o, "final state": final} | ({} if kept is None else {"kept": kept})


@pytest.mark.parametrize(
    ("lengths", "cuts", "emits", "has_initial", "has_d_final"),
    [
        ((130, 64), (64, 128), ((0, 64, 1), (0, 128, 2), (1, 64, 0)), True, True),
        ((20, 10, 0, 34, 0, 70, 5, 0), (64, 128), (), False, False),
        ((3, 65), (67,), ((1, 64, 0),), True, False),
        ((70,), (64,), (), False, True),
    ],
    ids=["of three segments", "whole ones and empty ones", "no loss of final states", "no initial states"],
)
def test_a_batch_in_segments_has_the_bits_of_the_whole(
    lengths: tuple[int, ...],
    cuts: tuple[int, ...],
    emits: Emits,
    has_initial: bool,
    has_d_final: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = problem(lengths)
    whole = outputs_and_gradients(case, emits, has_initial, has_d_final)
    monkeypatch.setattr(op, "SEGMENT_TOKENS", ROWS)
    assert [x.tokens.start for x in cut(chunk_table(lengths, DEVICE, emits), ROWS)] == [0, *cuts]
    for name, found in outputs_and_gradients(case, emits, has_initial, has_d_final).items():
        assert torch.equal(found, whole[name]), name


def test_what_is_held_between_the_passes_is_of_one_segment(monkeypatch: pytest.MonkeyPatch, allocations: Any) -> None:
    case = problem((4 * ROWS,))
    leaves = case.leaves(torch.float32)

    def held_bytes() -> int:
        """At the peak, beside outputs and gradients."""
        with type(allocations)() as counted:
            outputs = run(leaves, case.lengths, BOUNDED)
            gradients = torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])
        return counted.peak_bytes - sum(x.nbytes for x in (*outputs, *outputs, *gradients))

    of_the_whole = held_bytes()
    monkeypatch.setattr(op, "SEGMENT_TOKENS", ROWS)
    assert held_bytes() <= of_the_whole / 4


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 4), st.randoms(use_true_random=False))
def test_segments_are_a_batchs_chunks_in_order(lengths: list[int], num_rows: int, random: Random) -> None:
    chunks = [(n, first) for n, length in enumerate(lengths) for first in range(0, length, ROWS)]
    kept = random.sample(chunks, len(chunks) // 3)
    emits = tuple((n, first + ROWS, slot) for slot, (n, first) in enumerate(kept) if first + ROWS <= lengths[n])
    whole = chunk_table(tuple(lengths), torch.device("cpu"), emits)
    segments = cut(whole, num_rows * ROWS)
    starts, emitted, reached, of_sequence = list[int](), list[int](), list[int](), [0] * len(lengths)
    for segment in segments:
        table, first = segment.table, segment.tokens.start
        assert table.num_tokens == segment.tokens.stop - first < (num_rows + 1) * ROWS
        assert segment.chunks == slice(len(starts), len(starts) + table.num_chunks)
        starts += [first + start for start in table.starts_C.tolist()]
        emitted += [-1] * table.num_chunks if table.emits_C is None else table.emits_C.tolist()
        sequences = range(segment.sequences.start, segment.sequences.stop)
        assert segment.continues == (len(sequences) > 0 and of_sequence[sequences[0]] > 0)
        reached += [n for n in sequences if n not in reached[-1:]]
        for n, length in zip(sequences, table.lengths, strict=True):
            of_sequence[n] += length
        assert segment.is_continued == (len(sequences) > 0 and of_sequence[sequences[-1]] < lengths[sequences[-1]])
    assert starts == whole.starts_C.tolist()
    assert emitted == ([-1] * whole.num_chunks if whole.emits_C is None else whole.emits_C.tolist())
    assert of_sequence == lengths
    assert reached == list(range(len(lengths)))


def test_a_table_refuses_a_state_off_the_chunks() -> None:
    with pytest.raises(ValueError, match=rf"position 65 of sequence 0 must be a multiple of {ROWS} in \(0, 70\]"):
        chunk_table((70,), DEVICE, ((0, 65, 0),))


def test_inputs_of_several_types_are_refused_by_name() -> None:
    case = problem((3,))
    q, *rest, initial = case.leaves(torch.float32)
    with pytest.raises(ValueError, match=r"q, k, v and f must be torch.float32, got torch.bfloat16, torch.float32"):
        kda_chunk(q.bfloat16(), *rest, chunk_table((3,), DEVICE), BOUNDED, SCALE, initial)


def test_chunks_of_a_table_never_cross_sequences() -> None:
    table: ChunkTable = chunk_table((130, 0, 64), torch.device("cpu"))
    assert table.starts_C.tolist() == [0, 64, 128, 130]
    assert table.lengths_C.tolist() == [64, 64, 2, 64]
    assert table.edges_N.tolist() == [0, 3, 3, 4]
    assert table.tokens_N.tolist() == [0, 130, 130, 194]
