"""Timing on one GPU: device events around each repeat, medians, and a JSON file that says where they come from.

Without a GPU the host's clock takes the events' place, so that a script's dry run gets through; it measures nothing.
"""

from __future__ import annotations

import json
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

GIB = 1 << 30
CYCLES_PER_MS, MAX_WAIT_MS = 2_000_000, 20.0  # a device's clock, rounded up
FLUSH_BYTES = (
    256 << 20
)  # several times the L2 of any GPU of today: zeroed before a repeat, it leaves nothing of the last


@dataclass(frozen=True, slots=True)
class Timing:
    """bytes_moved: the fewest that the work can read and write, all repeats alike; 0 where that says nothing. host_ms: what
    the host takes to launch the work, where repeats_ms do not hold it."""

    name: str
    repeats_ms: tuple[float, ...]
    bytes_moved: int = 0
    host_ms: float | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.repeats_ms)

    @property
    def spread_ms(self) -> float:
        """Between the first and the third quartile."""
        first, _, third = statistics.quantiles(self.repeats_ms, n=4)
        return third - first

    @property
    def terabytes_per_s(self) -> float:
        return self.bytes_moved / self.median_ms / 1e9

    def to_json(self) -> dict[str, object]:
        """To 0.1 us, finer than the device's clock."""
        return {
            "name": self.name,
            "median_ms": round(self.median_ms, 4),
            "spread_ms": round(self.spread_ms, 4),
            "tb_per_s": round(self.terabytes_per_s, 3),
            "bytes_moved": self.bytes_moved,
            "host_ms": None if self.host_ms is None else round(self.host_ms, 3),
            "repeats_ms": [round(repeat, 4) for repeat in self.repeats_ms],
        }


def time_on_device(
    name: str,
    work: Callable[[], object],
    bytes_moved: int = 0,
    warmup: int = 3,
    repeats: int = 20,
    is_queued: bool = False,
) -> Timing:
    """Between two events on the stream: launches and work, and gaps between the launches of one repeat.

    is_queued: as in the middle of a training step, where the device is behind the host and finds nothing of its inputs in
    the L2. Before each repeat, outside its events, FLUSH_BYTES are written and the device waits until the host has launched
    the repeat; what the host takes for that is reported apart.
    """
    for _ in range(warmup):
        work()
    if not torch.cuda.is_available():
        return Timing(name, tuple(_host_ms(work) for _ in range(repeats)), bytes_moved)
    torch.cuda.synchronize()
    host_ms = _host_ms(work) if is_queued else None
    flushed = torch.empty(FLUSH_BYTES if is_queued else 0, dtype=torch.uint8, device="cuda")
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        if host_ms is not None:
            torch.cuda.synchronize()
            flushed.zero_()
            torch.cuda._sleep(int(min(2 * host_ms, MAX_WAIT_MS) * CYCLES_PER_MS))
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return Timing(name, tuple(start.elapsed_time(end) for start, end in events), bytes_moved, host_ms)


def time_in_graph(name: str, calls: Sequence[Callable[[], object]], bytes_moved: int = 0, repeats: int = 20) -> Timing:
    """One call's share of a CUDA graph of all of them, without the host's part.

    What the calls return is kept, so each writes elsewhere; with inputs of their own, larger together than the L2, each
    finds its inputs in memory.
    """
    for call in calls[:3]:
        call()
    if not torch.cuda.is_available():
        return time_on_device(name, calls[0], bytes_moved, repeats=repeats)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    whole = time_on_device(name, graph.replay, repeats=repeats)
    del kept
    return Timing(name, tuple(ms / len(calls) for ms in whole.repeats_ms), bytes_moved)


def _host_ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def copy_bytes_per_ms(num_bytes: int = 4 * GIB) -> float:
    """Read and written by a copy on the device, in all: what the floors of memory-bound work divide by."""
    source = torch.empty(num_bytes if torch.cuda.is_available() else 1 << 20, dtype=torch.uint8, device=device())
    target = torch.empty_like(source.random_(0, 256))
    return 2 * source.nbytes / time_on_device("copy", lambda: target.copy_(source)).median_ms


def peak_gib(work: Callable[[], object]) -> float | None:
    """The allocator's peak while work runs once, all that was live before counted too; None without a GPU."""
    if not torch.cuda.is_available():
        work()
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / GIB


def print_profile(work: Callable[[], object], rows: int = 30) -> None:
    """The kernels of one run of work by their time, after three runs that are not in it."""
    is_gpu = torch.cuda.is_available()
    for _ in range(3):
        work()
    kind = torch.profiler.ProfilerActivity.CUDA if is_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiled:
        work()
        if is_gpu:
            torch.cuda.synchronize()
    key = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    print(profiled.key_averages().table(sort_by=key, row_limit=rows, max_name_column_width=70), flush=True)


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in fp64, on got's device."""
    want = want.to(got.device, torch.float64)
    return float((got.double() - want).norm() / want.norm())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN equals NaN, and 0 differs from -0."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(words), b.contiguous().view(words))


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def describe_machine() -> dict[str, object]:
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    if not torch.cuda.is_available():
        return {"device": platform.processor() or "CPU", "driver": "none", "cuda": "none"} | versions
    properties = torch.cuda.get_device_properties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": driver,
        "cuda": torch.version.cuda,
    } | versions


def write_json(
    path: Path, machine: dict[str, object], config: dict[str, object], sections: dict[str, dict[str, object]]
) -> None:
    """sections: by name, each with floor_ms and timings, a list of Timing; what else is in it is written too."""
    write_result(path, {"machine": machine, "config": config, "sections": sections})


def write_result(path: Path, result: dict[str, object]) -> None:
    """JSON; a Timing in it is written as its `to_json`."""
    text = json.dumps(result, indent=1, default=Timing.to_json)
    text = re.sub(
        r"\[[\d.,\s]+\]", lambda numbers: " ".join(numbers[0].split()), text
    )  # a timing's repeats on one line
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
