"""Any published version on the evaluation suite, or at work on training prompts, from the command line."""

from __future__ import annotations

import json

from prefect import flow
from rich.console import Console
from rich.table import Table

from infra.console import bars, say
from infra.lineage import newest_step
from infra.policies import read_version
from infra.records import decode
from infra.stages.context import Context, Inputs
from infra.stages.evaluate import read_report
from infra.stages.prepare import find_inputs
from infra.stages.record import read_record
from infra.store import Store
from k3core.eval.compare import mean_and_stderr
from k3core.types import PolicyVersion, Ref, ScoredGroup
from tasks.evaluate import evaluate
from tasks.rollout import rollout
from tasks.score import score

SHOWN = 3


@flow(
    name="evaluate",
    flow_run_name="evaluate-{policy.run}-{policy.step}",
    validate_parameters=False,
    persist_result=False,
)
def evaluate_version(inputs: Inputs, root: str, policy: PolicyVersion) -> Ref:
    return evaluate(inputs, root, policy)


@flow(
    name="rollout", flow_run_name="rollout-{policy.run}-{policy.step}", validate_parameters=False, persist_result=False
)
def rollout_version(inputs: Inputs, root: str, policy: PolicyVersion) -> Ref:
    return score(inputs, root, rollout(inputs, root, policy, 0), 0)


def run_evaluation(root: str, run: str, step: int | None) -> int:
    """Prints means with standard errors and the pass rate of each criterion."""
    inputs, policy = find_version(root, run, step)
    with bars():
        record = evaluate_version(inputs, root, policy)
    report = read_report(Store(root), record)
    table = Table(title=f"{policy.run}@{policy.step} on {len(report.rewards)} prompts")
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_column("stderr", justify="right")
    for metric in ("reward", "fraction", "all_pass"):
        mean, stderr = mean_and_stderr(report, metric)
        table.add_row(metric, f"{mean:.3f}", f"{stderr:.3f}")
    for name, rate in report.criteria_pass_rate.items():
        table.add_row(f"criterion {name}", f"{rate:.3f}", "")
    Console().print(table)
    say(f"stopped: {json.dumps(dict(report.stop_reasons))}; {report.mean_turns:.2f} turns an episode")
    return 0


def run_rollout(root: str, run: str, step: int | None) -> int:
    """Prints some transcripts with their grades, and where the rest is."""
    inputs, policy = find_version(root, run, step)
    with bars():
        record = rollout_version(inputs, root, policy)
    context = Context.open(inputs, root)
    groups_ref = read_record(context.store, record).outputs["groups"]
    groups = decode(context.store.get(groups_ref), tuple[ScoredGroup, ...], groups_ref.uri)
    tokenizer = context.tokenizer()
    for group in groups[:SHOWN]:
        trajectory, grade = group.trajectories[0], group.scores[0]
        verdicts = ", ".join(f"{c.title} {c.verdict}" for c in grade.criteria)
        say(f"--- {group.prompt_id}: reward {grade.value}, {trajectory.stop_reason} ({verdicts})")
        say(tokenizer.decode(trajectory.tokens_T.tolist()))
    say(f"{sum(len(g.trajectories) for g in groups)} graded trajectories: {groups_ref.uri}")
    return 0


def find_version(root: str, run: str, step: int | None) -> tuple[Inputs, PolicyVersion]:
    """The run's pinned inputs and the version, the newest for None. ValueError says what there is."""
    store = Store(root)
    inputs = find_inputs(store, run)
    if inputs is None:
        raise ValueError(f"{root}: no run {run!r} here; start one with `k3 train`, or say where it lies with --root")
    newest = newest_step(store, run)
    wanted = newest if step is None else step
    policy = None if wanted is None else read_version(store, run, wanted)
    if policy is None:
        have = "no version yet" if newest is None else f"versions 0 to {newest}"
        raise ValueError(f"run {run!r} has no version {wanted}: it has {have}")
    return inputs, policy
