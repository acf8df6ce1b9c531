"""A against B on the same prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flows.evaluate import evaluate_version, find_version
from infra.config import RunConfig
from infra.console import bars, say
from infra.report import plot_comparison
from infra.stages.evaluate import find_evaluation, read_report
from infra.store import Store
from k3core.eval.compare import EvalMetric, compare, prompt_differences
from k3core.types import EvalReport

METRICS: tuple[EvalMetric, ...] = ("reward", "fraction", "all_pass")


def run_compare(cfg: RunConfig, a: tuple[str, int], b: tuple[str, int]) -> int:
    """Prints the paired differences B - A with their intervals, and draws those of the reward prompt by prompt."""
    first, second = evaluation_of(cfg, *a), evaluation_of(cfg, *b)
    names = "@".join(map(str, a)), "@".join(map(str, b))
    level = f"{cfg.evaluate.confidence:.0%}"
    table = Table(title=f"{names[1]} against {names[0]}")
    for column in ("", names[0], names[1], "difference", f"{level} interval", "P(better)"):
        table.add_column(column, justify="left" if not column else "right")
    for metric in METRICS:
        c = compare(first, second, metric, cfg.evaluate.confidence)
        interval = f"[{c.ci_low:+.3f}, {c.ci_high:+.3f}]"
        table.add_row(
            metric, f"{c.mean_a:.3f}", f"{c.mean_b:.3f}", f"{c.difference:+.3f}", interval, f"{c.p_better:.3f}"
        )
    Console().print(table)
    c = compare(first, second, "reward", cfg.evaluate.confidence)
    say(f"{c.n_prompts} prompts, paired by prompt; {c.n_ungraded} left out for want of a grade")
    folder = Store(cfg.root).local_path(cfg.run) or Path()
    picture = folder / f"compare-{a[0]}-{a[1]}-{b[0]}-{b[1]}.png"
    plot_comparison(c, prompt_differences(first, second, "reward"), picture)
    say(f"picture: {picture}")
    return 0


def evaluation_of(cfg: RunConfig, run: str, step: int) -> EvalReport:
    """The stored evaluation; a version that was published but not evaluated is evaluated now."""
    store = Store(cfg.root)
    record = find_evaluation(store, run, step)
    if record is None:
        inputs, policy = find_version(replace(cfg, run=run), step)
        with bars():
            record = evaluate_version(inputs, cfg.root, policy)
    return read_report(store, record)
