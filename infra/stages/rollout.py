"""Rollout: a version works on the step's prompts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from infra.config import RunConfig
from infra.cores import usable_cores
from infra.parts import build_environment, chat_settings, train_prompts, train_sampling
from infra.provenance import engine_build, prompts_and_rubric
from infra.records import encode
from infra.serving import ServedPolicyError, served_sha256
from infra.stages.context import Context, Inputs, Progress, no_progress
from infra.stages.record import stage_key
from infra.worker_processes import WorkerProcesses
from k3core.rollout.episodes import EpisodeSpec, rollout, trajectory_seed
from k3core.types import TRUNCATED, PolicyVersion, Ref, SamplingParams, Trajectory

ENGINES = WorkerProcesses()  # this process's own, kept between stages, each with the engine of the last config


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
    """In the order of specs; `progress` is told of each that is done.

    Spread over rollout.engine_processes: which process an episode ran in changes no bit of it, since it depends on its
    seed and not on its neighbours. rollout.max_running bounds the episodes of all processes together. Raises what an
    engine raises, and WorkerLost when one of the processes died.
    """
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        progress(done, len(specs))

    max_running = context.cfg.rollout.max_running
    shares = share_out(specs, min(num_engine_processes(context.cfg), max_running))
    if len(shares) <= 1:
        return _run(context, policy, specs, sampling, max_running, count)
    root = context.cfg.root
    if "://" not in root:  # the processes stay in the folder in which they were started
        root = str(Path(root).absolute())
    least, extra = divmod(max_running, len(shares))
    jobs = [
        _Share(
            context.inputs,
            root,
            policy,
            [specs[i] for i in share],
            sampling,
            least + (number < extra),
        )
        for number, share in enumerate(shares)
    ]
    in_shares = chain.from_iterable(ENGINES.run(_run_share, jobs, count))
    placed = dict(zip(chain.from_iterable(shares), in_shares, strict=True))
    return tuple(placed[i] for i in range(len(specs)))


def num_engine_processes(cfg: RunConfig) -> int:
    """rollout.engine_processes; where it is 0, one for each core, if other processes can read the store at all."""
    if cfg.rollout.engine_processes:
        return cfg.rollout.engine_processes
    return 1 if cfg.root.startswith("memory://") else usable_cores()


def share_out(specs: Sequence[EpisodeSpec], count: int) -> list[list[int]]:
    """Places in specs, in at most `count` shares of about as many episodes; none is empty.

    All samples of a prompt are in one share: its engine then computes the prompt once.
    """
    groups: dict[str, list[int]] = {}
    for i, spec in enumerate(specs):
        groups.setdefault(spec.prompt.id, []).append(i)
    shares: list[list[int]] = [[] for _ in range(min(count, len(groups)))]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(shares, key=len).extend(group)
    return shares


@dataclass(frozen=True, slots=True)
class _Share:
    """What one process runs of a stage."""

    inputs: Inputs
    root: str
    policy: PolicyVersion
    specs: Sequence[EpisodeSpec]
    sampling: SamplingParams
    max_running: int


def _run_share(share: _Share, tick: Callable[[], None]) -> tuple[Trajectory, ...]:
    """Raises ServedPolicyError when this process's engine holds other weights than were published: nobody else asks it."""
    context = Context.open(share.inputs, share.root)
    held = context.pool.own_engine(context.tokenizer()).load(share.policy)
    if held != (expected := served_sha256(context.store, share.policy)):
        raise ServedPolicyError(
            f"step {share.policy.step} of run {share.policy.run!r}: an engine process holds {held}, not {expected}"
        )
    return _run(context, share.policy, share.specs, share.sampling, share.max_running, tick)


def _run(
    context: Context,
    policy: PolicyVersion,
    specs: Sequence[EpisodeSpec],
    sampling: SamplingParams,
    max_running: int,
    tick: Callable[[], None],
) -> tuple[Trajectory, ...]:
    tokenizer = context.tokenizer()
    environment = build_environment(context.cfg)
    episodes = rollout(
        context.pool.engine_at(policy, tokenizer),
        environment,
        tokenizer,
        specs,
        sampling,
        context.cfg.environment.limits,
        max_running,
        lambda _: tick(),
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
