"""How many cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: "max 100000", or microseconds of each period


def usable_cores(quota: Path = QUOTA) -> int:
    """Those that it may be scheduled on, or fewer whole ones where a container's quota gives no more; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        share, period = quota.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if share == "max" else max(1, min(cores, int(share) // int(period)))
