"""The picture of a sweep: every run's reward before and after, with standard errors, best at the top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from infra.figures import CONTROL, INK, MUTED, POLICY, RULE, WARNING, save_png
from infra.sweep import Outcome

WIDTH_IN, ROW_IN, MARGIN_IN = 6.4, 0.34, 1.1
_MAX_LABEL = 48
_OFFSET = 0.13  # of the two estimates from the middle of their row


def plot_sweep(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """outcomes: in the order of the rows. A failed run keeps its row, with the word where its numbers would be."""
    figure = Figure(figsize=(WIDTH_IN, MARGIN_IN + ROW_IN * len(outcomes)), layout="constrained")
    axis = figure.subplots()
    for row, outcome in enumerate(outcomes):
        if outcome.before is None or outcome.after is None:
            axis.annotate("failed", (0.01, row), xycoords=("axes fraction", "data"), va="center", color=WARNING)
            continue
        for estimate, color, marker, at in (
            (outcome.before, CONTROL, "s", row + _OFFSET),
            (outcome.after, POLICY, "o", row - _OFFSET),
        ):
            axis.errorbar(
                estimate.mean, at, xerr=estimate.stderr, color=color, marker=marker, capsize=2.5, markersize=5
            )
    for label, color, marker in (("before", CONTROL, "s"), ("after", POLICY, "o")):
        axis.plot([], [], marker, color=color, label=label)
    labels = [outcome.point.label for outcome in outcomes]
    axis.set_yticks(
        range(len(outcomes)), [text if len(text) <= _MAX_LABEL else f"{text[: _MAX_LABEL - 1]}…" for text in labels]
    )
    axis.set_ylim(len(outcomes) - 0.5, -0.5)
    axis.set_xlim(left=min(0.0, axis.get_xlim()[0]))
    axis.set_xlabel("mean reward on the evaluation prompts ± standard error", color=MUTED, fontsize=8)
    axis.set_title(title, loc="left", color=INK, fontsize=10, fontweight="bold")
    axis.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, handletextpad=0.2, fontsize=8)
    axis.grid(axis="x", color=RULE, linewidth=0.5)
    axis.set_axisbelow(True)
    axis.tick_params(colors=INK, length=0, labelsize=8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(RULE)
    save_png(figure, path)
