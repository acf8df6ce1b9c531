"""What all stage tasks have in common."""

from __future__ import annotations

from typing import ParamSpec, TypeVar

from prefect import Task
from prefect.cache_policies import INPUTS, TASK_SOURCE

from infra.config import TasksConfig

P = ParamSpec("P")
R = TypeVar("R")

# A task is a pure function of its references: equal inputs give the stored result, in this run and in the next try.
CACHE = INPUTS + TASK_SOURCE


def configured(task: Task[P, R], cfg: TasksConfig) -> Task[P, R]:
    """The task with the run's retries and time-out."""
    return task.with_options(retries=cfg.retries, retry_delay_seconds=cfg.retry_delay_s, timeout_seconds=cfg.timeout_s)
