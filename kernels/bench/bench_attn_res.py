"""Attention Residuals at Kimi K3's width beside FLA: 9 sources of 7168, the next layer's norm included.

    PYTHONPATH=kernels python3 kernels/bench/bench_attn_res.py run --out kernels/bench/results/attn_res_h200.json

The sources lie in a bank [T, 8, D] with the running sum beside it, or are 9 tensors; FLA takes 9 tensors and copies the
bank's. The peer is installed as `peers.py` says; FLA's configurations are those of peers_tuned/h200.json, which
`bench_attn_res.py tune` fills on another GPU. `--lengths 4096,16384` measures a part and leaves the rest of the file;
`--only fla,ours` chooses; `--profile 16384` prints the kernels of our forward and backward; `--dry` runs it all on a CPU
at toy sizes, without figures worth reading.

Every source and the three vectors have their gradients. All outputs and gradients are compared with fp64 at each size.
Memory is the allocator's peak: sources, output and its gradient and all gradients are in it. The floor is bytes: each pass
reads its inputs and writes its results once, at the speed of a copy on this device.
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
from harness import copy_bytes_per_ms, describe_machine, device, peak_gib, print_profile, same_bits, time_on_device
from side_by_side import OURS, Case, Results, Row, attempt, command_line, is_there, report
from torch import Tensor

from k3kernels.attn_res import reference
from k3kernels.dispatch import batch_invariant
from k3kernels.rms_norm.reference import rms_norm

NUM_SOURCES = 9
EPS = 1e-6
PEERS = ("fla",)
FORWARD, BOTH = "forward", "forward+backward"
BANK, LIST = "bank", "list"
RESULTS = Path(__file__).parent / "results" / "attn_res_h200.json"
EXACT_TOKENS = 1024  # whose sources are widened to fp64 at once: half a GiB for each tensor of them
# One rounding to bf16 is 1.7e-3 of a tensor's norm, and FLA, which rounds once, is there. The definition rounds the
# mixture, the quotient of its norm and the product with the weight: 1.7e-3 times the root of 3.
LIMIT = 3.5e-3
# Sums over all tokens, of terms of both signs: their errors do not cancel as they do.
VECTOR_LIMIT = 5e-3
VECTORS = ("norm", "proj", "next_norm")
SOURCES = ("bank", "current", *(f"source {i}" for i in range(NUM_SOURCES)))
LIMITS = dict.fromkeys(("o", *SOURCES), LIMIT) | dict.fromkeys(VECTORS, VECTOR_LIMIT)


@dataclass(frozen=True, slots=True)
class Sizes:
    width: int
    check_length: int
    lengths: tuple[int, ...]
    forward_only: tuple[int, ...]


K3 = Sizes(7168, 256, (4096, 16384, 65536, 131072), (262144,))
TOY = Sizes(96, 5, (33, 1030), (70,))


class Inputs(NamedTuple):
    """sources by name: bank [T, 8, D] and current [T, D], or source 0 to 8 [T, D]; all bf16, the vectors [D] too."""

    sources: dict[str, Tensor]
    norm_D: Tensor
    proj_D: Tensor
    next_norm_D: Tensor

    @property
    def vectors(self) -> dict[str, Tensor]:
        return dict(zip(VECTORS, self[1:], strict=True))

    @property
    def all(self) -> dict[str, Tensor]:
        return self.sources | self.vectors


Forward = Callable[[Inputs], Tensor]


def draw(num_tokens: int, width: int, layout: str) -> Inputs:
    gen = torch.Generator(device()).manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {f"source {i}": (num_tokens, width) for i in range(NUM_SOURCES)}
    if layout == BANK:
        shapes = {"bank": (num_tokens, NUM_SOURCES - 1, width), "current": (num_tokens, width)}
    sources = {name: _normal(shape, gen) for name, shape in shapes.items()}
    norm_D, proj_D, next_norm_D = (_normal((width,), gen) for _ in VECTORS)
    return Inputs(sources, 1 + 0.1 * norm_D, 0.05 * proj_D, 1 + 0.1 * next_norm_D)


def draw_grad(num_tokens: int, width: int) -> Tensor:
    return _normal((num_tokens, width), torch.Generator(device()).manual_seed(1))


def _normal(shape: Sequence[int], gen: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=gen, device=device(), dtype=torch.bfloat16)


def rows_of(sources: dict[str, Tensor]) -> list[Tensor]:
    if BANK in sources:
        return [*sources["bank"].unbind(1), sources["current"]]
    return list(sources.values())


def run_eager(inputs: Inputs) -> Tensor:
    """Our reference; in fp64 the exact value."""
    mixture_TD = reference.attn_res_mix(rows_of(inputs.sources), inputs.norm_D, inputs.proj_D, EPS)
    return rms_norm(mixture_TD, inputs.next_norm_D, EPS)


def load_fla() -> Forward:
    attn_res = peers.load_fla_attn_res(EPS)
    return lambda inputs: attn_res(rows_of(inputs.sources), *inputs[1:])


def load_ours() -> Forward:
    ours = importlib.import_module("k3kernels.attn_res")
    attn_res, attn_res_bank = ours.attn_res, ours.attn_res_bank

    def run(inputs: Inputs) -> Tensor:
        sources, norm_D, proj_D, next_norm_D = inputs
        if BANK in sources:
            bank_TBD, current_TD = sources["bank"], sources["current"]
            o_TD: Tensor = attn_res_bank(bank_TBD, NUM_SOURCES - 1, current_TD, norm_D, proj_D, EPS, next_norm_D, EPS)
        else:
            o_TD = attn_res(rows_of(sources), norm_D, proj_D, EPS, next_norm_D, EPS)
        return o_TD

    return run


IMPLEMENTATIONS: dict[str, Callable[[], Forward]] = {"fla": load_fla, OURS: load_ours, "eager": lambda: run_eager}


def as_leaves(inputs: Inputs) -> Inputs:
    sources = {name: x.detach().requires_grad_() for name, x in inputs.sources.items()}
    return Inputs(sources, *(x.detach().requires_grad_() for x in inputs[1:]))


def forward_and_backward(run: Forward, leaves: Inputs, grad_o_TD: Tensor) -> dict[str, Tensor]:
    """o, and by an input's name its gradient."""
    o_TD = run(leaves)
    grads = torch.autograd.grad(o_TD, list(leaves.all.values()), grad_o_TD)
    return {"o": o_TD.detach()} | dict(zip(leaves.all, grads, strict=True))


def errors_of(got: dict[str, Tensor], inputs: Inputs, grad_o_TD: Tensor | None) -> dict[str, float]:
    """Relative to fp64, which is taken for EXACT_TOKENS tokens after the others; got is o, or o and all gradients."""
    wrong, whole = dict.fromkeys(got, 0.0), dict.fromkeys(got, 0.0)
    sums = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in inputs.vectors.items()}
    for start in range(0, len(got["o"]), EXACT_TOKENS):
        tokens = slice(start, start + EXACT_TOKENS)
        part = Inputs(
            {name: x[tokens].double() for name, x in inputs.sources.items()}, *(x.double() for x in inputs[1:])
        )
        if grad_o_TD is None:
            want = {"o": run_eager(part)}
        else:
            want = forward_and_backward(run_eager, as_leaves(part), grad_o_TD[tokens].double())
        for name, value in want.items():
            if name in sums:
                sums[name] += value
            else:
                wrong[name] += float((got[name][tokens].double() - value).square().sum())
                whole[name] += float(value.square().sum())
    for name in sums.keys() & got.keys():
        wrong[name] = float((got[name].double() - sums[name]).square().sum())
        whole[name] = float(sums[name].square().sum())
    return {name: (wrong[name] / whole[name]) ** 0.5 for name in got}


def floor_bytes(num_tokens: int, width: int, section: str) -> int:
    """Forward: sources read, o written. Backward: sources and o's gradient read, the sources' gradients written."""
    num_rows = NUM_SOURCES + 1 if section == FORWARD else 3 * NUM_SOURCES + 2
    return 2 * num_tokens * width * num_rows


class Bench:
    """The chosen implementations at one size after the other."""

    def __init__(self, sizes: Sizes, names: Sequence[str], results: Results, repeats: int) -> None:
        self.sizes, self.names, self.results, self.repeats = sizes, names, results, repeats
        self.bytes_per_ms = copy_bytes_per_ms()
        results.config["copy_tb_per_s"] = round(self.bytes_per_ms / 1e9, 3)

    def measure(self, num_tokens: int, layout: str, sections: Sequence[str]) -> None:
        inputs = draw(num_tokens, self.sizes.width, layout)
        for section in sections:
            floor_ms = floor_bytes(num_tokens, self.sizes.width, section) / self.bytes_per_ms
            for name in self.names:
                blank = Row(Case(section, num_tokens, layout), name, floor_ms=floor_ms, checked="all")
                self.results.add(attempt(blank, partial(self._measure, inputs)))

    def _measure(self, inputs: Inputs, blank: Row) -> Row:
        run, T, D = IMPLEMENTATIONS[blank.peer](), blank.case.size, self.sizes.width
        is_forward = blank.case.section == FORWARD
        leaves = inputs if is_forward else as_leaves(inputs)
        grad_o_TD = None if is_forward else draw_grad(T, D)

        def work() -> dict[str, Tensor]:
            if grad_o_TD is not None:
                return forward_and_backward(run, leaves, grad_o_TD)
            with torch.no_grad():
                return {"o": run(leaves)}

        first = work()
        errors = errors_of(first, inputs, grad_o_TD)
        again = work()
        bits = all(same_bits(first[name], again[name]) for name in first)
        del first, again
        peak = peak_gib(work)
        num_bytes = floor_bytes(T, D, blank.case.section)
        timing = time_on_device(blank.name, work, num_bytes, repeats=self.repeats, is_queued=True)
        return replace(blank, timing=timing, peak_gib=peak, errors=errors, same_bits=bits)

    def profile(self, num_tokens: int) -> None:
        """Prints the kernels of our forward and backward by their time, for each layout."""
        grad_o_TD = draw_grad(num_tokens, self.sizes.width)
        for layout in (BANK, LIST):
            leaves = as_leaves(draw(num_tokens, self.sizes.width, layout))
            print(layout)
            print_profile(partial(forward_and_backward, load_ours(), leaves, grad_o_TD))


def tune(sizes: Sizes, lengths: Sequence[int], path: Path) -> None:
    """FLA's choice for each kernel; one of them is tuned for each number of tokens, without being compiled again."""
    peers.compile_in_parallel(Path(__file__), ())
    run = load_fla()
    for T in lengths:
        leaves = as_leaves(draw(T, sizes.width, LIST))
        forward_and_backward(run, leaves, draw_grad(T, sizes.width))
        with torch.no_grad():
            run(leaves)
        print(f"{T:,} tokens: {peers.save_tuned(path)} entries in {path}", flush=True)


def compile_shard(sizes: Sizes, i: int, n: int) -> None:
    peers.try_every_nth_configuration(i, n)
    T = sizes.check_length
    forward_and_backward(load_fla(), as_leaves(draw(T, sizes.width, LIST)), draw_grad(T, sizes.width))


def run_bench(arguments: argparse.Namespace) -> int:
    """The exit status: 1 where ours does not keep to LIMITS, fails, or differs from run to run."""
    sizes = TOY if arguments.dry else K3
    names = ["fla", OURS]
    if arguments.dry:
        names = [OURS, "eager"] if is_there("k3kernels.attn_res", "attn_res_bank") else ["eager"]
    names = arguments.only.split(",") if arguments.only else names
    if set(names) - IMPLEMENTATIONS.keys():
        raise ValueError(f"--only {arguments.only} is not made of {', '.join(IMPLEMENTATIONS)}")
    if torch.cuda.is_available():
        peers.use_tuned(arguments.tuned)
    elif not arguments.dry:
        raise ValueError("no GPU here: --dry runs the script without one")
    default = Path(tempfile.mkdtemp()) / "attn_res.json" if arguments.dry else RESULTS
    config: dict[str, object] = {"width": sizes.width, "sources": NUM_SOURCES, "repeats": arguments.repeats}
    results = Results(arguments.out or default, describe_machine() | peers.versions(), config, PEERS)
    with batch_invariant(False):  # ours runs in kernels
        bench = Bench(sizes, names, results, arguments.repeats)
        if arguments.profile:
            bench.profile(arguments.profile)
            return 0
        lengths = (sizes.check_length, *sizes.lengths, *sizes.forward_only)
        for T in lengths if arguments.dry else arguments.lengths:
            for layout in (BANK, LIST):
                bench.measure(T, layout, (FORWARD,) if T in sizes.forward_only else (FORWARD, BOTH))
    return report(results, LIMITS, peers.tuned_here(arguments.tuned))


def main() -> int:
    lengths = (K3.check_length, *K3.lengths)
    parser, run, tuning, shard = command_line(__doc__ or "", (*lengths, *K3.forward_only), lengths, RESULTS)
    run.add_argument("--only", help=f"some of {', '.join(IMPLEMENTATIONS)}")
    run.set_defaults(call=run_bench)
    tuning.set_defaults(call=lambda a: tune(K3, a.lengths, a.tuned))
    shard.set_defaults(call=lambda a: compile_shard(K3, a.which, a.of))
    arguments = parser.parse_args()
    status: int | None = arguments.call(arguments)
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
