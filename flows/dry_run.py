"""What `k3 train` is about to do, before it does it."""

from __future__ import annotations

import dataclasses
import itertools

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from infra.config import RunConfig
from infra.config_doctor import num_parameters
from infra.stages.prepare import find_inputs
from infra.store import Store


def under_a_free_name(cfg: RunConfig) -> RunConfig:
    """The config itself while its run has stored nothing, else with the first free name of run-2, run-3, ..."""
    store = Store(cfg.root)
    names = itertools.chain([cfg.run], (f"{cfg.run}-{number}" for number in itertools.count(2)))
    return dataclasses.replace(cfg, run=next(name for name in names if find_inputs(store, name) is None))


def print_plan(cfg: RunConfig) -> None:
    """`k3 train --dry-run`: what the config comes to."""
    rollout, train, evaluation = cfg.rollout, cfg.train, cfg.evaluate
    start = f"{cfg.warm_start.steps} supervised steps"
    if cfg.warm_start.init is not None:
        start = f"{cfg.warm_start.init}, then {start}" if cfg.warm_start.steps else cfg.warm_start.init
    lora = f", rank {train.lora_rank}" if train.mode == "lora" else ""
    rows = {
        "run": f"{cfg.run}, seed {cfg.seed}",
        "model": f"{num_parameters(cfg.model):,} parameters, {cfg.model.num_hidden_layers} layers",
        "environment": cfg.environment.name,
        "start": start,
        "rollout": f"{cfg.steps} steps of {rollout.prompts_per_step} prompts x {rollout.group_size} trajectories",
        "update": f"GSPO, {train.mode}{lora}, learning rate {train.learning_rate:g}, {train.minibatches} minibatches",
        "evaluate": f"every {evaluation.every} steps, {evaluation.prompts} prompts x {evaluation.samples}",
        "control": f"{cfg.control.sequences} demonstrations" if cfg.control.enabled else "off",
        "writes to": f"{cfg.root.rstrip('/')}/{cfg.run}",
        "tracking": cfg.tracking.mlflow_uri or f"SQLite below {cfg.root}",
    }
    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in rows.items():
        table.add_row(name, Text(value))  # not markup: a name may hold brackets
    Console().print(table)
