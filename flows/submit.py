"""`k3 submit`: start a config as a run of the deployed loop, with the payload that the UI's form sends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound

from infra.config import RunConfig, from_tree
from infra.console import say

LOOP = "rl_training/rl-training"


def run_submit(cfg: RunConfig, tags: Sequence[str] = ()) -> int:
    """Prints where to watch it. Submitting the same config again continues a run that ended early."""
    flow_run = submit(cfg, tags)
    with get_client(sync_client=True) as client:
        ui = str(client.api_url).removesuffix("/").removesuffix("/api")
    say(f"{cfg.run}: {ui}/runs/flow-run/{flow_run.id}")
    return 0


def submit(cfg: RunConfig, tags: Sequence[str] = ()) -> FlowRun:
    """Does not wait. Where the config says nothing of pools or a store, the deployment's own defaults hold.

    Raises ValueError when the loop is not deployed there.
    """
    with get_client(sync_client=True) as client:
        try:
            defaults = client.read_deployment_by_name(LOOP).parameters["cfg"]
        except ObjectNotFound as error:
            raise ValueError(
                f"{client.api_url}: {LOOP} is not deployed there; `python -m flows.deploy` does it"
            ) from error
    flow_run = run_deployment(
        LOOP, parameters={"cfg": payload(cfg, defaults)}, timeout=0, as_subflow=False, tags=[cfg.run, *tags]
    )
    assert isinstance(flow_run, FlowRun)
    return flow_run


def payload(cfg: RunConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The whole tree of settings as JSON, checked before it is sent."""
    plain = RunConfig()
    tree: dict[str, Any] = json.loads(json.dumps(asdict(cfg)))
    if cfg.root == plain.root:
        tree["root"] = defaults["root"]
    if cfg.pools == plain.pools:
        tree["pools"] = {**tree["pools"], **defaults["pools"]}
    from_tree(tree)
    return tree
