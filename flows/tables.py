"""Tables on a terminal, in a file or in a pipe."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.text import Text

PIPE_COLUMNS = 100


def print_table(table: RenderableType) -> None:
    """As wide as the terminal; where there is none, in a file or a pipe, wide enough that nothing is cut."""
    console().print(table)


def print_line(line: str) -> None:
    """Wrapped between words where the terminal is narrow."""
    console().print(Text(line))


def console() -> Console:
    found = Console(highlight=False)
    if not found.is_terminal and found.width < PIPE_COLUMNS:
        found = Console(width=PIPE_COLUMNS, highlight=False)
    return found
