"""Addresses of MLflow's own pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import urlencode

from infra.tracking.connection import connect, is_http

LOCAL_UI = "http://127.0.0.1:5000"  # where `mlflow ui` answers


def compare_runs(uri: str, experiment: str, tag: str, value: str, runs: Sequence[str]) -> str | None:
    """The page that sets these runs (tag `k3.run`), all of which bear a tag, side by side; None for fewer than two."""
    client, _ = connect(uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return None
    tracked = client.search_runs([found.experiment_id], f"tags.`{tag}` = '{value}'", max_results=1000)
    ids = {run.data.tags.get("k3.run"): run.info.run_id for run in tracked}
    chosen = [ids[run] for run in runs if run in ids]
    if len(chosen) < 2:
        return None
    query = {
        "runs": _compact(chosen),
        "experiments": _compact([found.experiment_id]),
        "workflowType": "machine_learning",
    }
    return f"{uri.rstrip('/') if is_http(uri) else LOCAL_UI}/#/compare-runs?{urlencode(query)}"


def _compact(values: Sequence[str]) -> str:
    return json.dumps(values, separators=(",", ":"))
