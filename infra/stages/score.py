"""Score: the judge grades every trajectory against its prompt's rubric."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby

import numpy as np

from infra.parts import build_judge, train_prompts
from infra.provenance import judge_version, prompts_and_rubric
from infra.records import decode, encode
from infra.stages.context import Context, Inputs
from infra.stages.record import read_record, stage_key
from k3core.rewards.judge import grade
from k3core.rl.advantages import group_advantages
from k3core.types import Ref, ScoredGroup, Trajectory


def score_step(inputs: Inputs, root: str, rollout: Ref, attempt: int) -> Ref:
    """Record with output `groups`. A grade that could not be given stays None; it is counted and never a number."""
    context = Context.open(inputs, root)
    cfg = context.cfg
    step = read_record(context.store, rollout).step
    if (done := context.done(step, f"score-{attempt}", {"rollout": rollout})) is not None:
        return done
    source = read_record(context.store, rollout).outputs["trajectories"]
    trajectories = decode(context.store.get(source), tuple[Trajectory, ...], source.uri)
    prompts = {prompt.id: prompt for prompt in train_prompts(cfg, step, attempt)}
    judge, reward = build_judge(cfg), cfg.reward
    groups = []
    for prompt_id, members in groupby(trajectories, key=lambda t: t.prompt_id):
        group = tuple(members)
        scores = tuple(grade(prompts[prompt_id], t, judge, reward) for t in group)
        groups.append(ScoredGroup(prompt_id, group, scores))
    name = f"groups-{attempt}" if attempt else "groups"
    ref = context.store.put(stage_key(cfg.run, step, f"{name}.zst"), encode(groups))
    return context.record(
        "score",
        step,
        {"groups": ref},
        score_metrics(groups),
        name=f"score-{attempt}",
        inputs={"rollout": rollout},
        provenance={
            "attempt": attempt,
            "reward": asdict(reward),
            "judges": [judge_version(judge)],
            **prompts_and_rubric(list(prompts.values())),
        },
    )


def score_metrics(groups: list[ScoredGroup]) -> dict[str, float]:
    graded = [score for group in groups for score in group.scores if score.value is not None]
    metrics = {f"groups/{kind}": float(n) for kind, n in group_advantages(groups, normalize_std=False).counts.items()}
    if graded:  # no grade at all has no mean
        metrics["rollout/reward"] = float(np.mean([score.value for score in graded]))
        metrics["rollout/fraction"] = float(np.mean([score.fraction for score in graded]))
        metrics["rollout/all_pass"] = float(np.mean([bool(score.all_pass) for score in graded]))
    return metrics
