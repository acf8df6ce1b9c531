"""KDA at Kimi K3's width beside FLA and cuDNN: forward, forward and backward, memory, errors, and a step of decoding.

    PYTHONPATH=kernels python3 kernels/bench/bench_kda.py run --out kernels/bench/results/kda_h200.json

The peers are installed as `peers.py` says; FLA's configurations are those of peers_tuned/h200.json, which
`bench_kda.py tune` fills on another GPU. `--lengths 4096,16384` measures a part and leaves the rest of the file;
`--only fla,cudnn,ours` chooses, `--only decode` measures decoding instead; `--profile 16384` prints the kernels of our
forward and backward; `--dry` runs it all on a CPU at toy sizes, without figures worth reading.

Everybody takes the same raw q, k, v, f (gate), beta logits in bf16 and A_log, dt_bias in fp32; the gate, the norms of q
and k and the sigmoid of beta are part of the work, and every input has its gradient. Two draws of the gate are measured,
since cuDNN's time depends on it. cuDNN's backward has none of the
three: there, and in its second forward row, torch.compile does them. Memory is the allocator's peak: inputs, output and
its gradient and all gradients are in it. The floor is bytes: each pass reads its inputs and writes its results once, at
the speed of a copy on this device.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import peers
import torch
from harness import (
    copy_bytes_per_ms,
    describe_machine,
    device,
    peak_gib,
    print_profile,
    relative_error,
    same_bits,
    time_in_graph,
    time_on_device,
)
from peers import KdaDecode, KdaForward
from side_by_side import OURS, Case, Results, Row, attempt, command_line, is_there, numbers, report
from torch import Tensor

from k3kernels.dispatch import batch_invariant
from k3kernels.kda import kda_chunked, kda_gate, kda_recurrent, l2_norm
from k3kernels.kda.reference import kda_step

HEAD_DIM = 128
LOWER_BOUND = -5.0
SCALE = HEAD_DIM**-0.5
PEERS = ("fla", "cudnn")
FORWARD, BOTH, DECODE, CHECK = "forward", "forward+backward", "decode", "check"
SLOW, QUICK = "slow decay", "quick decay"  # cuDNN's forward takes twice as long for the one as for the other
EXACT_CHUNK = 32  # in fp64 the gate's bound lets a chunk's exponents be split around its middle up to here
RESULTS = Path(__file__).parent / "results" / "kda_h200.json"
# One rounding to bf16 is 1.7e-3 of a tensor's norm. A chunked form rounds the operands of its products of matrices, half a
# dozen of them one after the other: FLA and cuDNN are at 3.7e-3 to 4.4e-3 everywhere, and this leaves ours a third more.
TOKEN_LIMIT = 6e-3
# Sums over all tokens, of terms of both signs: their errors do not cancel as they do.
PARAMETER_LIMIT = 1e-2
LIMITS = dict.fromkeys(("o", "q", "k", "v", "f", "b", "state"), TOKEN_LIMIT) | dict.fromkeys(
    ("A_log", "dt_bias"), PARAMETER_LIMIT
)
STATE_BYTES = 512 << 20  # of states that one graph of decoding steps goes around: what is read is never in the L2
GRAPH_CALLS = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    num_heads: int
    lengths: tuple[int, ...]
    check_length: int
    batches: tuple[int, ...]


K3 = Sizes(96, (4096, 8192, 16384, 32768, 65536, 131072), 192, (1, 8, 32, 64, 128, 256))
TOY = Sizes(2, (64, 288), 40, (1, 3))


class Inputs(NamedTuple):
    """THK tensors and b [T, H] bf16; A_log [H] and dt_bias [H, K] fp32. Decoding: T is B, a token a sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    f: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor


def draw(num_tokens: int, num_heads: int, decay: str = SLOW) -> Inputs:
    """Normal rows; A_log in [0, 1.5), and dt_bias around -2 (most of a state outlives a chunk) or 0 (hardly any does)."""
    gen = torch.Generator(device()).manual_seed(0)
    row = (num_tokens, num_heads, HEAD_DIM)
    q, k, v, f = (_normal(row, gen) for _ in range(4))
    A_log_H = 1.5 * torch.rand(num_heads, generator=gen, device=device())
    dt_bias_HK = 0.5 * torch.randn(num_heads, HEAD_DIM, generator=gen, device=device())
    dt_bias_HK += {SLOW: -2.0, QUICK: 0.0}[decay]
    return Inputs(q, k, v, f, _normal(row[:2], gen), A_log_H, dt_bias_HK)


def draw_grad(num_tokens: int, num_heads: int) -> Tensor:
    return _normal((num_tokens, num_heads, HEAD_DIM), torch.Generator(device()).manual_seed(1))


def _normal(shape: Sequence[int], gen: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=gen, device=device(), dtype=torch.bfloat16)


def sequence_bounds(num_tokens: int) -> Tensor:
    return torch.tensor([0, num_tokens], dtype=torch.int32, device=device())


def run_eager(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Our eager ops for one sequence; in fp64 the exact value: token by token where that is short, else in chunks."""
    del cu_seqlens
    T, H, K = q.shape
    g = kda_gate(f, A_log, dt_bias, LOWER_BOUND)
    rows = (x.unsqueeze(0) for x in (l2_norm(q), l2_norm(k), v, g, torch.sigmoid(b.to(g.dtype))))
    q, k, v, g, beta = rows
    state = torch.zeros(1, H, K, K, dtype=g.dtype, device=g.device)
    if T % EXACT_CHUNK or K3.check_length >= T:
        return kda_recurrent(q, k, v, g, beta, state, SCALE)[0].squeeze(0)
    return kda_chunked(q, k, v, g, beta, state, EXACT_CHUNK, LOWER_BOUND, SCALE)[0].squeeze(0)


def load_ours() -> KdaForward:
    kda_chunk = importlib.import_module("k3kernels.kda.chunk.op").kda_chunk
    chunk_table = importlib.import_module("k3kernels.kda.chunk.table").chunk_table

    def run(
        q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        del cu_seqlens
        table = chunk_table((len(q),), q.device)
        o_THV: Tensor = kda_chunk(q, k, v, f, b, A_log, dt_bias, table, LOWER_BOUND, SCALE)[0]
        return o_THV

    return run


def load_our_decode() -> KdaDecode:
    """The state is written where it is."""
    step = importlib.import_module("k3kernels.kda.step")

    def run(
        q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        B = len(q)
        if B not in places:  # once: not what is timed
            places[B] = (
                torch.arange(B, dtype=torch.int32, device=q.device),
                torch.ones_like(q[:, 0, 0], dtype=torch.int32),
            )
        if id(q) not in stacked:
            stacked[id(q)] = torch.stack([q, k, v], 1).unsqueeze(1)
        weights = step.StepWeights(None, A_log, dt_bias, None)
        o = step.kda_steps(
            *(stacked[id(q)], f.unsqueeze(1), b.unsqueeze(1), None, weights, step.StepPool(state, None)),
            *(*places[B], LOWER_BOUND, SCALE),
        )
        return o.squeeze(1), state

    places: dict[int, tuple[Tensor, Tensor]] = {}
    stacked: dict[int, Tensor] = {}
    return run


@dataclass(frozen=True, slots=True)
class Implementation:
    peer: str
    load: Callable[[], KdaForward]
    sections: tuple[str, ...] = (FORWARD, BOTH, CHECK)
    variant: str = ""


IMPLEMENTATIONS = (
    Implementation("fla", partial(peers.load_fla_kda, LOWER_BOUND, SCALE)),
    Implementation("cudnn", partial(peers.load_cudnn_kda, LOWER_BOUND, SCALE), (FORWARD,)),
    Implementation(
        "cudnn", partial(peers.load_cudnn_kda_compiled_gate, LOWER_BOUND, SCALE), variant="torch.compile around it"
    ),
    Implementation(OURS, load_ours),
    Implementation("eager", lambda: run_eager),
)
DECODES: dict[str, Callable[[], KdaDecode]] = {
    "fla": partial(peers.load_fla_kda_decode, LOWER_BOUND, SCALE),
    OURS: load_our_decode,
}


def of_heads(inputs: Inputs, heads: list[int]) -> Inputs:
    return Inputs(*(x[heads] if name in ("A_log", "dt_bias") else x[:, heads] for name, x in inputs._asdict().items()))


def as_leaves(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    return Inputs(*(x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs))


def forward_and_backward(run: KdaForward, leaves: Inputs, grad_o_THV: Tensor, cu_seqlens: Tensor) -> dict[str, Tensor]:
    """o, and by an input's name its gradient."""
    o_THV = run(*leaves, cu_seqlens)
    return {"o": o_THV.detach()} | dict(
        zip(Inputs._fields, torch.autograd.grad(o_THV, leaves, grad_o_THV), strict=True)
    )


@dataclass(frozen=True)
class Exact:
    """o and every gradient of some heads, fp64, on the host: no row's memory has it."""

    heads: list[int]
    values: dict[str, Tensor]

    @classmethod
    def compute(cls, inputs: Inputs, grad_o_THV: Tensor, heads: list[int]) -> Exact:
        part = as_leaves(of_heads(inputs, heads), torch.float64)
        values = forward_and_backward(run_eager, part, grad_o_THV[:, heads].double(), sequence_bounds(len(inputs.q)))
        return cls(heads, {name: value.cpu() for name, value in values.items()})

    def errors(self, got: dict[str, Tensor]) -> dict[str, float]:
        return {
            name: relative_error(x[self.heads] if name in ("A_log", "dt_bias") else x[:, self.heads], self.values[name])
            for name, x in got.items()
        }

    @property
    def what(self) -> str:
        return "heads " + ", ".join(map(str, self.heads))


def floor_bytes(num_tokens: int, num_heads: int, section: str) -> int:
    """Forward: q, k, v, f, b read, o written. Backward: these but o read, and o's gradient; five gradients written."""
    row, scalar = 2 * num_tokens * num_heads * HEAD_DIM, 2 * num_tokens * num_heads
    forward = 5 * row + scalar
    return forward if section == FORWARD else forward + 9 * row + 2 * scalar


class Bench:
    """The chosen implementations at one length after the other."""

    def __init__(self, sizes: Sizes, chosen: Sequence[Implementation], results: Results, repeats: int) -> None:
        self.sizes, self.chosen, self.results, self.repeats = sizes, chosen, results, repeats
        self.bytes_per_ms = copy_bytes_per_ms()
        results.config["copy_tb_per_s"] = round(self.bytes_per_ms / 1e9, 3)
        self._loaded: dict[Implementation, KdaForward] = {}

    def check(self) -> None:
        """All heads at a short length against the recurrence itself."""
        T, H = self.sizes.check_length, self.sizes.num_heads
        inputs, grad_o_THV = draw(T, H), draw_grad(T, H)
        exact = Exact.compute(inputs, grad_o_THV, list(range(H)))
        for chosen in self._of(CHECK):
            blank = Row(Case(CHECK, T), chosen.peer, chosen.variant, checked="all heads")
            self.results.add(attempt(blank, partial(self._check, chosen, inputs, grad_o_THV, exact)))

    def measure(self, num_tokens: int, decay: str) -> None:
        H = self.sizes.num_heads
        inputs, grad_o_THV = draw(num_tokens, H, decay), draw_grad(num_tokens, H)
        exact = Exact.compute(inputs, grad_o_THV, sorted({0, H - 1}))
        del grad_o_THV
        for section, method in ((FORWARD, self._forward), (BOTH, self._both)):
            for chosen in self._of(section):
                floor_ms = floor_bytes(num_tokens, H, section) / self.bytes_per_ms
                case = Case(section, num_tokens, decay)
                blank = Row(case, chosen.peer, chosen.variant, floor_ms=floor_ms, checked=exact.what)
                self.results.add(attempt(blank, partial(method, chosen, inputs, exact)))

    def _of(self, section: str) -> list[Implementation]:
        return [chosen for chosen in self.chosen if section in chosen.sections]

    def _load(self, chosen: Implementation) -> KdaForward:
        if chosen not in self._loaded:
            self._loaded[chosen] = chosen.load()
        return self._loaded[chosen]

    def _check(self, chosen: Implementation, inputs: Inputs, grad_o_THV: Tensor, exact: Exact, blank: Row) -> Row:
        run, cu_seqlens, leaves = self._load(chosen), sequence_bounds(len(inputs.q)), as_leaves(inputs)
        got = forward_and_backward(run, leaves, grad_o_THV, cu_seqlens)
        again = forward_and_backward(run, leaves, grad_o_THV, cu_seqlens)
        bits = all(same_bits(got[name], again[name]) for name in got)
        return replace(blank, errors=exact.errors(got), same_bits=bits)

    @torch.no_grad()
    def _forward(self, chosen: Implementation, inputs: Inputs, exact: Exact, blank: Row) -> Row:
        run, cu_seqlens = self._load(chosen), sequence_bounds(len(inputs.q))

        def work() -> Tensor:
            return run(*inputs, cu_seqlens)

        first = work()
        errors, bits = exact.errors({"o": first}), same_bits(first, work())
        del first
        return self._timed(replace(blank, errors=errors, same_bits=bits), work)

    def _both(self, chosen: Implementation, inputs: Inputs, exact: Exact, blank: Row) -> Row:
        T = len(inputs.q)
        run, cu_seqlens, leaves = self._load(chosen), sequence_bounds(T), as_leaves(inputs)
        grad_o_THV = draw_grad(T, self.sizes.num_heads)

        def work() -> dict[str, Tensor]:
            return forward_and_backward(run, leaves, grad_o_THV, cu_seqlens)

        first = work()
        errors = exact.errors(first)
        again = work()
        bits = all(same_bits(first[name], again[name]) for name in first)
        del first, again
        return self._timed(replace(blank, errors=errors, same_bits=bits), work)

    def _timed(self, row: Row, work: Callable[[], object]) -> Row:
        peak = peak_gib(work)
        num_bytes = floor_bytes(row.case.size, self.sizes.num_heads, row.case.section)
        timing = time_on_device(row.name, work, num_bytes, repeats=self.repeats, is_queued=True)
        return replace(row, timing=timing, peak_gib=peak)

    def profile(self, num_tokens: int) -> None:
        """Prints the kernels of our forward and backward by their time."""
        leaves, grad_o_THV = (
            as_leaves(draw(num_tokens, self.sizes.num_heads)),
            draw_grad(num_tokens, self.sizes.num_heads),
        )
        print_profile(partial(forward_and_backward, load_ours(), leaves, grad_o_THV, sequence_bounds(num_tokens)))

    @torch.no_grad()
    def decode(self, batch: int, names: Sequence[str]) -> None:
        H = self.sizes.num_heads
        inputs = draw(batch, H)
        gen = torch.Generator(device()).manual_seed(2)
        state_BHKV = 0.1 * torch.randn(batch, H, HEAD_DIM, HEAD_DIM, generator=gen, device=device())
        moved = 2 * state_BHKV.nbytes + floor_bytes(batch, H, FORWARD)
        for name in names:
            blank = Row(
                Case(DECODE, batch),
                name,
                floor_ms=moved / self.bytes_per_ms,
                checked="heads " + str(sorted({0, H - 1})),
            )
            self.results.add(attempt(blank, partial(self._decode, name, inputs, state_BHKV, moved)))

    def _decode(self, name: str, inputs: Inputs, state_BHKV: Tensor, moved: int, blank: Row) -> Row:
        run = DECODES[name]()
        heads = sorted({0, self.sizes.num_heads - 1})
        q, k, v, f, b, A_log, dt_bias = (x.double() for x in of_heads(inputs, heads))
        g = kda_gate(f, A_log, dt_bias, LOWER_BOUND)
        want_o, want_state = kda_step(
            l2_norm(q), l2_norm(k), v, g, torch.sigmoid(b), state_BHKV[:, heads].double(), SCALE
        )
        o, after = run(*inputs, state_BHKV.clone())
        again = run(*inputs, state_BHKV.clone())
        errors = {
            "o": relative_error(o[:, heads], want_o),
            "state": relative_error(after[:, heads], want_state),
        }
        bits = same_bits(o, again[0]) and same_bits(after, again[1])
        del o, after, again
        num_states = max(1, STATE_BYTES // state_BHKV.nbytes) if torch.cuda.is_available() else 1
        states = [state_BHKV.clone() for _ in range(num_states)]
        calls = [partial(run, *inputs, states[i % num_states]) for i in range(max(GRAPH_CALLS, num_states))]
        timing = time_in_graph(blank.name, calls, moved, repeats=self.repeats)
        return replace(blank, timing=timing, errors=errors, same_bits=bits)


def tune(sizes: Sizes, lengths: Sequence[int], path: Path) -> None:
    """FLA's choice for each kernel, first met at 16K tokens: it tunes no kernel but q's and k's norms for each length."""
    peers.compile_in_parallel(Path(__file__), ("--lengths", ",".join(map(str, lengths))))
    run = peers.load_fla_kda(LOWER_BOUND, SCALE)
    for T in sorted(lengths, key=lambda T: (T != 16384, T)):
        inputs, grad_o_THV = draw(T, sizes.num_heads), draw_grad(T, sizes.num_heads)
        forward_and_backward(run, as_leaves(inputs), grad_o_THV, sequence_bounds(T))
        with torch.no_grad():
            run(*inputs, sequence_bounds(T))
        print(f"{T:,} tokens: {peers.save_tuned(path)} entries in {path}", flush=True)


def compile_shard(sizes: Sizes, i: int, n: int, lengths: Sequence[int]) -> None:
    peers.try_every_nth_configuration(i, n)
    run, T = peers.load_fla_kda(LOWER_BOUND, SCALE), 512
    forward_and_backward(run, as_leaves(draw(T, sizes.num_heads)), draw_grad(T, sizes.num_heads), sequence_bounds(T))
    for T in lengths:
        if T <= 65536:  # n processes hold four such tensors each
            peers.run_fla_l2_norm(draw_grad(T, sizes.num_heads))


def run_bench(arguments: argparse.Namespace) -> int:
    """The exit status: 1 where ours does not keep to LIMITS, fails, or differs from run to run."""
    sizes = TOY if arguments.dry else K3
    only = set(arguments.only.split(",")) if arguments.only else set()
    known = {*(one.peer for one in IMPLEMENTATIONS), DECODE}
    if only - known:
        raise ValueError(f"--only does not know {', '.join(sorted(only - known))}: {', '.join(sorted(known))}")
    if torch.cuda.is_available():
        peers.use_tuned(arguments.tuned)
    elif not arguments.dry:
        raise ValueError("no GPU here: --dry runs the script without one")
    default = Path(tempfile.mkdtemp()) / "kda.json" if arguments.dry else RESULTS
    config: dict[str, object] = {"num_heads": sizes.num_heads, "head_dim": HEAD_DIM, "repeats": arguments.repeats}
    results = Results(arguments.out or default, describe_machine() | peers.versions(), config, PEERS)
    by_default = {*PEERS, OURS}
    if arguments.dry:
        by_default = {"eager", OURS} if is_there("k3kernels.kda", "kda_chunk") else {"eager"}
    chosen = [one for one in IMPLEMENTATIONS if one.peer in ((only - {DECODE}) or by_default)]
    with batch_invariant(False):  # ours runs in kernels
        bench = Bench(sizes, chosen, results, arguments.repeats)
        if arguments.profile:
            bench.profile(arguments.profile)
            return 0
        if DECODE in only:
            for batch in sizes.batches if arguments.dry else arguments.batches:
                bench.decode(batch, sorted(only - {DECODE}) or ["fla"])
        else:
            bench.check()
            for T in sizes.lengths if arguments.dry else arguments.lengths:
                for decay in (SLOW, QUICK):
                    bench.measure(T, decay)
    return report(results, LIMITS, peers.tuned_here(arguments.tuned))


def main() -> int:
    parser, run, tuning, shard = command_line(__doc__ or "", K3.lengths, (K3.check_length, *K3.lengths), RESULTS)
    run.add_argument("--batches", type=numbers, default=K3.batches, help="sequences of decoding, default %(default)s")
    run.add_argument("--only", help="some of fla, cudnn, ours, eager; decode measures decoding instead")
    run.set_defaults(call=run_bench)
    tuning.set_defaults(call=lambda a: tune(K3, a.lengths, a.tuned))
    shard.set_defaults(call=lambda a: compile_shard(K3, a.which, a.of, a.lengths))
    arguments = parser.parse_args()
    status: int | None = arguments.call(arguments)
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
