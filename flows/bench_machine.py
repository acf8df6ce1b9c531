"""What a figure of a bench depends on: processor, load and versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe_machine(
    packages: tuple[str, ...] = ("numpy", "zstandard", "blake3", "xxhash", "torch"),
) -> dict[str, object]:
    """load_average: over the last minute, before the bench could raise it much; None where the system has none."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in packages},
    }


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
