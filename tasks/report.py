"""The run's report, and its copy in MLflow."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from infra.config import TrackingConfig
from infra.stages.context import Inputs
from infra.stages.report import RunHistory, report_run
from infra.stages.track import open_tracker


@task(name="report", cache_policy=NO_CACHE)
def report(
    inputs: Inputs, root: str, uri: str, tracking: TrackingConfig, history: RunHistory, commands: dict[str, str]
) -> str:
    """Returns the folder that holds it."""
    summary, folder = report_run(inputs, root, history, commands)
    tracker = open_tracker(inputs, root, uri, tracking)
    for name in ("report.json", "report.html", "curve.png"):
        tracker.log_report(folder / name)
    tracker.finish("FINISHED")
    rows = "\n".join(f"| {name} | {value} |" for name, value in summary.items() if not isinstance(value, dict))
    create_markdown_artifact(f"| | |\n|---|---|\n{rows}\n", key="report", description=str(folder))
    return str(folder)
