"""`python -m flows.bench_cache`: the prefix cache under agents with many turns, at several sizes of memory.

The engine's own loop, scheduler and cache run; its passes are left out, since what is found again depends on decisions
alone: they answer with zeros at once. So a machine without a GPU can rehearse the memory of a GPU's engine, and the time
that is left is the host's.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from flows.bench_machine import describe_machine
from k3core.model.model import Forward
from k3core.model.presets import PRESETS
from k3core.model.weights import named_tensors
from k3core.parity import awake_model
from k3core.rollout.engine import K3Engine
from k3core.rollout.memory import MemorySizes
from k3core.rollout.prefix_cache import hit_ceiling
from k3core.rollout.protocol import GenerateRequest
from k3core.rollout.runner import Pieces
from k3core.types import SamplingParams

CFG = PRESETS["tiny"]
PAGE = 64
SHARED, OF_GROUP, GROUP, DRAWN, RETURNED = 512, 256, 8, 24, 40  # tokens; trajectories of a group


class NoPasses:
    """A runner that computes nothing."""

    def __init__(self) -> None:
        self.routes = (len(CFG.routed_layers), CFG.num_experts_per_token)

    def prefill(self, pieces: Pieces) -> Forward:
        T = len(pieces.tokens)
        return Forward(torch.zeros(T, 1), torch.zeros(T, *self.routes, dtype=torch.long))

    def decode(
        self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int], adapter: object = None
    ) -> tuple[Tensor, Tensor]:
        del slots, positions, adapter
        return torch.zeros(len(tokens), CFG.vocab_size), torch.zeros(len(tokens), *self.routes, dtype=torch.long)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return torch.zeros(len(hidden_ND), CFG.vocab_size)

    def forget(self, adapter: object) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Row:
    """over_ceiling: hit tokens over those of a memory without end."""

    memory: str
    sizes: MemorySizes
    hit_rate: float
    over_ceiling: float
    restored_pages: int
    restored_states: int
    preempted: int
    host_us_per_token: float


def sizes_of(trajectories: int, turns: int) -> dict[str, MemorySizes]:
    """Shares of what all trajectories hold at their ends."""
    pages = trajectories * -(-longest(turns) // PAGE)

    def memory(share: float, states: int, host: bool) -> MemorySizes:
        host_sizes = (pages, 8 * trajectories) if host else (0, 0)
        return MemorySizes(PAGE, PAGE, int(share * pages), states, *host_sizes)

    return {
        "130 %, 12 states a trajectory": memory(1.3, 12 * trajectories, False),
        "60 %, 2.5 states, host tier": memory(0.6, 5 * trajectories // 2, True),
        "35 %, 1.25 states, host tier": memory(0.35, 5 * trajectories // 4, True),
        "60 %, 2.5 states": memory(0.6, 5 * trajectories // 2, False),
        "35 %, 1.25 states": memory(0.35, 5 * trajectories // 4, False),
    }


def longest(turns: int) -> int:
    return SHARED + OF_GROUP + turns * (DRAWN + RETURNED) + PAGE


async def play(engine: K3Engine, n: int, turns: int, asked: list[tuple[str, list[int]]]) -> None:
    shared, group, own = (np.random.default_rng(seed) for seed in (0, 1000 + n // GROUP, 5000 + n))
    tokens = [*shared.integers(0, 500, SHARED).tolist(), *group.integers(0, 500, OF_GROUP).tolist()]
    for turn in range(turns):
        asked.append(("", list(tokens)))
        request = GenerateRequest(f"s{n}", tokens, SamplingParams(max_tokens=DRAWN), n, num_drawn=DRAWN * turn)
        generation = await engine.generate(request)
        tokens = [*tokens, *generation.tokens_T.tolist(), *own.integers(0, 500, RETURNED).tolist()]
        for _ in range(min(200, int(3 * own.pareto(1.5)))):  # ticks that its tools take: a heavy tail
            await asyncio.sleep(0)


def measure(name: str, sizes: MemorySizes, trajectories: int, turns: int) -> Row:
    engine = K3Engine(CFG, -1, trajectories, longest(turns), max_batch_tokens=8192, sizes=sizes)
    engine.load(0, named_tensors(awake_model(CFG, torch.float32)))
    engine.runner = NoPasses()
    asked: list[tuple[str, list[int]]] = []

    async def everybody() -> None:
        await asyncio.gather(*[play(engine, n, turns, asked) for n in range(trajectories)])

    begin = time.perf_counter()
    asyncio.run(everybody())
    seconds = time.perf_counter() - begin
    stats, ceiling = engine.stats, hit_ceiling(asked, PAGE)
    return Row(
        name,
        sizes,
        stats.hit_tokens / ceiling.query_tokens,
        stats.hit_tokens / ceiling.hit_tokens,
        stats.restored_pages,
        stats.restored_checkpoints,
        engine.num_preempted,
        1e6 * seconds / (trajectories * turns * DRAWN),
    )


def bench(
    trajectories: Annotated[int, typer.Option(min=1, help="At work at a time.")] = 128,
    turns: Annotated[int, typer.Option(min=1, help="Of each.")] = 50,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For the JSON.")] = Path("bench"),
) -> None:
    """Hit rate of the prefix cache over its ceiling, at several sizes of memory."""
    torch.set_num_threads(1)
    cases = sizes_of(trajectories, turns)
    rows = [
        measure(name, sizes, trajectories, turns) for name, sizes in track(cases.items(), "cache sizes", transient=True)
    ]
    table = Table(box=box.SIMPLE_HEAD)
    for column in (
        "memory, of what all hold at the end",
        "hit rate",
        "of its ceiling",
        "pages, states restored",
        "host, µs a token",
    ):
        table.add_column(column, justify="left" if column.startswith("memory") else "right")
    for row in rows:
        restored = f"{row.restored_pages:,}, {row.restored_states:,}"
        table.add_row(
            row.memory, f"{row.hit_rate:.4f}", f"{row.over_ceiling:.4f}", restored, f"{row.host_us_per_token:.0f}"
        )
    Console().print(table)
    machine = describe_machine(("numpy", "torch"))
    out.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": machine,
        "trajectories": trajectories,
        "turns": turns,
        "rows": [asdict(r) for r in rows],
    }
    (out / "cache.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0)


if __name__ == "__main__":
    typer.run(bench)
