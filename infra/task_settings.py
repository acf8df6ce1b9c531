"""How often a stage is tried, and how long one try may take. Alone in its file, so that a flow reads it at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

StageName = Literal["warm_start", "rollout", "score", "update", "publish", "evaluate", "control", "track"]

Retries = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class Patience:
    """retries: tries after the first. timeout_s: of one try; it fails then, and is tried again."""

    retries: int
    retry_delay_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class TasksConfig:
    """How Prefect retries a stage: the first three for every stage, the others for one. None: as for every stage.

    What would fail the same way again (a setting, a broken file, a diagnosis) is not tried again, whatever these say.
    """

    retries: Annotated[int, Field(ge=0, description="tries after the first: a lost process, node or connection")] = 2
    retry_delay_s: Annotated[float, Field(ge=0, description="seconds before the next try")] = 1.0
    timeout_s: Annotated[float, Field(gt=0, description="seconds that one try of a stage may take")] = 3600.0
    loop_restarts: Annotated[
        int, Field(ge=0, description="times the reaper takes up a loop again that crashed on a work pool")
    ] = 3
    warm_start_retries: Annotated[Retries | None, Field(description="it goes on from its last checkpoint")] = None
    warm_start_timeout_s: Annotated[Seconds | None, Field(description="the longest stage of a small run")] = None
    rollout_retries: Annotated[Retries | None, Field(description="engines and sandboxes are lost most often")] = None
    rollout_timeout_s: Annotated[
        Seconds | None, Field(description="above environment.episode_timeout_s times the waves of episodes")
    ] = None
    score_retries: Annotated[Retries | None, Field(description="a judge's endpoint may be away for minutes")] = None
    score_timeout_s: Annotated[Seconds | None, Field(description="above the judge's own time-outs together")] = None
    update_retries: Annotated[Retries | None, Field(description="the ledger applies a step once all the same")] = None
    update_timeout_s: Annotated[Seconds | None, Field(description="a hung collective shows as nothing else")] = None
    publish_retries: Annotated[Retries | None, Field(description="an engine that comes back acknowledges late")] = None
    publish_timeout_s: Annotated[Seconds | None, Field(description="an upload, and a load on every engine")] = None
    evaluate_retries: Annotated[Retries | None, Field(description="as rollout")] = None
    evaluate_timeout_s: Annotated[Seconds | None, Field(description="as rollout, for the suite's size")] = None
    control_retries: Annotated[Retries | None, Field(description="an arm starts over")] = None
    control_timeout_s: Annotated[Seconds | None, Field(description="as long as the whole loop beside it")] = None
    track_retries: Annotated[Retries | None, Field(description="the tracking server may be away")] = None
    track_timeout_s: Annotated[Seconds | None, Field(description="seconds, on a server that answers")] = None

    def of(self, stage: StageName) -> Patience:
        retries: int | None = getattr(self, f"{stage}_retries")
        timeout_s: float | None = getattr(self, f"{stage}_timeout_s")
        return Patience(
            self.retries if retries is None else retries,
            self.retry_delay_s,
            self.timeout_s if timeout_s is None else timeout_s,
        )
