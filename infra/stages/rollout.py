"""Rollout: a version works on the step's prompts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from infra.parts import build_environment, chat_settings, train_prompts, train_sampling
from infra.provenance import engine_build, prompts_and_rubric
from infra.records import encode
from infra.stages.context import Context, Inputs, Progress, no_progress
from infra.stages.record import stage_key
from k3core.rollout.episodes import EpisodeSpec, rollout, trajectory_seed
from k3core.types import TRUNCATED, PolicyVersion, Ref, SamplingParams, Trajectory


def rollout_step(
    inputs: Inputs, root: str, policy: PolicyVersion, attempt: int, progress: Progress = no_progress
) -> Ref:
    """Record with output `trajectories`: group after group, in the order of the step's prompts.

    A trajectory's seed names run seed, step, attempt, prompt and sample, so a retry samples the same ones again.
    """
    context = Context.open(inputs, root)
    cfg, name = context.cfg, f"rollout-{attempt}"
    read = {"policy": policy.weights, "tokenizer": inputs.tokenizer}
    if (done := context.done(policy.step, name, read)) is not None:
        return done
    prompts = train_prompts(cfg, policy.step, attempt)
    specs = [
        EpisodeSpec(prompt, sample, trajectory_seed(cfg.seed, policy.step, attempt, prompt.id, sample))
        for prompt in prompts
        for sample in range(cfg.rollout.group_size)
    ]
    started = time.perf_counter()
    trajectories = run_episodes(context, policy, specs, train_sampling(cfg), progress)
    seconds = time.perf_counter() - started
    file = f"trajectories-{attempt}" if attempt else "trajectories"
    ref = context.store.put(stage_key(cfg.run, policy.step, f"{file}.zst"), encode(trajectories))
    metrics = rollout_metrics(trajectories, seconds)
    return context.record(
        "rollout",
        policy.step,
        {"trajectories": ref},
        metrics,
        name=name,
        inputs=read,
        provenance={
            "attempt": attempt,
            "policy": f"{policy.run}@{policy.step}",
            "sampling": asdict(train_sampling(cfg)),
            "group_size": cfg.rollout.group_size,
            "engine": engine_build(context.pool.engine_at(policy, context.tokenizer())),
            "environment": {"name": cfg.environment.name, "sha256": build_environment(cfg).sha256},
            **prompts_and_rubric(prompts),
        },
    )


def run_episodes(
    context: Context,
    policy: PolicyVersion,
    specs: Sequence[EpisodeSpec],
    sampling: SamplingParams,
    progress: Progress,
) -> tuple[Trajectory, ...]:
    tokenizer = context.tokenizer()
    engine = context.pool.engine_at(policy, tokenizer)
    done = 0

    def count(_: Trajectory) -> None:
        nonlocal done
        done += 1
        progress(done, len(specs))

    environment = build_environment(context.cfg)
    episodes = rollout(
        engine,
        environment,
        tokenizer,
        specs,
        sampling,
        context.cfg.environment.limits,
        context.cfg.rollout.max_running,
        count,
        chat_settings(context.cfg, environment, tokenizer),
    )
    return tuple(asyncio.run(episodes))


def rollout_metrics(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, float]:
    sampled = int(sum(t.loss_mask_T.sum() for t in trajectories))
    stops: Counter[str] = Counter(t.stop_reason for t in trajectories)
    metrics = {
        "rollout/turns": float(np.mean([t.num_turns for t in trajectories])),
        "rollout/tool_calls": float(np.mean([t.num_tool_calls for t in trajectories])),
        "rollout/tokens": float(np.mean([len(t.tokens_T) for t in trajectories])),
        "rollout/truncated_fraction": sum(stops[reason] for reason in TRUNCATED) / len(trajectories),
        "rollout/infra_error_fraction": stops["infrastructure_error"] / len(trajectories),
        "rollout/seconds": seconds,
        "rollout/tokens_per_s": sampled / seconds,
    }
    return metrics | {f"stop/{reason}": count / len(trajectories) for reason, count in sorted(stops.items())}
