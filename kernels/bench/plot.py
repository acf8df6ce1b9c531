"""The results files of the benches beside peers as one picture: time over the floor of bytes, by size.

python kernels/bench/plot.py docs/images/kernels.png kernels/bench/results/{kda,kda_layer,attn_res}_h200.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

COLORS = {"ours": "#1b6ca8", "fla": "#c8553d", "cudnn": "#6a994e"}
TITLES = {"kda_h200": "KDA", "kda_layer_h200": "KDA layer", "attn_res_h200": "Attention Residuals"}
UNITS = {"decode": "sequences"}


def panels(results: list[Path]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """By title and peer: sizes and multiples of the floor, of each peer's fastest form."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for path in results:
        for row in json.loads(path.read_text())["rows"]:
            if row["timing"] is None or not row["floor_ms"]:
                continue
            part = f", {row['layout']}" if row["layout"] else ""
            sizes = found.setdefault(f"{TITLES[path.stem]}, {row['section']}{part}", {}).setdefault(row["peer"], {})
            times = row["timing"]["median_ms"] / row["floor_ms"]
            sizes[row["size"]] = min(times, sizes.get(row["size"], times))
    return {title: {peer: sorted(sizes.items()) for peer, sizes in by.items()} for title, by in found.items()}


def draw(axis: Any, title: str, lines: dict[str, list[tuple[int, float]]]) -> None:
    for peer, points in lines.items():
        axis.plot(*zip(*points, strict=True), marker="o", markersize=4, color=COLORS[peer], label=peer)
    axis.set_xscale("log", base=2)
    sizes = sorted({size for points in lines.values() for size, _ in points})
    axis.set_xticks(sizes, [f"{size // 1024}K" if size >= 1024 else str(size) for size in sizes])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(UNITS.get(title.split(", ")[1], "tokens"), fontsize=8)
    axis.tick_params(labelsize=6.5)
    axis.grid(alpha=0.3)
    axis.axhline(1, color="black", linewidth=0.8, linestyle=":")


def main(picture: Path, *results: Path) -> None:
    found = panels(list(results))
    columns = 4
    rows = -(-len(found) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.2 * columns, 2.7 * rows), layout="constrained", squeeze=False)
    for axis, title in zip(axes.flat, sorted(found), strict=False):
        draw(axis, title, found[title])
    for axis in axes.flat[len(found) :]:
        axis.axis("off")
    handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="lower right", ncols=3, fontsize=9)
    figure.supylabel("time, as a multiple of the floor of bytes", fontsize=9)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
