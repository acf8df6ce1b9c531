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
from collections.abc import Callable
from pathlib import Path

import torch
from harness import describe_machine, relative_error, same_bits, time_on_device, write_result
from torch import Tensor

from k3kernels.moe.frozen import moe_experts_frozen
from k3kernels.moe.matrices import LoraPair, Matrices, PackedMatrices
from k3kernels.moe.packed import LowRank, Products
from k3kernels.moe.pairs import Pairs, sort_pairs
from k3kernels.moe.reference import moe_experts
from k3kernels.mxfp4 import unpack

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


def exact(xs: list[Tensor], ws: list[Tensor], pairs: Pairs, is_transposed: bool, low: LowRank | None) -> list[Tensor]:
    """In fp64: the product of xs[0] with each, or the sum of each x times its own."""
    edges = pairs.edges.tolist()
    outs = []
    for m, w in enumerate(ws):
        x = xs[m if is_transposed else 0].double()
        out = x.new_zeros(len(x), w.shape[2 if is_transposed else 1])
        for e, (i, j) in enumerate(itertools.pairwise(edges)):
            out[i:j] = x[i:j] @ (w[e].double() if is_transposed else w[e].double().T)
            if low is not None:
                factor = low.factors[m][e].double()
                out[i:j] += low.z[m][i:j].double() @ (factor if is_transposed else factor.T)
        outs.append(out)
    return [sum(outs)] if is_transposed else outs  # type: ignore[list-item]


def check_products(found: dict[str, object]) -> None:
    outer, inner = 512, 768
    counts = [0, 1, 31, 33, 64, 97, 130, 150, 161, 480, 0, 7]
    pairs = pairs_of(counts)
    P, E = sum(counts), len(counts)
    products = Products.of(pairs)
    for is_packed in (False, True):
        for number in (1, 2):
            for rank in (0, 64, 128):
                stored = [codes(E, outer, inner, seed=m) for m in range(number)]
                ws = [dense(w) for w in stored]
                given = stored if is_packed else ws
                for is_transposed in (False, True):
                    width, other = (outer, inner) if is_transposed else (inner, outer)
                    xs = [randn(P, width, seed=7 + m) for m in range(number if is_transposed else 1)]
                    low = None
                    if rank:
                        shape = (E, rank, other) if is_transposed else (E, other, rank)
                        low = LowRank(
                            [randn(P, rank, seed=20 + m) for m in range(number)],
                            [randn(*shape, seed=30 + m, scale=0.1) for m in range(number)],
                        )

                    def run(matrices, xs=xs, low=low, is_transposed=is_transposed):  # type: ignore[no-untyped-def]
                        if is_transposed:
                            return [products.inputs_gradient(xs, matrices, low)]
                        return products.product(xs[0], matrices, low)

                    got, again = run(given), run(given)
                    want = exact(xs, ws, pairs, is_transposed, low)
                    error = max(relative_error(g, w) for g, w in zip(got, want, strict=True))
                    bits = all(same_bits(g, a) for g, a in zip(got, again, strict=True))
                    if is_packed:
                        bits = bits and all(same_bits(g, a) for g, a in zip(got, run(ws), strict=True))
                    name = f"{'mxfp4' if is_packed else 'bf16'} x{number} rank {rank} {'y w' if is_transposed else 'x w^T'}"
                    report(found, name, error, ONCE, bits)


def check_scales(found: dict[str, object]) -> None:
    """A row of ones and zeros picks out one column of the matrix: every code under every scale."""
    wrong = 0
    pairs = pairs_of([256])
    products = Products.of(pairs)
    eye = torch.eye(256, device=DEVICE, dtype=torch.bfloat16)
    for scale in (0, 1, 2, 60, 118, 127, 128, 129, 140, 251):
        w = codes(1, 256, 256, seed=scale, scale=scale)
        (got,) = products.product(eye[pairs.order_P.long()], [w])
        want = dense(w)[0].T[pairs.order_P.long()]
        wrong += int((got != want).sum())
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
    flops = 2 * 2 * P * R * F
    works: dict[str, Callable[[], object]] = {
        "mxfp4 w1 and w3": lambda: products.product(x, stored),
        "mxfp4 w1 and w3, inputs": lambda: products.inputs_gradient([y, y], stored),
    }
    if E <= 128:
        w13 = [dense(w) for w in stored]
        stacked = torch.cat(w13, 1)
        y13 = torch.cat([y, y], 1)
        works |= {
            "bf16 w1 and w3": lambda: products.product(x, w13),
            "bf16 w1 and w3, inputs": lambda: products.inputs_gradient([y, y], w13),
            "torch w1 and w3": lambda: torch._grouped_mm(x, stacked.mT, offs=offs),
            "torch w1 and w3, inputs": lambda: torch._grouped_mm(y13, stacked, offs=offs),
        }
    for name, work in works.items():
        timing = time_on_device(name, work, repeats=repeats, is_queued=True)
        found[f"{E} experts, {P} pairs: {name}"] = {"ms": timing.median_ms, "spread_ms": timing.spread_ms}
        rate = flops / timing.median_ms / 1e9
        print(f"{E} experts, {P} pairs, {name}: {timing.median_ms:.3f} ms, {rate:.0f} TFLOP/s", flush=True)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=OUT)
    arguments.add_argument("--repeats", type=int, default=10)
    options = arguments.parse_args()
    checks: dict[str, object] = {}
    times: dict[str, object] = {}
    for check in (check_products, check_scales, check_experts):
        check(checks)
    for E, tokens in ((112, 1024), (112, 4096), (112, 16384), (896, 8192)):
        time_products(times, E, 16 * tokens, options.repeats)
        torch.cuda.empty_cache()
    write_result(options.out, {"machine": describe_machine(), "checks": checks, "times": times})
    return 0 if all(check["is_good"] for check in checks.values()) else 1  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main())
