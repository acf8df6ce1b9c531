"""Aligned KDA and paged MLA on one GPU: equal bits for every caller, error against fp64, times against bytes; prints JSON.

PYTHONPATH=.:kernels python kernels/bench/check_aligned.py [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from k3kernels.kda.reference import kda_recurrent
from k3kernels.kda.triton import (
    UNKEPT,
    KdaPool,
    KdaWork,
    decode_work,
    empty_pool,
    kda_aligned_packed,
    prefill_work,
)
from k3kernels.mla import reference
from k3kernels.mla.triton import mla_paged

DEVICE = torch.device("cuda")
H, K, BOUND, SCALE = 32, 128, -5.0, 128**-0.5
C, R, PAGE, MLA_SCALE = 576, 512, 64, 192**-0.5


def median_ms(work: Callable[[], object], repeats: int = 10) -> float:
    times = []
    for repeat in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_bytes_per_ms() -> float:
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source))


def kda_inputs(T: int) -> list[Tensor]:
    q, k, v, g = (torch.randn(T, H, K, device=DEVICE) for _ in range(4))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    beta = torch.rand(T, H, device=DEVICE)
    return [q.bfloat16(), k.bfloat16(), v.bfloat16(), BOUND * torch.sigmoid(2 * g - 2), beta]


def check_kda(precision: str, bytes_per_ms: float) -> dict[str, object]:
    found: dict[str, object] = {}
    inputs, T = kda_inputs(300), 300

    def run(rows: list[Tensor], pool: KdaPool, work: KdaWork) -> Tensor:
        q, k, v, g, beta = rows
        return kda_aligned_packed(q, k, v, g, beta, pool, work, SCALE, precision=precision)

    def new_pool(slots: int) -> KdaPool:
        return empty_pool(slots, H, K, K, torch.bfloat16, torch.float32, DEVICE)

    pool = new_pool(1)
    want = run(inputs, pool, prefill_work([T], [0], [0], [], DEVICE))
    edges = [0, 1, 16, 37, 100, 160, 200]
    pieces, other = [], new_pool(1)
    for a, b in itertools.pairwise(edges):
        pieces.append(run([x[a:b] for x in inputs], other, prefill_work([b - a], [a], [0], [], DEVICE)))
    for p in range(200, T):
        where = torch.tensor([[0], [p]], dtype=torch.int32, device=DEVICE)
        pieces.append(run([x[p : p + 1] for x in inputs], other, decode_work(where[0], where[1])))
    found["pieces_and_decode_equal"] = torch.equal(torch.cat(pieces), want)
    found["states_equal"] = torch.equal(pool.state, other.state)
    eight = [torch.cat([x] * 8) for x in inputs]
    batch = run(eight, new_pool(1), prefill_work([T] * 8, [0] * 8, [UNKEPT] * 8, [], DEVICE))
    found["batch_equal"] = all(torch.equal(o, want) for o in batch.split(T))
    zero = torch.zeros(1, H, K, K, dtype=torch.float64, device=DEVICE)
    q, k, v, g, beta = (x.double()[None] for x in inputs)
    exact = kda_recurrent(q, k, v, g, beta, zero, SCALE)[0][0]
    found["relative_error"] = float((want.double() - exact).norm() / exact.norm())
    found["relative_error_of_rounding_alone"] = float((exact.bfloat16().double() - exact).norm() / exact.norm())
    for N in (1, 8, 64, 256):
        rows, pool, slots = kda_inputs(N), new_pool(N), torch.arange(N, dtype=torch.int32, device=DEVICE)
        work = decode_work(slots, torch.full_like(slots, 23))
        graph = torch.cuda.CUDAGraph()
        run(rows, pool, work)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            run(rows, pool, work)
        found[f"decode_{N}_ms"] = median_ms(graph.replay)
        row_bytes = H * (2 * K + 2 * K + 4 * K + 4)
        size_bytes = pool.state.nbytes * (1 + 1 / 16) + N * (row_bytes * 7.5 + row_bytes * 2 + H * K * 4)
        found[f"decode_{N}_floor_ms"] = size_bytes / bytes_per_ms
    rows, pool, work = kda_inputs(8192), new_pool(1), prefill_work([8192], [0], [0], [], DEVICE)
    found["prefill_8192_ms"] = median_ms(lambda: run(rows, pool, work))
    return found


def check_mla(bytes_per_ms: float) -> dict[str, object]:
    found: dict[str, object] = {}
    length, max_pages = 16384, 16384 // PAGE
    pool = torch.randn(max_pages * 2, PAGE, C, device=DEVICE).bfloat16()
    table = torch.randperm(max_pages * 2, device=DEVICE).int().view(2, max_pages)
    places = [0, 15, 63, 64, 1000, 2047, 2048, 4095, 8192, 16383]
    position = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    sequence = torch.arange(len(places), device=DEVICE).int() % 2
    q = torch.randn(len(places), H, C, device=DEVICE).bfloat16()
    want = mla_paged(q, pool, table, sequence, position, R, MLA_SCALE)
    alone = [
        mla_paged(q[t : t + 1], pool, table, sequence[t : t + 1], position[t : t + 1], R, MLA_SCALE, p + 1)
        for t, p in enumerate(places)
    ]
    found["alone_equals_batch"] = torch.equal(torch.cat(alone), want)
    exact = reference.mla_paged(q.double(), pool.double(), table, sequence, position, R, MLA_SCALE)
    found["relative_error"] = float((want.double() - exact).norm() / exact.norm())
    for N in (1, 8, 64, 256):
        tables = torch.randint(max_pages * 2, (N, max_pages), device=DEVICE, dtype=torch.int32)
        many, each = torch.randn(N, H, C, device=DEVICE).bfloat16(), torch.arange(N, device=DEVICE).int()
        context = 4096
        at = torch.full_like(each, context - 1)
        work = partial(mla_paged, many, pool, tables, each, at, R, MLA_SCALE, context)
        found[f"decode_{N}_at_{context}_ms"] = median_ms(work)
        found[f"decode_{N}_floor_ms"] = N * context * C * 2 / bytes_per_ms  # the pool is shared: L2 may beat it
    many = torch.randn(length // 2, H, C, device=DEVICE).bfloat16()
    at = torch.arange(length // 2, device=DEVICE).int()
    prefill = median_ms(lambda: mla_paged(many, pool, table, at * 0, at, R, MLA_SCALE, length // 2), 3)
    return found | {"prefill_8192_ms": prefill}


def main() -> int:
    """Exit status 1 when any bits differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    torch.manual_seed(0)
    speed = copy_bytes_per_ms()
    found = {f"kda_{precision}": check_kda(precision, speed) for precision in ("tf32x3", "ieee")}
    found["mla"] = check_mla(speed)
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    text = json.dumps(machine | {"copy_tb_per_s": speed / 1e9} | found, indent=1)
    if out is not None:
        out.write_text(text + "\n")
    print(text)
    return int(any(fact is False for facts in found.values() for fact in facts.values()))


if __name__ == "__main__":
    sys.exit(main())
