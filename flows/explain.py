"""What a version comes from, in the terminal or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from infra.lineage import OnBytes, ancestry, newest_step, origin_of
from infra.lineage_view import closing, render
from infra.store import Store

WIDTH = 120  # of a pipe, which has none


def run_explain(root: str, run: str, step: int | None, depth: int, is_checked: bool, as_json: bool) -> int:
    """1 when something that the version comes from is missing or altered. `step` None: the newest."""
    store = Store(root)
    wanted = _newest(store, root, run) if step is None else step
    with _bar() as on_bytes:
        found = ancestry(store, run, wanted, check=is_checked, on_bytes=on_bytes)
    if as_json:
        print(json.dumps({"run": run, "step": wanted, "is_checked": is_checked, **found.to_json()}, indent=1))
        if found.problems:
            print(*closing(found, is_checked), sep="\n", file=sys.stderr)
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = WIDTH
        console.print(render(found, depth, is_checked), soft_wrap=not console.is_terminal)
    return 1 if found.problems else 0


def _newest(store: Store, root: str, run: str) -> int:
    """In a run that holds scores alone, the step that they are of."""
    newest = newest_step(store, run)
    if newest is not None:
        return newest
    origin = origin_of(store, run)
    if origin is None:
        raise ValueError(f"{root}: run {run!r} has no version here; say where it lies with --root")
    return int(origin["step"])


@contextmanager
def _bar() -> Iterator[OnBytes]:
    """On stderr, so that JSON can be piped."""
    console = Console(stderr=True)
    columns = TextColumn("check"), BarColumn(bar_width=30), DownloadColumn(binary_units=True), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)
