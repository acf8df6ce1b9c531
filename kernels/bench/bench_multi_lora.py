"""LoRA with an adapter a row beside the product of one merged weight and a loop over adapters, at Kimi K3's widths.

    PYTHONPATH=kernels python3 kernels/bench/bench_multi_lora.py --parts --out kernels/bench/results/multi_lora_h200.json

32 adapters of rank 64; W is frozen. "merged" is the product with one W and has no adapters: forward x W^T, backward dy W.
"loop" is PyTorch, an adapter after the other, whose rows are known beforehand. Ours takes its sorted rows, made once a
batch, as given (`--parts` times them, and each kernel alone in several configurations). Adapters are in bf16, or in fp32
where it says so. `--dry` runs it all on a CPU at toy sizes, without figures worth reading.

Errors are relative to fp64: y and x's gradient at 64 rows, A's and B's gradients of two adapters. The floor is the larger
of the products' at the speed of a large one on this device and of the bytes that have to move, at the speed of a copy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import copy_bytes_per_ms, describe_machine, device, peak_gib, same_bits, time_on_device
from side_by_side import OURS, Case, Results, Row, attempt, numbers, report
from torch import Tensor

from k3kernels.linear import multi_lora as op
from k3kernels.linear import multi_lora_launch as launch

PEERS = ("merged", "loop")
FORWARD, BOTH = "forward", "forward+backward"
MIXED, GROUPED, ONE = "mixed", "grouped", "one adapter"  # has all rows
SINGLE = "fp32 adapters"
RESULTS = Path(__file__).parent / "results" / "multi_lora_h200.json"
# Two roundings to bf16, each 1.7e-3 of a tensor's norm, and some room.
LIMITS = dict.fromkeys(("y", "x", "A", "B"), 4e-3)
CHECKED_ROWS, CHECKED_ADAPTERS = 64, 2
Change = dict[str, Any]  # of names in multi_lora_launch.py


@contextmanager
def one_stream(product: Callable[[], object] | None) -> Iterator[None]:
    """In place of `beside`."""
    yield
    if product is not None:
        product()


def of_shrink(**values: int) -> Change:
    return {"SHRINK": launch.SHRINK | values}


def of_expand(**values: int) -> Change:
    return {"EXPAND": launch.EXPAND | values}


def of_gradient(**values: int) -> Change:
    return {"ACCUMULATE": launch.ACCUMULATE | values}


CONFIGURATIONS: dict[str, dict[str, Change]] = {
    "shrink": {
        "": {},
        "128 rows": of_shrink(BM=128),
        "64 rows": of_shrink(BM=64),
        "128 rows, pieces of 896": {"PIECE": 896} | of_shrink(BM=128),
        "5 stages": of_shrink(num_stages=5),
    },
    "shrink and gradient": {"": {}, "3 stages": of_shrink(num_stages=3), "128 rows": of_shrink(BM=128)},
    "expand": {
        "": {},
        "64 rows, 128 columns": of_expand(BM=64, BN=128, COLUMNS=128),
        "of 1792 columns": of_expand(COLUMNS=1792),
        "of 448 columns": of_expand(COLUMNS=448),
        "128 at a time": of_expand(BN=128),
    },
    "gradient": {
        "": {},
        "8 warps": of_gradient(num_warps=8),
        "64 columns, 4 stages": of_gradient(BC=64, num_stages=4),
    },
    BOTH: {
        "": {},
        "dB apart": {"fuses_gradient": lambda *_: False},
        "one launch after the other": {"starts_early": lambda _: False},
        "one stream": {"beside": one_stream},
    },
}


@dataclass(frozen=True, slots=True)
class Sizes:
    tokens: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]  # (in, out)
    adapters: int
    rank: int


K3 = Sizes((4096, 16384), ((7168, 7168), (7168, 2048), (12288, 7168)), 32, 64)
TOY = Sizes((40,), ((48, 32),), 3, 16)


class Inputs(NamedTuple):
    x_TI: Tensor
    W_OI: Tensor
    A_nrI: Tensor
    B_nOr: Tensor
    scale_n: Tensor
    grad_TO: Tensor
    adapter_T: Tensor


def draw(sizes: Sizes, T: int, shape: tuple[int, int], order: str) -> Inputs:
    """Adapters are drawn for each row, and about alike in number, but for ONE."""
    (num_in, num_out), n, r = shape, sizes.adapters, sizes.rank
    gen = torch.Generator(device()).manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (std * torch.randn(shape, generator=gen, device=device())).bfloat16()

    adapter_T = torch.randint(0, n, (T,), generator=gen, device=device())
    if order == GROUPED:
        adapter_T = adapter_T.sort().values
    elif order == ONE:
        adapter_T = torch.zeros_like(adapter_T)
    A_nrI, B_nOr = normal(n, r, num_in, std=num_in**-0.5), normal(n, num_out, r, std=r**-0.5)
    scale_n = torch.linspace(0.5, 2, n, device=device())
    return Inputs(
        normal(T, num_in),
        normal(num_out, num_in, std=num_in**-0.5),
        A_nrI,
        B_nOr,
        scale_n,
        normal(T, num_out),
        adapter_T,
    )


Work = Callable[[], dict[str, Tensor]]


def as_work(forward: Callable[..., Tensor], leaves: dict[str, Tensor], grad_TO: Tensor | None) -> Work:
    """forward of the leaves; with grad_TO also their gradients, by name."""

    def work() -> dict[str, Tensor]:
        if grad_TO is None:
            with torch.no_grad():
                return {"y": forward(*leaves.values())}
        y_TO = forward(*leaves.values())
        grads = torch.autograd.grad(y_TO, list(leaves.values()), grad_TO)
        return {"y": y_TO.detach()} | dict(zip(leaves, grads, strict=True))

    return work


def merged_work(inputs: Inputs, _: str, grad_TO: Tensor | None) -> Work:
    def work() -> dict[str, Tensor]:
        y_TO = inputs.x_TI @ inputs.W_OI.T
        return {"y": y_TO} if grad_TO is None else {"y": y_TO, "x": grad_TO @ inputs.W_OI}

    return work


def loop_work(inputs: Inputs, _: str, grad_TO: Tensor | None) -> Work:
    of_adapter = [(inputs.adapter_T == a).nonzero().flatten() for a in range(len(inputs.A_nrI))]
    scales = inputs.scale_n.tolist()

    def forward(x_TI: Tensor, A_nrI: Tensor, B_nOr: Tensor) -> Tensor:
        y_TO = x_TI @ inputs.W_OI.T
        for rows, A_rI, B_Or, scale in zip(of_adapter, A_nrI.unbind(), B_nOr.unbind(), scales, strict=True):
            y_TO.index_add_(0, rows, (x_TI.index_select(0, rows) @ A_rI.T * scale) @ B_Or.T)
        return y_TO

    return as_work(forward, leaves_of(inputs), grad_TO)


def our_work(inputs: Inputs, variant: str, grad_TO: Tensor | None) -> Work:
    rows = launch.sorted_rows(inputs.adapter_T, len(inputs.A_nrI))

    def forward(x_TI: Tensor, A_nrI: Tensor, B_nOr: Tensor) -> Tensor:
        return op.multi_lora(x_TI, inputs.W_OI, A_nrI, B_nOr, inputs.scale_n, rows)

    leaves = leaves_of(inputs)
    if variant == SINGLE:
        leaves |= {name: leaves[name].detach().float().requires_grad_() for name in ("A", "B")}
    return as_work(forward, leaves, grad_TO)


def leaves_of(inputs: Inputs) -> dict[str, Tensor]:
    return {
        n: x.detach().requires_grad_() for n, x in zip("xAB", (inputs.x_TI, inputs.A_nrI, inputs.B_nOr), strict=True)
    }


@contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


WORKS: dict[str, Callable[[Inputs, str, Tensor | None], Work]] = {
    "merged": merged_work,
    "loop": loop_work,
    OURS: our_work,
}


def errors_of(got: dict[str, Tensor], inputs: Inputs) -> dict[str, float]:
    """Of what a peer with adapters computed, at the rows and adapters that are checked."""
    x_TI, W_OI, A_nrI, B_nOr, scale_n, grad_TO, adapter_T = inputs
    some = torch.linspace(0, len(x_TI) - 1, CHECKED_ROWS, device=device()).long().unique()
    wide_W, wide_A, wide_B = W_OI.double(), A_nrI[adapter_T[some]].double(), B_nOr[adapter_T[some]].double()
    scale = scale_n[adapter_T[some], None].double()
    x, grad = x_TI[some].double(), grad_TO[some].double()
    wants = {"y": x @ wide_W.T + (wide_B @ (wide_A @ x[:, :, None])).squeeze(2) * scale}
    gots = {"y": got["y"][some]}
    if "x" in got:
        wants["x"] = grad @ wide_W + (grad[:, None] @ wide_B @ wide_A).squeeze(1) * scale
        gots["x"] = got["x"][some]
        few = range(min(CHECKED_ADAPTERS, len(A_nrI)))
        of = [adapter_T == a for a in few]
        xs, grads = [x_TI[rows].double() for rows in of], [scale_n[a] * grad_TO[of[a]].double() for a in few]
        wants["A"] = torch.stack([(grads[a] @ B_nOr[a].double()).T @ xs[a] for a in few])
        wants["B"] = torch.stack([grads[a].T @ (xs[a] @ A_nrI[a].double().T) for a in few])
        gots |= {name: got[name][: len(few)] for name in ("A", "B")}
    return {name: float((gots[name].double() - want).norm() / want.norm()) for name, want in wants.items()}


class Bench:
    def __init__(self, sizes: Sizes, results: Results, repeats: int) -> None:
        self.sizes, self.results, self.repeats = sizes, results, repeats
        self.bytes_per_ms = copy_bytes_per_ms()
        side = 8192 if torch.cuda.is_available() else 64
        a, b = (torch.randn(side, side, device=device()).bfloat16() for _ in range(2))
        self.flops_per_ms = 2 * side**3 / time_on_device("product", lambda: a @ b).median_ms
        results.config |= {
            "copy_tb_per_s": round(self.bytes_per_ms / 1e9, 3),
            "product_tflops": round(self.flops_per_ms / 1e9, 1),
        }

    def measure(self, T: int, shape: tuple[int, int], order: str) -> None:
        inputs = draw(self.sizes, T, shape, order)
        layout = f"{shape[0]}->{shape[1]} {order}"
        for section in (FORWARD, BOTH):
            floor_ms = self._floor_ms(inputs, section)
            for peer, variant in (("merged", ""), ("loop", ""), (OURS, ""), (OURS, SINGLE)):
                blank = Row(Case(section, T, layout), peer, variant, floor_ms=floor_ms)
                self.results.add(attempt(blank, partial(self._measure, inputs)))

    def _floor_ms(self, inputs: Inputs, section: str) -> float:
        """With adapters in bf16; each pass reads W once, and the second all that the first did."""
        x_TI, W_OI, A_nrI, B_nOr, _, grad_TO, _ = inputs
        factors = A_nrI.numel() + B_nOr.numel()
        flops = 2 * len(x_TI) * (W_OI.numel() + self.sizes.rank * sum(W_OI.shape))
        elements = x_TI.numel() + W_OI.numel() + factors + grad_TO.numel()
        if section == BOTH:
            flops = 2 * flops + 2 * len(x_TI) * self.sizes.rank * sum(W_OI.shape)
            elements = 3 * x_TI.numel() + 2 * W_OI.numel() + 3 * factors + 2 * grad_TO.numel()
        return max(flops / self.flops_per_ms, 2 * elements / self.bytes_per_ms)

    def _measure(self, inputs: Inputs, blank: Row) -> Row:
        work = WORKS[blank.peer](inputs, blank.variant, inputs.grad_TO if blank.case.section == BOTH else None)
        first, again = work(), work()
        bits = all(same_bits(first[name], again[name]) for name in first)
        errors = {} if blank.peer == "merged" else errors_of(first, inputs)
        del first, again
        peak = peak_gib(work)
        timing = time_on_device(blank.name, work, repeats=self.repeats, is_queued=True)
        checked = f"{CHECKED_ROWS} rows, {CHECKED_ADAPTERS} adapters"
        return replace(blank, timing=timing, peak_gib=peak, errors=errors, same_bits=bits, checked=checked)

    def measure_parts(self, T: int, shape: tuple[int, int], order: str) -> None:
        """Each kernel alone; a configuration that differs says how."""
        inputs = draw(self.sizes, T, shape, order)
        x_TI, W_OI, A_nrI, B_nOr, scale_n, grad_TO, adapter_T = inputs
        rows = launch.sorted_rows(adapter_T, len(A_nrI))
        z_TR, y_TO = launch.shrink(x_TI, A_nrI, scale_n, rows, None, True), torch.empty_like(grad_TO)
        grad_A, grad_B, dx_TI = torch.empty_like(A_nrI), torch.empty_like(B_nOr), torch.empty_like(x_TI)
        flops, z = 2 * T * W_OI.numel(), z_TR.numel()
        x, dy, A, B = (tensor.numel() for tensor in (x_TI, grad_TO, A_nrI, B_nOr))
        # name, which changes of CONFIGURATIONS, work, its operations, and elements of two bytes that it has to move
        parts: list[tuple[str, str, Callable[[], object], int, int]] = [
            ("rows", "", lambda: launch.sorted_rows(adapter_T, len(A_nrI)), 0, 0),
            ("product", "", lambda: torch.mm(x_TI, W_OI.T), flops, 0),
            ("product, added to", "", lambda: y_TO.addmm_(x_TI, W_OI.T), flops, 0),
            ("product of the gradient", "", lambda: torch.mm(grad_TO, W_OI), flops, 0),
            ("A in bf16", "", lambda: A_nrI.float().bfloat16(), 0, 5 * A // 2),
            (
                "shrink x",
                "shrink",
                partial(launch.shrink, x_TI, A_nrI, scale_n, rows, None, True),
                0,
                x + A + z,
            ),
            (
                "shrink dy",
                "",
                partial(launch.shrink, grad_TO, B_nOr, scale_n, rows, None, False),
                0,
                dy + B + z,
            ),
            (
                "shrink dy and dB",
                "shrink and gradient",
                partial(launch.shrink, grad_TO, B_nOr, scale_n, rows, None, False, z_TR, grad_B),
                0,
                dy + 2 * B + 2 * z,
            ),
            (
                "expand, adding",
                "",
                partial(launch.expand, z_TR, B_nOr, y_TO, y_TO, rows, None, True),
                0,
                2 * dy + B + z,
            ),
            (
                "expand, writing",
                "expand",
                partial(launch.expand, z_TR, B_nOr, None, y_TO, rows, None, True),
                0,
                dy + B + z,
            ),
            (
                "expand dx",
                "",
                partial(launch.expand, z_TR, A_nrI, None, dx_TI, rows, None, False),
                0,
                x + A + z,
            ),
            ("dA", "gradient", partial(launch.accumulate, x_TI, z_TR, grad_A, rows, True), 0, x + A + z),
            ("dB", "gradient", partial(launch.accumulate, grad_TO, z_TR, grad_B, rows, False), 0, dy + B + z),
        ]
        for name, changes, call, part_flops, elements in parts:
            case = Case(f"part: {name}", T, f"{shape[0]}->{shape[1]} {order}")
            floor_ms = max(part_flops / self.flops_per_ms, 2 * elements / self.bytes_per_ms) or None
            for variant, change in CONFIGURATIONS.get(changes, {"": {}}).items():
                blank = Row(case, OURS, variant, floor_ms=floor_ms)
                self.results.add(attempt(blank, partial(self._time, changed(change, call))))
        self._measure_changes(inputs, Case(f"part: {BOTH}", T, f"{shape[0]}->{shape[1]} {order}"))

    def _measure_changes(self, inputs: Inputs, case: Case) -> None:
        """Of the whole, whose bits none of them changes."""
        work = our_work(inputs, "", inputs.grad_TO)
        want = work()

        def measure(change: Change, blank: Row) -> Row:
            with replaced(launch, **change):
                got = work()
                bits = all(same_bits(got[name], want[name]) for name in want)
                return replace(self._time(work, blank), same_bits=bits)

        for variant, change in CONFIGURATIONS[BOTH].items():
            blank = Row(case, OURS, variant, floor_ms=self._floor_ms(inputs, BOTH))
            self.results.add(attempt(blank, partial(measure, change)))

    def _time(self, call: Callable[[], object], blank: Row) -> Row:
        return replace(blank, timing=time_on_device(blank.name, call, repeats=self.repeats, is_queued=True))


def changed(change: Change, work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with replaced(launch, **change):
            work()

    return run


def run_bench(arguments: argparse.Namespace) -> int:
    """The exit status: 1 where ours does not keep to LIMITS, fails, or differs from run to run."""
    sizes = TOY if arguments.dry else K3
    if not torch.cuda.is_available() and not arguments.dry:
        raise ValueError("no GPU here: --dry runs the script without one")
    default = Path(tempfile.mkdtemp()) / "multi_lora.json" if arguments.dry else RESULTS
    config: dict[str, object] = {"adapters": sizes.adapters, "rank": sizes.rank, "repeats": arguments.repeats}
    results = Results(arguments.out or default, describe_machine(), config, PEERS)
    bench = Bench(sizes, results, arguments.repeats)
    tokens = sizes.tokens if arguments.dry else arguments.tokens
    shapes = sizes.shapes if arguments.dry else arguments.shapes
    for T in tokens:
        for shape in shapes:
            for order in (MIXED, GROUPED):
                bench.measure(T, shape, order)
        bench.measure(T, shapes[0], ONE)
        if arguments.parts:
            bench.measure_parts(T, shapes[0], MIXED)
    return report(results, LIMITS)


def shapes_of(text: str) -> tuple[tuple[int, int], ...]:
    """`7168x7168,12288x7168`: in x out."""
    return tuple((int(a), int(b)) for a, b in (shape.split("x") for shape in text.split(",")))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=numbers, default=K3.tokens)
    parser.add_argument("--shapes", type=shapes_of, default=K3.shapes, help="in x out, as 7168x7168,12288x7168")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--parts", action="store_true", help="also each kernel alone, at the first shape")
    parser.add_argument("--out", type=Path, help=f"JSON file to write, default {RESULTS.name} beside the other results")
    parser.add_argument("--dry", action="store_true", help="toy sizes, on a CPU")
    return run_bench(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
