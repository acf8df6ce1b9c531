"""`k3 parity`: whether an engine's log-probabilities are a trainer's, bit by bit, in every way that the engine computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flows.bench_machine import describe_machine
from flows.model_source import find_model
from flows.quantities import size
from flows.tables import print_line, print_table
from k3core.model.sizes import num_parameters
from k3core.parity import WAYS, Parity, ParityCase

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPIES = 3  # of the weights at a time: the trainer's, an engine's, and the next engine's
Gap = tuple[ParityCase, ParityCase]


def run_parity(preset: str, dtypes: Sequence[str], device: str, out: Path | None) -> int:
    """1 when any bit differs or a way was not taken. Raises ValueError for a model, a device or a file that is not there,
    and for a model that does not fit into memory."""
    cfg = find_model(preset).cfg
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; leave it out to use the CPU")
    if out is not None and not out.absolute().parent.is_dir():
        raise ValueError(f"--json {out}: {out.absolute().parent} is not a folder")
    needed = COPIES * num_parameters(cfg) * max(DTYPES[name].itemsize for name in DTYPES)
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    if needed > free:
        raise ValueError(f"--preset {preset}: its weights take {size(needed)} at a time, and {size(free)} are free")
    cases: dict[str, list[ParityCase]] = {}
    with _progress(len(dtypes) * len(WAYS) + 1) as is_done:
        for name in dtypes:
            cases[name] = Parity(cfg, DTYPES[name], device).cases(lambda case: is_done(case.name))
        gap = Parity(cfg, torch.float32, device).replay_gap(torch.bfloat16)
        is_done("replay gap")
    print_table(_ways_table(cases))
    print_table(_gap_table(gap))
    complaints = [line for name, found in cases.items() for case in found for line in _complaints(name, case)]
    for line in complaints:
        print_line(line)
    if out is not None:
        document = {
            "preset": preset,
            "device": device if device == "cpu" else torch.cuda.get_device_name(),
            "holds": not complaints,
            "cases": {name: [asdict(case) for case in found] for name, found in cases.items()},
            "replay_gap": [asdict(case) for case in gap],
            "machine": describe_machine(),
        }
        out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if complaints else 0


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, nothing where that is no terminal; yields what to call with the name of each part that is done."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description:<34}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("weights", total=total)
        yield lambda name: bar.update(task, description=name, advance=1)


def _ways_table(cases: Mapping[str, Sequence[ParityCase]]) -> Table:
    title = "the engine against the trainer's pass: what differs, and by how many nats at most"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for heading in ("way", "seen by"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tokens", *(f"{name}\n{what}" for name in cases for what in ("logprobs", "routes", "largest"))):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in zip(*cases.values(), strict=True):
        figures = [(f"{c.num_differing:,}", f"{c.num_routes_differing:,}", f"{c.max_abs:.2g}") for c in row]
        table.add_row(
            row[0].name, row[0].evidence, f"{row[0].num_tokens:,}", *(text for each in figures for text in each)
        )
    return table


def _gap_table(gap: Sequence[ParityCase]) -> Table:
    table = Table(
        box=box.SIMPLE,
        pad_edge=False,
        title="the replay gap: a bf16 engine under an fp32 trainer",
        title_justify="left",
    )
    table.add_column("experts", no_wrap=True)
    for heading in ("tokens", "routes that differ", "mean |difference|, nat", "largest"):
        table.add_column(heading, justify="right")
    for case in gap:
        routes = f"{case.num_routes_differing:,} of {case.num_routes:,}"
        table.add_row(case.name, f"{case.num_tokens:,}", routes, f"{case.mean_abs:.2g}", f"{case.max_abs:.2g}")
    return table


def _complaints(dtype: str, case: ParityCase) -> Iterator[str]:
    where = f"{dtype}, {case.name}"
    if not case.is_taken:
        yield f"{where}: the way was not taken ({case.evidence}), so it shows nothing"
    if case.num_differing:
        yield (
            f"{where}: {case.num_differing:,} of {case.num_tokens:,} logprobs differ, by up to {case.max_abs:.2g} nat"
        )
    if case.num_routes_differing:
        yield f"{where}: {case.num_routes_differing:,} of {case.num_routes:,} routed experts differ"
