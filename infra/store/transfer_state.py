"""The small file that says how far a transfer got; a reader sees a whole one or none."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def read_state(file: Path, kind: type[DataclassInstance]) -> dict[str, Any] | None:
    """The fields of a `kind`. None without a file, and for one that is no such state: after a power loss, say."""
    try:
        state = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return state if isinstance(state, dict) and state.keys() == {field.name for field in fields(kind)} else None


def write_state(file: Path, state: DataclassInstance) -> None:
    written = _written(file)
    written.write_text(json.dumps(asdict(state)), encoding="ascii")
    os.replace(written, file)


def remove_state(file: Path) -> None:
    """With what a process that was killed while it wrote has left beside it."""
    file.unlink(missing_ok=True)
    _written(file).unlink(missing_ok=True)


def _written(file: Path) -> Path:
    return file.with_name(f"{file.name}.new")
