"""Work for the simulator: turns of trajectories with lognormal tool times. Synthetic, and seeded."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """tool_s passes before the turn asks for a prefill of its new tokens; then it decodes."""

    tool_s: float
    num_prefill: int
    num_decode: int


@dataclass(frozen=True, slots=True)
class TracedTrajectory:
    """All its turns stay on one rank, where its history is cached: only new tokens are prefilled."""

    rank: int
    turns: tuple[Turn, ...]


Trace = tuple[TracedTrajectory, ...]


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Medians in tokens or seconds; sigmas of the lognormals. A tool sigma of 1.5 has a mean of 3.1 medians."""

    num_trajectories: int = 128
    num_turns: int = 50
    num_ranks: int = 4
    prompt_tokens: int = 4000
    observation_tokens: int = 600
    decode_tokens: int = 120
    token_sigma: float = 0.8
    tool_s: float = 1.0
    tool_sigma: float = 1.5


def make_trace(cfg: TraceConfig, seed: int) -> Trace:
    """Trajectory i lives on rank i mod num_ranks; first turns bring the prompt, later ones an observation."""
    rng = random.Random(seed)

    def tokens(median: int) -> int:
        return max(1, round(rng.lognormvariate(math.log(median), cfg.token_sigma)))

    def turn(index: int) -> Turn:
        num_prefill = tokens(cfg.observation_tokens if index else cfg.prompt_tokens)
        return Turn(rng.lognormvariate(math.log(cfg.tool_s), cfg.tool_sigma), num_prefill, tokens(cfg.decode_tokens))

    return tuple(
        TracedTrajectory(i % cfg.num_ranks, tuple(turn(index) for index in range(cfg.num_turns)))
        for i in range(cfg.num_trajectories)
    )


def burst_trace(num_trajectories: int = 128, num_turns: int = 6) -> Trace:
    """Built to show a mechanism, not recorded: a burst at the start, then small requests beside many long decodes.

    The burst sets a high-water mark that later queues reach only when most trajectories wait (SGLang pull 32880).
    """
    return tuple(
        TracedTrajectory(i % 4, tuple(_burst_turn(i, index) for index in range(num_turns)))
        for i in range(num_trajectories)
    )


def _burst_turn(trajectory: int, index: int) -> Turn:
    num_decode = 400 + (53 * trajectory + 29 * index) % 200
    if index == 0:
        return Turn(0.0, 4000, num_decode)
    return Turn(0.05 * ((37 * trajectory + 11 * index) % 100), 200, num_decode)


def drift_trace(chunk_tokens: int, chunk_s: float, num_turns: int = 60, num_ranks: int = 4) -> Trace:
    """Built to show a mechanism, not recorded: equal ranks that start two chunks apart (SGLang issue 35241).

    Every turn is two chunks and comes a fixed time after the last, so that nothing but the rule can close the gap.
    """
    return tuple(
        TracedTrajectory(
            rank, tuple(Turn(0.0 if index else 2 * chunk_s * rank, 2 * chunk_tokens, 40) for index in range(num_turns))
        )
        for rank in range(num_ranks)
    )
