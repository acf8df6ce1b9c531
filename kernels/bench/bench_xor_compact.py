"""xor_compact against the device's read and copy bandwidth, and against plain torch.

    PYTHONPATH=kernels python3 kernels/bench/bench_xor_compact.py --out kernels/bench/results/xor_compact_h200.json

Every variant's result is compared with torch's, bit for bit, before it is timed. "floor" is the fastest kernel here that
reads the same two tensors; it leaves one word of XOR a block.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from harness import Timing, describe_machine, time_on_device, write_json
from table import render
from torch import Tensor

from k3kernels.xor_compact import Compacted, reference, xor_compact
from k3kernels.xor_compact import triton as fused
from k3kernels.xor_compact.triton import Tile

DEVICE = torch.device("cuda")
CHUNK = 1 << 28  # elements: bounds the memory of checks and of plain torch
DENSITIES = (0.003, 0.028, 0.17)
CAPACITY_FRACTION = 0.25
DEFAULT = fused.TILES[2]
VARIANTS = {
    "fused: 4 warps, 8192 elements (default)": DEFAULT,
    "fused: 8 warps, 16384 elements": Tile(16384, num_warps=8),
    "fused: 4 warps, 4096 elements": Tile(4096),
    "fused: 1 warp, 4096 elements": Tile(4096, num_warps=1),
}


@triton.jit
def read_kernel(base_ptr, new_ptr, checksums_ptr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    start = program.to(tl.int64) * WORDS
    offsets = tl.arange(0, WORDS)
    xor = tl.load(base_ptr + start + offsets) ^ tl.load(new_ptr + start + offsets)
    tl.store(checksums_ptr + program, tl.xor_sum(xor, 0))


def make_new(base: Tensor, density: float) -> Tensor:
    """base with a random XOR, never 0, in a random share of the elements."""
    gen = torch.Generator(DEVICE).manual_seed(round(density * 1e6))
    new = base.clone()
    for first in range(0, new.numel(), CHUNK):
        chunk = new[first : first + CHUNK]
        value = torch.randint(1, 1 << 16, chunk.shape, device=DEVICE, generator=gen, dtype=torch.int32).to(torch.int16)
        chunk ^= value.masked_fill_(torch.rand(chunk.shape, device=DEVICE, generator=gen) >= density, 0)
    return new


def plain_torch(base: Tensor, new: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions in the chunk and values, a chunk at a time."""
    for first in range(0, new.numel(), CHUNK):
        xor = base[first : first + CHUNK] ^ new[first : first + CHUNK]
        positions_N = xor.nonzero().squeeze(1)
        yield positions_N, xor[positions_N]


def check(result: Compacted, base: Tensor, new: Tensor) -> None:
    """Bit equality with plain torch, or AssertionError."""
    assert result.positions_N is not None
    assert result.values_N is not None
    positions_N, values_N = result.positions_N.view(torch.int16), result.values_N.view(torch.int16)
    done, blocks_done = 0, 0
    for chunk_positions_N, chunk_values_N in plain_torch(base, new):
        num_blocks = min(CHUNK // result.block, result.counts_B.numel() - blocks_done)
        counts_B = torch.bincount(chunk_positions_N // result.block, minlength=num_blocks)
        assert torch.equal(counts_B, result.counts_B[blocks_done : blocks_done + num_blocks].long()), "counts differ"
        part = slice(done, done + chunk_positions_N.numel())
        assert torch.equal((chunk_positions_N % result.block).to(torch.int16), positions_N[part]), "positions differ"
        assert torch.equal(chunk_values_N, values_N[part]), "values differ"
        done, blocks_done = part.stop, blocks_done + num_blocks
    assert done == result.num_changed == positions_N.numel() == values_N.numel()


def check_odd_sizes() -> int:
    """The public function on the device against its definition on the CPU; the number of cases."""
    num_cases = 0
    gen = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.uint8):
        block = reference.BLOCKS[dtype.itemsize]
        for size in (0, 1, 65, block - 1, block, block + 1, 5 * block + 5):
            for density in (0.0, 0.03, 1.0):
                raw = torch.randint(0, 256, (2 * size * dtype.itemsize,), dtype=torch.uint8, generator=gen)
                base, other = raw.view(reference.SIGNED[dtype.itemsize]).reshape(2, size)
                new = torch.where(torch.rand(size, generator=gen) < density, other, base).view(dtype)
                base = base.view(dtype)
                for start in (0, 1):  # 1: off the 16-byte boundary
                    want = xor_compact(base[start:], new[start:], 1.0)
                    got = xor_compact(base.to(DEVICE)[start:], new.to(DEVICE)[start:], 1.0).to("cpu")
                    for field in ("counts_B", "positions_N", "values_N"):
                        a, b = getattr(want, field), getattr(got, field)
                        same = a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()
                        assert same, f"{dtype} {size} {density} {start}: {field} differs"
                    num_cases += 1
    base = torch.zeros(100_000, dtype=torch.bfloat16, device=DEVICE)
    assert xor_compact(base, base + 1, 0.999).positions_N is None, "an overflow went unnoticed"
    return num_cases + 1


@dataclass(frozen=True)
class Pair:
    """base and new as int16, a multiple of every block."""

    base: Tensor
    new: Tensor
    num_changed: int

    @property
    def read_bytes(self) -> int:
        return 2 * self.new.numel() * self.new.element_size()

    @property
    def record_bytes(self) -> int:
        return 4 * self.num_changed

    def unordered(self, tile: Tile) -> fused.Unordered:
        capacity = int(self.new.numel() * CAPACITY_FRACTION)
        return fused.empty_blocks(self.new.numel() // tile.block, capacity, 2, DEVICE)

    def compact(self, tile: Tile, unordered: fused.Unordered) -> None:
        unordered.cursor.zero_()
        fused.launch(self.base, self.new, unordered, slice(0, unordered.counts_B.numel()), tile)

    def order(self, unordered: fused.Unordered) -> tuple[Tensor, Tensor]:
        starts_B = fused.block_starts(unordered.counts_B)
        return fused.order_blocks(unordered, starts_B, self.num_changed, torch.uint16)


def time_floors(pair: Pair) -> tuple[list[Timing], float]:
    """Copy and read bandwidth of the device on the same bytes; the best read time in ms."""
    to = torch.empty_like(pair.new)
    timings = [time_on_device("torch copy, as many bytes in all", lambda: to.copy_(pair.new), pair.read_bytes)]
    words = pair.base.view(torch.int32), pair.new.view(torch.int32)
    for block_words, num_warps in ((4096, 4), (8192, 8)):
        checksums = torch.empty(words[0].numel() // block_words, dtype=torch.int32, device=DEVICE)

        def read(checksums: Tensor = checksums, block_words: int = block_words, num_warps: int = num_warps) -> None:
            read_kernel[(checksums.numel(),)](*words, checksums, WORDS=block_words, num_warps=num_warps)

        name = f"read only, {4 * block_words // 1024} KiB, {num_warps} warps"
        timings.append(time_on_device(name, read, pair.read_bytes))
    return timings, min(timing.median_ms for timing in timings[1:])


def time_variant(name: str, tile: Tile, pair: Pair) -> Timing:
    """After its result was found right."""
    unordered = pair.unordered(tile)
    pair.compact(tile, unordered)
    check(Compacted(pair.new.numel(), tile.block, unordered.counts_B, *pair.order(unordered)), pair.base, pair.new)
    assert unordered.mismatches.item() == 0, "a block's changes do not make up its XOR"
    return time_on_device(name, lambda: pair.compact(tile, unordered), pair.read_bytes + pair.record_bytes)


def time_rest(pair: Pair) -> list[Timing]:
    """What surrounds the fused kernel of the default tile, and the way that does without it."""
    unordered = pair.unordered(DEFAULT)
    pair.compact(DEFAULT, unordered)
    moved = pair.read_bytes + 3 * pair.record_bytes

    def both() -> None:
        pair.compact(DEFAULT, unordered)
        pair.order(unordered)

    def public() -> None:
        xor_compact(pair.base.view(torch.bfloat16), pair.new.view(torch.bfloat16), CAPACITY_FRACTION)

    def naive() -> None:
        for _ in plain_torch(pair.base, pair.new):
            pass

    ordered = pair.order(unordered)
    on_host = [torch.empty(part.shape, dtype=part.dtype, pin_memory=DEVICE.type == "cuda") for part in ordered]

    def copy_out() -> None:
        for host, part in zip(on_host, ordered, strict=True):
            host.copy_(part, non_blocking=True)

    return [
        time_on_device("order the blocks", lambda: pair.order(unordered), 2 * pair.record_bytes),
        time_on_device("fused and ordered", both, moved),
        time_on_device("xor_compact(): allocations and waits included", public, moved),
        time_on_device("plain torch: xor, nonzero, gather", naive, moved, warmup=1, repeats=5),
        time_on_device("positions and values to pinned host memory", copy_out, pair.record_bytes, warmup=1, repeats=5),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0, help="size of each of the two tensors")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    started = time.monotonic()

    def note(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)

    torch.manual_seed(0)
    machine = describe_machine()
    note(str(machine))
    note(f"{check_odd_sizes()} cases at odd sizes equal the definition")

    num_elements = int(arguments.gib * (1 << 29)) // (1 << 15) * (1 << 15)
    config: dict[str, object] = {
        "gib": arguments.gib,
        "num_elements": num_elements,
        "capacity_fraction": CAPACITY_FRACTION,
        "variants": {name: asdict(tile) for name, tile in VARIANTS.items()},
    }
    base = torch.empty(num_elements, dtype=torch.int16, device=DEVICE)
    for first in range(0, num_elements, CHUNK):
        base[first : first + CHUNK].random_(-(1 << 15), 1 << 15)

    sections: dict[str, dict[str, object]] = {}
    for density in DENSITIES:
        new = make_new(base, density)
        pair = Pair(base, new, sum(positions_N.numel() for positions_N, _ in plain_torch(base, new)))
        note(f"{density:.1%} of {num_elements} elements: {pair.num_changed} changed")
        timings, floor_ms = time_floors(pair)
        timings += [time_variant(name, tile, pair) for name, tile in VARIANTS.items()]
        timings += time_rest(pair)
        sections[f"{density:.1%}"] = {"num_changed": pair.num_changed, "floor_ms": floor_ms, "timings": timings}
        write_json(arguments.out, machine, config, sections)
    note("done; every result equals plain torch's, bit for bit")
    print(render(json.loads(arguments.out.read_text())))


if __name__ == "__main__":
    main()
