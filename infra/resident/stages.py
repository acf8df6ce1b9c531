"""Which stage is which function, and whether the node's resident trainer or engine runs it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from infra.resident.client import Resident
from k3core.types import Ref

Role = Literal["engine", "trainer"]
Progress = Callable[[int, int], None]  # (done, of)


@dataclass(frozen=True, slots=True)
class Stage:
    """role None: it needs no resident weights, and runs where it is called."""

    role: Role | None
    module: str
    function: str

    def load(self) -> Callable[..., Ref]:
        """Not before it is needed: torch takes seconds that a flow which only calls a resident has no use for."""
        function: Callable[..., Ref] = getattr(import_module(self.module), self.function)
        return function


STAGES: Mapping[str, Stage] = {
    "warm_start": Stage("trainer", "infra.stages.warm_start", "warm_start"),
    "rollout": Stage("engine", "infra.stages.rollout", "rollout_step"),
    "score": Stage(None, "infra.stages.score", "score_step"),
    "update": Stage("trainer", "infra.stages.update", "update_step"),
    "publish": Stage("trainer", "infra.stages.publish", "publish_step"),
    "evaluate": Stage("engine", "infra.stages.evaluate", "evaluate_step"),
    "control": Stage(None, "infra.stages.control", "control_arm"),
}


def run_stage(name: str, progress: Progress, **arguments: Any) -> Ref:
    """At the resident whose address the environment names (K3_ENGINE_URL, K3_TRAINER_URL), else in this process.

    Raises what the stage raises, and ResidentLost when the resident died or fell silent on the way.
    """
    stage = STAGES[name]
    url = None if stage.role is None else os.environ.get(f"K3_{stage.role.upper()}_URL")
    if url:
        return Resident(url).run_stage(name, arguments, progress)
    return run_here(stage, progress, arguments)


def run_here(stage: Stage, progress: Progress, arguments: Mapping[str, Any]) -> Ref:
    function = stage.load()
    shown = {"progress": progress} if "progress" in inspect.signature(function).parameters else {}
    return function(**arguments, **shown)
