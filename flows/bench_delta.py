"""`k3 bench delta --run`: what deltas of a real run take, beside their entropy and a compressed XOR."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import zstandard
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from flows.bench_machine import describe_machine
from infra.policies import Held, load, read_version
from infra.store import Store
from infra.version_chain import find_steps
from k3core.checkpoint.delta import apply_delta, encode_delta
from k3core.checkpoint.floor import entropy_floor
from k3core.checkpoint.tensors import RawTensor, Weights, from_torch, to_safetensors, to_torch
from k3core.errors import IntegrityError
from k3core.sealed import canonical_json
from k3kernels.mxfp4 import GROUP, pack, repack

DTYPES = ("bf16", "mxfp4", "stored")
EXPERT = re.compile(r"\.experts\.\d+\.w[123]\.weight$")
SMALL_CLASSES = 3
REFERENCE = (
    "Fireworks' report on RL for Kimi K3, a checkpoint of 1,024 GiB: a delta is 98 % smaller;\n"
    "over 50 steps, with whole versions from time to time, 94 % less is sent."
)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Bytes of one version. manifest: the entries of the delta, as JSON. dense: the XOR of each tensor, zstd level 1.

    delta_3: the same delta with SMALL_CLASSES magnitude classes, which takes longer.
    """

    step: int
    changed_fraction: float
    full: int
    delta: int
    delta_3: int
    floor: float
    dense: int
    manifest: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Over all versions after the first. saved: by sending deltas and manifests in place of whole versions, with a
    whole one first and then each full_every steps."""

    num_steps: int
    changed_fraction: float
    full: int
    delta: int
    delta_3: int
    floor: float
    dense: int
    manifest: int
    full_every: int
    saved: float
    saved_3: float


def measure_run(root: str, run: str, dtype: str, full_every: int, out: Path, experts_only: bool = False) -> int:
    """Encodes and applies the delta of each published version, and writes delta-sizes.json and .png into `out`.

    experts_only: of the routed experts' tensors alone, which are nearly all of a released model and a part of a tiny one.

    Raises ValueError for a run without two whole versions, and IntegrityError when a version does not return bit for
    bit.
    """
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    if full_every < 1:
        raise ValueError(f"--full-every {full_every}: expected at least 1")
    found = versions(Store(root), run, dtype)
    if experts_only:
        found = ((step, _experts_of(run, weights)) for step, weights in found)
    pairs = itertools.pairwise(found)
    rows = [measure_step(step, parent, new) for (_, parent), (step, new) in pairs]
    if not rows:
        raise ValueError(f"{run}: fewer than two versions are published in {root}; choose the folder with --root")
    totals = sum_up(rows, full_every)
    what = f"{dtype}, routed experts alone" if experts_only else dtype
    print_sizes(run, what, rows, totals)
    out.mkdir(parents=True, exist_ok=True)
    document = {
        "run": run,
        "dtype": dtype,
        "experts_only": experts_only,
        "totals": asdict(totals),
        "steps": [asdict(row) for row in rows],
        "machine": describe_machine(),
    }
    (out / "delta-sizes.json").write_text(json.dumps(document, indent=1) + "\n")
    sizes_figure(rows, f"{run}, {what}").savefig(out / "delta-sizes.png", dpi=150)
    print(f"\n{out / 'delta-sizes.json'}, {out / 'delta-sizes.png'}")
    return 0


def versions(store: Store, run: str, dtype: str) -> Iterator[tuple[int, dict[str, RawTensor]]]:
    """Each published version in turn, as an engine that serves `dtype` would get it."""
    held: Held | None = None
    packed: dict[str, RawTensor] = {}
    for step in find_steps(store, run):
        version = read_version(store, run, step)
        assert version is not None, "nothing deletes a manifest"
        if version.kind == "adapter":
            raise ValueError(f"{run} step {step} is an adapter, which is always sent whole: choose a run of mode full")
        weights = load(store, version, held)
        held = Held(version.weights_sha256, weights)
        if dtype == "mxfp4":
            packed = as_mxfp4(weights, packed)
            yield step, packed
        else:
            yield step, as_bf16(weights) if dtype == "bf16" else weights


def _experts_of(run: str, weights: Weights) -> dict[str, RawTensor]:
    experts = {name: raw for name, raw in weights.items() if ".experts." in name}
    if not experts:
        raise ValueError(f"--experts-only: {run} has no routed experts")
    return experts


def as_bf16(weights: Weights) -> dict[str, RawTensor]:
    """Floating-point tensors rounded to the nearest bfloat16, ties to even."""
    return from_torch(
        {
            name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in to_torch(weights).items()
        }
    )


def as_mxfp4(weights: Weights, before: Weights) -> dict[str, RawTensor]:
    """Routed experts packed, with the bytes of `before` (the version before, packed) where values did not change; other
    floating-point tensors as bfloat16.

    Where a matrix is not a multiple of 32 wide, groups run on over the ends of its rows: the sizes are those of the
    format, though no engine reads that. Raises ValueError for weights without routed experts.
    """
    experts = [name for name in weights if EXPERT.search(name)]
    if not experts and not any(name.endswith(".weight_packed") for name in weights):
        raise ValueError("--dtype mxfp4: the run's weights have no routed experts to pack")
    old = to_torch({name: raw for name, raw in before.items() if name.endswith((".weight_packed", ".weight_scale"))})
    tensors = {name: raw for name, raw in as_bf16(weights).items() if not EXPERT.search(name)}
    for name, values in to_torch({name: weights[name] for name in experts}).items():
        if values.shape[-1] % GROUP:
            values = values.flatten()
        codes, scale = f"{name}_packed", f"{name}_scale"
        pair = repack(values, old[codes], old[scale]) if codes in old else pack(values)
        tensors |= from_torch({codes: pair[0], scale: pair[1]})
    return tensors


def measure_step(step: int, parent: Weights, new: Weights) -> StepSizes:
    """Raises IntegrityError unless both deltas give the new version back."""
    sizes: list[int] = []
    for max_classes in (1, SMALL_CLASSES):
        payload, entries = encode_delta(parent, new, max_classes=max_classes)
        if apply_delta(parent, entries, payload, f"delta of step {step}") != new:
            raise IntegrityError(f"delta of step {step}: expected the published weights bit for bit, found others")
        sizes.append(len(payload))
    changed, elements = (sum(of) for of in zip(*((e.num_changed, e.num_elements) for e in entries), strict=True))
    return StepSizes(
        step=step,
        changed_fraction=changed / max(elements, 1),
        full=len(to_safetensors(new)),
        delta=sizes[0],
        delta_3=sizes[1],
        floor=entropy_floor(parent, new).total_bytes,
        dense=dense_xor_bytes(parent, new),
        manifest=len(canonical_json({"entries": [asdict(entry) for entry in entries]})),
    )


def dense_xor_bytes(parent: Weights, new: Weights) -> int:
    """What slime's disk delta stores: the XOR bytes of each tensor as they lie, zstd level 1."""
    compressor = zstandard.ZstdCompressor(level=1)
    xor = (np.frombuffer(parent[name].data, np.uint8) ^ np.frombuffer(new[name].data, np.uint8) for name in new)
    return sum(len(compressor.compress(of.tobytes())) for of in xor)


def sum_up(rows: Sequence[StepSizes], full_every: int) -> Totals:
    def sent(deltas: Sequence[int]) -> float:
        return sum(
            row.full if index % full_every == 0 else delta + row.manifest
            for index, (row, delta) in enumerate(zip(rows, deltas, strict=True))
        )

    full = sum(row.full for row in rows)
    return Totals(
        num_steps=len(rows),
        changed_fraction=sum(row.changed_fraction for row in rows) / len(rows),
        full=full,
        delta=sum(row.delta for row in rows),
        delta_3=sum(row.delta_3 for row in rows),
        floor=sum(row.floor for row in rows),
        dense=sum(row.dense for row in rows),
        manifest=sum(row.manifest for row in rows),
        full_every=full_every,
        saved=1 - sent([row.delta for row in rows]) / full,
        saved_3=1 - sent([row.delta_3 for row in rows]) / full,
    )


def print_sizes(run: str, dtype: str, rows: Sequence[StepSizes], totals: Totals) -> None:
    # Deltas are a hundredth of a version and less.
    unit, divisor = ("kB", 1e3) if rows[0].full < 1e8 else ("MB", 1e6) if rows[0].full < 1e11 else ("GB", 1e9)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("step", "changed", "full", "dense", "floor"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("delta", f"{SMALL_CLASSES} cl."):
        for column in (heading, "/floor", "dense/"):
            table.add_column(column, justify="right", no_wrap=True)
    labelled: list[tuple[str, StepSizes | Totals]] = [*((str(row.step), row) for row in rows), ("all", totals)]
    for label, row in labelled:
        ratios = [
            (f"{delta / row.floor:.2f}", f"{row.dense / delta:.2f}") if row.floor else ("", "")
            for delta in (row.delta, row.delta_3)
        ]
        full, dense, floor, delta, delta_3 = (
            f"{value / divisor:,.{0 if value >= 100 * divisor else 1}f}"
            for value in (row.full, row.dense, row.floor, row.delta, row.delta_3)
        )
        changed = f"{row.changed_fraction:.2%}"
        table.add_row(label, changed, full, dense, floor, delta, *ratios[0], delta_3, *ratios[1])
    print(f"{run}, {dtype}: each version after the first, {unit}; every delta was applied and compared bit for bit\n")
    Console().print(table)
    print(
        "\ndense: the XOR of each tensor under zstd level 1, as slime stores it. floor: the entropy of which elements"
    )
    print("changed and of their XOR, those of a tensor taken as alike; a delta below it makes use of the base.")
    if dtype == "mxfp4":
        print("Of packed experts a changed element is a byte: two weights of four bits, or the scale of 32.")
    print(f"Last columns: with {SMALL_CLASSES} magnitude classes, which take two to three times as long.")
    smaller, smaller_3 = (1 - delta / totals.full for delta in (totals.delta, totals.delta_3))
    print(
        f"A delta is {smaller:.1%} ({SMALL_CLASSES} classes: {smaller_3:.1%}) smaller than the version. "
        f"{totals.num_steps} steps, whole versions first\nand each {totals.full_every}, else deltas and the "
        f"{totals.manifest / totals.num_steps / 1e3:,.1f} kB of each one's manifest entries: "
        f"{totals.saved:.1%} ({totals.saved_3:.1%}) less is sent."
    )
    print(f"For comparison: {REFERENCE}")


def sizes_figure(rows: Sequence[StepSizes], title: str) -> Figure:
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axis = figure.subplots()
    steps = [row.step for row in rows]
    for label, values, style in (
        ("whole", [row.full for row in rows], "k-"),
        ("dense XOR, zstd level 1", [row.dense for row in rows], "s--"),
        ("entropy floor of the XOR", [row.floor for row in rows], ":"),
        ("delta", [row.delta for row in rows], "o-"),
        (f"delta, {SMALL_CLASSES} magnitude classes", [row.delta_3 for row in rows], "^-"),
    ):
        axis.plot(steps, values, style, label=label, markersize=4)
    axis.set(title=title, xlabel="step", ylabel="bytes", yscale="log")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3)
    return figure
