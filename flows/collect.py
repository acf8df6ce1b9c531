"""What `k3 delta gc` does: shows what a run no longer needs, and deletes it when told so."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from rich import box
from rich.markup import escape
from rich.table import Table

from flows.tables import print_table
from infra.aliases import aliased_steps, registry_uri
from infra.doctor import size
from infra.gc import Keep, Plan, collect, live
from infra.store import Store

SHOWN = 20  # the rest is counted


def collect_garbage(root: str, run: str, keep: Keep, mlflow: str | None, yes: bool) -> int:
    """Versions that an alias of the registry names stay, beside what `keep` says."""
    store = Store(root)
    now, aliases = datetime.now(UTC), aliased_steps(registry_uri(root, mlflow), run)
    plan = live(store, run, keep.with_steps(aliases), now)
    _print_plan(plan, aliases)
    if not plan.garbage:
        print("nothing may go")
    elif not yes:
        print(f"{len(plan.garbage)} files, {size(plan.size_bytes)}, may go; `--yes` deletes them")
    else:
        deleted = collect(store, plan, now)
        print(f"deleted {len(deleted)} files, {size(sum(item.size_bytes for item in deleted))}")
        if spared := len(plan.garbage) - len(deleted):
            print(f"{spared} stay: a version that was published meanwhile needs them")
    return 0


def _print_plan(plan: Plan, aliases: Mapping[int, str]) -> None:
    """One line for what stays, by reason; a table of what may go."""
    reasons = {step: f"{why}, {aliases[step]}" if step in aliases else why for step, why in plan.live.items()}
    for reason in dict.fromkeys(reasons.values()):
        steps = [str(step) for step, why in reasons.items() if why == reason]
        print(f"stays: step {', '.join(steps)} ({reason})")
    for step in sorted(plan.keep.steps & set(plan.dead)):
        print(f"gone: step {step} was to be kept, but was pruned before that was said")
    if not plan.garbage:
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("may go", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("because", overflow="fold")
    for item in plan.garbage[:SHOWN]:
        table.add_row(escape(item.key.removeprefix(f"{plan.run}/")), size(item.size_bytes), item.reason)
    if rest := plan.garbage[SHOWN:]:
        table.add_row(f"... and {len(rest)} more", size(sum(item.size_bytes for item in rest)), "")
    print_table(table)
