"""MLflow: one run per training run, a logged model per policy version, a table and some traces per evaluation."""

from __future__ import annotations

import os

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read while mlflow is imported, so it has to come first

from infra.tracking.evaluation import Evaluation, Graded, Traced, select
from infra.tracking.metrics import METRICS, NONFINITE
from infra.tracking.tracker import EvaluatedOn, Registered, RunStatus, Tracker, flatten

__all__ = [
    "METRICS",
    "NONFINITE",
    "EvaluatedOn",
    "Evaluation",
    "Graded",
    "Registered",
    "RunStatus",
    "Traced",
    "Tracker",
    "flatten",
    "select",
]
