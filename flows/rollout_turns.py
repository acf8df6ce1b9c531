"""A tree's side of `flows.bench_against`: serves given weights and runs the rollout stage each time it is told to.

It runs as a program under another revision's packages, so it may use only what both revisions have: `prepare_run`,
`warm_start`, `publish_step`, `rollout_step`, their records and `load`, with the arguments that they had at fb0be39.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from infra.config import RunConfig, load
from infra.host import keep_freed_memory
from infra.stages.context import Context
from infra.stages.prepare import prepare_run
from infra.stages.publish import publish_step
from infra.stages.record import read_record, stage_key
from infra.stages.rollout import rollout_step
from infra.stages.warm_start import warm_start
from infra.store import Store


def make_policy(cfg: RunConfig, weights: Path) -> None:
    """A warm start's weights into the file."""
    record = read_record(store := Store(cfg.root), warm_start(prepare_run(cfg), cfg.root))
    weights.write_bytes(store.get(record.outputs["weights"]))


def take_turns(cfg: RunConfig, weights: Path) -> None:
    """For each line of stdin, an attempt's number, one JSON line: see `flows.bench_against.Turn`."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the stages print is no reply
    inputs = prepare_run(cfg)
    context = Context.open(inputs, cfg.root)
    ref = context.store.put(stage_key(cfg.run, 0, "weights.safetensors"), weights.read_bytes())
    published = publish_step(inputs, cfg.root, context.record("warm_start", 0, {"weights": ref}, {}), None)
    policy = read_record(context.store, published).policy
    assert policy is not None
    for line in sys.stdin:
        begin = time.perf_counter()
        ref = rollout_step(inputs, cfg.root, policy, int(line))
        seconds = time.perf_counter() - begin
        record = read_record(context.store, ref)
        reply = {
            "attempt": int(line),
            "seconds": seconds,
            "tokens": round(record.metrics["rollout/tokens_per_s"] * record.metrics["rollout/seconds"]),
            "asked": record.provenance["prompts"],
            "sampling": record.provenance["sampling"],
            "weights_sha256": policy.weights_sha256,
        }
        replies.write(json.dumps(reply) + "\n")


def main(arguments: Sequence[str]) -> None:
    what, root, weights, config, *overrides = arguments
    keep_freed_memory()
    cfg = load(config, (*overrides, f"root={root}"))
    (make_policy if what == "policy" else take_turns)(cfg, Path(weights))


if __name__ == "__main__":
    main(sys.argv[1:])
