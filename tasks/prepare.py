"""Pin the run's config and tokenizer."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.config import RunConfig
from infra.stages.context import Inputs
from infra.stages.prepare import prepare_run


@task(name="prepare", cache_policy=NO_CACHE)
def prepare(cfg: RunConfig) -> Inputs:
    """Never cached: it is what finds out that the config changed."""
    return prepare_run(cfg)
