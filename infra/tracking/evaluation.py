"""One evaluation as MLflow shows it: a row for every episode, and which of them are worth a trace."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from infra.tracking.conversation import Conversation
from k3core.types import TRUNCATED, PolicyVersion, Prompt, Score, Trajectory


@dataclass(frozen=True, slots=True)
class Graded:
    """An episode of an evaluation. `score.criteria` is empty where no verdict was kept."""

    prompt: Prompt
    trajectory: Trajectory
    score: Score

    @property
    def key(self) -> str:
        """What it is called within its evaluation."""
        return f"{self.trajectory.prompt_id}#{self.trajectory.sample}"


@dataclass(frozen=True, slots=True)
class Traced:
    """A selected episode. role: why it was selected."""

    role: str
    graded: Graded
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class Evaluation:
    """judge: its id. started_ms: when the stage began; when an episode or a turn did is not recorded.

    traces: the selected ones of `episodes`.
    """

    policy: PolicyVersion
    suite: str
    suite_sha256: str
    judge: str
    judge_is_code: bool
    started_ms: int
    episodes: tuple[Graded, ...]
    traces: tuple[Traced, ...]


def select(episodes: Sequence[Graded], count: int) -> list[tuple[str, Graded]]:
    """At most `count` episodes with their roles: best, worst, median, a truncated one, one with a fault of ours.

    What is left of `count` goes to the first samples in the suite's order: the same prompts for every version, so that
    two versions can be read side by side. Ties are broken by prompt and sample.
    """
    by_key = sorted(episodes, key=lambda e: (e.trajectory.prompt_id, e.trajectory.sample))
    graded = sorted((e for e in by_key if e.score.value is not None), key=lambda e: e.score.value or 0.0)
    truncated = [e for e in by_key if e.trajectory.stop_reason in TRUNCATED]
    broken = [e for e in by_key if e.trajectory.stop_reason == "infrastructure_error"]
    wanted = [("best", graded[-1:]), ("worst", graded[:1]), ("median", graded[(len(graded) - 1) // 2 :][:1])]
    wanted += [("truncated", truncated[:1]), ("infrastructure error", broken[:1])]
    first = [e for e in episodes if e.trajectory.sample == 0]
    chosen: dict[str, tuple[str, Graded]] = {}
    for role, members in [*wanted, *(("same for every version", [e]) for e in first)]:
        for episode in members:
            if len(chosen) < count:
                chosen.setdefault(episode.key, (role, episode))
    return list(chosen.values())


def trace_id(run_id: str, step: int, episode: Graded) -> str:
    """The same whenever it is asked for, so that an episode's trace is written once however often it is tracked."""
    return "tr-" + hashlib.sha256(f"{run_id}/{step}/{episode.key}".encode()).hexdigest()[:32]


def table_json(run_id: str, evaluation: Evaluation) -> str:
    """The artifact that MLflow's table views read (`load_table`, the runs' side-by-side view).

    The view compares the second column of runs by the first, unless told otherwise: so an episode's name and what came
    of it stand there. A criterion that every prompt has gets a column. What has no grade is null.
    """
    traced = {traced.graded.key for traced in evaluation.traces}
    step = evaluation.policy.step
    verdicts = [{c.title: c.verdict for c in e.score.criteria} for e in evaluation.episodes]
    judged = [titles for titles in verdicts if titles]
    shared = [title for title in judged[0] if all(title in titles for titles in judged)] if judged else []
    rows = [
        {
            "episode": episode.key,
            "outcome": _outcome(episode),
            "prompt": episode.trajectory.prompt_id,
            "sample": episode.trajectory.sample,
            "step": step,
            "reward": episode.score.value,
            "fraction": episode.score.fraction,
            "all pass": _word(episode.score.all_pass),
            **{title: titles.get(title) for title in shared},
            "stop": episode.trajectory.stop_reason,
            "turns": episode.trajectory.num_turns,
            "tool calls": episode.trajectory.num_tool_calls,
            "tokens": len(episode.trajectory.tokens_T),
            "sampled tokens": int(episode.trajectory.loss_mask_T.sum()),
            "trace": trace_id(run_id, step, episode) if episode.key in traced else None,
        }
        for episode, titles in zip(evaluation.episodes, verdicts, strict=True)
    ]
    columns = list(rows[0]) if rows else []
    return json.dumps({"columns": columns, "data": [list(row.values()) for row in rows]}, ensure_ascii=False)


def _word(passed: bool | None) -> str | None:
    return None if passed is None else "pass" if passed else "fail"


def _outcome(episode: Graded) -> str:
    """Reward, end, the criteria that were not passed, and what was delivered, for a person."""
    score, trajectory = episode.score, episode.trajectory
    grade = f"not graded ({score.reason})" if score.value is None else f"reward {score.value:.3f}"
    missed: dict[str, list[str]] = {}
    for result in score.criteria:
        if result.verdict != "pass":
            missed.setdefault(result.verdict, []).append(result.title)
    lines = [f"{grade}, {trajectory.stop_reason}"]
    lines += [f"{verdict}: {', '.join(titles)}" for verdict, titles in missed.items()]
    lines += [f"{name}:\n{text}" for name, text in sorted(trajectory.deliverables.items())]
    return "\n".join(lines)
