"""What a person sees while it runs: a bar for each stage on a terminal, a line for each result everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

_console = Console(highlight=False)
_bars = Bars(
    TextColumn("{task.description:<24}"),
    BarColumn(bar_width=30),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    console=_console,
    transient=True,
    disable=not _console.is_terminal,
)


def say(line: str) -> None:
    _console.print(line, markup=False, soft_wrap=True)


@contextmanager
def bars() -> Iterator[None]:
    """Shows the bars of the stages that run inside."""
    with _bars:
        yield


@contextmanager
def stage_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A callback (done, of) that draws one bar until the stage ends."""
    bar = _bars.add_task(label, total=None)
    try:
        yield lambda done, of: _bars.update(bar, completed=done, total=of)
    finally:
        _bars.remove_task(bar)
