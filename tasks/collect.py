"""What a run no longer needs is deleted."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from infra.aliases import aliased_steps, registry_uri
from infra.gc import Keep, live
from infra.gc import collect as collect_plan
from infra.store import Store
from tasks.stage import worth_retrying


@task(
    name="collect",
    task_run_name="collect-{run}",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=10,
    retry_condition_fn=worth_retrying,
)
def collect(root: str, run: str, keep_last: int, mlflow: str | None) -> int:
    """Bytes that were deleted. Trying again is safe wherever the last try ended."""
    store = Store(root)
    keep = Keep(last=keep_last).with_steps(aliased_steps(registry_uri(root, mlflow), run))
    now = datetime.now(UTC)
    deleted = collect_plan(store, live(store, run, keep, now), now)
    table = [{"file": item.key, "bytes": item.size_bytes, "because": item.reason} for item in deleted]
    create_table_artifact(table=table, key="collected", description=f"what {run} no longer needed")
    return sum(item.size_bytes for item in deleted)
