"""Routed experts at Kimi K3's sizes beside torch's grouped GEMM: 112 of 896 experts, 16 a token, as on one of 8 ranks.

    PYTHONPATH=kernels python3 kernels/bench/bench_moe.py run --out kernels/bench/results/moe_h200.json
    PYTHONPATH=kernels python3 kernels/bench/bench_moe.py parts --tokens 4096

Latent width 3584, inner width 3072, SiTU, bf16; every gradient. `run` measures forward, forward and backward, and forward
in fp8; torch's forms are those of `moe_torch.py`. Routes are drawn with equal chances or with those of Zipf's law.
`--lengths 1024,4096` measures a part and leaves the rest of the file; `--only ours,torch` chooses; `--sections` too;
`--products` says which of our five products are torch's (`gated,weights`, or `all`); `--profile 4096` prints the kernels
of our forward and backward; `--dry` runs it all on a CPU at toy sizes, without figures worth reading.

`parts` times each product alone, in several tiles, beside torch's; `--tile 128,256,64,8,4` (rows, columns, depth, warps,
stages, and optionally band, is_persistent, is_flat) adds one.

Errors are relative to fp64: of out, dx and dweights at 64 tokens, of the matrices' gradients at two experts. Memory is the
allocator's peak, inputs, matrices and all gradients included. The floor is the larger of two: the products at the speed of
a sustained bf16 (fp8) product, and matrices, inputs and results moved once a pass at the speed of a copy.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import moe_parts
import moe_torch
import torch
from harness import copy_bytes_per_ms, describe_machine, peak_gib, print_profile, same_bits, time_on_device
from moe_inputs import BETAS, K3, NAMES, TOY, UNIFORM, ZIPF, Exact, Inputs, Sizes, draw, draw_matrices, exact
from side_by_side import OURS, Case, Results, Row, attempt, numbers, report
from torch import Tensor

from k3kernels.moe.grouped import TORCH, Products, Tiles, pick_tiles
from k3kernels.moe.train import moe_experts_train

FORWARD, BOTH, FP8 = "forward", "forward+backward", "fp8 forward"
SECTIONS = (FORWARD, BOTH, FP8)
RESULTS = Path(__file__).parent / "results" / "moe_h200.json"
FLOPS_PER_MS = {FORWARD: 687e9, BOTH: 687e9, FP8: 1320e9}  # sustained, as measured on an H200
# One rounding to bf16 is 1.7e-3 of a tensor's norm: gate, up, h, y and the result are rounded, and in backward as many again.
# One rounding to e4m3 is 2.6e-2: a row, a matrix, h and a matrix are.
LIMIT, FP8_LIMIT = 6e-3, 8e-2
LIMITS = dict.fromkeys(("out", *(f"d{name}" for name in NAMES)), LIMIT) | {"fp8 out": FP8_LIMIT}


@dataclass(frozen=True, slots=True)
class Choice:
    """Our products and tiles: None is what the op would pick."""

    products: Products | None
    tiles: Tiles | None


def load_ours(inputs: Inputs, choice: Choice) -> Callable[[Inputs], Tensor]:
    del inputs

    def run(inputs: Inputs) -> Tensor:
        matrices = inputs.w1, inputs.w3, inputs.w2
        return moe_experts_train(
            inputs.x, inputs.experts, inputs.weights, *matrices, BETAS, choice.products, choice.tiles
        )

    return run


def load_ours_fp8(inputs: Inputs, choice: Choice) -> Callable[[Inputs], Tensor]:
    fp8 = importlib.import_module("k3kernels.moe.fp8")
    matrices = [fp8.quantise_matrices(w) for w in (inputs.w1, inputs.w3, inputs.w2)]

    def run(inputs: Inputs) -> Tensor:
        out: Tensor = fp8.moe_experts_fp8(
            inputs.x, inputs.experts, inputs.weights, *matrices, BETAS, choice.tiles or fp8.FP8_TILES
        )
        return out

    return run


def load_torch_fp8(inputs: Inputs, choice: Choice) -> Callable[[Inputs], Tensor]:
    del choice
    w13 = moe_torch.quantise_matrices(torch.cat((inputs.w1, inputs.w3), 1))
    w2 = moe_torch.quantise_matrices(inputs.w2)
    run = moe_torch.load_fp8()
    return lambda inputs: run(inputs.x, inputs.experts, inputs.weights, *w13, *w2)


def forward_and_backward(run: Callable[[Inputs], Tensor], leaves: Inputs) -> dict[str, Tensor]:
    out = run(leaves)
    grads = torch.autograd.grad(out, list(leaves.all.values()), leaves.grad)
    return {"out": out.detach()} | dict(zip(leaves.all, grads, strict=True))


def torch_work(variant: str, inputs: Inputs, is_forward: bool) -> Callable[[], dict[str, Tensor]]:
    """torch's leaves are the stacked w13; w1's gradient is the upper half of its."""
    run = moe_torch.VARIANTS[variant]()
    leaves = {"x": inputs.x, "weights": inputs.weights, "w13": torch.cat((inputs.w1, inputs.w3), 1), "w2": inputs.w2}
    if not is_forward:
        leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}

    def work() -> dict[str, Tensor]:
        x, weights, w13, w2 = leaves.values()
        if is_forward:
            with torch.no_grad():
                return {"out": run(x, inputs.experts, weights, w13, w2)}
        out = run(x, inputs.experts, weights, w13, w2)
        got = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), inputs.grad), strict=True))
        grad_w1, grad_w3 = got.pop("w13").chunk(2, 1)
        return {"out": out.detach()} | got | {"w1": grad_w1, "w3": grad_w3}

    return work


def work_of(blank: Row, inputs: Inputs, choice: Choice) -> Callable[[], dict[str, Tensor]]:
    is_forward = blank.case.section != BOTH
    if blank.peer == "torch" and blank.case.section != FP8:
        return torch_work(blank.variant, inputs, is_forward)
    of_fp8 = load_torch_fp8 if blank.peer == "torch" else load_ours_fp8
    run = (of_fp8 if blank.case.section == FP8 else load_ours)(inputs, choice)
    leaves = inputs if is_forward else inputs.as_leaves()

    def work() -> dict[str, Tensor]:
        if not is_forward:
            return forward_and_backward(run, leaves)
        with torch.no_grad():
            return {"out": run(leaves)}

    return work


def floor_ms(num_tokens: int, sizes: Sizes, section: str, bytes_per_ms: float) -> float:
    """The backward pass is two forwards: it reads the matrices, writes as much of gradients, and multiplies twice as often."""
    passes = 3 if section == BOTH else 1
    values = sizes.experts * 3 * sizes.latent * sizes.width
    flops = passes * 6 * num_tokens * sizes.slots * sizes.latent * sizes.width
    size = 1 if section == FP8 else 2
    num_bytes = passes * (values * size + 2 * 2 * num_tokens * sizes.latent)
    return max(flops / FLOPS_PER_MS[section], num_bytes / bytes_per_ms)


class Bench:
    """The chosen implementations at one size after the other."""

    def __init__(self, sizes: Sizes, peers: Sequence[str], results: Results, repeats: int, choice: Choice) -> None:
        self.sizes, self.peers, self.results, self.repeats, self.choice = sizes, peers, results, repeats, choice
        self.bytes_per_ms = copy_bytes_per_ms()
        results.config["copy_tb_per_s"] = round(self.bytes_per_ms / 1e9, 3)
        self.matrices = draw_matrices(sizes)

    def measure(self, num_tokens: int, layout: str, sections: Sequence[str]) -> None:
        inputs = draw(num_tokens, layout, self.sizes, self.matrices)
        truth = exact(inputs, self.sizes, with_gradients=BOTH in sections)
        for section in sections:
            case = Case(section, num_tokens, layout)
            floor = floor_ms(num_tokens, self.sizes, section, self.bytes_per_ms)
            for peer in self.peers:
                name, _, wanted = peer.partition(":")
                variants = [wanted] if wanted else [""]
                if name == "torch" and not wanted:
                    variants = ["rowwise"] if section == FP8 else list(moe_torch.DEFAULT_VARIANTS)
                for variant in variants:
                    blank = Row(case, name, variant, floor_ms=floor, checked="64 tokens, 2 experts")
                    self.results.add(attempt(blank, partial(self._measure, inputs, truth)))

    def _measure(self, inputs: Inputs, truth: Exact, blank: Row) -> Row:
        work = work_of(blank, inputs, self.choice)
        first = work()
        errors = truth.errors(first)
        if blank.case.section == FP8:
            errors = {f"fp8 {name}": error for name, error in errors.items()}
        again = work()
        bits = all(same_bits(first[name], again[name]) for name in first)
        del first, again
        peak = peak_gib(work)
        timing = time_on_device(blank.name, work, repeats=self.repeats, is_queued=True)
        torch.compiler.reset()  # the next size is compiled for itself
        return replace(blank, timing=timing, peak_gib=peak, errors=errors, same_bits=bits)

    def profile(self, num_tokens: int) -> None:
        inputs = draw(num_tokens, UNIFORM, self.sizes, self.matrices)
        run = load_ours(inputs, self.choice)
        print_profile(partial(forward_and_backward, run, inputs.as_leaves()))


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
    tiles = None
    if arguments.dry:
        tiles = moe_parts.TOY_TILES
    elif arguments.tile:
        tiles = moe_parts.with_tile(pick_tiles(1 << 12, torch.bfloat16), arguments.tile)
    choice = Choice(chosen_products(arguments.products), tiles)
    config: dict[str, object] = {"experts": sizes.experts, "slots": sizes.slots, "latent": sizes.latent}
    config |= {"width": sizes.width, "repeats": arguments.repeats, "products": arguments.products}
    results = Results(arguments.out or default, describe_machine(), config, ("torch",))
    bench = Bench(sizes, arguments.only.split(","), results, arguments.repeats, choice)
    if arguments.profile:
        bench.profile(arguments.profile)
        return 0
    for num_tokens in sizes.lengths if arguments.dry else arguments.lengths:
        for layout in arguments.layouts.split(","):
            bench.measure(num_tokens, layout, [s for s in SECTIONS if s in arguments.sections.split(",")])
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
