"""What `k3 delta` does with the published versions of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from flows.tables import print_table
from infra import policies
from infra.doctor import size
from infra.policies import load, read_version, stats, verify
from infra.policy_diff import TensorDifference, difference
from infra.serving import read_served
from infra.store import Store
from infra.version_chain import chain_of, find_steps
from k3core.checkpoint.floor import entropy_floor
from k3core.checkpoint.tensors import Weights, to_safetensors
from k3core.types import PolicyVersion

SHOWN = 20  # names; the rest is counted


def verify_versions(root: str, run: str, steps: Sequence[int] | None) -> int:
    """Rebuilds each version from its base and deltas. 1 when one is missing or broken. `steps` None: all."""
    store = Store(root)
    checks = verify(store, run, _steps(store, run) if steps is None else steps)
    for check in checks:
        said = check.error or "ok"
        print(f"{check.step:6d}  {check.kind or '-':7}  {said.partition(': ')[2] if check.is_pruned else said}")
    broken = sum(check.error is not None and not check.is_pruned for check in checks)
    pruned = sum(check.is_pruned for check in checks)
    whole = len(checks) - broken - pruned
    kept = f"; {pruned} were pruned" if pruned else ""
    print(f"{whole} of {len(checks)} versions of {run} are bit for bit what was published{kept}")
    return 1 if broken else 0


def print_stats(root: str, run: str, steps: Sequence[int] | None, floor: bool = False) -> int:
    """1 when one of `steps` is not published. `steps` None: all. floor: also the entropy of each delta."""
    store = Store(root)
    wanted = _steps(store, run) if steps is None else steps
    found = stats(store, run, wanted)
    served = read_served(store, run)
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("step", "kind", "on", "chain", "payload", "whole", "share", "changed", "sent", "ratio"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    if floor:
        table.add_column("floor", justify="right")
    sent = whole = 0
    for step in wanted:
        if step not in found:
            table.add_row(str(step), "missing")
            continue
        row = found[step]
        version = _require(store, run, step)
        sent, whole = sent + row.bytes_payload, whole + row.bytes_full
        is_served = served is not None and served.version.step == step
        table.add_row(
            str(step),
            row.kind + ("*" if is_served else ""),
            "" if version.parent is None else str(version.parent),
            str(len(chain_of(store, version))),
            size(row.bytes_payload),
            size(row.bytes_full),
            f"{row.bytes_payload / row.bytes_full:.1%}",
            "" if row.changed_fraction is None else f"{row.changed_fraction:.2%}",
            size(sent),
            f"{sent / whole:.1%}",
            *([_floor(store, version)] if floor else []),
        )
    print_table(table)
    print("chain: files that rebuild it; sent: payloads so far; ratio: of sent to as many whole versions")
    if served is not None:
        names = ", ".join(ack.engine for ack in served.acks)
        print(f"* served: step {served.version.step}, acknowledged by {names}")
    return 0 if len(found) == len(set(wanted)) else 1


def reconstruct(root: str, run: str, step: int, out: Path) -> int:
    """Writes a version as one safetensors file, by rename. Raises ValueError when it is not published."""
    store = Store(root)
    version = _require(store, run, step)
    data = to_safetensors(load(store, version))
    written = out.with_name(f".{out.name}.tmp")
    written.write_bytes(data)
    os.replace(written, out)
    print(f"{out}: {version.kind} {run} step {step}, {size(len(data))}, weights sha256 {version.weights_sha256}")
    return 0


def compact(root: str, run: str, step: int | None) -> int:
    """A whole copy of a version that is a delta, of the served or else the newest one for None."""
    store = Store(root)
    if step is None:
        served = read_served(store, run)
        step = _steps(store, run)[-1] if served is None else served.version.step
    version = _require(store, run, step)
    num_files = len(chain_of(store, version))
    anchor = policies.compact(store, version)
    if anchor is None:
        print(f"{run} step {step} is whole already")
    elif num_files == 1:
        print(f"{run} step {step} has a whole copy already: {anchor.uri}")
    else:
        print(f"{run} step {step}: one whole copy in place of {num_files} files")
        print(anchor.uri)
        print(f"it is the version that it was, weights sha256 {version.weights_sha256}")
        print(f"`k3 delta gc {run}` shows what is not needed any more")
    return 0


def print_difference(root: str, run: str, a: int, b: int, top: int) -> int:
    """Tensor by tensor, the largest difference first."""
    store = Store(root)
    first, second = (_weights(store, run, step) for step in (a, b))
    found = difference(first, second)
    changed = [tensor for tensor in found.tensors if tensor.num_changed]
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("tensor", overflow="fold", max_width=52)
    table.add_column("dtype")
    for heading in ("elements", "changed", "share", "max |Δ|"):
        table.add_column(heading, justify="right")
    for tensor in changed[:top]:
        table.add_row(escape(tensor.name), *_columns(tensor))
    if len(changed) > top:
        table.add_row(f"... and {len(changed) - top} more; --top shows more")
    table.add_section()
    for total in found.by_dtype().values():
        table.add_row(total.name, *_columns(total))
    print_table(table)
    print(f"{run} step {a} and step {b}: {len(changed)} of {len(found.tensors)} common tensors differ")
    for names, where in (
        (found.only_a, f"only in step {a}"),
        (found.only_b, f"only in step {b}"),
        (found.reshaped, "of another dtype or shape"),
    ):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            print(f"{where}: {', '.join(names[:SHOWN])}{more}")
    return 0


def _columns(tensor: TensorDifference) -> tuple[str, ...]:
    share = tensor.num_changed / max(tensor.num_elements, 1)
    gap = "not finite" if math.isnan(tensor.max_abs) else f"{tensor.max_abs:.3g}"
    return tensor.dtype, f"{tensor.num_elements:,}", f"{tensor.num_changed:,}", f"{share:.2%}", gap


def _floor(store: Store, version: PolicyVersion) -> str:
    """Of a delta: the entropy of which elements changed and of their XOR."""
    if version.parent is None:
        return ""
    parent = _require(store, version.run, version.parent)
    return size(entropy_floor(load(store, parent), load(store, version)).total_bytes)


def _weights(store: Store, run: str, step: int) -> Weights:
    return load(store, _require(store, run, step))


def _require(store: Store, run: str, step: int) -> PolicyVersion:
    version = read_version(store, run, step)
    if version is None:
        raise ValueError(
            f"step {step} of {run} is not published in {store.uri(run).removesuffix(f'/{run}')}; "
            f"`k3 delta stats {run}` shows what is"
        )
    return version


def _steps(store: Store, run: str) -> range:
    """The first to the last published version. Raises ValueError when there is none."""
    steps = find_steps(store, run)
    if not steps:
        raise ValueError(f"{run}: nothing is published in {store.uri(run)}; choose the folder with --root")
    return range(steps[0], steps[-1] + 1)
