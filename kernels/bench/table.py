"""Puts a results file into the README as a table, between the two marks that name the file.

    python3 kernels/bench/table.py kernels/bench/results/xor_compact_h200.json kernels/README.md

Without a README it prints the table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def render(result: dict[str, Any]) -> str:
    """A result's own `table`, header first; else medians in ms, in brackets as multiples of the section's floor_ms, a
    column a section."""
    rows = result["table"] if "table" in result else _of_sections(result["sections"])
    align = ["---", *["---:"] * (len(rows[0]) - 1)]
    machine = result["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("driver", "cuda", "torch", "triton", "python"))
    lines = "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], align, *rows[1:]))
    return f"{machine['device']}; {versions}.\n\n{lines}"


def _of_sections(sections: dict[str, Any]) -> list[list[str]]:
    cells: dict[str, dict[str, str]] = {}
    for column, section in sections.items():
        for timing in section["timings"]:
            times_floor = timing["median_ms"] / section["floor_ms"]
            cells.setdefault(timing["name"], {})[column] = f"{timing['median_ms']:.3f} ({times_floor:.2f})"
    return [["", *sections], *([name, *(by.get(column, "") for column in sections)] for name, by in cells.items())]


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
