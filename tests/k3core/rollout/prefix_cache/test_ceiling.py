from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from k3core.rollout.prefix_cache import CacheConfig, Namespace, hit_ceiling


def branching_hit_rate(num_branches: int, num_turns: int, prompt_tokens: int, turn_tokens: int) -> float:
    """Closed form for branches that share a prompt and grow by turn_tokens a turn: 1 - computed / asked."""
    computed = prompt_tokens + num_branches * num_turns * turn_tokens
    asked = num_branches * (num_turns * prompt_tokens + turn_tokens * num_turns * (num_turns + 1) // 2)
    return 1.0 - computed / asked


def branching_trace(num_branches: int, num_turns: int, prompt_tokens: int, turn_tokens: int) -> list[list[int]]:
    fresh = itertools.count()
    prompt = [next(fresh) for _ in range(prompt_tokens)]
    branches = [list(prompt) for _ in range(num_branches)]
    trace = []
    for _ in range(num_turns):
        for branch in branches:
            branch += [next(fresh) for _ in range(turn_tokens)]
            trace.append(list(branch))
    return trace


@pytest.mark.parametrize("shape", [(1, 1, 0, 1), (4, 5, 0, 6), (4, 5, 30, 6), (3, 7, 11, 1), (16, 4, 50, 9)])
def test_the_ceiling_of_a_branching_trace_is_the_closed_formula(
    shape: tuple[int, int, int, int], namespace: Namespace
) -> None:
    ceiling = hit_ceiling((namespace, tokens) for tokens in branching_trace(*shape))
    assert ceiling.rate == pytest.approx(branching_hit_rate(*shape), abs=1e-12)


@pytest.mark.parametrize(("prompt_tokens", "percent"), [(0, 96.1), (30_000, 98.6), (60_000, 99.1)])
def test_ninety_nine_percent_is_a_statement_about_the_workload(prompt_tokens: int, percent: float) -> None:
    assert round(100 * branching_hit_rate(16, 50, prompt_tokens, 600), 1) == percent


def test_one_token_is_always_computed_and_namespaces_share_nothing(namespace: Namespace) -> None:
    other = dataclasses.replace(namespace, tenant="other")
    requests = [(namespace, [1, 2, 3, 4]), (namespace, [1, 2, 3, 4]), (other, [1, 2, 3, 4])]
    assert hit_ceiling(requests).hit_tokens == 3
    assert hit_ceiling(requests, grid=2).hit_tokens == 2
    assert hit_ceiling(requests, grid=4).hit_tokens == 0
    assert hit_ceiling([]).rate == 0.0


def test_with_room_and_planned_checkpoints_the_cache_reaches_the_ceiling_on_the_grid(
    fake_engine: Any, roomy: CacheConfig, namespace: Namespace
) -> None:
    engine = fake_engine(roomy)
    trace = branching_trace(4, 4, 24, 8)
    for tokens in trace:
        engine.serve(namespace, tokens, positions=range(engine.cfg.grid, len(tokens) + 1, engine.cfg.grid))
    ceiling = hit_ceiling([(namespace, tokens) for tokens in trace], grid=8)
    assert engine.cache.stats.hit_tokens == ceiling.hit_tokens
    assert engine.cache.stats.query_tokens == ceiling.query_tokens
