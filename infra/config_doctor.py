"""Whether this machine can run this config."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from infra.config import RunConfig
from infra.doctor import Finding, check_root, size
from k3core.model.config import K3Config
from k3core.model.model import K3Model

WEIGHT_BYTES = 4  # float32
TRAINING_BYTES = 16  # float32 weight, gradient and AdamW's two moments


def diagnose_config(cfg: RunConfig) -> list[Finding]:
    """A required finding that is not ok means: do not start."""
    parameters = num_parameters(cfg.model)
    model = _model(cfg, parameters)
    bases = 1 + (cfg.steps // cfg.publish.full_every if cfg.train.mode == "full" else 0)
    return [
        model,
        *_environment(cfg),
        *check_root(cfg.root, bases * parameters * WEIGHT_BYTES if model.ok else 0),
    ]


def num_parameters(model: K3Config) -> int:
    """Exact, from shapes alone: nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in K3Model(model).parameters())


def memory_bytes() -> int:
    """Of this machine, or of its GPUs together where those have more."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return max(host, sum(gpus))


def _model(cfg: RunConfig, parameters: int) -> Finding:
    needed = parameters * (TRAINING_BYTES if cfg.train.mode == "full" else WEIGHT_BYTES)
    have = memory_bytes()
    detail = f"{parameters:,} parameters, {size(needed)} to train of {size(have)} memory"
    reasons = []
    if needed > have:
        reasons.append("GPUs with that much memory")
    if cfg.warm_start.init is not None:
        reasons.append(f"the checkpoint {cfg.warm_start.init}, which this version cannot load yet")
    remedy = f"this run needs {' and '.join(reasons)}; `tiny` runs anywhere" if reasons else ""
    return Finding("model", not reasons, True, detail, remedy)


def _environment(cfg: RunConfig) -> Iterator[Finding]:
    if cfg.environment.path is not None:
        ok = Path(cfg.environment.path).is_dir()
        detail = f"{cfg.environment.name} at {cfg.environment.path}"
        yield Finding("environment", ok, True, detail, "" if ok else "no such folder: correct environment.path")
