"""A whole copy of the served version, once its chain is long."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.serving import compact_served
from infra.store import Store
from tasks.stage import worth_retrying


@task(
    name="compact",
    task_run_name="compact-{run}",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=10,
    retry_condition_fn=worth_retrying,
)
def compact(root: str, run: str, full_anchor_every: int) -> int | None:
    """The step that got a copy; None when none was due. Never cached: the pointer moves."""
    return compact_served(Store(root), run, full_anchor_every)
