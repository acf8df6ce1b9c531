"""`k3 bench delta --synthetic`: how fast one core encodes and applies a delta, beside what it consists of."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import zstandard
from blake3 import blake3
from rich import box
from rich.console import Console
from rich.table import Table

from flows.bench_machine import describe_machine
from infra.host import keep_freed_memory
from k3core.checkpoint.delta import apply_delta, encode_delta
from k3core.checkpoint.tensors import RawTensor, Weights, tensor_digest

TENSOR_BYTES = 64 << 20
STD = 0.02  # of the weights, as in a trained transformer


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of each repeat for `size_bytes` of new weights; cpu_seconds leaves out when others had the core."""

    name: str
    size_bytes: int
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]

    def gigabytes_per_s(self, seconds: float) -> float:
        return self.size_bytes / seconds / 1e9


def measure_speed(gib: float, learning_rate: float, repeats: int, out: Path) -> int:
    """Normal bf16 weights and one update of at most learning_rate each; prints, and writes delta-speed.json.

    Sizes of synthetic updates say nothing about real ones, and are not reported.
    """
    try:
        import xxhash
    except ImportError as error:
        raise ValueError("xxhash is not installed: pip install 'k3rl[bench]'") from error
    keep_freed_memory()  # as in a run
    parent, new = synthetic(gib, learning_rate)
    size_bytes = sum(len(tensor.data) for tensor in new.values())
    known = {name: tensor_digest(name, tensor) for name, tensor in parent.items()}
    xor = {name: dense_xor(parent[name], new[name]) for name in new}
    frames = dense_encode(parent, new)
    delta, delta_3 = (encode_delta(parent, new, max_classes=max_classes) for max_classes in (1, 3))
    memory = {name: memoryview(bytearray(len(tensor.data))) for name, tensor in new.items()}
    work: dict[str, Callable[[], object]] = {
        "encode": lambda: encode_delta(parent, new, parent_digests=known),
        "encode, base hashed too": lambda: encode_delta(parent, new),
        "apply": lambda: apply_delta(parent, delta[1], delta[0], "payload"),
        "apply, into given memory": lambda: apply_delta(parent, delta[1], delta[0], "payload", out=memory),
        "encode, 3 classes": lambda: encode_delta(parent, new, max_classes=3, parent_digests=known),
        "apply, 3 classes": lambda: apply_delta(parent, delta_3[1], delta_3[0], "payload"),
        "dense: XOR, zstd-1, hash": lambda: dense_encode(parent, new),
        "dense: inflate, XOR, hashes": lambda: dense_apply(parent, frames),
        "zstd-1 of the XOR alone": lambda: [zstandard.ZstdCompressor(level=1).compress(data) for data in xor.values()],
        "inflate it": lambda: [zstandard.ZstdDecompressor().decompress(frame) for frame in frames.values()],
        "BLAKE3": lambda: [blake3(tensor.data).digest() for tensor in new.values()],
        "xxh3-128": lambda: [xxhash.xxh3_128_digest(tensor.data) for tensor in new.values()],
    }
    machine = describe_machine()
    speeds = [Speed(name, size_bytes, *timed(run, repeats)) for name, run in work.items()]
    changed = sum(entry.num_changed for entry in delta[1]) / sum(entry.num_elements for entry in delta[1])
    print(
        f"{size_bytes / 2**30:.2f} GiB of normal bf16 weights, learning rate {learning_rate:g}: {changed:.2%} of the "
        f"elements change\none thread of {machine['cpu']}, load {machine['load_average']:.1f}; "
        f"GB of new weights a second, {repeats} repeats"
    )
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("")
    for heading in ("median", "slowest", "fastest", "median by CPU time"):
        table.add_column(heading, justify="right")
    for speed in speeds:
        median, cpu = statistics.median(speed.seconds), statistics.median(speed.cpu_seconds)
        columns = (median, max(speed.seconds), min(speed.seconds), cpu)
        table.add_row(speed.name, *(f"{speed.gigabytes_per_s(seconds):.2f}" for seconds in columns))
    Console().print(table)
    print("encode hashes the new weights, apply the base and the result")
    out.mkdir(parents=True, exist_ok=True)
    document = {
        "size_bytes": size_bytes,
        "learning_rate": learning_rate,
        "changed_fraction": changed,
        "speeds": [
            {**asdict(speed), "median_gigabytes_per_s": speed.gigabytes_per_s(statistics.median(speed.seconds))}
            for speed in speeds
        ],
        "machine": machine,
    }
    (out / "delta-speed.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"\n{out / 'delta-speed.json'}")
    return 0


def dense_xor(before: RawTensor, after: RawTensor) -> bytes:
    return (np.frombuffer(before.data, np.uint8) ^ np.frombuffer(after.data, np.uint8)).tobytes()


def dense_encode(parent: Weights, new: Weights) -> dict[str, bytes]:
    """The plain way, with the same checks as ours: hash the new weights."""
    frames = {}
    for name in new:
        blake3(new[name].data).digest()
        frames[name] = zstandard.ZstdCompressor(level=1).compress(dense_xor(parent[name], new[name]))
    return frames


def dense_apply(parent: Weights, frames: Mapping[str, bytes]) -> None:
    """The plain way, with the same checks as ours: hash the base and the result."""
    for name, frame in frames.items():
        blake3(parent[name].data).digest()
        xor = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
        blake3((np.frombuffer(parent[name].data, np.uint8) ^ xor).data).digest()


def synthetic(gib: float, learning_rate: float, seed: int = 0) -> tuple[dict[str, RawTensor], dict[str, RawTensor]]:
    """Weights before and after an update, the same for equal arguments."""
    generator = np.random.default_rng(seed)
    left = int(gib * 2**30) // 2
    parent: dict[str, RawTensor] = {}
    new: dict[str, RawTensor] = {}
    while left > 0:
        size = min(left, TENSOR_BYTES // 2)
        weights = generator.standard_normal(size, np.float32) * np.float32(STD)
        step = np.clip(generator.standard_normal(size, np.float32), -1, 1) * np.float32(learning_rate)
        name = f"layers.{len(new)}.weight"
        parent[name], new[name] = (RawTensor("BF16", (size,), _bf16(values)) for values in (weights, weights + step))
        left -= size
    return parent, new


def timed(run: Callable[[], object], repeats: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Wall and CPU seconds of this thread for each repeat, after one that is not counted."""
    run()
    wall, cpu = [], []
    for _ in range(repeats):
        begin = time.perf_counter(), time.thread_time()
        run()
        wall.append(time.perf_counter() - begin[0])
        cpu.append(time.thread_time() - begin[1])
    return tuple(wall), tuple(cpu)


def _bf16(values: np.ndarray) -> bytes:
    """Rounded to nearest, ties to even; finite values only."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
