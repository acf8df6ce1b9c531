"""Batch invariance, error and time of the GEMM, the LoRA branch and the routed experts, on one GPU. Prints JSON.

PYTHONPATH=.:kernels python kernels/bench/check_linear_moe.py [--out FILE] [--limit SECONDS]

"differing" counts elements whose bits differ between rows in a batch of M and the same rows in the largest batch: 0 is
the contract, and the exit status is 1 where it is broken. "other slices" asks the same of instructions of another width,
which the contract does not cover. "error" is the largest error against fp64 over the largest |value|, beside cuBLAS's.
Times are of CUDA graphs of GRAPH_CALLS calls in a row, the median of REPEATS; few rows go through copies of the weight
that together exceed the L2 cache. What does not fit the time limit is listed under "skipped".
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import torch
import triton
from torch import Tensor

from k3kernels.linear import triton as linear_triton
from k3kernels.moe import triton as moe_triton
from k3kernels.moe.eager import moe_experts as moe_experts_eager
from k3kernels.moe.reference import moe_experts as moe_experts_reference

DEVICE = torch.device("cuda")
ROWS = (1, 2, 7, 16, 64, 128, 256, 1000, 4096)
TIMED_ROWS = (1, 16, 128, 1000, 4096)
SHAPES = ((2048, 512), (2048, 2048), (2304, 9216), (2048, 16384), (7168, 2048), (7168, 7168), (512, 2048))  # K, N
FP32_SHAPES = ((2048, 512), (7168, 512))
MOES = ((2048, 512), (2304, 1024))  # latent width, expert width; 64 experts, 8 of them a token
NUM_EXPERTS, NUM_SLOTS = 64, 8
BETAS = (4.0, 25.0)
COLD_BYTES = 256 << 20  # of weights that are gone through before one is seen again
GRAPH_CALLS, REPEATS = 20, 11

Inputs = tuple[Tensor, Tensor, Tensor]  # x, experts, weights
Stacks = tuple[Tensor, Tensor, Tensor]  # w1, w3, w2


@dataclass
class Report:
    """skipped: names of timings that had no time left."""

    start: float
    limit_s: float
    sections: dict[str, dict[str, object]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    num_differing: int = 0

    def has_time(self, name: str) -> bool:
        if time.monotonic() - self.start < self.limit_s:
            return True
        self.skipped.append(name)
        return False

    def check(self, together: Tensor, alone: Tensor) -> int:
        count = num_differing(together, alone)
        self.num_differing += count
        return count


def num_differing(a: Tensor, b: Tensor) -> int:
    """Elements whose bits differ: NaN equals itself, 0 is not -0."""
    patterns = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return int((a.contiguous().view(patterns) != b.contiguous().view(patterns)).sum())


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def wild(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Magnitudes over some six powers of ten, so that every order of a sum rounds to something else."""
    return (torch.randn(*shape, device=DEVICE) * torch.exp(3 * torch.randn(*shape, device=DEVICE))).to(dtype)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


def median_us(work: Callable[[], object], calls: int = GRAPH_CALLS) -> float:
    """Microseconds a call, within one CUDA graph of `calls` of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return round(statistics.median(start.elapsed_time(end) for start, end in events) * 1000 / calls, 2)


def copies_of(weight: Tensor) -> list[Tensor]:
    count = min(GRAPH_CALLS, max(1, math.ceil(COLD_BYTES / (weight.numel() * weight.element_size()))))
    return [weight, *(weight.clone() for _ in range(count - 1))]


def check_linear(report: Report, K: int, N: int, dtype: torch.dtype) -> None:
    """Rows at the start and rows in the middle; ordinary numbers and wild ones; bf16 also into fp32."""
    M = max(ROWS)
    differing: dict[str, dict[int, int]] = {}
    section: dict[str, object] = {"differing": differing}
    weight = randn(N, K, dtype=dtype, scale=K**-0.5)
    outputs = (dtype, torch.float32) if dtype == torch.bfloat16 else (dtype,)
    for kind, x in (("normal", randn(M, K, dtype=dtype)), ("wild", wild(M, K, dtype=dtype))):
        for out_dtype in outputs:
            together = linear_triton.multiply(x, weight, out_dtype)
            counts = {}
            for rows in ROWS:
                first = (M - rows) // 2
                counts[rows] = sum(
                    report.check(together[a : a + rows], linear_triton.multiply(x[a : a + rows], weight, out_dtype))
                    for a in (0, first)
                )
            differing[f"{kind} {out_dtype}"] = counts
        if dtype == torch.bfloat16:
            together = linear_triton.multiply(x[:64], weight, torch.float32)
            tile = linear_triton.pick_tile(1, N, K, dtype)
            section[f"other slices, {kind}"] = {
                slice: num_differing(
                    together,
                    linear_triton.multiply(
                        x[:64], weight, torch.float32, dataclasses.replace(tile, slice=slice, num_stages=2)
                    ),
                )
                for slice in (16, 32, 128)
            }
        if kind == "normal":
            want = x[:64].double() @ weight.double().T
            section["error"] = relative_error(linear_triton.multiply(x[:64], weight), want)
            section["error of cuBLAS"] = relative_error(torch.mm(x[:64], weight.T), want)
    report.sections[f"linear {dtype} K={K} N={N}"] = section


def time_linear(report: Report, K: int, N: int, dtype: torch.dtype) -> None:
    copies = copies_of(randn(N, K, dtype=dtype, scale=K**-0.5))
    report.sections[f"linear {dtype} K={K} N={N}"]["times"] = {
        str(rows): time_rows(randn(rows, K, dtype=dtype), copies)
        for rows in TIMED_ROWS
        if report.has_time(f"linear {dtype} K={K} N={N} M={rows}")
    }


def time_rows(x: Tensor, copies: list[Tensor]) -> dict[str, float]:
    (rows, K), N = x.shape, copies[0].shape[0]
    turn = cycle(copies if rows <= 128 else copies[:1])
    calls = GRAPH_CALLS if rows <= 128 else 5
    ours_us = median_us(lambda: linear_triton.multiply(x, next(turn)), calls)
    cublas_us = median_us(lambda: torch.mm(x, next(turn).T), calls)
    took = {
        "ours_us": ours_us,
        "cublas_us": cublas_us,
        "ours_over_cublas": round(ours_us / cublas_us, 2),
        "weights_tb_per_s": round(N * K * x.element_size() / ours_us / 1e6, 2),
        "tflops": round(2 * rows * K * N / ours_us / 1e6, 1),
    }
    if x.dtype == torch.bfloat16 and rows <= 64:
        for columns in (16, 32):
            tile = dataclasses.replace(linear_triton.pick_tile(rows, N, K, x.dtype), slice=columns)
            took[f"slice_{columns}_us"] = time_tile(x, copies, tile)
    return took


def time_tile(x: Tensor, copies: list[Tensor], tile: linear_triton.Tile) -> float:
    turn = cycle(copies)
    return median_us(lambda: linear_triton.multiply(x, next(turn), tile=tile))


def routes(rows: int) -> tuple[Tensor, Tensor]:
    """Some experts are chosen far more often than others."""
    scores = torch.randn(rows, NUM_EXPERTS, device=DEVICE) + torch.randn(NUM_EXPERTS, device=DEVICE)
    weights, experts = torch.sigmoid(scores).topk(NUM_SLOTS)
    return experts, weights / weights.sum(-1, keepdim=True)


def rows_of(inputs: Inputs, first: int, end: int) -> Inputs:
    x, experts, weights = (t[first:end].clone() for t in inputs)
    return x, experts, weights


def run_moe(inputs: Inputs, stacks: Stacks) -> Tensor:
    return moe_triton.moe_experts(*inputs, *stacks, BETAS)


def check_moe(report: Report, R: int, F: int, dtype: torch.dtype, max_rows: int) -> None:
    w1, w3 = (randn(NUM_EXPERTS, F, R, dtype=dtype, scale=R**-0.5) for _ in range(2))
    stacks = w1, w3, randn(NUM_EXPERTS, R, F, dtype=dtype, scale=F**-0.5)
    inputs = (randn(max_rows, R, dtype=dtype), *routes(max_rows))
    together = run_moe(inputs, stacks)
    differing = {}
    for rows in (rows for rows in ROWS if rows <= max_rows):
        spans = [(a, a + rows) for a in (0, (max_rows - rows) // 2)]
        differing[rows] = sum(report.check(together[a:b], run_moe(rows_of(inputs, a, b), stacks)) for a, b in spans)
    x, experts, weights = rows_of(inputs, 0, 32)
    wide1, wide3, wide2 = (w.double() for w in stacks)
    want = moe_experts_reference(x.double(), experts, weights.double(), wide1, wide3, wide2, BETAS)
    report.sections[f"moe {dtype} R={R} F={F}"] = {
        "differing": differing,
        "differing in a graph": check_graph(report, inputs, stacks),
        "error": relative_error(together[:32], want),
        "error of the definition": relative_error(moe_experts_reference(x, experts, weights, *stacks, BETAS), want),
        "times": {
            str(rows): time_moe(rows_of(inputs, 0, rows), stacks)
            for rows in TIMED_ROWS
            if rows <= max_rows and report.has_time(f"moe {dtype} R={R} F={F} M={rows}")
        },
    }


def time_moe(inputs: Inputs, stacks: Stacks) -> dict[str, float]:
    """The stacks alone exceed the L2 cache, but what 8 experts of one token take does not: routes change by the call."""
    x, experts, weights = inputs
    (rows, R), F = x.shape, stacks[0].shape[1]
    calls = GRAPH_CALLS if rows <= 128 else 5
    turn = cycle([(x, (experts + shift * NUM_SLOTS) % NUM_EXPERTS, weights) for shift in range(8)])
    buckets = linear_triton.bucket(experts.flatten(), NUM_EXPERTS)
    ours_us = median_us(lambda: run_moe(next(turn), stacks), calls)
    used_bytes = int(experts.unique().numel()) * 3 * R * F * x.element_size()
    return {
        "ours_us": ours_us,
        "of_which_bucket_us": median_us(lambda: linear_triton.bucket(experts.flatten(), NUM_EXPERTS), calls),
        "of_which_gate_up_us": median_us(lambda: moe_triton.gate_up(x, buckets, NUM_SLOTS, *stacks[:2], BETAS), calls),
        "eager_us": eager_us(lambda: moe_experts_eager(*inputs, *stacks, BETAS)),
        "weights_tb_per_s": round(used_bytes / ours_us / 1e6, 2),
        "tflops": round(6 * rows * NUM_SLOTS * R * F / ours_us / 1e6, 1),
    }


def check_graph(report: Report, inputs: Inputs, stacks: Stacks) -> int:
    """A captured layer, replayed with other inputs and routes than it was captured with, against one outside a graph."""
    held = rows_of(inputs, 0, 16)
    run_moe(held, stacks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_moe(held, stacks)
    for old, new in zip(held, rows_of(inputs, 16, 32), strict=True):
        old.copy_(new)
    graph.replay()
    return report.check(out, run_moe(held, stacks))


def eager_us(work: Callable[[], object], repeats: int = 5) -> float:
    """It waits for the host, so no graph can hold it."""
    work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e6, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=95.0, help="seconds after which nothing more is timed")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = Report(time.monotonic(), arguments.limit)
    with torch.inference_mode():
        for K, N in SHAPES:
            check_linear(report, K, N, torch.bfloat16)
        for K, N in FP32_SHAPES:
            check_linear(report, K, N, torch.float32)
        for R, F in MOES:
            check_moe(report, R, F, torch.bfloat16, max(ROWS))
        check_moe(report, 512, 256, torch.float32, 256)
        for K, N in SHAPES:
            time_linear(report, K, N, torch.bfloat16)
        for K, N in FP32_SHAPES:
            time_linear(report, K, N, torch.float32)
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "seconds": round(time.monotonic() - report.start, 1),
        "differing in all": report.num_differing,
        "skipped": report.skipped,
        "sections": report.sections,
    }
    text = json.dumps(result, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)
    sys.exit(1 if report.num_differing else 0)


if __name__ == "__main__":
    main()
