"""Puts a results file into the README as a table, between the two marks that name the file.

    python3 kernels/bench/table.py kernels/bench/results/xor_compact_h200.json kernels/README.md

Without a README it prints the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OURS = "ours"


def render(result: dict[str, Any]) -> str:
    """Rows of several peers: a line a case; rows of layers: a line each. Else a result's own `table`, header first, or
    medians in ms, in brackets as multiples of the section's floor_ms, a column a section."""
    if "rows" in result and "what" in result["rows"][0]:
        rows = _of_layers(result["rows"])
    elif "rows" in result:
        rows = _of_peers(result["rows"])
    else:
        rows = result["table"] if "table" in result else _of_sections(result["sections"])
    align = ["---", *["---:"] * (len(rows[0]) - 1)]
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in _versions(machine))
    lines = "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], align, *rows[1:]))
    return f"{machine['device']}; {versions}.\n\n{lines}"


def _versions(machine: Mapping[str, Any]) -> list[tuple[str, Any]]:
    known = ("driver", "cuda", "torch", "triton", "python", "fla-core", "nvidia-cudnn-frontend")
    return [(name, machine[name]) for name in known if name in machine]


def _of_sections(sections: dict[str, Any]) -> list[list[str]]:
    cells: dict[str, dict[str, str]] = {}
    for column, section in sections.items():
        for timing in section["timings"]:
            times_floor = timing["median_ms"] / section["floor_ms"]
            cells.setdefault(timing["name"], {})[column] = f"{timing['median_ms']:.3f} ({times_floor:.2f})"
    return [["", *sections], *([name, *(by.get(column, "") for column in sections)] for name, by in cells.items())]


def _of_peers(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Median and spread of ours, a peer's fastest variant and its multiple of ours; memory and errors in one order."""
    peers = list(dict.fromkeys(row["peer"] for row in rows if row["peer"] != OURS))
    cases: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["section"], row["layout"], row["size"]), []).append(row)
    everybody = ", ".join((OURS, *peers))
    header = ["what", "size", "ours, ms", *(f"{peer}, ms" for peer in peers), "x floor"]
    header += [f"peak GiB: {everybody}", f"worst error: {everybody}", "same bits"]
    return [header, *(_of_case(case, cases[case], peers) for case in sorted(cases))]


def _of_case(case: tuple[str, str, int], rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> list[str]:
    section, layout, size = case
    best = {peer: _fastest([row for row in rows if row["peer"] == peer]) for peer in (OURS, *peers)}
    cells = [f"{section}, {layout}" if layout else section, f"{size:,}"]
    ours = best[OURS]
    ours_ms = ours["timing"]["median_ms"] if ours and ours["timing"] else None
    cells.append("" if ours is None or ours_ms is None else f"{ours_ms:.3f} ± {ours['timing']['spread_ms']:.3f}")
    for peer in peers:
        row = best[peer]
        if row is None or (row["timing"] is None and row["failed"] is None):
            cells.append("")
        elif row["failed"] is not None:
            cells.append(f"fails: {row['failed'].partition(':')[0]}")
        else:
            ms = row["timing"]["median_ms"]
            cells.append(f"{ms:.3f}" if ours_ms is None else f"{ms:.3f} ({ms / ours_ms:.2f} ×)")
    cells.append("" if ours is None or ours_ms is None or not ours["floor_ms"] else f"{ours_ms / ours['floor_ms']:.2f}")
    everybody = [best[peer] for peer in (OURS, *peers)]
    peaks = ["-" if row is None or row["peak_gib"] is None else f"{row['peak_gib']:.2f}" for row in everybody]
    errors = ["-" if row is None or not row["errors"] else _worst(row["errors"]) for row in everybody]
    bits = "" if ours is None else {None: "", True: "yes", False: "no"}[ours["same_bits"]]
    return [*cells, *("" if set(parts) == {"-"} else ", ".join(parts) for parts in (peaks, errors)), bits]


def _of_layers(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Of bench_block.py, a line a row; of a peer, its time as a multiple of ours."""
    ours = {row["what"]: row["timing"]["median_ms"] for row in rows if row["by"] == OURS}
    header = ["what", "tokens", "by", "ms", "× ours", "peak GiB", "worst error", "same bits"]
    lines = [header]
    for row in rows:
        ms, bits = row["timing"]["median_ms"], "yes" if row["same_bits"] else "no"
        cells = [row["what"], f"{row['tokens']:,}", row["by"], f"{ms:.1f} ± {row['timing']['spread_ms']:.1f}"]
        ratio = "" if row["by"] == OURS else f"{ms / ours[row['what']]:.2f}"
        lines.append([*cells, ratio, f"{row['peak_gib']:.1f}", _worst(row["errors"]), bits])
    return lines


def _fastest(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The row that is compared; one that failed only where no variant did better."""
    return min(
        rows,
        key=lambda row: (row["failed"] is not None, row["timing"]["median_ms"] if row["timing"] else 0.0),
        default=None,
    )


def _worst(errors: Mapping[str, float]) -> str:
    name = max(errors, key=errors.__getitem__)
    return f"{errors[name]:.1e} ({name})"


def put_between_marks(readme: str, name: str, table: str) -> str:
    before, mark, rest = readme.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->\n")
    if not end:
        raise ValueError(f"the README lacks the lines <!-- {name} --> and <!-- end of {name} -->: add them")
    return f"{before}{mark}{table}\n{end}{after}"


def main(results: Path, readme: Path | None = None) -> None:
    table = render(json.loads(results.read_text()))
    if readme is None:
        print(table)
    else:
        readme.write_text(put_between_marks(readme.read_text(), results.name, table))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
