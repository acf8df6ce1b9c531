"""`python -m flows.deploy`: tell a Prefect server what there is: pools, results, deployments, automations. Repeatable.

Takes PREFECT_API_URL, K3_ROOT (where runs are stored) and K3_ENGINE_URL (the engine that acknowledges versions) from
the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from prefect.automations import Automation
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.filesystems import RemoteFileSystem

from infra.work_pools import create_pools

PROJECT = Path(__file__).parent.parent
DEPLOYMENTS = PROJECT / "infra" / "prefect.yaml"
LOOPS = "loops"
RESULTS = "k3-results"  # a block of this name says where task results lie; credentials come from the environment
LOOPS_AT_ONCE = 4  # of the cpu pool's slots, so that the stages that loops wait for always find one


def deploy() -> None:
    root = os.environ["K3_ROOT"]
    create_pools(os.environ["PREFECT_API_URL"])
    with get_client(sync_client=True) as client:
        limit_loops(client)
        if root.startswith("s3://"):
            RemoteFileSystem(basepath=f"{root}/.prefect/results").save(RESULTS, overwrite=True)
        prefect = str(Path(sys.executable).parent / "prefect")
        subprocess.run(
            [prefect, "--no-prompt", "deploy", "--all", "--prefect-file", str(DEPLOYMENTS)],
            check=True,
            cwd=PROJECT,
            env={**os.environ, "K3_PROJECT": str(PROJECT)},
        )
        publish_automation(automation(client))


def limit_loops(client: SyncPrefectClient) -> None:
    """A queue that exists keeps its limit, which somebody may have changed."""
    with suppress(ObjectAlreadyExists):
        client.create_work_queue(name=LOOPS, work_pool_name="cpu")
    queue = client.read_work_queue_by_name(LOOPS, work_pool_name="cpu")
    if queue.concurrency_limit is None:
        client.update_work_queue(queue.id, concurrency_limit=LOOPS_AT_ONCE)


def automation(client: SyncPrefectClient) -> Automation:
    """A version that its loop does not evaluate itself (evaluate.between) is evaluated beside it."""
    evaluate = client.read_deployment_by_name("evaluate/gpu-rollout")
    return Automation(
        name="k3rl: a published policy is evaluated",
        description="Event k3.policy.published with k3.evaluated_by=automation starts evaluate/gpu-rollout.",
        trigger=EventTrigger(
            expect={"k3.policy.published"},
            match={"k3.evaluated_by": "automation"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=evaluate.id,
                parameters={name: _from_payload(name) for name in ("inputs", "root", "policy")},
                job_variables=None,
            )
        ],
    )


def _from_payload(name: str) -> dict[str, Any]:
    template = "{{ event.payload." + name + " | tojson }}"
    return {"__prefect_kind": "json", "value": {"__prefect_kind": "jinja", "template": template}}


def publish_automation(wanted: Automation) -> None:
    try:
        wanted.id = cast(Automation, Automation.read(name=wanted.name)).id
    except (ObjectNotFound, ValueError):
        wanted.create()
    else:
        wanted.update()


if __name__ == "__main__":
    deploy()
