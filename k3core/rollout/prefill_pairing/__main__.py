"""`python -m k3core.rollout.prefill_pairing ranks --ticks 100000`: rehearse the lockstep of real processes.

`… simulate --seed 0` compares the rules on a synthetic trace under a stated cost model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from k3core.rollout.prefill_pairing.baselines import (
    SglangLimits,
    atom_like,
    fixed_delay,
    no_delay,
    pairing,
    sglang_like,
)
from k3core.rollout.prefill_pairing.decide import Limits
from k3core.rollout.prefill_pairing.rehearsal import RehearsalConfig, as_json, rehearse
from k3core.rollout.prefill_pairing.simulator import CostModel, Outcome, simulate
from k3core.rollout.prefill_pairing.traces import TraceConfig, make_trace


def print_simulation(seed: int) -> None:
    """One JSON line a rule. Simulated seconds, of no GPU."""
    trace, cost = make_trace(TraceConfig(), seed), CostModel()
    outcomes = (
        simulate(trace, no_delay(), cost),
        simulate(trace, fixed_delay(8), cost),
        simulate(trace, sglang_like(SglangLimits()), cost),
        simulate(trace, atom_like(cost.budget_tokens), cost),
        simulate(trace, pairing(Limits(budget_tokens=cost.budget_tokens)), cost),
    )
    print(json.dumps({"trace": asdict(TraceConfig()), "seed": seed, "cost": asdict(cost)}))
    for outcome in outcomes:
        print(json.dumps(_summary(outcome)))


def _summary(outcome: Outcome) -> dict[str, object]:
    return {
        "rule": outcome.rule,
        "padded_share": round(outcome.padded_share, 4),
        "padded_tokens": outcome.padded_tokens,
        "prefill_slots": outcome.prefill_slots,
        "stall_s": round(outcome.stall_s, 2),
        "output_tokens_per_s": round(outcome.output_tokens_per_s, 1),
        **{f"ttft_p{percent}_s": round(outcome.ttft_percentile_s(percent), 3) for percent in (50, 95, 99)},
        "longest_hold": outcome.longest_hold,
        "ticks_by_reason": outcome.ticks_by_reason,
    }


def main() -> int:
    """Exit status 1 when two ranks differed in a tick that all completed, or a survivor did not fail open."""
    parser = argparse.ArgumentParser(prog="python -m k3core.rollout.prefill_pairing")
    commands = parser.add_subparsers(dest="command", required=True)
    ranks = commands.add_parser("ranks", help="gloo processes under random skew; the last one is lost at the end")
    ranks.add_argument("--ticks", type=int, default=3000)
    ranks.add_argument("--ranks", type=int, default=4)
    ranks.add_argument("--seed", type=int, default=0)
    ranks.add_argument("--deadline-s", type=float, default=2.0)
    ranks.add_argument("--freeze", action="store_true", help="stop the last process instead of killing it")
    simulation = commands.add_parser("simulate", help="the rules side by side on one synthetic trace")
    simulation.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.command == "simulate":
        print_simulation(args.seed)
        return 0
    cfg = RehearsalConfig(
        num_ranks=args.ranks,
        num_ticks=args.ticks,
        seed=args.seed,
        deadline_s=args.deadline_s,
        freezes_last=args.freeze,
    )
    with tempfile.TemporaryDirectory() as folder:
        rehearsal = rehearse(cfg, Path(folder))
    print(as_json(rehearsal))
    is_equal = rehearsal.num_equal_ticks == rehearsal.num_common_ticks
    return 0 if is_equal and rehearsal.was_open_alone else 1


if __name__ == "__main__":
    sys.exit(main())
