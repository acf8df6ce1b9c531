"""`k3 rescore` and `k3 retrain`: a step of a run done again from its stored trajectories, as a run of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefect import flow
from rich import box
from rich.console import Console
from rich.table import Table

from flows.stages import NothingToLearn, Stages
from infra.branch import (
    Changed,
    Origin,
    changed_scores,
    changes_grading,
    compared,
    find_origin,
    open_branch,
    read_groups,
)
from infra.config import RunConfig
from infra.console import bars, say
from infra.lineage import newest_step
from infra.stages.inputs import Inputs
from infra.stages.record import StageRecord, read_record
from infra.stages.track import tracking_uri
from infra.store import Store
from k3core.types import PolicyVersion, Ref
from tasks.redo import adopt, track_origin
from tasks.score import score
from tasks.stage import configured

SCORED = (
    "rollout/reward",
    "rollout/fraction",
    "rollout/all_pass",
    "groups/kept",
    "groups/zero_variance_all_pass",
    "groups/zero_variance_all_fail",
    "groups/zero_variance_other",
    "groups/ungraded",
    "groups/ungraded_trajectories",
)
TRAINED = (
    "gspo/loss",
    "gspo/ratio_mean",
    "gspo/ratio_max",
    "gspo/clip_fraction",
    "train/grad_norm",
    "train/learning_rate",
    "train/vetoed_steps",
    "drift/numeric/abs_max",
    "drift/numeric/k3_rollout_trainer",
    "drift/numeric/differing_tokens",
    "drift/stale/abs_mean",
)
SHOWN = 12  # episodes


@dataclass(frozen=True, slots=True)
class Retrained:
    version: PolicyVersion
    scores: Ref
    trained: Ref


@flow(name="rescore", flow_run_name="{cfg.run}", validate_parameters=False, persist_result=False)
def rescore_steps(cfg: RunConfig, inputs: Inputs, origins: tuple[Origin, ...]) -> list[Ref]:
    """The records of the new scores, in the order of `origins`."""
    scores = [grade_again(cfg, inputs, origin) for origin in origins]
    names = ", ".join(origin.name for origin in origins)
    configured(track_origin, cfg.tasks.of("track"))(
        inputs, cfg.root, tracking_uri(cfg), cfg.tracking, names, tuple(scores)
    )
    return scores


@flow(name="retrain", flow_run_name="{cfg.run}", validate_parameters=False, persist_result=False)
def retrain_step(cfg: RunConfig, inputs: Inputs, origin: Origin, is_graded_again: bool) -> Retrained:
    """The version that other settings make of the same trajectories, published, evaluated and tracked."""
    stages = Stages(cfg, inputs)
    scores = grade_again(cfg, inputs, origin) if is_graded_again else origin.score
    require_variance(cfg, scores, origin)
    parent = stages.policy(configured(adopt, cfg.tasks.of("publish"))(inputs, cfg.root, origin.parent))
    trained = stages.update(parent, scores, origin.optimizer)
    published = stages.publish(trained, parent)
    version = stages.policy(published)
    evaluation = stages.evaluate(version)
    stages.track((origin.rollout, scores, trained, published), evaluation)
    configured(track_origin, cfg.tasks.of("track"))(inputs, cfg.root, tracking_uri(cfg), cfg.tracking, origin.name, ())
    return Retrained(version, scores, trained)


def grade_again(cfg: RunConfig, inputs: Inputs, origin: Origin) -> Ref:
    graded: Ref = configured(score, cfg.tasks.of("score"))(
        inputs=inputs, root=cfg.root, rollout=origin.rollout, attempt=origin.attempt
    )
    return graded


def require_variance(cfg: RunConfig, scores: Ref, origin: Origin) -> None:
    counts = read_record(Store(cfg.root), scores).metrics
    if counts["groups/kept"] == 0:
        kinds = ", ".join(
            f"{name} {count:.0f}" for name, count in counts.items() if name.startswith("groups/") and count
        )
        raise NothingToLearn(
            f"{origin.name}: with these rewards no group of its trajectories has variance ({kinds}): change reward.*"
        )


def run_rescore(
    root: str, versions: Sequence[tuple[str, int | None]], settings: Sequence[str], name: str | None
) -> int:
    """Prints old against new for each version, and the episodes whose grade changed."""
    store = Store(root)
    if len({run for run, _ in versions}) > 1:
        raise ValueError("rescore: the versions are of several runs; rescore one run at a time")
    origins = tuple(_origin(store, root, *version) for version in versions)
    cfg, inputs = open_branch(store, origins[-1], root, "rescore", settings, name)
    with bars():
        scores = rescore_steps(cfg, inputs, origins)
    console = Console(highlight=False)
    for origin, record in zip(origins, scores, strict=True):
        console.print(scores_table(store, origin, record, cfg.run))
        for line in changes_lines(store, origin, record):
            say(line)
    say(f"scores: run {cfg.run}, record {scores[-1].uri}")
    say(f"next:   k3 explain {cfg.run}@{origins[-1].version.step}   or   {_retrain_command(origins[-1], settings)}")
    return 0


def run_retrain(root: str, run: str, step: int | None, settings: Sequence[str], name: str | None) -> int:
    """Prints old against new, and where the new version lies."""
    store = Store(root)
    origin = _origin(store, root, run, step)
    cfg, inputs = open_branch(store, origin, root, "retrain", settings, name)
    with bars():
        done = retrain_step(cfg, inputs, origin, changes_grading(settings))
    new = f"{cfg.run}@{done.version.step}"
    console = Console(highlight=False)
    if done.scores != origin.score:
        console.print(scores_table(store, origin, done.scores, cfg.run))
        for line in changes_lines(store, origin, done.scores):
            say(line)
    before, after = read_record(store, origin.update), read_record(store, done.trained)
    table = _table(origin.name, new)
    for metric, old, now in compared(before, after, TRAINED):
        table.add_row(metric, f"{old:.6g}", f"{now:.6g}", "" if old == now else f"{now - old:+.3g}")
    weights = origin.version.weights_sha256, done.version.weights_sha256
    table.add_row("weights sha256", weights[0][:12], weights[1][:12], "same" if weights[0] == weights[1] else "other")
    builds = [_digest(record.provenance.get("trainer", {}).get("code_sha256")) for record in (before, after)]
    table.add_row("trainer code", *builds, "same" if builds[0] == builds[1] else "other")
    console.print(table)
    say(f"{new}: weights sha256 {done.version.weights_sha256}, {done.version.weights.uri}")
    say(f"next: k3 compare {origin.name} {new}")
    return 0


def scores_table(store: Store, origin: Origin, record: Ref, run: str) -> Table:
    before, after = read_record(store, origin.score), read_record(store, record)
    table = _table(origin.name, run)
    for metric, old, now in compared(before, after, SCORED):
        if old or now:
            table.add_row(metric, f"{old:.4g}", f"{now:.4g}", "" if old == now else f"{now - old:+.4g}")
    for word, digests in (("rubric", _rubrics(before, after)), ("judge code", _judges(before, after))):
        table.add_row(word, *digests, "same" if digests[0] == digests[1] else "other")
    return table


def changes_lines(store: Store, origin: Origin, record: Ref) -> list[str]:
    """Those whose verdicts changed first: a reward that only weighs the same verdicts otherwise says less."""
    before, after = read_groups(store, origin.score), read_groups(store, record)
    total = sum(len(group.scores) for group in after)
    changed = changed_scores(before, after)
    decided = [one for one in changed if one.verdicts]
    lines = [f"{len(changed)} of {total} episodes have another grade, {len(decided)} of them another verdict"]
    lines += [_change_line(one) for one in [*decided, *(one for one in changed if not one.verdicts)][:SHOWN]]
    if len(changed) > SHOWN:
        lines.append(f"  and {len(changed) - SHOWN} more")
    return lines


def _change_line(change: Changed) -> str:
    def reward(value: float | None) -> str:
        return "none" if value is None else f"{value:.3f}"

    verdicts = f"  ({'; '.join(change.verdicts)})" if change.verdicts else ""
    return f"  {change.prompt_id} #{change.sample}: {reward(change.before.value)} -> {reward(change.after.value)}{verdicts}"


def _rubrics(*records: StageRecord) -> list[str]:
    return [_digest(record.provenance.get("rubric_sha256")) for record in records]


def _judges(*records: StageRecord) -> list[str]:
    return [
        ", ".join(f"{judge['id']} {_digest(judge['code_sha256'])}" for judge in record.provenance.get("judges", ()))
        for record in records
    ]


def _digest(sha256: str | None) -> str:
    return "unknown" if sha256 is None else sha256[:12]


def _table(old: str, new: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", old, new, "difference"):
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    return table


def _origin(store: Store, root: str, run: str, step: int | None) -> Origin:
    newest = newest_step(store, run) if step is None else step
    if newest is None:
        raise ValueError(f"{root}: run {run!r} has no version here; say where it lies with --root")
    return find_origin(store, root, run, newest)


def _retrain_command(origin: Origin, settings: Sequence[str]) -> str:
    return " ".join(["k3 retrain", origin.name, *settings])
