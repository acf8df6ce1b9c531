"""Products with experts' matrices as they are stored, on one Hopper GPU: against fp64, and their time beside torch's.

    PYTHONPATH=kernels python3 kernels/bench/check_moe.py [--out FILE]

Every product is compared with each expert's own in fp64, at odd numbers of rows and for every scale byte; MXFP4 has to give
the bits of the same matrices in bf16. Then K3's experts: 112 of them for 1K to 16K tokens (one of eight ranks), and all 896
for 8K tokens, beside torch's grouped GEMM over bf16. A line a check; exit status 1 where one fails.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from harness import describe_machine, relative_error, same_bits, time_on_device, write_result
from torch import Tensor

from k3kernels.moe.frozen import moe_experts_frozen
from k3kernels.moe.hopper import LowRank, Products
from k3kernels.moe.matrices import LoraPair, Matrices, PackedMatrices
from k3kernels.moe.pairs import Pairs, sort_pairs
from k3kernels.moe.reference import moe_experts
from k3kernels.mxfp4 import unpack
from k3kernels.situ.reference import situ

OUT = Path(__file__).parent / "checks" / "moe_h200.json"
DEVICE = torch.device("cuda")
BETAS = (4.0, 25.0)
ONCE, GRADIENT = 2.5e-3, 1e-2  # relative errors: one rounding to bf16, and several of them


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def randn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), device=DEVICE, dtype=torch.bfloat16).mul_(scale)


def codes(E: int, outer: int, inner: int, seed: int, scale: int | None = None) -> PackedMatrices:
    """Random codes; scales around 1/sqrt(inner), or all of one byte."""
    gen = generator(seed)
    packed = torch.randint(256, (E, outer, inner // 2), generator=gen, device=DEVICE, dtype=torch.uint8)
    scales = torch.randint(118, 121, (E, outer, inner // 32), generator=gen, device=DEVICE, dtype=torch.uint8)
    return PackedMatrices(packed, scales if scale is None else torch.full_like(scales, scale), torch.bfloat16)


def pairs_of(counts: list[int]) -> Pairs:
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    experts = experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(0))]
    return sort_pairs(experts.to(DEVICE)[:, None], len(counts))


def dense(w: Matrices) -> Tensor:
    return unpack(w.packed, w.scale, torch.bfloat16) if isinstance(w, PackedMatrices) else w  # type: ignore[return-value]


LOST = 9  # rows without an expert, behind all others; they hold NaN


class Case:
    """Rows of experts that end anywhere, two matrices, and what the products of them are in fp64; a pair of LoRA above each
    matrix, or none."""

    outer, inner = 1024, 768
    counts = (0, 1, 31, 33, 64, 97, 130, 150, 161, 177, 480, 0, 7)

    def __init__(self, rank: int) -> None:
        E, self.num_rows = len(self.counts), sum(self.counts)
        pairs = pairs_of(list(self.counts))
        self.pairs = replace(pairs, order_P=torch.cat([pairs.order_P, pairs.order_P[:LOST]]))
        self.stored = [codes(E, self.outer, self.inner, seed=m) for m in range(2)]
        self.dense = [dense(w) for w in self.stored]
        self.x, *self.ys = (self.rows(n, 5 + i) for i, n in enumerate((self.inner, self.outer, self.outer)))
        self.forward = self.backward = None
        if rank:
            zs = [self.rows(rank, 20 + m) for m in range(2)]
            self.forward = LowRank(zs, [randn(E, self.outer, rank, seed=30 + m, scale=0.1) for m in range(2)])
            self.backward = LowRank(zs, [randn(E, rank, self.inner, seed=40 + m, scale=0.1) for m in range(2)])

    def rows(self, width: int, seed: int) -> Tensor:
        return torch.cat([randn(self.num_rows, width, seed=seed), randn(LOST, width, seed=0).fill_(torch.nan)])

    def of_experts(self, product: Callable[[int, slice], Tensor]) -> Tensor:
        edges = itertools.pairwise(self.pairs.edges.tolist())
        return torch.cat([product(e, slice(i, j)) for e, (i, j) in enumerate(edges)])

    def product(self, m: int) -> Tensor:
        def of(e: int, p: slice) -> Tensor:
            y = self.x[p].double() @ self.dense[m][e].double().T
            low = self.forward
            return y if low is None else y + low.z[m][p].double() @ low.factors[m][e].double().T

        return self.of_experts(of)

    def inputs_gradient(self, m: int) -> Tensor:
        def of(e: int, p: slice) -> Tensor:
            x = self.ys[m][p].double() @ self.dense[m][e].double()
            low = self.backward
            return x if low is None else x + low.z[m][p].double() @ low.factors[m][e].double()

        return self.of_experts(of)

    def works(self, ws: Sequence[Matrices]) -> dict[str, Callable[[], Sequence[Tensor | None]]]:
        products, low, back = Products.of(self.pairs), self.forward, self.backward
        of_first = back and LowRank(back.z[:1], back.factors[:1])
        return {
            "gate, up, h": partial(products.gated, self.x, *ws, BETAS, True, low),
            "h alone": lambda: products.gated(self.x, *ws, BETAS, False, low)[2:],
            "x w^T": lambda: [products.product(self.x, ws[0], low)],
            "y w": lambda: [products.inputs_gradient(self.ys[:1], ws[:1], of_first)],
            "y w, two": lambda: [products.inputs_gradient(self.ys, ws, back)],
        }

    def wants(self) -> dict[str, list[Tensor]]:
        gate, up = self.product(0), self.product(1)
        h = situ(gate.bfloat16().double(), up.bfloat16().double(), *BETAS)
        first, second = self.inputs_gradient(0), self.inputs_gradient(1)
        of_all = {"gate, up, h": [gate, up, h], "h alone": [h], "x w^T": [gate]}
        return of_all | {"y w": [first], "y w, two": [first + second]}


def check_products(found: dict[str, object]) -> None:
    """MXFP4 has to give the bits of the same matrices in bf16."""
    for rank in (0, 64, 128):
        case = Case(rank)
        wants = case.wants()
        results: dict[str, list[Tensor]] = {}
        for kind, ws in (("mxfp4", case.stored), ("bf16", case.dense)):
            for name, work in case.works(ws).items():
                got, again = ([y[: case.num_rows] for y in work() if y is not None] for _ in range(2))
                error = max(relative_error(g, w) for g, w in zip(got, wants[name], strict=True))
                bits = all(same_bits(g, a) for g, a in zip(got, again, strict=True))
                if kind == "bf16":
                    bits = bits and all(same_bits(g, m) for g, m in zip(got, results[name], strict=True))
                results[name] = got
                report(found, f"{kind}, rank {rank}: {name}", error, 2 * ONCE, bits)


def check_weights_gradient(found: dict[str, object]) -> None:
    case = Case(0)
    products, y, x = Products.of(case.pairs), case.ys[0], case.x
    got, again = (products.weights_gradient(y, x) for _ in range(2))
    want = case.of_experts(lambda _, p: (y[p].double().T @ x[p].double())[None])
    report(found, "y^T x", relative_error(got, want), 2 * ONCE, same_bits(got, again))


def check_scales(found: dict[str, object]) -> None:
    """A row of ones and zeros picks out one column of the matrix, or one row: every code under every scale."""
    wrong = 0
    pairs = pairs_of([512])
    products = Products.of(pairs)
    eye = torch.eye(512, device=DEVICE, dtype=torch.bfloat16)[pairs.order_P.long()]
    for scale in (0, 1, 2, 60, 118, 127, 128, 129, 140, 251):
        w = codes(1, 512, 512, seed=scale, scale=scale)
        wrong += int((products.product(eye, w) != dense(w)[0].T[pairs.order_P.long()]).sum())
        wrong += int((products.inputs_gradient([eye], [w]) != dense(w)[0][pairs.order_P.long()]).sum())
    report(found, "every code under ten scales, differing", float(wrong), 0.0, True)


def check_experts(found: dict[str, object]) -> None:
    """The whole operation, all pairs of LoRA, against the definition in fp64."""
    E, R, F, T, k, rank = 8, 512, 768, 300, 3, 24
    experts = torch.rand(T, E - 1, generator=generator(1), device=DEVICE).topk(k).indices  # the last has no rows
    stored = [codes(E, F, R, 1), codes(E, F, R, 2), codes(E, R, F, 3)]
    x, weights = randn(T, R, seed=4), torch.rand(T, k, generator=generator(5), device=DEVICE)
    shapes = ((F, R), (F, R), (R, F))
    factors = []
    for i, (outer, inner) in enumerate(shapes):
        factors += [
            randn(E, rank, inner, seed=40 + i, scale=inner**-0.5),
            randn(E, outer, rank, seed=50 + i, scale=0.2),
        ]
    grad = randn(T, R, seed=6)

    def run(op: Callable[..., Tensor], dtype: torch.dtype, matrices: list[Matrices]) -> list[Tensor]:
        leaves = [x.to(dtype), weights.to(torch.promote_types(dtype, torch.float32)), *(f.to(dtype) for f in factors)]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        lora = tuple(LoraPair(leaves[2 + 2 * i], leaves[3 + 2 * i], 0.5) for i in range(3))
        out = op(leaves[0], experts, leaves[1], *matrices, BETAS, lora)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    got, again = (run(moe_experts_frozen, torch.bfloat16, list(stored)) for _ in range(2))
    want = run(moe_experts, torch.float64, [unpack(w.packed, w.scale, torch.float64) for w in stored])
    names = ("out", "dx", "dweights", "dA1", "dB1", "dA3", "dB3", "dA2", "dB2")
    for name, g, w, a in zip(names, got, want, again, strict=True):
        report(found, f"experts with LoRA: {name}", relative_error(g, w), GRADIENT, same_bits(g, a))


def report(found: dict[str, object], name: str, error: float, limit: float, bits: bool) -> None:
    is_good = error <= limit and bits
    found[name] = {"error": float(f"{error:.3g}"), "limit": limit, "same bits": bits, "is_good": is_good}
    print(f"{'ok  ' if is_good else 'FAIL'} {name}: {error:.2e} of {limit:.1e}, same bits {bits}", flush=True)


def time_products(found: dict[str, object], E: int, P: int, repeats: int) -> None:
    R, F = 3584, 3072
    experts = torch.randint(E, (P, 1), generator=generator(0), device=DEVICE)
    pairs = sort_pairs(experts, E)
    products, offs = Products.of(pairs), pairs.edges[1:]
    stored = [codes(E, F, R, seed=1), codes(E, F, R, seed=2)]
    x, y = randn(P, R, seed=3), randn(P, F, seed=4)
    works: dict[str, tuple[int, Callable[[], object]]] = {}
    kinds: dict[str, Sequence[Matrices]] = {"mxfp4": stored}
    if E <= 128:
        kinds["bf16"] = [dense(w) for w in stored]
    for kind, (w1, w3) in kinds.items():
        works |= {
            f"{kind}, w1 and w3, h": (2, partial(products.gated, x, w1, w3, BETAS, False)),
            f"{kind}, w1 and w3, gate, up, h": (2, partial(products.gated, x, w1, w3, BETAS, True)),
            f"{kind}, w1": (1, partial(products.product, x, w1)),
            f"{kind}, inputs": (2, partial(products.inputs_gradient, [y, y], [w1, w3])),
            f"{kind}, hidden": (1, partial(products.inputs_gradient, [y], [w1])),
        }
    if E <= 128:
        w13, y13 = torch.cat([dense(w) for w in stored], 1), torch.cat([y, y], 1)
        works |= {
            "weights": (1, lambda: products.weights_gradient(y, x)),
            "torch, w1 and w3": (2, lambda: torch._grouped_mm(x, w13.mT, offs=offs)),
            "torch, inputs": (2, lambda: torch._grouped_mm(y13, w13, offs=offs)),
            "torch, weights": (1, lambda: torch._grouped_mm(y.mT, x, offs=offs)),
        }
    for name, (number, work) in works.items():
        timing = time_on_device(name, work, repeats=repeats, is_queued=True)
        found[f"{E} experts, {P} pairs: {name}"] = {"ms": timing.median_ms, "spread_ms": timing.spread_ms}
        rate = number * 2 * P * R * F / timing.median_ms / 1e9
        print(f"{E} experts, {P} pairs, {name}: {timing.median_ms:.3f} ms, {rate:.0f} TFLOP/s", flush=True)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=OUT)
    arguments.add_argument("--repeats", type=int, default=10)
    options = arguments.parse_args()
    checks: dict[str, object] = {}
    times: dict[str, object] = {}
    for check in (check_products, check_weights_gradient, check_scales, check_experts):
        check(checks)
    for E, tokens in ((112, 1024), (112, 4096), (112, 16384), (896, 8192)):
        time_products(times, E, 16 * tokens, options.repeats)
        torch.cuda.empty_cache()
    write_result(options.out, {"machine": describe_machine(), "checks": checks, "times": times})
    return 0 if all(check["is_good"] for check in checks.values()) else 1  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main())
