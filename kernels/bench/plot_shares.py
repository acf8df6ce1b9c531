"""Where a step spends its device time, by operation, as one picture: K3's layers, a 3 B model's training step and decoding.

python kernels/bench/plot_shares.py docs/images/shares.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from operations import OTHERS, operation_of

HERE = Path(__file__).parent
BLOCK, ENGINE = HERE / "results" / "block_h200.json", HERE / "checks" / "engine_h200.json"


def shares() -> dict[str, dict[str, float]]:
    """ms by operation of each step."""
    found = {}
    for what, step in json.loads(BLOCK.read_text())["profile"].items():
        found[what.removesuffix(" tokens").rpartition(",")[0]] = {
            op: ms for op, (ms, _) in step["by_operation"].items()
        }
    for batch, kernels in json.loads(ENGINE.read_text())["sections"]["profile"].items():
        if not isinstance(kernels, dict):  # how long it took
            continue
        by: dict[str, float] = {}
        for kernel, (_, ms) in kernels.items():
            by[operation_of(kernel)] = by.get(operation_of(kernel), 0.0) + ms
        found[f"decoding step of the 3 B model, {batch}"] = by
    return found


def main(picture: Path) -> None:
    found = shares()
    totals: dict[str, float] = {}
    for by in found.values():
        for op, ms in by.items():
            totals[op] = totals.get(op, 0.0) + ms / sum(by.values())
    operations = sorted(totals, key=lambda op: (op == OTHERS, -totals[op]))
    colors = dict(zip(operations, plt.get_cmap("tab20").colors, strict=False))
    figure, axis = plt.subplots(figsize=(10, 0.62 * len(found) + 1.6), layout="constrained")
    for y, by in enumerate(reversed(found.values())):
        total, left = sum(by.values()), 0.0
        for op in operations:
            share = 100 * by.get(op, 0.0) / total
            axis.barh(y, share, left=left, color=colors[op], label=op if y == 0 else None, height=0.7)
            if share > 3.5:
                axis.text(left + share / 2, y, f"{share:.0f}", ha="center", va="center", fontsize=7)
            left += share
    labels = [f"{what}\n{sum(by.values()):.1f} ms on the device" for what, by in found.items()]
    axis.set_yticks(range(len(found)), labels[::-1], fontsize=7.5)
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of the device's time", fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
