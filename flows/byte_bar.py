"""A progress bar of bytes, on stderr; nothing where that is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@contextmanager
def byte_bar(what: str, before: str | None = None) -> Iterator[Callable[[int, int], None]]:
    """Yields a function of (done, of). before: what is going on until it is first called, where that is another thing."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(bar_width=30), DownloadColumn(binary_units=True)
    with Progress(
        *columns, TransferSpeedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(before or what, total=None)
        yield lambda done, of: bar.update(task, description=what, completed=done, total=of)
