"""The stages of one run: each a task with the run's retries, and small decisions about when it is called."""

from __future__ import annotations

from dataclasses import dataclass

from prefect.futures import PrefectFuture

from infra.config import RunConfig
from infra.console import say
from infra.stages.context import Inputs
from infra.stages.record import read_record
from infra.stages.summary import iteration_line
from infra.stages.track import Tracked, tracking_uri
from infra.store import Store
from k3core.types import PolicyVersion, Ref
from tasks.control import control
from tasks.evaluate import evaluate
from tasks.publish import publish
from tasks.rollout import rollout
from tasks.score import score
from tasks.stage import configured
from tasks.track import track
from tasks.update import update
from tasks.warm_start import warm_start

MAX_ATTEMPTS = 3


class NothingToLearn(Exception):
    """Several batches of one step had no group with variance."""


class TooManyVetoes(Exception):
    """Several updates in a row were refused: a loss or gradient was not finite."""


class PolicyStandsStill(Exception):
    """Two updates in a row changed no byte of the served policy."""


@dataclass(slots=True)
class Stages:
    cfg: RunConfig
    inputs: Inputs
    num_vetoes: int = 0  # in a row
    num_unchanged: int = 0  # updates in a row
