"""What all stage tasks have in common: their settings, and a results folder that survives kill -9."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from prefect import State, Task
from prefect.cache_policies import INPUTS, TASK_SOURCE
from prefect.client.schemas.objects import TaskRun
from prefect.exceptions import ExternalSignal
from prefect.settings import get_current_settings

from infra.console import say
from infra.launch import ChildFailed, is_stopping
from infra.task_settings import Patience
from k3core.errors import IntegrityError, RunError

P = ParamSpec("P")
R = TypeVar("R")

# A task is a pure function of its references: equal inputs give the stored result, in this run and in the next try.
CACHE = INPUTS + TASK_SOURCE


def configured(task: Task[P, R], patience: Patience, *, watches_itself: bool = False) -> Task[P, R]:
    """The task with its stage's retries and, unless what it starts has the time-out, time-out."""
    return task.with_options(
        retries=patience.retries,
        retry_delay_seconds=patience.retry_delay_s,
        timeout_seconds=None if watches_itself else patience.timeout_s,
        retry_condition_fn=worth_retrying,
    )


def worth_retrying(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Not what would fail the same way again: a setting, a broken file, a diagnosis. Says what is tried again."""
    del run
    error = state.result(raise_on_failure=False)
    if is_stopping() or _was_told_to_stop(error):
        return False
    if isinstance(error, (ValueError, IntegrityError, RunError)) and not isinstance(error, ChildFailed):
        return False
    say(f"{task.name}: {type(error).__name__}: {error}; trying again")
    return True


def _was_told_to_stop(error: object) -> bool:
    """Whether it came of what a signal's handler raised, in the middle of an operation that then failed in its own way:
    tried again, the run would go on as if nobody had asked it to end."""
    while isinstance(error, BaseException):
        if isinstance(error, ExternalSignal | KeyboardInterrupt | SystemExit):
            return True
        error = error.__cause__ or error.__context__
    return False


def discard_torn_results(still_writing_s: float = 1.0) -> list[Path]:
    """Delete the result files that a killed process left half written, so that their tasks run again.

    Prefect writes them in place, and would fail for ever on one that does not parse. One that changes within
    `still_writing_s` is being written by another process that works on the run, and stays.
    """
    folder = Path(get_current_settings().results.local_storage_path)
    torn = {
        path: path.stat().st_mtime_ns for path in sorted(folder.glob("*")) if path.is_file() and not _is_whole(path)
    }
    if not torn:
        return []
    time.sleep(still_writing_s)
    left = [path for path, changed in torn.items() if path.exists() and path.stat().st_mtime_ns == changed]
    for path in left:
        path.unlink(missing_ok=True)
    return left


def _is_whole(path: Path) -> bool:
    try:
        document = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(document, dict) and {"metadata", "result"} <= document.keys()
