"""Before any test module is imported: one thread, no telemetry, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.update(
    OMP_NUM_THREADS="1",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    DO_NOT_TRACK="true",
    MLFLOW_DISABLE_TELEMETRY="true",
    HF_HUB_OFFLINE="1",
)

import torch
from hypothesis import settings

# A deadline per example measures the machine, not the code.
settings.register_profile("k3rl", deadline=None)
settings.load_profile("k3rl")

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read while triton is imported, and torch has not imported it yet
# pytest puts this folder on the path, where tests/k3core would hide the package of that name.
sys.path = [path for path in sys.path if path != str(Path(__file__).parent)]
