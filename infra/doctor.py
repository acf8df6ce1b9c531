"""What is missing on this machine, and for which feature. Imports neither torch nor any other dependency by itself."""

from __future__ import annotations

import importlib
import os
import shutil
import sqlite3
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, ModuleType

from packaging.requirements import Requirement

from k3core.errors import RunError

DISTRIBUTION = "k3rl"
PYTHON = (3, 11)
SQLITE = (3, 24, 0)  # Prefect's own bound
DISK_BYTES = 1 << 30  # a demo run, its baselines and MLflow's database
SGLANG_TIMEOUT_S = 3.0

# Compiled packages are imported, because an installed one may still not load; the others are only looked up.
COMPILED = ("torch", "numpy", "tokenizers", "safetensors", "zstandard", "triton")
# Not needed by every run: what each is for.
OPTIONAL: Mapping[str, str] = MappingProxyType({"triton": "the GPU kernels", "s3fs": "s3:// stores"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked thing. `remedy` says what to do, and is empty where nothing needs doing."""

    name: str
    ok: bool
    required: bool
    detail: str
    remedy: str = ""


def diagnose(root: str = "runs", sglang_url: str | None = None) -> list[Finding]:
    """Never raises for what is missing: that is a finding. `sglang_url` None: no engine is asked."""
    found = [_python(), *_packages(root), *_devices(), _sqlite(), *check_root(root, DISK_BYTES)]
    return found if sglang_url is None else [*found, _sglang(sglang_url)]


def local_folder(root: str) -> Path | None:
    """The folder that a store root stands for; None where it lies elsewhere."""
    scheme, separator, rest = root.partition("://")
    if not separator:
        return Path(root)
    return Path(rest) if scheme == "file" else None


def check_root(root: str, needed_bytes: int) -> Iterator[Finding]:
    """Whether `root` can be written, safely by several at once, and holds `needed_bytes`. Leaves nothing there."""
    folder = local_folder(root)
    if folder is None:
        if root.startswith("memory://"):
            yield Finding("root", True, True, f"{root}: lost when the process ends")
        else:
            yield _object_store(root)
        return
    nearest = folder.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        yield Finding("root", False, True, f"{folder}: {error}", "choose another folder with root=...")
        return
    yield Finding("root", True, True, f"{folder}: writable")
    free = shutil.disk_usage(nearest).free
    yield Finding(
        "disk",
        free >= needed_bytes,
        True,
        f"{size(free)} free, {size(needed_bytes)} needed",
        "" if free >= needed_bytes else "free some space, or choose another folder with root=...",
    )


def _object_store(root: str) -> Finding:
    store = importlib.import_module("infra.store")  # here, because its dependencies may be what is missing
    try:
        store.Store(root, store.StoreOptions(tries=2)).check_conditions()
    except (store.StoreUnavailable, RunError) as error:
        return Finding("root", False, True, str(error), "see docs/operations.md for what a store needs")
    return Finding("root", True, True, f"{root}: writable, and conditional writes hold")


def size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def _python() -> Finding:
    ok = sys.version_info[:2] >= PYTHON
    wanted = ".".join(map(str, PYTHON))
    return Finding("python", ok, True, sys.version.split()[0], "" if ok else f"install Python {wanted} or newer")


def _packages(root: str) -> Iterator[Finding]:
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield Finding(DISTRIBUTION, False, True, "not installed", "make setup")
        return
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", "kernels")):
            yield _package(requirement, root)


def _package(requirement: Requirement, root: str) -> Finding:
    name = requirement.name
    is_required = name not in OPTIONAL or (name == "s3fs" and root.startswith("s3://"))
    purpose = f" ({OPTIONAL[name]})" if name in OPTIONAL else ""
    remedy = f"pip install '{name}{requirement.specifier}'{purpose}"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, False, is_required, "not installed", remedy)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(name, False, is_required, f"{version} is outside {requirement.specifier}", remedy)
    loaded = _load(name) if name in COMPILED else None
    if isinstance(loaded, str):
        return Finding(name, False, is_required, f"{version} does not load: {loaded}", f"reinstall it: {remedy}")
    return Finding(name, True, is_required, f"{version}{purpose}")


def _load(name: str) -> ModuleType | str:
    """The module, or the first line of why it does not load: a missing CUDA or C library is an OSError."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        return str(error).partition("\n")[0]


def _devices() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch = _load("torch")
    if isinstance(torch, str):
        yield Finding("threads", True, False, f"{cores} cores")
        return
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield Finding(
        "gpu",
        bool(names),
        False,
        ", ".join(names) or "none: everything runs on the CPU",
        "" if names else "needed for models larger than tiny",
    )
    threads = torch.get_num_threads()
    yield Finding(
        "threads",
        threads <= cores,
        False,
        f"{threads} torch threads on {cores} cores",
        "" if threads <= cores else f"export OMP_NUM_THREADS={cores}: more threads than cores wait for each other",
    )


def _sqlite() -> Finding:
    ok = sqlite3.sqlite_version_info >= SQLITE
    wanted = ".".join(map(str, SQLITE))
    remedy = "" if ok else f"Prefect needs SQLite {wanted} or newer: use a newer Python build, or PostgreSQL"
    return Finding("sqlite", ok, True, sqlite3.sqlite_version, remedy)


def _sglang(url: str) -> Finding:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=SGLANG_TIMEOUT_S):
            return Finding("sglang", True, False, f"{url}: healthy")
    except (OSError, ValueError) as error:  # URLError is an OSError; a malformed URL is a ValueError
        return Finding("sglang", False, False, f"{url}: {error}", "start it, or correct the URL")
