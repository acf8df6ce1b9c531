"""`python -m flows.bench_rollout`: how much faster a rollout is when its episodes are spread over engine processes.

The policy is made here by a short warm start, in a store that is gone afterwards. One process and several take turns on
the same prompts, which no engine has seen before, and must give the same trajectories to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from flows.bench_machine import describe_machine
from infra.config import RunConfig, load
from infra.host import keep_freed_memory
from infra.parts import train_prompts, train_sampling
from infra.records import encode
from infra.stages.context import Context, no_progress
from infra.stages.prepare import prepare_run
from infra.stages.publish import publish_step
from infra.stages.record import read_record
from infra.stages.rollout import ENGINES, run_episodes
from infra.stages.warm_start import warm_start
from k3core.rollout.episodes import EpisodeSpec, trajectory_seed
from k3core.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class Measured:
    """One rollout. tokens: sampled ones. sha256: of all its trajectories."""

    processes: int
    repeat: int
    seconds: float
    tokens: int
    sha256: str

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def measure_rollout(cfg: RunConfig, processes: int, repeats: int, out: Path) -> int:
    """Prints a table and writes rollout.json. 1 if the trajectories of a repeat differ."""
    machine = describe_machine(("numpy", "torch"))
    with tempfile.TemporaryDirectory(prefix="k3-bench-") as root:
        context, policy = _published(replace(cfg, root=root))
        begin = time.perf_counter()
        for count in (1, processes):  # engines are built, and their processes started, before anything is counted
            _rollout(context, policy, count, repeats, group_size=1)
        start_seconds = time.perf_counter() - begin
        measured = [
            _rollout(context, policy, count, repeat, cfg.rollout.group_size)
            for repeat in range(repeats)
            for count in (1, processes)
        ]
        ENGINES.end()
    alone, together = measured[::2], measured[1::2]
    ratios = [a.seconds / b.seconds for a, b in zip(alone, together, strict=True)]
    is_equal = all(a.sha256 == b.sha256 for a, b in zip(alone, together, strict=True))

    print(
        f"{cfg.rollout.prompts_per_step} prompts x {cfg.rollout.group_size} trajectories, at most "
        f"{cfg.rollout.max_running} at a time; {machine['cores']} cores of {machine['cpu']}, load "
        f"{machine['load_average']:.1f}; {repeats} repeats in turn"
    )
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("engine processes")
    for heading in ("tokens/s, median", "slowest", "fastest", "seconds, median"):
        table.add_column(heading, justify="right")
    for runs in (alone, together):
        speeds = [m.tokens_per_s for m in runs]
        columns = (statistics.median(speeds), min(speeds), max(speeds))
        seconds = statistics.median(m.seconds for m in runs)
        table.add_row(str(runs[0].processes), *(f"{speed:,.0f}" for speed in columns), f"{seconds:.2f}")
    Console().print(table)
    print(f"speed-up {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")
    print("the same trajectories, bit for bit" if is_equal else "the trajectories differ")
    out.mkdir(parents=True, exist_ok=True)
    document = {
        "rollout": asdict(cfg.rollout),
        "warm_start_steps": cfg.warm_start.steps,
        "start_seconds": start_seconds,
        "measured": [{**asdict(m), "tokens_per_s": m.tokens_per_s} for m in measured],
        "speed_up": {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)},
        "is_equal": is_equal,
        "machine": machine,
    }
    (out / "rollout.json").write_text(json.dumps(document, indent=1) + "\n")
    print(out / "rollout.json")
    return 0 if is_equal else 1


def _published(cfg: RunConfig) -> tuple[Context, PolicyVersion]:
    inputs = prepare_run(cfg)
    context = Context.open(inputs, cfg.root)
    published = publish_step(inputs, cfg.root, warm_start(inputs, cfg.root), None)
    policy = read_record(context.store, published).policy
    assert policy is not None
    return context, policy


def _rollout(context: Context, policy: PolicyVersion, processes: int, repeat: int, group_size: int) -> Measured:
    """Of other prompts in each repeat: what a prefix cache keeps of an earlier one must not help."""
    cfg = replace(context.cfg, rollout=replace(context.cfg.rollout, engine_processes=processes))
    specs = [
        EpisodeSpec(prompt, sample, trajectory_seed(cfg.seed, repeat, prompt.id, sample))
        for prompt in train_prompts(cfg, repeat, 0)
        for sample in range(group_size)
    ]
    begin = time.perf_counter()
    trajectories = run_episodes(replace(context, cfg=cfg), policy, specs, train_sampling(cfg), no_progress)
    seconds = time.perf_counter() - begin
    tokens = int(sum(t.loss_mask_T.sum() for t in trajectories))
    return Measured(processes, repeat, seconds, tokens, hashlib.sha256(encode(trajectories)).hexdigest())


def bench(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Of the config.")] = None,
    config: Annotated[str, typer.Option(help="Whose model, environment and rollout are measured.")] = "tiny",
    warm_start_steps: Annotated[int, typer.Option(min=1, help="Supervised steps of the policy.")] = 100,
    processes: Annotated[int, typer.Option(min=2, help="Against one.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Of each.")] = 3,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For the JSON.")] = Path("bench"),
) -> None:
    """Tokens a second of one rollout: in one engine process, and spread over several."""
    torch.set_num_threads(1)  # as the engine processes have
    keep_freed_memory()
    steps = (f"warm_start.steps={warm_start_steps}", f"warm_start.expert_steps={warm_start_steps}")
    settings: Sequence[str] = (*steps, *(overrides or ()))
    sys.exit(measure_rollout(load(config, settings), processes, repeats, out))


if __name__ == "__main__":
    typer.run(bench)
