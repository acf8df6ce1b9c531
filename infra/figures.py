"""The report's plots, in colours for paper. In a page each colour becomes a CSS variable: dark mode is CSS alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

INK, MUTED, RULE = "#1d2126", "#5d6671", "#d5d9de"
POLICY, CONTROL, EXPERT, WARNING = "#0b62a8", "#77808b", "#b9620f", "#b3261e"
CSS_VARIABLE: Mapping[str, str] = {
    INK: "--ink",
    MUTED: "--muted",
    RULE: "--rule",
    POLICY: "--policy",
    CONTROL: "--control",
    EXPERT: "--expert",
    WARNING: "--warning",
}

WIDTH_IN, HEIGHT_IN = 4.2, 2.7
_MAX_CRITERIA = 24
_STYLE = {
    "figure.constrained_layout.use": True,
    "font.size": 8.0,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlepad": 8.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 3.0,
    "ytick.major.size": 0.0,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "legend.fontsize": 8.0,
    "text.color": INK,
    "text.parse_math": False,  # a criterion's id may hold a dollar sign
    "svg.fonttype": "none",
}


@dataclass(frozen=True, slots=True)
class Curve:
    """One arm of an evaluation: mean and standard error at each policy step."""

    label: str
    steps: tuple[int, ...]
    means: tuple[float, ...]
    stderrs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One metric over the steps; NaN, where it is missing or not finite, is a gap and never a bridge."""

    label: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


_ARM_LOOK: tuple[Mapping[str, Any], ...] = (
    {"color": POLICY, "marker": "o", "linestyle": "-", "zorder": 4},
    {"color": CONTROL, "marker": "s", "linestyle": "--", "zorder": 3},
    {"color": EXPERT, "marker": "^", "linestyle": ":", "zorder": 3},
)
_LINE_LOOK: tuple[Mapping[str, Any], ...] = (
    {"color": POLICY, "marker": "o", "linestyle": "-", "zorder": 4},
    {"color": INK, "marker": "s", "linestyle": "--", "zorder": 3},
    {"color": MUTED, "marker": "^", "linestyle": ":", "zorder": 3},
)
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def curves_figure(panels: Mapping[str, Sequence[Curve]], ylabels: Sequence[str], title: str | None = None) -> Figure:
    """Arms with error bars (one standard error), one panel a metric. Arms come as policy, control, expert-only."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN * len(panels), HEIGHT_IN + (0.3 if title else 0.0)))
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold", color=INK)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (name, curves), ylabel in zip(axes, panels.items(), ylabels, strict=True):
            for curve, look in zip(curves, _ARM_LOOK, strict=False):
                axis.errorbar(
                    curve.steps,
                    curve.means,
                    yerr=curve.stderrs,
                    label=curve.label,
                    linewidth=1.6,
                    elinewidth=0.9,
                    capsize=2.2,
                    markersize=3.8,
                    **look,
                )
            if title:
                axis.set_title(name)
            axis.set_ylabel(ylabel)
            _step_axis(axis)
            _from_zero(axis)
            axis.margins(x=0.04)
            axis.legend(loc="best", handlelength=2.6)
    return figure


def lines_figure(lines: Sequence[Line], ylabel: str, *, log: bool = False, from_zero: bool = False) -> Figure:
    """Metrics by training step. A log axis is used only when something is above zero."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN))
        axis = figure.subplots()
        log = log and any(value > 0 for line in lines for value in line.values)
        for line, look in zip(lines, _LINE_LOOK, strict=False):
            values = np.array(line.values)
            if log:
                values = np.where(values > 0, values, np.nan)
            axis.plot(line.steps, values, label=line.label, linewidth=1.5, markersize=3.2, **look)
        axis.set_ylabel(ylabel)
        _step_axis(axis)
        if log:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(FuncFormatter(_power_of_ten))
            axis.yaxis.set_minor_formatter(NullFormatter())
        if from_zero:
            _from_zero(axis)
        if len(lines) > 1:
            axis.legend(loc="best", handlelength=2.6)
    return figure


def criteria_figure(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[Figure, int]:
    """Pass rate of each criterion before and after, largest gain first; also how many did not fit and were left out."""
    common = sorted(before.keys() & after.keys(), key=lambda id: before[id] - after[id])
    by_size = sorted(common, key=lambda id: -abs(after[id] - before[id]))
    shown = [id for id in common if id in set(by_size[:_MAX_CRITERIA])]
    with matplotlib.rc_context(_STYLE | {"axes.grid.axis": "x", "ytick.labelcolor": INK}):
        figure = Figure(figsize=(WIDTH_IN, max(HEIGHT_IN, 0.9 + 0.22 * len(shown))))
        axis = figure.subplots()
        rows = range(len(shown))
        old = [100 * before[id] for id in shown]
        new = [100 * after[id] for id in shown]
        axis.hlines(rows, old, new, color=[POLICY if b >= a else WARNING for a, b in zip(old, new, strict=True)], lw=2)
        axis.plot(old, rows, "s", color=CONTROL, markersize=4.5, label="before", linestyle="none")
        axis.plot(new, rows, "o", color=POLICY, markersize=5.5, label="after", linestyle="none")
        axis.set_yticks(rows, [id if len(id) <= 28 else f"{id[:27]}…" for id in shown])
        axis.set_ylim(len(shown) - 0.4, -0.6)
        axis.set_xlim(-3, 103)
        axis.set_xlabel("samples that pass (%)")
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, handletextpad=0.2)
    return figure, len(common) - len(shown)


def bytes_figure(payload: Line, full_bytes: float) -> Figure:
    """Bytes of each published version beside those of the whole weights."""
    finite = [value for value in payload.values if math.isfinite(value)]
    unit, divisor = byte_unit(max([full_bytes, *finite]))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN))
        axis = figure.subplots()
        axis.bar(payload.steps, np.array(payload.values) / divisor, width=0.72, color=POLICY, label="published delta")
        axis.axhline(full_bytes / divisor, color=CONTROL, linestyle="--", linewidth=1.4, label="whole weights")
        axis.set_ylabel(f"size ({unit})")
        _step_axis(axis)
        axis.set_ylim(0.0, 1.3 * full_bytes / divisor)
        axis.legend(loc="upper right", ncols=2, handlelength=2.0)
    return figure


def stages_figure(seconds: Mapping[str, float]) -> Figure:
    """Wall-clock seconds by stage, in the order given."""
    with matplotlib.rc_context(_STYLE | {"axes.grid.axis": "x", "ytick.labelcolor": INK}):
        figure = Figure(figsize=(WIDTH_IN, max(HEIGHT_IN, 0.7 + 0.24 * len(seconds))))
        axis = figure.subplots()
        rows = range(len(seconds))
        axis.barh(rows, list(seconds.values()), height=0.62, color=POLICY)
        for row, value in zip(rows, seconds.values(), strict=True):
            axis.annotate(
                f"{value:,.1f}" if value < 100 else f"{value:,.0f}",
                (value, row),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                color=INK,
            )
        axis.set_yticks(rows, list(seconds))
        axis.set_ylim(len(seconds) - 0.4, -0.6)
        axis.set_xlim(0, 1.14 * max([*seconds.values(), 1e-9]))
        axis.set_xlabel("wall clock (s)")
    return figure


def differences_figure(differences: Sequence[float], low: float, mean: float, high: float, title: str) -> Figure:
    """Every prompt's difference in order of size, and the interval of their mean."""
    ordered = np.sort(np.array(differences))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(1.5 * WIDTH_IN, HEIGHT_IN + 0.3))
        axis = figure.subplots()
        colors = [POLICY if value > 0 else WARNING if value < 0 else CONTROL for value in ordered]
        axis.vlines(np.arange(1, len(ordered) + 1), 0, ordered, color=colors, linewidth=2)
        axis.scatter(np.arange(1, len(ordered) + 1), ordered, color=colors, s=9, zorder=3)
        axis.axhline(0.0, color=INK, linewidth=0.8)
        axis.axhspan(low, high, color=EXPERT, alpha=0.18, linewidth=0, label="interval of the mean")
        axis.axhline(mean, color=EXPERT, linewidth=1.3, label="mean difference")
        axis.set_xlabel("prompt, in order of its difference")
        axis.set_ylabel("difference (B − A)")
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axis.set_title(title)
        axis.legend(loc="upper left")
    return figure


def byte_unit(size_bytes: float) -> tuple[str, float]:
    """Decimal unit in which a size reads well, and its divisor."""
    for unit, divisor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= divisor:
            return unit, divisor
    return "bytes", 1.0


def save_png(figure: Figure, path: Path) -> None:
    with matplotlib.rc_context(_STYLE):
        figure.savefig(path, format="png", dpi=200, facecolor="white")


def inline_svg(figure: Figure, name: str) -> str:
    """An <svg> element for a page: as wide as its column, colours are CSS variables, ids are unique to `name`.

    Needs the page to style its text and to set stroke-linejoin and stroke-linecap, as matplotlib's own sheet would.
    """
    text = StringIO()
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)  # would style the page
    svg = (
        re.sub(r' (?:width|height|xmlns|xmlns:xlink|version)="[^"]*"', "", svg[: svg.index(">")])
        + svg[svg.index(">") :]
    )
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r" font-family: [^;]*;", "", svg)
    referenced = set(re.findall(r"#(\w+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in referenced else "", svg)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{name}"', 1)
    for color, variable in CSS_VARIABLE.items():
        svg = svg.replace(color, f"var({variable})")
    return svg


def _power_of_ten(value: float, _position: int) -> str:
    """10⁻⁶, or 3·10⁻⁶ where an axis has ticks between the powers."""
    exponent = math.floor(math.log10(value) + 1e-9)
    factor = value / 10.0**exponent
    power = f"10{str(exponent).translate(_SUPERSCRIPT)}"
    return power if abs(factor - 1.0) < 1e-6 else f"{factor:g}·{power}"


def _from_zero(axis: Axes) -> None:
    """Starts the axis at zero unless something is below, and gives an all-zero plot some height."""
    if axis.dataLim.y0 >= 0:
        axis.set_ylim(bottom=0.0)
    if axis.dataLim.y1 <= 0:
        axis.set_ylim(top=1.0)


def _step_axis(axis: Axes) -> None:
    axis.set_xlabel("policy step (updates)")
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
