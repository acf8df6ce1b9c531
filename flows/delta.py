"""What `k3 delta` does with the published versions of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from infra.doctor import size
from infra.policies import load, read_version, stats, verify
from infra.store import Store
from k3core.checkpoint.tensors import to_safetensors
from k3core.errors import IntegrityError

# Versions are found by key, never by a listing; a gap shorter than this is reported as missing versions.
LOOK_AHEAD = 32


def verify_versions(root: str, run: str, steps: Sequence[int] | None) -> int:
    """Rebuilds each version from its base and deltas. 1 when one is missing or broken. `steps` None: all."""
    store = Store(root)
    checks = verify(store, run, _steps(store, run) if steps is None else steps)
    for check in checks:
        print(f"{check.step:6d}  {check.kind or '-':7}  {check.error or 'ok'}")
    broken = sum(check.error is not None for check in checks)
    print(f"{len(checks) - broken} of {len(checks)} versions of {run} are bit for bit what was published")
    return 1 if broken else 0


def print_stats(root: str, run: str, steps: Sequence[int] | None) -> int:
    """1 when one of `steps` is not published. `steps` None: all."""
    store = Store(root)
    wanted = _steps(store, run) if steps is None else steps
    found = stats(store, run, wanted)
    table = Table("step", "kind", "payload", "whole", "payload/whole", "changed elements", box=box.SIMPLE)
    for step in wanted:
        if step not in found:
            table.add_row(str(step), "missing", "", "", "", "")
            continue
        row = found[step]
        changed = "" if row.changed_fraction is None else f"{row.changed_fraction:.2%}"
        share = f"{row.bytes_payload / row.bytes_full:.1%}"
        table.add_row(str(step), row.kind, size(row.bytes_payload), size(row.bytes_full), share, changed)
    Console().print(table)
    return 0 if len(found) == len(set(wanted)) else 1


def reconstruct(root: str, run: str, step: int, out: Path) -> int:
    """Writes a version as one safetensors file, by rename. Raises ValueError when it is not published."""
    store = Store(root)
    version = read_version(store, run, step)
    if version is None:
        raise ValueError(f"step {step} of {run} is not published in {root}; `k3 delta stats {run}` shows what is")
    data = to_safetensors(load(store, version))
    written = out.with_name(f".{out.name}.tmp")
    written.write_bytes(data)
    os.replace(written, out)
    print(f"{out}: {version.kind} {run} step {step}, {size(len(data))}, weights sha256 {version.weights_sha256}")
    return 0


def _steps(store: Store, run: str) -> range:
    """0 to the last published version. Raises ValueError when there is none."""
    last, step = -1, 0
    while step - last <= LOOK_AHEAD:
        if _exists(store, run, step):
            last = step
        step += 1
    if last < 0:
        raise ValueError(f"{run}: nothing is published in {store.uri(run)}; choose the folder with --root")
    return range(last + 1)


def _exists(store: Store, run: str, step: int) -> bool:
    try:
        return read_version(store, run, step) is not None
    except IntegrityError:  # it is there, and what is wrong with it is for the caller to report
        return True
