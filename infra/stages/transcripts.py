"""Episodes as text, for a person to read."""

from __future__ import annotations

from infra.stages.context import Context, Inputs
from infra.stages.evaluate import read_report, read_trajectories
from infra.stages.record import stage_key
from k3core.types import Ref

NUM_EPISODES = 8


def write_transcripts(inputs: Inputs, root: str, evaluation: Ref) -> str:
    """The first episodes of an evaluation with their rewards, one text file; returns its uri."""
    context = Context.open(inputs, root)
    report = read_report(context.store, evaluation)
    tokenizer = context.tokenizer()
    parts = []
    for trajectory in read_trajectories(context.store, evaluation)[:NUM_EPISODES]:
        reward = report.rewards[trajectory.prompt_id][trajectory.sample]
        head = f"=== {trajectory.prompt_id} sample {trajectory.sample}: reward {reward}, {trajectory.stop_reason}"
        parts.append(f"{head}\n{tokenizer.decode(trajectory.tokens_T.tolist())}\n")
    key = stage_key(context.cfg.run, report.step, "transcripts.txt")
    return context.store.put(key, "\n".join(parts).encode()).uri
