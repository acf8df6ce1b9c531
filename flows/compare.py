"""A against B on the same prompts."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from flows.evaluate import evaluate_version, find_version
from infra.console import bars, say
from infra.report import plot_comparison
from infra.stages.evaluate import find_evaluation, read_report
from infra.store import Store
from k3core.eval.compare import EvalMetric, compare, prompt_differences
from k3core.types import EvalReport

METRICS: tuple[EvalMetric, ...] = ("reward", "fraction", "all_pass")


def run_compare(root: str, a: tuple[str, int | None], b: tuple[str, int | None], confidence: float) -> int:
    """Prints the paired differences B - A with their intervals, and draws those of the reward prompt by prompt."""
    first, second = evaluation_of(root, *a), evaluation_of(root, *b)
    names = f"{first.run}@{first.step}", f"{second.run}@{second.step}"
    table = Table(title=f"{names[1]} against {names[0]}")
    for column in ("", names[0], names[1], "difference", f"{confidence:.0%} interval", "P(better)"):
        table.add_column(column, justify="right" if column else "left")
    comparisons = {metric: compare(first, second, metric, confidence) for metric in METRICS}
    for metric, c in comparisons.items():
        interval = f"[{c.ci_low:+.3f}, {c.ci_high:+.3f}]"
        means = f"{c.mean_a:.3f}", f"{c.mean_b:.3f}"
        table.add_row(metric, *means, f"{c.difference:+.3f}", interval, f"{c.p_better:.3f}")
    Console().print(table)
    reward = comparisons["reward"]
    say(f"{reward.n_prompts} prompts, paired by prompt; {reward.n_ungraded} left out for want of a grade")
    folder = Store(root).local_path(second.run) or Path()
    picture = folder / f"compare-{names[0]}-{names[1]}.png"
    plot_comparison(reward, prompt_differences(first, second, "reward"), picture)
    say(f"picture: {picture}")
    return 0


def evaluation_of(root: str, run: str, step: int | None) -> EvalReport:
    """The stored evaluation; a version that was published but not evaluated is evaluated now."""
    store = Store(root)
    inputs, policy = find_version(root, run, step)
    record = find_evaluation(store, run, policy.step)
    if record is None:
        with bars():
            record = evaluate_version(inputs, root, policy)
    return read_report(store, record)
