"""Our kernel and its peers at the same sizes, in one process: rows, ratios, and what ours has to keep to.

A row that could not be measured says why and holds no figure.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import peers
import torch
from harness import Timing, write_result

OURS = "ours"


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured: the pass (`forward`, ...), the layout of its inputs ("" where there is one), tokens or sequences."""

    section: str
    size: int
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation at one case.

    peer: whose it is, `ours` for ours; variant tells its forms apart. failed: why there are no figures. errors: relative
    to fp64, by tensor, in `checked` (which part of each tensor). same_bits: of two runs; None where not compared.
    """

    case: Case
    peer: str
    variant: str = ""
    timing: Timing | None = None
    floor_ms: float | None = None
    peak_gib: float | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    checked: str = ""
    same_bits: bool | None = None
    failed: str | None = None

    @property
    def name(self) -> str:
        return f"{self.peer}, {self.variant}" if self.variant else self.peer

    def to_json(self) -> dict[str, object]:
        """Of the timing the repeats, in ms; errors to three digits."""
        return {
            "section": self.case.section,
            "layout": self.case.layout,
            "size": self.case.size,
            "peer": self.peer,
            "variant": self.variant,
            "timing": self.timing,
            "floor_ms": self.floor_ms,
            "peak_gib": self.peak_gib,
            "errors": {name: float(f"{error:.3g}") for name, error in self.errors.items()},
            "checked": self.checked,
            "same_bits": self.same_bits,
            "failed": self.failed,
        }

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Row:
        timing = row["timing"]
        if timing is not None:
            timing = Timing(timing["name"], tuple(timing["repeats_ms"]), timing["bytes_moved"], timing.get("host_ms"))
        kept = {name: row[name] for name in ("floor_ms", "peak_gib", "errors", "checked", "same_bits", "failed")}
        return cls(Case(row["section"], row["size"], row["layout"]), row["peer"], row["variant"], timing, **kept)


def attempt(blank: Row, measure: Callable[[Row], Row]) -> Row:
    """measure(blank), or blank with what stopped it. Memory that it held is free again afterwards."""
    try:
        return measure(blank)
    except Exception as error:  # a peer may fail in any way; the others are still measured
        first_line = next(iter(str(error).splitlines()), "")
        return replace(blank, failed=f"{type(error).__name__}: {first_line[:200]}")
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def fastest(rows: Sequence[Row], case: Case, peer: str) -> float | None:
    """The least median of a peer's variants, in ms; None where it has none."""
    times = [row.timing.median_ms for row in rows if row.case == case and row.peer == peer and row.timing is not None]
    return min(times, default=None)


def table(rows: Sequence[Row], peers: Sequence[str]) -> list[list[str]]:
    """A line a row, header first. `PEER / this`: the time of the peer's fastest variant as a multiple of the row's."""
    ratios = [f"{peer} / this" for peer in peers]
    header = ["what", "size", "by", "ms", "spread", "host ms"]
    header += [*ratios, "x floor", "peak GiB", "worst error", "same bits"]
    return [header, *(_cells(row, rows, peers) for row in rows)]


def _cells(row: Row, rows: Sequence[Row], peers: Sequence[str]) -> list[str]:
    what = f"{row.case.section}, {row.case.layout}" if row.case.layout else row.case.section
    start = [what, f"{row.case.size:,}", row.name]
    if row.failed is not None:
        return [*start, f"failed: {row.failed}", *[""] * (len(peers) + 6)]
    ms = None if row.timing is None else row.timing.median_ms
    spread = "" if row.timing is None else f"{row.timing.spread_ms:.3f}"
    host_ms = None if row.timing is None else row.timing.host_ms
    host = "" if host_ms is None else f"{host_ms:.2f}"
    ratios = [_ratio(fastest(rows, row.case, peer), ms) for peer in peers]
    peak = "" if row.peak_gib is None else f"{row.peak_gib:.2f}"
    worst = max(row.errors, key=lambda name: row.errors[name], default=None)
    error = "" if worst is None else f"{row.errors[worst]:.1e} ({worst})"
    bits = {None: "", True: "yes", False: "no"}[row.same_bits]
    return [
        *start,
        "" if ms is None else f"{ms:.3f}",
        spread,
        host,
        *ratios,
        _ratio(ms, row.floor_ms),
        peak,
        error,
        bits,
    ]


def _ratio(above: float | None, below: float | None) -> str:
    return "" if above is None or below is None else f"{above / below:.2f}"


def violations(rows: Sequence[Row], limits: Mapping[str, float]) -> list[str]:
    """What ours does not keep to, a line each. limits: the largest error by tensor."""
    found = []
    for row in rows:
        if row.peer != OURS:
            continue
        where = f"{row.case.section} {row.case.layout} at {row.case.size:,}".replace("  ", " ")
        if row.failed is not None:
            found.append(f"{where}: {row.failed}")
        if row.same_bits is False:
            found.append(f"{where}: two runs differ in their bits")
        for name, error in row.errors.items():
            if not error <= limits[name]:  # NaN too
                found.append(f"{where}: {name} is off by {error:.2e}, allowed {limits[name]:.1e}")
    return found


class Results:
    """The rows of a results file, written after each. A case measured again loses all of its earlier rows, so that those
    set against each other come from one process.

    Raises ValueError for a file from another machine or other versions.
    """

    def __init__(self, path: Path, machine: dict[str, object], config: dict[str, object], peers: Sequence[str]) -> None:
        self.path, self.machine, self.config, self.peers = path, machine, config, peers
        self.rows: list[Row] = []
        self._here: set[Case] = set()
        if path.exists():
            earlier = json.loads(path.read_text())
            if earlier["machine"] != machine:
                raise ValueError(f"{path} was measured on another machine or other versions: give another --out")
            self.rows = [Row.from_json(row) for row in earlier["rows"]]

    def add(self, row: Row) -> None:
        if row.case not in self._here:
            self._here.add(row.case)
            self.rows = [earlier for earlier in self.rows if earlier.case != row.case]
        self.rows.append(row)
        print(" | ".join(_cells(row, self.rows, self.peers)), flush=True)
        self._write()

    @property
    def measured_here(self) -> list[Row]:
        return [row for row in self.rows if row.case in self._here]

    def table(self) -> list[list[str]]:
        return table(sorted(self.rows, key=lambda row: (row.case.section, row.case.layout, row.case.size)), self.peers)

    def _write(self) -> None:
        rows = [row.to_json() for row in self.rows]
        write_result(self.path, {"machine": self.machine, "config": self.config, "rows": rows})


def print_table(cells: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell; a failure's text runs over its neighbours."""
    widths = [max(len(cell) for cell in column if not cell.startswith("failed")) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def report(results: Results, limits: Mapping[str, float], tuned_here: Sequence[str] | None = None) -> int:
    """Prints the table and what ours does not keep to; the exit status, 1 where there is something of that.

    tuned_here: FLA's kernels that were, where it is a peer.
    """
    print_table(results.table())
    tuned = "" if tuned_here is None else f"; FLA kernels tuned in this process: {', '.join(tuned_here) or 'none'}"
    print(f"written to {results.path}{tuned}")
    broken = violations(results.measured_here, limits)
    for line in broken:
        print(line)
    return 1 if broken else 0


Parser = argparse.ArgumentParser


def command_line(
    doc: str, lengths: Sequence[int], tuned_lengths: Sequence[int], results: Path
) -> tuple[Parser, Parser, Parser, Parser]:
    """The parser, and those of its commands run, tune and shard, with the options that the benches share."""
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="measure")
    run.add_argument("--lengths", type=numbers, default=tuple(lengths), help="tokens, default %(default)s")
    run.add_argument("--repeats", type=int, default=20)
    run.add_argument("--profile", type=int, metavar="T", help="print our kernels at T tokens and stop")
    run.add_argument("--out", type=Path, help=f"JSON file to write, default {results.name} beside the other results")
    run.add_argument("--dry", action="store_true", help="toy sizes, on a CPU")
    tuning = commands.add_parser("tune", help="let FLA choose its configurations, and keep them")
    shard = commands.add_parser("shard", help="a process of tune's")
    shard.add_argument("which", type=int)
    shard.add_argument("of", type=int)
    for command in (tuning, shard):
        command.add_argument("--lengths", type=numbers, default=tuple(tuned_lengths))
    for command in (run, tuning):
        command.add_argument("--tuned", type=Path, default=peers.TUNED, help="FLA's configurations")
    return parser, run, tuning, shard


def numbers(text: str) -> tuple[int, ...]:
    """Of a command line's option: `4096,16384`."""
    return tuple(int(number) for number in text.split(","))


def is_there(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(module), name)
