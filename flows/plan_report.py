"""What `k3 plan` shows: memory of one GPU term by term and as a bar, traffic, what to cut, the longest context."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from flows.model_source import find_model
from flows.quantities import duration, size
from flows.tables import console, print_line, print_table
from k3core.model.config import K3Config
from k3core.plan import (
    ATTENTION,
    MACHINES,
    Cut,
    Machine,
    Mesh,
    Phase,
    Plan,
    Training,
    cuts,
    largest_context,
    packed,
    plan,
    present_targets,
)

AXES = ("fsdp", "ep", "cp", "tp")
SHOWN = 8  # of what is alive in the layer being recomputed
CUTS = 3
TIGHT = 0.05  # of the memory: less to spare, and fragmentation may take it
COLORS = ("blue", "cyan", "green", "yellow", "magenta", "red", "bright_blue", "bright_cyan", "bright_green", "white")
MARKS = "ABCDEFGHIJ"


def report(
    model: str,
    gpus: int,
    context: int,
    mode: Literal["lora", "full"],
    mesh: str | None,
    gpu_memory: str,
    rank: int,
    targets: str | None,
    batch_tokens: int | None,
    rollout_sequences: int,
    as_json: bool,
) -> int:
    """1 when it does not fit."""
    cfg = find_model(model).cfg
    chosen = present_targets(cfg, ATTENTION) if targets is None else tuple(dict.fromkeys(targets.split(",")))
    training = Training(packed(context, batch_tokens), mode, rank, chosen, rollout_sequences=rollout_sequences)
    machine, axes = parse_machine(gpu_memory), parse_mesh(mesh, gpus, cfg)
    made = plan(cfg, machine, axes, training)
    longest = largest_context(cfg, machine, axes, training)
    if as_json:
        print(json.dumps(to_json(model, made, longest), indent=1))
    else:
        _print(model, made, longest)
    return 0 if made.fits else 1


def parse_machine(text: str) -> Machine:
    if text in MACHINES:
        return MACHINES[text]
    try:
        memory = float(text)
    except ValueError:
        memory = math.nan
    if not (math.isfinite(memory) and memory > 0):
        raise ValueError(f"--gpu-memory {text}: expected {', '.join(MACHINES)}, or a number of bytes such as 141e9")
    return Machine(f"{size(memory)} a GPU", memory)


def parse_mesh(text: str | None, gpus: int, cfg: K3Config) -> Mesh:
    """`fsdp=8,ep=8`; an axis that is not named has one rank. GPUs beyond the axes' product hold replicas."""
    if text is None:
        return Mesh(fsdp=gpus, ep=math.gcd(gpus, cfg.num_experts))
    ranks: dict[str, int] = {}
    for part in text.split(","):
        axis, _, number = part.partition("=")
        if axis not in AXES or not number.isdecimal() or int(number) < 1 or axis in ranks:
            raise ValueError(f"--mesh {text}: expected each of {', '.join(AXES)} at most once, as in fsdp=8,ep=8,cp=1")
        ranks[axis] = int(number)
    mesh = Mesh(**ranks)
    if gpus % mesh.num_gpus:
        raise ValueError(
            f"--mesh {text} and --gpus {gpus}: fsdp x cp x tp = {mesh.num_gpus} must divide the GPUs (ep ranks are among "
            "those of fsdp x cp)"
        )
    return replace(mesh, dp=gpus // mesh.num_gpus)


def to_json(model: str, made: Plan, longest: int) -> dict[str, Any]:
    return {
        "model": model,
        "machine": asdict(made.machine),
        "mesh": {**asdict(made.mesh), "gpus": made.mesh.num_gpus},
        "training": asdict(made.training),
        "fits": made.fits,
        "peak": {"phase": made.peak.name, "bytes": round(made.peak_bytes)},
        "phases": [
            {"name": phase.name, "bytes": round(phase.num_bytes), "rows": [asdict(row) for row in phase.rows]}
            for phase in made.phases
        ],
        "alive_in_the_layer": {name: round(num_bytes) for name, num_bytes in made.largest},
        "traffic": [asdict(flow) for flow in made.flows],
        "cuts": [asdict(cut) for cut in cuts(made)],
        "largest_context": longest,
        "notes": list(made.notes),
    }


def _print(model: str, made: Plan, longest: int) -> None:
    mesh, training = made.mesh, made.training
    ranks = ", ".join(f"{axis}={getattr(mesh, axis)}" for axis in ("dp", *AXES) if getattr(mesh, axis) > 1)
    gpus = f"{mesh.num_gpus} GPUs ({ranks})" if mesh.num_gpus > 1 else "1 GPU"
    print_line(f"{model} on {gpus}, {made.machine.name}: {size(made.machine.memory_bytes)} of each usable")
    sequences = f"{len(training.lengths)} x {training.context:,} tokens" if len(training.lengths) > 1 else ""
    print_line(f"{training.mode}: {sequences or f'{training.context:,} tokens'} in a pass of each data rank")
    print_table(_memory(made.peak, made))
    print_table(_bar(made))
    others = [phase for phase in made.phases if phase is not made.peak]
    print_line("at other times: " + ", ".join(f"{phase.name} {size(phase.num_bytes)}" for phase in others))
    print_table(_alive(made))
    if made.flows:
        print_table(_traffic(made))
    print_line(_verdict(made, longest))
    for cut in cuts(made)[:CUTS]:
        print_line(_cut(cut))
    for note in made.notes:
        print_line(f"note: {note}")


def _memory(phase: Phase, made: Plan) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("")
    table.add_column(f"one GPU, {phase.name}", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("split by", no_wrap=True)
    table.add_column("source", no_wrap=True)
    table.add_column("of what", overflow="fold")
    for mark, color, row in zip(MARKS, COLORS, phase.rows, strict=False):
        table.add_row(Text(mark, style=color), row.name, size(row.num_bytes), row.split, row.source, row.note)
    table.add_section()
    table.add_row(
        "", "all", size(phase.num_bytes), "", "", f"{phase.num_bytes / made.machine.memory_bytes:.0%} of a GPU"
    )
    return table


def _bar(made: Plan) -> Text:
    """One GPU's memory from left to right; what is larger than the GPU goes on behind the mark."""
    width = max(20, console().width - 2)
    whole = max(made.machine.memory_bytes, made.peak_bytes)
    text, drawn, end = Text(), 0, 0.0
    for mark, color, row in zip(MARKS, COLORS, made.peak.rows, strict=False):
        end += row.num_bytes
        columns = round(end / whole * width) - drawn
        text.append(mark * columns, style=f"black on {color}")
        drawn += columns
    free = round(made.machine.memory_bytes / whole * width)
    text.append("·" * max(0, free - drawn))
    limit = Text(" " * max(0, min(free, width) - 1) + "^", style="bold")
    label = f" {size(made.machine.memory_bytes)}"
    if free + len(label) > width:
        limit = Text(" " * max(0, free - 1 - len(label)) + f"{label.strip()} ^", style="bold")
    else:
        limit.append(label)
    return Text("\n").join([text, limit])


def _alive(made: Plan) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("alive in that layer at its peak", overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    total = sum(num_bytes for _, num_bytes in made.largest)
    for name, num_bytes in made.largest[:SHOWN]:
        table.add_row(name, size(num_bytes), f"{num_bytes / total:.0%}")
    if rest := made.largest[SHOWN:]:
        num_bytes = sum(num_bytes for _, num_bytes in rest)
        table.add_row(f"{len(rest)} more", size(num_bytes), f"{num_bytes / total:.0%}")
    return table


def _traffic(made: Plan) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("sent by one GPU, a pass and a step", overflow="fold")
    table.add_column("axis", no_wrap=True)
    table.add_column("bytes", justify="right")
    table.add_column("over", overflow="fold")
    table.add_column("time", justify="right")
    speeds = {"NVLink": made.machine.nvlink_bytes_per_s, "network": made.machine.network_bytes_per_s}
    for flow in made.flows:
        link = f"{flow.link}, {speeds[flow.link] / 1e9:.0f} GB/s"
        table.add_row(flow.name, flow.axis, size(flow.num_bytes), link, duration(flow.seconds))
    return table


def _verdict(made: Plan, longest: int) -> str:
    spare = made.machine.memory_bytes - made.peak_bytes
    if spare < 0:
        said = f"does not fit: {size(-spare)} too much on each GPU"
    elif spare < TIGHT * made.machine.memory_bytes:
        said = f"fits, with {size(spare)} to spare, which the allocator's fragmentation may take"
    else:
        said = f"fits, with {size(spare)} to spare"
    context = f"the longest context that fits is {longest:,} tokens" if longest else "no context fits"
    return f"{said}; {context}, one sequence in a pass"


def _cut(cut: Cut) -> str:
    return f"{cut.term}: {cut.change} saves {size(cut.saved_bytes)} a GPU"
