"""Rehearses a group of real processes: random work, random skew, one peer lost; then compares what they decided."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from k3core.rollout.prefill_pairing.counts import RankCounts
from k3core.rollout.prefill_pairing.decide import Limits, Reason
from k3core.rollout.prefill_pairing.ranks import PairingGroup

REASONS = tuple(Reason)
NUM_TICKS_ALONE = 100


@dataclass(frozen=True, slots=True)
class RehearsalConfig:
    """num_ticks: completed by all before the last rank is lost. max_skew_s: a rank's nap, before one tick in 50.

    freezes_last: the last rank is stopped (SIGSTOP), its connections left open, so that only the deadline helps.
    """

    num_ranks: int = 4
    num_ticks: int = 3000
    seed: int = 0
    deadline_s: float = 2.0
    max_skew_s: float = 0.002
    start_timeout_s: float = 60.0
    freezes_last: bool = False
    limits: Limits = field(default_factory=lambda: Limits(budget_tokens=1000))


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """num_equal_ticks: ticks in which all ranks had one verdict, from the first on; num_common_ticks: those all made.

    num_working_ticks: by rank, ticks before the group broke there; the lost rank made as many as it wrote.
    slowest_tick_s: over survivors, the breaking tick included. fail_open_s: from the loss to the last survivor's
    first verdict without a group. was_open_alone: survivors fired every tick after that.
    """

    num_common_ticks: int
    num_equal_ticks: int
    num_working_ticks: tuple[int, ...]
    longest_hold: int
    slowest_tick_s: float
    fail_open_s: float
    was_open_alone: bool
    ticks_by_reason: dict[str, int]


def rehearse(cfg: RehearsalConfig, folder: Path) -> Rehearsal:
    """Spawns cfg.num_ranks processes that meet over a file in folder (empty); kills or freezes the last.

    Raises RuntimeError when a rank does not start, or a survivor does not end by itself.
    """
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=run_rank, args=(rank, cfg, folder)) for rank in range(cfg.num_ranks)]
    for process in ranks:
        process.start()
    try:
        _wait_for_ticks(cfg, folder, ranks[-1])
        lost_at = time.monotonic()
        assert ranks[-1].pid is not None
        os.kill(ranks[-1].pid, signal.SIGSTOP if cfg.freezes_last else signal.SIGKILL)
        for rank, process in enumerate(ranks[:-1]):
            process.join(cfg.start_timeout_s)
            if process.exitcode != 0:
                raise RuntimeError(f"rank {rank} ended with {process.exitcode}, not 0: see its traceback above")
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return _compare(cfg, folder, lost_at)


def _wait_for_ticks(cfg: RehearsalConfig, folder: Path, last: multiprocessing.process.BaseProcess) -> None:
    """Raises RuntimeError when the ticks stop coming for start_timeout_s."""
    log, num_ticks, seen_at = _log_path(folder, cfg.num_ranks - 1), 0, time.monotonic()
    while num_ticks < cfg.num_ticks:
        time.sleep(0.01)
        num_now = log.stat().st_size // 3 if log.exists() else 0
        if num_now > num_ticks:
            num_ticks, seen_at = num_now, time.monotonic()
        if last.exitcode is not None or time.monotonic() - seen_at > cfg.start_timeout_s:
            raise RuntimeError(f"the last rank stopped after {num_ticks} of {cfg.num_ticks} ticks: see its traceback")


def run_rank(rank: int, cfg: RehearsalConfig, folder: Path) -> None:
    """Ticks until the group breaks, then NUM_TICKS_ALONE more. Writes three bytes a tick: fire, reason, held."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=cfg.num_ranks,
        timeout=timedelta(seconds=cfg.start_timeout_s),
    )
    group = PairingGroup(None, cfg.limits, cfg.deadline_s)
    shared, own = random.Random(cfg.seed), random.Random(f"{cfg.seed}/{rank}")
    slowest_tick_s, opened_at, num_alone = 0.0, 0.0, 0
    with _log_path(folder, rank).open("wb", buffering=0) as log:
        while num_alone < NUM_TICKS_ALONE:
            if own.random() < 0.02:
                time.sleep(own.uniform(0.0, cfg.max_skew_s))
            counts = _random_counts(shared, own)
            started_at = time.monotonic()
            verdict = group.tick(counts)
            if not num_alone:
                slowest_tick_s = max(slowest_tick_s, time.monotonic() - started_at)
            if group.is_broken:
                opened_at = opened_at or time.monotonic()
                num_alone += 1
            log.write(bytes([verdict.fire, REASONS.index(verdict.reason), verdict.state.num_held]))
    end = {"num_working_ticks": group.num_ticks - num_alone, "slowest_tick_s": slowest_tick_s, "opened_at": opened_at}
    (folder / f"rank{rank}.json").write_text(json.dumps(end))
    os._exit(0)  # a group whose peer is gone has nobody left to say goodbye to


def _random_counts(shared: random.Random, own: random.Random) -> RankCounts:
    """The mood of a tick is shared, so that long holds and rare rules come up; the numbers are each rank's own."""
    mood = shared.random()
    is_idle = own.random() < 0.3
    return RankCounts(
        pending_tokens=0 if mood < 0.02 or is_idle else own.randrange(1, 400) if mood < 0.9 else own.randrange(1, 3000),
        num_decoding=0 if 0.02 < mood < 0.03 else own.randrange(1, 30),
        kv_per_mille=own.randrange(900, 1000) if 0.03 < mood < 0.04 else own.randrange(100, 900),
        is_in_chunk=0.3 < mood < 0.5 and own.random() < 0.2,
        is_overdue=own.random() < 0.002,
    )


def _log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def _compare(cfg: RehearsalConfig, folder: Path, lost_at: float) -> Rehearsal:
    logs = [_log_path(folder, rank).read_bytes() for rank in range(cfg.num_ranks)]
    ends = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(cfg.num_ranks - 1)]
    ticks = [[log[i : i + 3] for i in range(0, len(log) - 2, 3)] for log in logs]
    working = [*(end["num_working_ticks"] for end in ends), len(ticks[-1])]
    num_common = min(working)
    equal = [len({rank_ticks[i] for rank_ticks in ticks}) == 1 for i in range(num_common)]
    return Rehearsal(
        num_common_ticks=num_common,
        num_equal_ticks=next((i for i, is_equal in enumerate(equal) if not is_equal), num_common),
        num_working_ticks=tuple(working),
        longest_hold=max(tick[2] for rank_ticks in ticks for tick in rank_ticks),
        slowest_tick_s=max(end["slowest_tick_s"] for end in ends),
        fail_open_s=max(end["opened_at"] for end in ends) - lost_at,
        was_open_alone=all(tick[0] for rank_ticks in ticks[:-1] for tick in rank_ticks[-NUM_TICKS_ALONE:]),
        ticks_by_reason=dict(Counter(REASONS[tick[1]].value for tick in ticks[0][:num_common])),
    )


def as_json(rehearsal: Rehearsal) -> str:
    return json.dumps(asdict(rehearsal), indent=2)
