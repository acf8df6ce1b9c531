"""The work pools: what each runs, and how many flow runs at once. `python -m infra.work_pools` creates them."""

from __future__ import annotations

import os
import urllib.error

from infra.checks import ask_prefect

# Flow runs at once. A GPU holds one engine or one trainer; the cpu pool also takes the loops that wait for the others.
POOLS = {"cpu": 8, "gpu-rollout": 1, "gpu-train": 1}


def create_pools(api_url: str) -> None:
    """A pool that exists keeps its limit, which somebody may have changed. The first worker fills in the template."""
    for name, limit in POOLS.items():
        try:
            ask_prefect(api_url, "/work_pools/", {"name": name, "type": "process", "concurrency_limit": limit})
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise


if __name__ == "__main__":
    create_pools(os.environ["PREFECT_API_URL"])
