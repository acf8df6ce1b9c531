"""A run that redoes a step of another run: from the stored trajectories, with other rewards or another loss.

What the trajectories were made with (model, tokenizer, environment, rollout, seed) stays; what grades them and learns
from them may change. The new run pins its own config and, under `from`, what it redoes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from infra.config import RunConfig, parse
from infra.lineage import key_of
from infra.pins import pin
from infra.policies import read_version
from infra.pruned import find_mark
from infra.records import decode
from infra.stages.context import stage_config
from infra.stages.inputs import Inputs
from infra.stages.prepare import find_inputs
from infra.stages.record import StageRecord, find_record, read_record, stage_key
from infra.store import Store
from k3core.types import PolicyVersion, Ref, Score, ScoredGroup

Redo = Literal["rescore", "retrain"]

GRADING = frozenset({"reward", "judge"})
LEARNING = frozenset({"gspo", "train", "publish"})
AROUND = frozenset({"tasks", "tracking"})
# What decides which parameters there are: the stored weights and moments are of these.
FIXED = ("train.mode", "train.lora_")


@dataclass(frozen=True, slots=True)
class Origin:
    """A version, and what made it. parent: the version that sampled the trajectories and was updated.

    attempt: which draw of prompts. optimizer: the state before the update; None for a fresh one.
    """

    inputs: Inputs
    version: PolicyVersion
    parent: PolicyVersion
    rollout: Ref
    score: Ref
    update: Ref
    optimizer: Ref | None
    attempt: int

    @property
    def name(self) -> str:
        return f"{self.version.run}@{self.version.step}"


@dataclass(frozen=True, slots=True)
class Changed:
    """An episode whose grade is another one."""

    prompt_id: str
    sample: int
    before: Score
    after: Score

    @property
    def verdicts(self) -> list[str]:
        """The criteria that were decided otherwise."""
        before = {result.id: result.verdict for result in self.before.criteria}
        return [
            f"{result.title}: {before.get(result.id, 'not asked')} -> {result.verdict}"
            for result in self.after.criteria
            if before.get(result.id) != result.verdict
        ]


def find_origin(store: Store, root: str, run: str, step: int) -> Origin:
    """Raises ValueError when there is no such version, or when no trajectories made it."""
    inputs, version = find_inputs(store, run), read_version(store, run, step)
    if inputs is None or version is None:
        raise ValueError(f"{root}: run {run!r} has no version {step} here; `k3 explain {run}` shows what it has")
    if step == 0:
        raise ValueError(f"{run}@0 is the warm start: no trajectories made it; name a later version")
    publication = find_record(store, stage_key(run, step, "publish.json"))
    if publication is None or publication[0].inputs is None:
        raise ValueError(
            f"{run}@{step}: its records do not say what it was made of (an earlier version of this project wrote them);"
            " train the run again under another name"
        )
    if "trained" not in publication[0].inputs:
        raise ValueError(f"{run}@{step} was adopted from {publication[0].provenance.get('adopted')}: redo that one")
    update = publication[0].inputs["trained"]
    read = _inputs_of(store, update)
    rollout = _inputs_of(store, read["score"])["rollout"]
    parent = read_version(store, run, step - 1)
    if parent is None or parent.weights != read["policy"]:
        raise ValueError(f"{run}@{step}: the version before it is not the one that it was made of")
    attempt = read_record(store, rollout).provenance["attempt"]
    return Origin(inputs, version, parent, rollout, read["score"], update, read.get("optimizer"), attempt)


def redo_config(store: Store, origin: Origin, root: str, name: str, redo: Redo, settings: Sequence[str]) -> RunConfig:
    """The old run's config with `settings` (key=value) changed. Raises ValueError for a setting that cannot change."""
    allowed = GRADING | AROUND | (LEARNING if redo == "retrain" else frozenset())
    for setting in settings:
        key = setting.partition("=")[0].strip()
        section = key.partition(".")[0]
        if section in LEARNING - allowed:
            raise ValueError(f"{key}: rescoring does not learn; use `k3 retrain {origin.name}`")
        if section not in allowed or key.startswith(FIXED):
            raise ValueError(
                f"{key}: the stored trajectories and weights were made with it, so it cannot change afterwards; "
                f"can: {', '.join(sorted(allowed & {entry.name for entry in fields(RunConfig)}))}; "
                "for the others, `k3 train` a new run"
            )
    step = origin.version.step
    pinned = store.get(origin.inputs.config).decode()
    fixed = [f"root={json.dumps(root)}", f"run={json.dumps(name)}", f"steps={step}", "evaluate.every=1"]
    return parse(pinned, origin.inputs.config.uri, [*settings, *fixed])


def open_branch(
    store: Store, origin: Origin, root: str, redo: Redo, settings: Sequence[str], name: str | None
) -> tuple[RunConfig, Inputs]:
    """The config and the pinned inputs of the new run; the same request again finds the run of the first.

    name None: the first of {run}-{redo}-1, -2, ... that is free or redoes just this.
    Raises ValueError when `name` is taken by a run that does not.
    """
    if redo == "rescore" or changes_grading(settings):
        _refuse_pruned(store, origin)
    record = origin.update if redo == "retrain" else origin.score
    run = origin.version.run
    names = (f"{run}-{redo}-{n}" for n in itertools.count(1)) if name is None else iter([name])
    for candidate in names:
        cfg = redo_config(store, origin, root, candidate, redo, settings)
        key, text = f"{candidate}/config.toml", stage_config(cfg).encode()
        inputs = Inputs(store.ref(key, text), origin.inputs.tokenizer, origin.inputs.init)
        document: dict[str, Any] = {
            "config": asdict(inputs.config),
            "tokenizer": asdict(inputs.tokenizer),
            "from": {"run": run, "step": origin.version.step, "record": asdict(record)},
        }
        if inputs.init is not None:
            document["init"] = asdict(inputs.init)
        pinned = store.read_manifest(f"{candidate}/run.json")
        if pinned is not None and pinned != document:
            continue
        pin(store, origin.parent, by=candidate)  # before anything relies on it
        if pinned is None:
            store.put(key, text)
            store.commit(f"{candidate}/run.json", document)
        return cfg, inputs
    raise ValueError(f"run {name!r} in {root} is another one; choose a new name with --as")


def changes_grading(settings: Sequence[str]) -> bool:
    return any(setting.partition(".")[0].strip() in GRADING for setting in settings)


def read_groups(store: Store, score: Ref) -> tuple[ScoredGroup, ...]:
    ref = read_record(store, score).outputs["groups"]
    return decode(store.get(ref), tuple[ScoredGroup, ...], ref.uri)


def changed_scores(before: Sequence[ScoredGroup], after: Sequence[ScoredGroup]) -> list[Changed]:
    """In the order of the episodes."""
    return [
        Changed(trajectory.prompt_id, trajectory.sample, old, new)
        for a, b in zip(before, after, strict=True)
        for trajectory, old, new in zip(b.trajectories, a.scores, b.scores, strict=True)
        if _grade(old) != _grade(new)
    ]


def compared(before: StageRecord, after: StageRecord, names: Sequence[str]) -> list[tuple[str, float, float]]:
    """(metric, before, after) for those that both measured."""
    return [
        (name, before.metrics[name], after.metrics[name])
        for name in names
        if name in before.metrics and name in after.metrics
    ]


def _grade(score: Score) -> tuple[Any, ...]:
    """All but the words of the reasoning."""
    verdicts = tuple((result.id, result.verdict) for result in score.criteria)
    return score.value, score.fraction, score.all_pass, score.reason, verdicts


def _refuse_pruned(store: Store, origin: Origin) -> None:
    ref = read_record(store, origin.rollout).outputs["trajectories"]
    key = key_of(store, ref)
    mark = find_mark(store, key.split("/")[0], ref.sha256, key)
    if mark is not None and store.size(key) is None:
        raise ValueError(f"{origin.name}: its trajectories cannot be graded again: {key} was {mark.sentence()}")


def _inputs_of(store: Store, ref: Ref) -> dict[str, Ref]:
    record = read_record(store, ref)
    if record.inputs is None:
        raise ValueError(f"{ref.uri} does not say what it read; train the run again under another name")
    return dict(record.inputs)
