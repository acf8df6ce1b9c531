"""The batch-invariant x W^T beside torch's (cuBLAS), at Kimi K3's widths and from 1 row to 16,384.

    PYTHONPATH=kernels python3 kernels/bench/bench_invariant.py --out kernels/bench/results/invariant_h200.json

"ours" is what `linear` picks; "without TMA" is the kernel for few rows at any number of them; the others are tiles of the
kernel for many rows: rows x columns x depth, warps, stages, parts of the result. `--tile` chooses these, and `--tile none`
leaves them out. "same bits" compares the first rows with the same rows in a batch of 64; torch's are compared too, and
need not be the same. Errors are of the first rows and relative to fp64. `--dry` runs it all on a CPU at toy sizes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from harness import copy_bytes_per_ms, describe_machine, device, relative_error, same_bits, time_on_device
from side_by_side import OURS, Case, Results, Row, attempt, numbers, report
from torch import Tensor

from k3kernels.linear import persistent
from k3kernels.linear.triton import Tile, multiply, pick_tile

TORCH, WITHOUT_TMA = "torch", "without TMA"
ROWS = (1, 64, 1024, 4096, 16384)
SHAPES = ((7168, 7168), (12288, 7168), (7168, 12288), (7168, 3584))  # in, out
TILES = (
    Tile(128, 256, 2, 64, 8, 4),
    Tile(128, 256, 1, 64, 8, 3),
    Tile(128, 256, 2, 64, 8, 3),
    Tile(256, 128, 2, 64, 8, 4),
    Tile(256, 128, 1, 64, 8, 3),
    Tile(128, 128, 1, 64, 8, 4),
    Tile(128, 128, 1, 64, 4, 4),
    Tile(128, 256, 2, 128, 8, 2),
)
ALONE = 64  # rows that are computed by themselves
RESULTS = Path(__file__).parent / "results" / "invariant_h200.json"
LIMITS = {"y": 2e-3}  # one rounding to bf16 is 1.7e-3 of a tensor's norm

Product = Callable[[Tensor, Tensor], Tensor]


def name_of(tile: Tile) -> str:
    return f"{tile.block_m}x{tile.slice}x{tile.block_k} {tile.num_warps}w {tile.num_stages}s {tile.parts}p"


def tile_of(text: str) -> Tile:
    """`128x256x64x8x4x2`: rows, columns, depth, warps, stages, parts."""
    block_m, columns, block_k, num_warps, num_stages, parts = map(int, text.split("x"))
    return Tile(block_m, columns, parts, block_k, num_warps, num_stages)


def without_tma(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    return multiply(x_MK, weight_NK, tile=pick_tile(M, N, K, x_MK.dtype))


def of_tile(tile: Tile, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    return persistent.multiply(x_MK, weight_NK, x_MK.dtype, tile)


def products(M: int, tiles: Sequence[Tile]) -> dict[tuple[str, str], Product]:
    """By peer and variant."""
    chosen: dict[tuple[str, str], Product] = {(TORCH, ""): torch.nn.functional.linear, (OURS, ""): multiply}
    if M >= persistent.MIN_ROWS:
        chosen[OURS, WITHOUT_TMA] = without_tma
        chosen |= {(OURS, name_of(tile)): partial(of_tile, tile) for tile in tiles}
    return chosen


class Bench:
    def __init__(self, results: Results, repeats: int, tiles: Sequence[Tile]) -> None:
        self.results, self.repeats, self.tiles = results, repeats, tiles
        self.bytes_per_ms = copy_bytes_per_ms()
        side = 8192 if torch.cuda.is_available() else 64
        a, b = (torch.randn(side, side, device=device()).bfloat16() for _ in range(2))
        self.flops_per_ms = 2 * side**3 / time_on_device("product", lambda: a @ b).median_ms
        results.config |= {
            "copy_tb_per_s": round(self.bytes_per_ms / 1e9, 3),
            "product_tflops": round(self.flops_per_ms / 1e9, 1),
        }

    def measure(self, rows: Sequence[int], K: int, N: int) -> None:
        gen = torch.Generator(device()).manual_seed(0)
        x_MK = torch.randn(max(rows), K, generator=gen, device=device()).bfloat16()
        weight_NK = (torch.randn(N, K, generator=gen, device=device()) * K**-0.5).bfloat16()
        exact = x_MK[:ALONE].double() @ weight_NK.double().T
        alone = {TORCH: torch.nn.functional.linear(x_MK[:ALONE], weight_NK), OURS: multiply(x_MK[:ALONE], weight_NK)}
        for M in rows:
            floor_ms = max(2 * M * N * K / self.flops_per_ms, 2 * (M * K + N * K + M * N) / self.bytes_per_ms)
            for (peer, variant), product in products(M, self.tiles).items():
                blank = Row(Case(f"{K}->{N}", M), peer, variant, floor_ms=floor_ms, checked=f"{ALONE} rows")
                call = partial(product, x_MK[:M], weight_NK)
                row = attempt(blank, partial(self._measure, call, exact, alone[peer]))
                self.results.add(row)
                if row.timing is not None:
                    bits = "the bits of 64 rows" if row.same_bits else "OTHER BITS than 64 rows"
                    print(f"  {2e-9 * M * N * K / row.timing.median_ms:.1f} TFLOP/s, {bits}", flush=True)

    def _measure(self, call: Callable[[], Tensor], exact: Tensor, alone: Tensor, blank: Row) -> Row:
        first = call()[:ALONE]
        errors = {"y": relative_error(first, exact[: len(first)])}
        bits = same_bits(first, alone[: len(first)])
        timing = time_on_device(blank.name, call, repeats=self.repeats, is_queued=True)
        return replace(blank, timing=timing, errors=errors, same_bits=bits)


def run_bench(arguments: argparse.Namespace) -> int:
    """The exit status: 1 where ours is off, fails, or gives a row other bits in another batch."""
    if not torch.cuda.is_available() and not arguments.dry:
        raise ValueError("no GPU here: --dry runs the script without one")
    tiles = TILES if arguments.tile is None else arguments.tile
    rows, shapes = arguments.rows, arguments.shapes
    if arguments.dry:
        rows, shapes, tiles = (1, 64, 130), ((64, 64), (72, 264)), (Tile(64, 128, 2, 64, 8, 3),)
        persistent.MIN_ROWS, persistent.LARGE = 100, tiles[0]
    default = Path(tempfile.mkdtemp()) / "invariant.json" if arguments.dry else RESULTS
    results = Results(arguments.out or default, describe_machine(), {"repeats": arguments.repeats}, (TORCH,))
    bench = Bench(results, arguments.repeats, tiles)
    for K, N in shapes:
        bench.measure(rows, K, N)
    return report(results, LIMITS)


def shapes_of(text: str) -> tuple[tuple[int, int], ...]:
    """`7168x7168,12288x7168`: in x out."""
    return tuple((int(a), int(b)) for a, b in (shape.split("x") for shape in text.split(",")))


def tiles_of(text: str) -> tuple[Tile, ...]:
    return () if text == "none" else tuple(tile_of(tile) for tile in text.split(","))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=numbers, default=ROWS)
    parser.add_argument("--shapes", type=shapes_of, default=SHAPES, help="in x out, as 7168x7168,12288x7168")
    parser.add_argument("--tile", type=tiles_of, help="rows x columns x depth x warps x stages x parts, or none")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help=f"JSON file to write, default {RESULTS.name} beside the other results")
    parser.add_argument("--dry", action="store_true", help="toy sizes, on a CPU")
    return run_bench(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
