"""Which versions of a run the registry's aliases name: champion, candidate, and what people have set."""

from __future__ import annotations

import os
from pathlib import Path

from mlflow.tracking import MlflowClient

from infra.config_rules import TRACKING_URI
from infra.store import Store


def registry_uri(root: str, given: str | None) -> str:
    """What is given, what the environment says, or the SQLite file below root.

    Raises ValueError when that file is not there: whoever deletes must know what the aliases name.
    """
    if named := given or os.environ.get(TRACKING_URI):
        return named
    database: Path | None = Store(root).local_path("mlflow.db")
    if database is None or not database.is_file():
        raise ValueError(
            f"{root}: no mlflow.db here, so nobody knows which version is the champion: say where MLflow is with"
            f" --mlflow URI or {TRACKING_URI}, or --mlflow none when there is none"
        )
    return f"sqlite:///{database}"


def aliased_steps(uri: str, run: str) -> dict[int, str]:
    """Step -> alias, over all registered models. Reads only. `uri` "none": no registry, no aliases."""
    if uri == "none":
        return {}
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    found: dict[int, str] = {}
    for model in client.search_registered_models():
        for alias, number in model.aliases.items():
            tags = client.get_model_version(model.name, str(number)).tags
            if tags.get("k3.run") == run and "k3.step" in tags:
                found[int(tags["k3.step"])] = alias
    return found
