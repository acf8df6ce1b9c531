"""A fence around what a cancelled stage still does: once it is up, nothing that the stage writes reaches the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Cancelled(Exception):
    """The stage was cancelled while it ran."""


_up: ContextVar[threading.Event | None] = ContextVar("fence", default=None)


@contextmanager
def fenced(cancelled: threading.Event) -> Iterator[None]:
    """From when `cancelled` is set, `pass_fence` raises for whoever runs in this context."""
    token = _up.set(cancelled)
    try:
        yield
    finally:
        _up.reset(token)


def pass_fence() -> None:
    """Raises Cancelled behind a raised fence. The store asks before each write, long loops between their rounds."""
    cancelled = _up.get()
    if cancelled is not None and cancelled.is_set():
        raise Cancelled("the stage was cancelled; nothing more is written")
