"""One KDA layer of Kimi K3 without its projections beside the same from FLA's parts: forward and backward.

    PYTHONPATH=kernels python3 kernels/bench/bench_kda_layer.py run --out kernels/bench/results/kda_layer_h200.json

The short convolution with SiLU of q, k and v, KDA from raw gates, and the gated output norm. FLA gets q, k and v as three
tensors, as its layer makes them, ours side by side, as our layer does; all inputs have gradients. The peer is installed as
`peers.py` says, its configurations are those of peers_tuned/h200.json, which `bench_kda_layer.py tune` fills.
`--lengths 4096,16384` measures a part; `--only fla,ours` chooses; `--profile 16384` prints our kernels. Errors are
against fp64 at the first and the last head. Memory is the allocator's peak; the floor is bytes: each pass reads its inputs
and writes its results once, at the speed of a copy on this device.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import bench_kda
import peers
import torch
from bench_kda import HEAD_DIM, LOWER_BOUND, SCALE
from harness import (
    copy_bytes_per_ms,
    describe_machine,
    device,
    peak_gib,
    print_profile,
    relative_error,
    same_bits,
    time_on_device,
)
from side_by_side import OURS, Case, Results, Row, attempt, command_line, report
from torch import Tensor

from k3kernels.dispatch import batch_invariant
from k3kernels.kda import kda_chunked, kda_gate, l2_norm
from k3kernels.packing import Packing
from k3kernels.rms_norm import reference as norm_reference
from k3kernels.short_conv.reference import short_conv

NUM_HEADS, TAPS, EPS = 96, 4, 1e-5
LENGTHS = (4096, 16384, 65536, 131072)
PEERS = ("fla",)
FORWARD, BOTH = "forward", "forward+backward"
RESULTS = Path(__file__).parent / "results" / "kda_layer_h200.json"
# bench_kda's, and one rounding more before and behind it
LIMITS = dict.fromkeys(("y", "qkv", "f", "b", "gate"), 7e-3) | dict.fromkeys(
    ("taps", "A_log", "dt_bias", "norm"), 1.2e-2
)


class Inputs(NamedTuple):
    """qkv [T, 3, H, K], f and gate [T, H, K], b [T, H] bf16; taps [3, H, K, 4], A_log [H], dt_bias [H, K], norm [K] fp32."""

    qkv: Tensor
    f: Tensor
    b: Tensor
    gate: Tensor
    taps: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor

    def leaves(self, dtype: torch.dtype | None = None) -> Inputs:
        return Inputs(*(x.detach().to(dtype or x.dtype).requires_grad_() for x in self))

    def of_heads(self, heads: list[int]) -> Inputs:
        parts = {"A_log": self.A_log[heads], "dt_bias": self.dt_bias[heads], "norm": self.norm}
        by_token = {"f": self.f[:, heads], "b": self.b[:, heads], "gate": self.gate[:, heads]}
        return Inputs(**parts, **by_token, qkv=self.qkv[:, :, heads], taps=self.taps[:, heads])


Forward = Callable[[Inputs], Tensor]


def draw(T: int) -> Inputs:
    raw = bench_kda.draw(T, NUM_HEADS)
    generator = torch.Generator(device()).manual_seed(3)

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=device(), dtype=dtype)

    gate, taps = randn(T, NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16), 0.5 * randn(3, NUM_HEADS, HEAD_DIM, TAPS)
    qkv = torch.stack([raw.q, raw.k, raw.v], 1)
    return Inputs(qkv, raw.f, raw.b, gate, taps, raw.A_log, raw.dt_bias, 1 + 0.1 * randn(HEAD_DIM))


def run_exact(x: Inputs) -> Tensor:
    """In the inputs' own type: y [T, H, K]."""
    T, H = x.b.shape
    rows = torch.cat([x.qkv.new_zeros(TAPS - 1, *x.qkv.shape[1:]), x.qkv]).flatten(1)[None]
    q, k, v = short_conv(rows, x.taps.reshape(-1, TAPS)).view(1, T, 3, H, HEAD_DIM).unbind(2)
    g = kda_gate(x.f, x.A_log, x.dt_bias, LOWER_BOUND)[None]
    state = torch.zeros(1, H, HEAD_DIM, HEAD_DIM, dtype=g.dtype, device=g.device)
    beta = torch.sigmoid(x.b)[None]
    o = kda_chunked(l2_norm(q), l2_norm(k), v, g, beta, state, bench_kda.EXACT_CHUNK, LOWER_BOUND, SCALE)[0]
    return norm_reference.gated_rms_norm(o[0], x.gate, x.norm, EPS)


def load_ours() -> Forward:
    kda_chunk = importlib.import_module("k3kernels.kda.chunk.op").kda_chunk
    chunk_table = importlib.import_module("k3kernels.kda.chunk.table").chunk_table
    short_conv_train = importlib.import_module("k3kernels.short_conv.train").short_conv_train
    gated_rms_norm = importlib.import_module("k3kernels.rms_norm").gated_rms_norm

    def run(x: Inputs) -> Tensor:
        T, H = x.b.shape
        packing = Packing((T,), x.b.device)
        parts = short_conv_train(x.qkv.flatten(1), x.taps.reshape(-1, TAPS), packing, 3)
        q, k, v = (part.view(T, H, HEAD_DIM) for part in parts)
        table = chunk_table((T,), x.b.device)
        o = kda_chunk(q, k, v, x.f, x.b, x.A_log, x.dt_bias, table, LOWER_BOUND, SCALE)[0]
        y: Tensor = gated_rms_norm(o, x.gate, x.norm, EPS)
        return y

    return run


def load_fla() -> Forward:
    return peers.load_fla_kda_layer(LOWER_BOUND, SCALE, EPS)


IMPLEMENTATIONS: dict[str, Callable[[], Forward]] = {"fla": load_fla, OURS: load_ours}


def forward_and_backward(run: Forward, leaves: Inputs, grad_y: Tensor) -> dict[str, Tensor]:
    y = run(leaves)
    grads = torch.autograd.grad(y, list(leaves), grad_y)
    return {"y": y.detach()} | dict(zip(Inputs._fields, grads, strict=True))


def split(x: Inputs) -> Inputs:
    """For FLA: q, k and v apart. A leaf of three tensors is [3, T, H, K], whose parts are contiguous."""
    return x._replace(qkv=x.qkv.transpose(0, 1).contiguous())


def errors_of(got: dict[str, Tensor], inputs: Inputs, grad_y: Tensor | None) -> dict[str, float]:
    heads = [0, NUM_HEADS - 1]
    part = inputs.of_heads(heads).leaves(torch.float64)
    if grad_y is None:
        want = {"y": run_exact(part)}
    else:
        want = forward_and_backward(run_exact, part, grad_y[:, heads].double())
    errors = {}
    for name, exact in want.items():
        if name == "norm":  # of all heads
            continue
        mine = got[name]
        if name in ("qkv", "taps"):
            mine = mine[:, :, heads] if name == "qkv" else mine[:, heads]
        elif name in ("A_log", "dt_bias"):
            mine = mine[heads]
        else:
            mine = mine[:, heads]
        errors[name] = relative_error(mine, exact)
    return errors


def floor_bytes(T: int, section: str) -> int:
    """Forward: q, k, v, f, gate and b read, y written. Backward: these and y's gradient read, their gradients written."""
    row, scalar = 2 * T * NUM_HEADS * HEAD_DIM, 2 * T * NUM_HEADS
    forward = 6 * row + scalar
    return forward if section == FORWARD else forward + 11 * row + 2 * scalar


class Bench:
    def __init__(self, names: Sequence[str], results: Results, repeats: int) -> None:
        self.names, self.results, self.repeats = names, results, repeats
        self.bytes_per_ms = copy_bytes_per_ms()
        results.config["copy_tb_per_s"] = round(self.bytes_per_ms / 1e9, 3)

    def measure(self, T: int) -> None:
        inputs = draw(T)
        for section in (FORWARD, BOTH):
            for name in self.names:
                floor_ms = floor_bytes(T, section) / self.bytes_per_ms
                blank = Row(Case(section, T), name, floor_ms=floor_ms, checked=f"heads 0, {NUM_HEADS - 1}")
                self.results.add(attempt(blank, partial(self._measure, inputs)))

    def _measure(self, inputs: Inputs, blank: Row) -> Row:
        run, T = IMPLEMENTATIONS[blank.peer](), blank.case.size
        is_fla, is_forward = blank.peer == "fla", blank.case.section == FORWARD
        own = split(inputs) if is_fla else inputs
        leaves = own if is_forward else own.leaves()
        grad_y = None if is_forward else bench_kda.draw_grad(T, NUM_HEADS)

        def work() -> dict[str, Tensor]:
            if grad_y is not None:
                return forward_and_backward(run, leaves, grad_y)
            with torch.no_grad():
                return {"y": run(leaves)}

        first = work()
        if is_fla and not is_forward:
            first["qkv"] = first["qkv"].transpose(0, 1)
        errors = errors_of(first, inputs, grad_y)
        again = work()
        if is_fla and not is_forward:
            again["qkv"] = again["qkv"].transpose(0, 1)
        bits = all(same_bits(first[name], again[name]) for name in first)
        del first, again
        peak = peak_gib(work)
        moved = floor_bytes(T, blank.case.section)
        timing = time_on_device(blank.name, work, moved, repeats=self.repeats, is_queued=True)
        return replace(blank, timing=timing, peak_gib=peak, errors=errors, same_bits=bits)


def tune(lengths: Sequence[int], path: Path) -> None:
    """FLA's choice for each kernel."""
    peers.compile_in_parallel(Path(__file__), ())
    run = load_fla()
    for T in sorted(lengths, key=lambda T: (T != 16384, T)):
        x = split(draw(T))
        forward_and_backward(run, x.leaves(), bench_kda.draw_grad(T, NUM_HEADS))
        with torch.no_grad():
            run(x)
        print(f"{T:,} tokens: {peers.save_tuned(path)} entries in {path}", flush=True)


def compile_shard(i: int, n: int) -> None:
    peers.try_every_nth_configuration(i, n)
    forward_and_backward(load_fla(), split(draw(512)).leaves(), bench_kda.draw_grad(512, NUM_HEADS))


def run_bench(arguments: argparse.Namespace) -> int:
    """The exit status: 1 where ours does not keep to LIMITS, fails, or differs from run to run."""
    names = arguments.only.split(",") if arguments.only else list(IMPLEMENTATIONS)
    if set(names) - IMPLEMENTATIONS.keys():
        raise ValueError(f"--only {arguments.only} is not made of {', '.join(IMPLEMENTATIONS)}")
    if not torch.cuda.is_available():
        raise ValueError("no GPU here: this script needs one")
    peers.use_tuned(arguments.tuned)
    config: dict[str, object] = {"num_heads": NUM_HEADS, "head_dim": HEAD_DIM, "repeats": arguments.repeats}
    results = Results(arguments.out or RESULTS, describe_machine() | peers.versions(), config, PEERS)
    with batch_invariant(False):  # ours runs in kernels
        if arguments.profile:
            T = arguments.profile
            leaves, grad_y = draw(T).leaves(), bench_kda.draw_grad(T, NUM_HEADS)
            print_profile(partial(forward_and_backward, load_ours(), leaves, grad_y))
            return 0
        bench = Bench(names, results, arguments.repeats)
        for T in arguments.lengths:
            bench.measure(T)
    return report(results, LIMITS, peers.tuned_here(arguments.tuned))


def main() -> int:
    parser, run, tuning, shard = command_line(__doc__ or "", LENGTHS, LENGTHS, RESULTS)
    run.add_argument("--only", help=f"some of {', '.join(IMPLEMENTATIONS)}")
    run.set_defaults(call=run_bench)
    tuning.set_defaults(call=lambda a: tune(a.lengths, a.tuned))
    shard.set_defaults(call=lambda a: compile_shard(a.which, a.of))
    arguments = parser.parse_args()
    status: int | None = arguments.call(arguments)
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
