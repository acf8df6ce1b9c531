"""Routed experts at Kimi K3's sizes beside torch's grouped GEMM: 112 of 896 experts, 16 a token, as on one of 8 ranks.

    PYTHONPATH=kernels python3 kernels/bench/bench_moe.py run --out kernels/bench/results/moe_h200.json
    PYTHONPATH=kernels python3 kernels/bench/bench_moe.py parts --tokens 4096

Latent width 3584, inner width 3072, SiTU, bf16; every gradient. `run` measures forward, forward and backward, and both in
fp8; torch's forms are those of `moe_torch.py` and `moe_torch_fp8.py`. In fp8 quantised matrices are given, and the matrices'
gradients are products of bf16; h has the scale that its bound gives, or as variant "rows" one a row. Routes are drawn with
equal chances or with those of Zipf's law.
`--lengths 1024,4096` measures a part and leaves the rest of the file; `--only ours,torch` chooses, `--only torch:static` one
variant where a section has it; `--sections` too;
`--products` says which of our five products are torch's (`gated,weights`, or `all`; in fp8 the weights' alone);
`--profile 4096` prints the kernels of ours in each of the sections; `--dry` runs it all on a CPU at toy sizes, without
figures worth reading.

`parts` times each product alone, in several tiles, beside torch's; `--tile 128,256,64,8,4` (rows, columns, depth, warps,
stages, and optionally band, is_persistent, is_flat) adds one.

Errors are relative to fp64: of out, dx and dweights at 64 tokens, of the matrices' gradients at two experts. Memory is the
allocator's peak, inputs, matrices and all gradients included. The floor is the larger of two: the products at the speed of
a sustained bf16 (fp8) product, and matrices, inputs and results moved once a pass at the speed of a copy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import moe_parts
import moe_torch
import moe_torch_fp8
import torch
from harness import copy_bytes_per_ms, describe_machine, peak_gib, print_profile, same_bits, time_on_device
from moe_inputs import BETAS, K3, NAMES, TOY, UNIFORM, ZIPF, Exact, Inputs, Sizes, draw, draw_matrices, exact
from side_by_side import OURS, Case, Results, Row, attempt, numbers, report
from torch import Tensor

from k3kernels.moe import fp8, fp8_train
from k3kernels.moe.grouped import TORCH, Products, Tiles, pick_tiles
from k3kernels.moe.train import moe_experts_train

FORWARD, BOTH, FP8, FP8_BOTH = "forward", "forward+backward", "fp8 forward", "fp8 forward+backward"
SECTIONS = (FORWARD, BOTH, FP8, FP8_BOTH)
RESULTS = Path(__file__).parent / "results" / "moe_h200.json"
BF16_FLOPS_PER_MS, FP8_FLOPS_PER_MS = 687e9, 1320e9  # sustained, as measured on an H200
PASSES = {FORWARD: (1, 0), BOTH: (3, 0), FP8: (0, 1), FP8_BOTH: (1, 2)}  # in bf16 and in fp8; backward is two
# One rounding to bf16 is 1.7e-3 of a tensor's norm: gate, up, h, y and the result are rounded, and in backward as many again.
# One rounding to e4m3 is 2.6e-2: a row, a matrix, h and a matrix are, and in backward as many.
LIMIT, FP8_LIMIT = 6e-3, 8e-2
TENSORS = ("out", *(f"d{name}" for name in NAMES))
LIMITS = dict.fromkeys(TENSORS, LIMIT) | {f"fp8 {name}": FP8_LIMIT for name in TENSORS}


@dataclass(frozen=True, slots=True)
class Choice:
    """Our products and tiles, in bf16 and in fp8: None is what the op would pick."""

    products: Products | None
    tiles: Tiles | None
    fp8_tiles: Tiles | None


def load_ours(inputs: Inputs, choice: Choice) -> Callable[[Inputs], Tensor]:
    del inputs

    def run(inputs: Inputs) -> Tensor:
        matrices = inputs.w1, inputs.w3, inputs.w2
        return moe_experts_train(
            inputs.x, inputs.experts, inputs.weights, *matrices, BETAS, choice.products, choice.tiles
        )

    return run


def load_ours_fp8(inputs: Inputs, choice: Choice, variant: str) -> Callable[[Inputs], Tensor]:
    matrices = fp8.quantise_gated(inputs.w1, inputs.w3), fp8.quantise_matrices(inputs.w2)
    tiles = choice.fp8_tiles or fp8.FP8_TILES
    hidden: fp8.Hidden = fp8.ROWS if variant == fp8.ROWS else None

    def run(inputs: Inputs) -> Tensor:
        return fp8.moe_experts_fp8(inputs.x, inputs.experts, inputs.weights, *matrices, BETAS, tiles, hidden)

    return run


def load_ours_fp8_train(leaves: Inputs, choice: Choice) -> Callable[[Inputs], Tensor]:
    matrices = fp8_train.Fp8Matrices.of(leaves.w1, leaves.w3, leaves.w2)
    product = None if choice.products is None else choice.products.weights

    def run(inputs: Inputs) -> Tensor:
        rows = inputs.x, inputs.experts, inputs.weights
        return fp8_train.moe_experts_fp8_train(*rows, matrices, BETAS, choice.fp8_tiles, weights_product=product)

    return run


def forward_and_backward(run: Callable[[Inputs], Tensor], leaves: Inputs) -> dict[str, Tensor]:
    out = run(leaves)
    grads = torch.autograd.grad(out, list(leaves.all.values()), leaves.grad)
    return {"out": out.detach()} | dict(zip(leaves.all, grads, strict=True))


def torch_work(variant: str, inputs: Inputs, section: str) -> Callable[[], dict[str, Tensor]]:
    """torch's leaves are the stacked w13; w1's gradient is the upper half of its."""
    is_forward = section in (FORWARD, FP8)
    matrices = {"w13": torch.cat((inputs.w1, inputs.w3), 1), "w2": inputs.w2}
    if section in (FP8, FP8_BOTH):
        run = moe_torch_fp8.load(variant, matrices["w13"], matrices["w2"], with_gradients=not is_forward)
    else:
        run = moe_torch.VARIANTS[variant]()
    leaves = {"x": inputs.x, "weights": inputs.weights} | ({} if section == FP8 else matrices)
    del matrices
    if not is_forward:
        leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}

    def work() -> dict[str, Tensor]:
        x, weights, *trained = leaves.values()
        if is_forward:
            with torch.no_grad():
                return {"out": run(x, inputs.experts, weights, *trained)}
        out = run(x, inputs.experts, weights, *trained)
        got = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), inputs.grad), strict=True))
        grad_w1, grad_w3 = got.pop("w13").chunk(2, 1)
        return {"out": out.detach()} | got | {"w1": grad_w1, "w3": grad_w3}

    return work


def our_work(variant: str, inputs: Inputs, section: str, choice: Choice) -> Callable[[], dict[str, Tensor]]:
    if section in (FORWARD, FP8):
        run = load_ours(inputs, choice) if section == FORWARD else load_ours_fp8(inputs, choice, variant)

        def forward() -> dict[str, Tensor]:
            with torch.no_grad():
                return {"out": run(inputs)}

        return forward
    leaves = inputs.as_leaves()
    run = load_ours(leaves, choice) if section == BOTH else load_ours_fp8_train(leaves, choice)
    return partial(forward_and_backward, run, leaves)


def variants_of(peer: str, section: str, wanted: str) -> tuple[str, ...]:
    """The one that is wanted, where the section has it; else those that are measured."""
    known: tuple[str, ...]
    measured: tuple[str, ...]
    if peer == OURS:
        known = measured = ("", "rows") if section == FP8 else ("",)
    elif section in (FP8, FP8_BOTH):
        known = measured = moe_torch_fp8.VARIANTS
    else:
        known, measured = tuple(moe_torch.VARIANTS), moe_torch.DEFAULT_VARIANTS
    return (wanted,) if wanted in known and wanted else measured


def floor_ms(num_tokens: int, sizes: Sizes, section: str, bytes_per_ms: float) -> float:
    """The backward pass is two forwards: it reads the matrices, writes as much of gradients, and multiplies twice as often."""
    in_bf16, in_fp8 = PASSES[section]
    values = sizes.experts * 3 * sizes.latent * sizes.width
    flops = 6 * num_tokens * sizes.slots * sizes.latent * sizes.width
    num_bytes = values * (2 * in_bf16 + in_fp8) + (in_bf16 + in_fp8) * 2 * 2 * num_tokens * sizes.latent
    return max(flops * (in_bf16 / BF16_FLOPS_PER_MS + in_fp8 / FP8_FLOPS_PER_MS), num_bytes / bytes_per_ms)


class Bench:
    """The chosen implementations at one size after the other."""

    def __init__(self, sizes: Sizes, peers: Sequence[str], results: Results, repeats: int, choice: Choice) -> None:
        self.sizes, self.peers, self.results, self.repeats, self.choice = sizes, peers, results, repeats, choice
        self.bytes_per_ms = copy_bytes_per_ms()
        results.config["copy_tb_per_s"] = round(self.bytes_per_ms / 1e9, 3)
        self.matrices = draw_matrices(sizes)

    def measure(self, num_tokens: int, layout: str, sections: Sequence[str]) -> None:
        inputs = draw(num_tokens, layout, self.sizes, self.matrices)
        truth = exact(inputs, self.sizes, with_gradients=not {BOTH, FP8_BOTH}.isdisjoint(sections))
        for section in sections:
            case = Case(section, num_tokens, layout)
            floor = floor_ms(num_tokens, self.sizes, section, self.bytes_per_ms)
            for peer in self.peers:
                name, _, wanted = peer.partition(":")
                for variant in variants_of(name, section, wanted):
                    blank = Row(case, name, variant, floor_ms=floor, checked="64 tokens, 2 experts")
                    self.results.add(attempt(blank, partial(self._measure, inputs, truth)))

    def _measure(self, inputs: Inputs, truth: Exact, blank: Row) -> Row:
        section = blank.case.section
        if blank.peer == OURS:
            work = our_work(blank.variant, inputs, section, self.choice)
        else:
            work = torch_work(blank.variant, inputs, section)
        first = work()
        errors = truth.errors(first)
        if section in (FP8, FP8_BOTH):
            errors = {f"fp8 {name}": error for name, error in errors.items()}
        again = work()
        bits = all(same_bits(first[name], again[name]) for name in first)
        del first, again
        peak = peak_gib(work)
        timing = time_on_device(blank.name, work, repeats=self.repeats, is_queued=True)
        torch.compiler.reset()  # the next size is compiled for itself
        return replace(blank, timing=timing, peak_gib=peak, errors=errors, same_bits=bits)

    def profile(self, num_tokens: int, sections: Sequence[str]) -> None:
        inputs = draw(num_tokens, UNIFORM, self.sizes, self.matrices)
        for section in sections:
            print(section)
            print_profile(our_work("", inputs, section, self.choice))


def chosen_products(text: str) -> Products | None:
    """text: `gated,weights` are torch's, `all` of them; none of them is what the op picks."""
    names = [field.name for field in fields(Products)]
    chosen = names if text == "all" else [name for name in text.split(",") if name]
    if set(chosen) - set(names):
        raise ValueError(f"--products {text} is not made of {', '.join(names)}")
    return replace(Products(), **{name: getattr(TORCH, name) for name in chosen}) if chosen else None


def run_bench(arguments: argparse.Namespace) -> int:
    """The exit status: 1 where ours does not keep to LIMITS, fails, or differs from run to run."""
    sizes = TOY if arguments.dry else K3
    if not torch.cuda.is_available() and not arguments.dry:
        raise ValueError("no GPU here: --dry runs the script without one")
    default = Path(tempfile.mkdtemp()) / "moe.json" if arguments.dry else RESULTS
    tiles = fp8_tiles = None
    if arguments.dry:
        tiles = fp8_tiles = moe_parts.TOY_TILES
    elif arguments.tile:
        tiles = moe_parts.with_tile(pick_tiles(1 << 12, torch.bfloat16), arguments.tile)
        fp8_tiles = moe_parts.with_tile(replace(fp8.FP8_TILES, weights=tiles.weights), arguments.tile)
    choice = Choice(chosen_products(arguments.products), tiles, fp8_tiles)
    config: dict[str, object] = {"experts": sizes.experts, "slots": sizes.slots, "latent": sizes.latent}
    config |= {"width": sizes.width, "repeats": arguments.repeats, "products": arguments.products}
    results = Results(arguments.out or default, describe_machine(), config, ("torch",))
    bench = Bench(sizes, arguments.only.split(","), results, arguments.repeats, choice)
    sections = [section for section in SECTIONS if section in arguments.sections.split(",")]
    if arguments.profile:
        bench.profile(arguments.profile, sections)
        return 0
    for num_tokens in sizes.lengths if arguments.dry else arguments.lengths:
        for layout in arguments.layouts.split(","):
            bench.measure(num_tokens, layout, sections)
    return report(results, LIMITS)


def run_parts(arguments: argparse.Namespace) -> int:
    sizes = TOY if arguments.dry else K3
    matrices = draw_matrices(sizes)
    for num_tokens in sizes.lengths if arguments.dry else arguments.tokens:
        inputs = draw(num_tokens, arguments.layout, sizes, matrices)
        moe_parts.measure(inputs, arguments.part.split(","), arguments.tile, arguments.repeats, arguments.dry)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="measure")
    run.add_argument("--lengths", type=numbers, default=K3.lengths, help="tokens, default %(default)s")
    run.add_argument("--layouts", default=f"{UNIFORM},{ZIPF}")
    run.add_argument("--sections", default=",".join(SECTIONS))
    run.add_argument("--only", default=f"torch,{OURS}", help="torch, torch:parts, ..., ours")
    run.add_argument("--products", default="", help="those of ours that torch multiplies: gated,down,..., or all")
    run.add_argument("--profile", type=int, metavar="T", help="print our kernels at T tokens and stop")
    run.add_argument("--out", type=Path, help=f"JSON file to write, default {RESULTS.name} beside the other results")
    run.set_defaults(call=run_bench)
    parts = commands.add_parser("parts", help="each product alone")
    parts.add_argument("--tokens", type=numbers, default=(4096,))
    parts.add_argument("--layout", default=UNIFORM)
    parts.add_argument("--part", default=",".join(moe_parts.PARTS), help="default %(default)s")
    parts.set_defaults(call=run_parts)
    for command, repeats in ((run, 10), (parts, 5)):
        command.add_argument("--repeats", type=int, default=repeats)
        command.add_argument("--tile", help="PART:rows,columns,depth,warps,stages[,band,is_persistent,is_flat]")
        command.add_argument("--dry", action="store_true", help="toy sizes, on a CPU")
    arguments = parser.parse_args()
    status: int = arguments.call(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
