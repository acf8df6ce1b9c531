"""Timing on one GPU: device events around each repeat, medians, and a JSON file that says where they come from."""

from __future__ import annotations

import json
import platform
import re
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton


@dataclass(frozen=True, slots=True)
class Timing:
    """bytes_moved: the fewest that the work can read and write, all repeats alike; 0 where that says nothing."""

    name: str
    repeats_ms: tuple[float, ...]
    bytes_moved: int = 0

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
            "repeats_ms": [round(repeat, 4) for repeat in self.repeats_ms],
        }


def time_on_device(
    name: str, work: Callable[[], object], bytes_moved: int = 0, warmup: int = 3, repeats: int = 20
) -> Timing:
    """Between two events on the stream: launches and work, and gaps between the launches of one repeat."""
    for _ in range(warmup):
        work()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return Timing(name, tuple(start.elapsed_time(end) for start, end in events), bytes_moved)


def describe_machine() -> dict[str, object]:
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
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def write_json(
    path: Path, machine: dict[str, object], config: dict[str, object], sections: dict[str, dict[str, object]]
) -> None:
    """sections: by name, each with floor_ms and timings, a list of Timing; what else is in it is written too."""
    result = {"machine": machine, "config": config, "sections": sections}
    text = json.dumps(result, indent=1, default=Timing.to_json)
    text = re.sub(
        r"\[[\d.,\s]+\]", lambda numbers: " ".join(numbers[0].split()), text
    )  # a timing's repeats on one line
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
