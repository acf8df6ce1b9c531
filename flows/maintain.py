"""maintain: keeps a run's store small, for a schedule. Safe beside a run that goes on."""

from __future__ import annotations

from prefect import flow

from infra.console import say
from infra.doctor import size
from tasks.collect import collect
from tasks.compact import compact


@flow(name="maintain", flow_run_name="maintain-{run}", persist_result=False)
def maintain(root: str, run: str, keep_last: int = 2, full_anchor_every: int = 10, mlflow: str | None = None) -> int:
    """A whole copy of the served version once `full_anchor_every` files rebuild it; then what nothing needs goes.

    mlflow: where the aliases are read that keep a version; none: the environment's server, or the file below root.
    Returns the bytes that were freed.
    """
    step = compact(root, run, full_anchor_every)
    freed = collect(root, run, keep_last, mlflow)
    say(f"{run}: {'no copy was due' if step is None else f'step {step} has a whole copy'}; {size(freed)} freed")
    return freed
