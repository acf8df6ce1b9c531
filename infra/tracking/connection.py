"""Where MLflow is: an SQLite file of this machine, which several processes share, or a server."""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

# Its table creation and migrations are no news to a person who waits for a step.
logging.getLogger("mlflow").setLevel(logging.WARNING)
logging.getLogger("alembic").setLevel(logging.WARNING)

T = TypeVar("T")

LOCK_TIMEOUT_S = 300.0


def connect(uri: str) -> tuple[MlflowClient, FileLock]:
    """A client, and the lock under which to look for something and create it."""
    lock = _lock_of(uri)
    if (database := sqlite_file(uri)) is not None:
        _make_tables(uri, database)
    return MlflowClient(tracking_uri=uri, registry_uri=uri), lock


@cache
def _make_tables(uri: str, database: Path) -> None:
    """The tables of a new file are made by one process, while the others wait: MLflow lets each of them try.

    The file is in WAL mode from its beginning, in which readers (the UI) and a writer do not wait for each other.
    """
    database.parent.mkdir(parents=True, exist_ok=True)
    with _lock_of(uri):
        if not database.exists():
            _create_in_wal_mode(database)
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)
        client.search_registered_models(max_results=1)


def sqlite_file(uri: str) -> Path | None:
    """None when the tracking store is no local file."""
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]).absolute() if uri.startswith("sqlite:///") else None


def is_http(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def keep_first(found: Sequence[T], order: Callable[[T], Any], delete: Callable[[T], object]) -> T | None:
    """The one that stays, of things that must exist once; None when there is none.

    No lock reaches every process that uses a server. Two that create at the same time leave two; whoever looks next
    deletes all but the first.
    """
    ordered = sorted(found, key=order)
    for extra in ordered[1:]:
        try:
            delete(extra)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # else the other process was quicker
                raise
    return ordered[0] if ordered else None


def _lock_of(uri: str) -> FileLock:
    """Beside the database. For a server, a lock of this machine and user: it leaves the races between machines alone."""
    if (database := sqlite_file(uri)) is not None:
        return FileLock(f"{database}.lock", timeout=LOCK_TIMEOUT_S)
    name = hashlib.sha256(f"{os.getuid()} {uri}".encode()).hexdigest()[:16]
    return FileLock(Path(tempfile.gettempdir()) / f"k3-mlflow-{name}.lock", timeout=LOCK_TIMEOUT_S)


def _create_in_wal_mode(database: Path) -> None:
    connection = sqlite3.connect(database)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
    finally:
        connection.close()
