"""Control arms: what as many more demonstrations would have done, without any RL. Run as a process of its own."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
from pydantic import TypeAdapter

from infra.host import keep_freed_memory
from infra.launch import run_job
from infra.parts import Arm
from infra.policies import publish
from infra.stages.context import Context, Inputs, Progress, no_progress
from infra.stages.evaluate import evaluate_in
from infra.stages.record import stage_key
from infra.stages.warm_start import continue_supervised
from k3core.checkpoint.tensors import from_torch
from k3core.types import PolicyVersion, Ref


def control_arm(
    inputs: Inputs,
    root: str,
    policy: PolicyVersion,
    label: str,
    sequences: int,
    timeout_s: float,
    progress: Progress = no_progress,
) -> Ref:
    """Record of the arm's evaluation. The work runs in a child process, so it uses the other core."""
    job = {
        "inputs": asdict(inputs),
        "root": root,
        "policy": asdict(policy),
        "label": label,
        "sequences": sequences,
    }
    run_job("infra.stages.control", job, timeout_s, progress)
    store = Context.open(inputs, root).store
    key = stage_key(policy.run, policy.step, f"{record_name(label, sequences)}.json")
    data = store.read(key)
    assert data is not None, f"{key}: the child ended well without writing it"
    return store.ref(key, data)


def record_name(label: str, sequences: int) -> str:
    return f"evaluate-{label}-{sequences}"


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    job: dict[str, Any] = json.load(sys.stdin)
    inputs = TypeAdapter(Inputs).validate_python(job["inputs"])
    policy = TypeAdapter(PolicyVersion).validate_python(job["policy"])
    context = Context.open(inputs, job["root"])
    one_process = replace(context.cfg.rollout, engine_processes=1)  # the loop beside it has the other cores
    context = replace(context, cfg=replace(context.cfg, rollout=one_process))
    cfg, label = context.cfg, job["label"]
    trained_on = cfg.warm_start.steps * cfg.warm_start.rows  # the arm goes on where the warm start ended
    share = cfg.warm_start.expert_share if label == "control" else 1.0

    def progress(done: int, of: int) -> None:
        print(f"progress {done} {of}", flush=True)

    weights = continue_supervised(context, policy, Arm(label, share, trained_on), job["sequences"], progress)
    side_run = f"{cfg.run}/control/{label}-{job['sequences']}"
    version, _ = publish(
        context.store, side_run, policy.step, from_torch(weights), None, 1, cfg.publish.zstd_level, {"arm": label}
    )
    evaluate_in(context, version, "control", label, record_name(label, job["sequences"]), start=policy)


if __name__ == "__main__":
    main()
