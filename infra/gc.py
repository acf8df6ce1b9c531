"""What a run no longer needs. Decided from manifests, records and pointers read by key; a listing only proposes.

Manifests, records, ledger and marks stay for ever: what is collected are payloads, and a reader of one that is gone is
told when and why. Each object is marked before it goes, and the plan is made anew between the two: a version published
meanwhile either is seen here, and keeps its chain, or sees the mark, and gets a whole copy of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from infra.ledger import Ledger
from infra.pins import pinned_steps
from infra.pruned import Mark, find_mark, key_sha256, mark
from infra.serving import read_served
from infra.stages.record import StageRecord, find_record, read_record, stage_key
from infra.store import AlreadyCommitted, Store
from infra.version_chain import as_version, chain_of, find_anchor, find_manifest, find_steps, payload_key
from k3core.checkpoint.chain import Manifest
from k3core.sealed import seal, unseal
from k3core.types import PolicyVersion, Ref

_PAYLOAD = re.compile(r".*/policies/(\d{6})/(?:payload|anchor)-[^/]+$")
_CHECKPOINT = re.compile(r"(.*/checkpoints/.+)/(\d{6})-(?:weights|optimizer)\.safetensors$")


@dataclass(frozen=True, slots=True)
class Keep:
    """What stays beside the served version, the newest, and all that stands on what the served one stands on.

    last: how many of the newest versions. steps: further versions, with all that their stages made: champion and
    candidate; the versions that other runs pinned are added. trajectories: those of finished steps too, though the
    scored groups hold them. orphan_hours: for how long gc must have known a payload that no manifest names, for its try
    may still be at work.
    """

    last: int = 2
    steps: frozenset[int] = frozenset()
    trajectories: bool = True
    orphan_hours: float = 24.0

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"keep_last must be at least 1, found {self.last}: the newest version always stays")
        if self.orphan_hours < 1:
            raise ValueError(f"orphan_hours must be at least 1, found {self.orphan_hours:g}: a try may take as long")

    def with_steps(self, steps: Iterable[int]) -> Keep:
        return replace(self, steps=self.steps.union(steps))


@dataclass(frozen=True, slots=True)
class Garbage:
    """An object that may go. sha256: of its bytes; of its key for what nothing describes (`key_sha256`)."""

    step: int
    key: str
    sha256: str
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """live: step -> why it stays; the other published steps are `dead`: their files may go, or went before.

    garbage: what is there and may go. suspects: what no document names, and nobody has known of for long enough.
    """

    run: str
    keep: Keep
    live: Mapping[int, str]
    dead: tuple[int, ...]
    garbage: tuple[Garbage, ...]
    suspects: tuple[str, ...]

    def instead(self, step: int) -> str:
        """For whoever misses something of a step: the nearest version that stays, a later one if there is one."""
        later = [other for other in self.live if other >= step]
        return f"use step {min(later) if later else max(self.live)}"

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.garbage)


def live(store: Store, run: str, keep: Keep, now: datetime) -> Plan:
    """Which versions stay and which objects may go; deletes nothing. now: with a time zone.

    Raises ValueError for a run without versions and for a step to keep that does not exist, IntegrityError when a
    manifest or a pointer was altered: nothing is collected on the word of a broken document.
    """
    served = read_served(store, run)
    steps = find_steps(store, run, -1 if served is None else served.version.step)
    if not steps:
        raise ValueError(f"{run}: nothing is published in {store.uri(run)}; choose the folder with --root")
    if unknown := sorted(keep.steps - set(steps)):
        raise ValueError(
            f"{run}: step {unknown[0]} is to be kept, but it is not published (steps {steps[0]} to {steps[-1]})"
        )
    keep = keep.with_steps(pinned_steps(store, run))
    manifests = {step: _manifest(store, run, step) for step in steps}
    versions = {step: as_version(*found) for step, found in manifests.items()}
    wanted = _reasons(store, versions, None if served is None else served.version, keep)
    chains = {step: chain_of(store, versions[step]) for step in wanted}
    # What an earlier collection took, when less was to be kept, cannot stay; what is left of its chain may go.
    chains = {step: chain for step, chain in chains.items() if not _is_gone(store, run, chain)}
    reasons = {step: why for step, why in wanted.items() if step in chains}
    needed = {payload_key(store, run, link.payload) for chain in chains.values() for link in chain}
    holders = set(steps) if served is None else {step for step in steps if step <= served.version.step}
    garbage = [
        *_dead_payloads(store, run, manifests, reasons, needed),
        *_stage_outputs(store, run, holders, steps, keep),
    ]
    present = [item for item in garbage if store.size(item.key) is not None]
    unnamed = [*_orphans(store, run), *_old_checkpoints(store, run)]
    old = [item for item in unnamed if _hours_known(store, run, item.key, now) >= keep.orphan_hours]
    suspects = tuple(item.key for item in unnamed if item not in old)
    dead = tuple(step for step in steps if step not in reasons)
    return Plan(run, keep, reasons, dead, (*present, *old), suspects)


def collect(store: Store, plan: Plan, now: datetime) -> list[Garbage]:
    """Marks what the plan lists, plans again, deletes what both plans list; returns that.

    Safe beside a run that goes on, after a crash anywhere, and twice.
    """
    said = f"{now.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    for item in plan.garbage:
        mark(store, plan.run, Mark(item.key, item.sha256, item.size_bytes, item.reason, said, plan.instead(item.step)))
    for key in plan.suspects:
        with suppress(AlreadyCommitted):  # seen before
            store.commit(_seen_key(plan.run, key), seal({"key": key, "seen_at": now.isoformat()}))
    still = {item.key for item in live(store, plan.run, plan.keep, now).garbage}
    deleted: list[Garbage] = []
    for item in plan.garbage:
        if item.key in still:
            store.delete(item.key)
            deleted.append(item)
    return deleted


def _is_gone(store: Store, run: str, chain: Iterable[Manifest]) -> bool:
    """Whether gc deleted a file of the chain; a file that is missing for another reason is for its reader to report."""
    for link in chain:
        key = payload_key(store, run, link.payload)
        owner = key.partition("/policies/")[0]
        if store.size(key) is None and find_mark(store, owner, link.payload.sha256, key) is not None:
            return True
    return False


def _reasons(
    store: Store, versions: Mapping[int, PolicyVersion], served: PolicyVersion | None, keep: Keep
) -> dict[int, str]:
    """step -> why it stays."""
    steps = sorted(versions)
    newest = steps[-1]
    reasons = dict.fromkeys(steps[-keep.last :], "one of the newest")
    # A publisher may be encoding against any version since the last whole one: the pointer moves while it works.
    anchored = versions[newest] if served is None else served
    root = chain_of(store, anchored)[0].step
    reasons |= {
        step: f"not older than step {root}, on which the served version stands" for step in steps if step >= root
    }
    reasons |= dict.fromkeys(sorted(keep.steps), "to be kept")
    reasons[newest] = "the newest"
    if served is not None:
        reasons[served.step] = "served"
    if any(versions[step].kind == "adapter" for step in reasons) and 0 in versions:
        reasons.setdefault(0, "adapters stand on it")
    return dict(sorted(reasons.items()))


def _dead_payloads(
    store: Store,
    run: str,
    manifests: Mapping[int, tuple[Manifest, Ref]],
    reasons: Mapping[int, str],
    needed: set[str],
) -> Iterator[Garbage]:
    for step, (manifest, ref) in manifests.items():
        anchor = find_anchor(store, manifest, ref)
        for file in (manifest, *([] if anchor is None else [anchor])):
            key = payload_key(store, run, file.payload)
            if key in needed or file.payload.size_bytes == 0 or not key.startswith(f"{run}/policies/"):
                continue  # what was adopted belongs to another run
            why = f"step {step} has a whole copy" if step in reasons else f"no live version needs step {step}"
            yield Garbage(step, key, file.payload.sha256, file.payload.size_bytes, why)


def _stage_outputs(store: Store, run: str, holders: set[int], steps: Sequence[int], keep: Keep) -> Iterator[Garbage]:
    """Of steps before the last one that was applied: a resume goes on from the last.

    holders: steps whose policy was published and served, so that nobody needs the trainer's copy.
    """
    ledger = Ledger(store, run)
    applied: dict[int, StageRecord] = {}
    for step in range(steps[0] + 1, steps[-1] + 2):
        entry = ledger.get(step)
        if entry is not None:
            applied[step] = read_record(store, Ref(**entry["result"]["record"]))
    last = max(applied, default=0)
    warm_start = find_record(store, stage_key(run, 0, "warm_start.json"))
    if warm_start is not None:
        applied[0] = warm_start[0]
    for step, record in sorted(applied.items()):
        if step >= last:
            continue
        why = f"step {last} was applied after step {step}"
        if "weights" in record.outputs and step in holders:
            yield _output(run, step, record.outputs["weights"], f"{why}, whose policy is published")
        if step in keep.steps:
            continue
        if "optimizer" in record.outputs:
            yield _output(run, step, record.outputs["optimizer"], why)
        if not keep.trajectories:
            yield from _trajectories(store, run, step)


def _trajectories(store: Store, run: str, step: int) -> Iterator[Garbage]:
    attempt = 0
    while (rollout := find_record(store, stage_key(run, step, f"rollout-{attempt}.json"))) is not None:
        scored = find_record(store, stage_key(run, step, f"score-{attempt}.json"))
        if scored is not None and "trajectories" in rollout[0].outputs:
            yield _output(run, step, rollout[0].outputs["trajectories"], f"the scored groups of step {step} hold them")
        attempt += 1


def _orphans(store: Store, run: str) -> Iterator[Garbage]:
    """Payloads of tries that never committed, or have not yet."""
    for key in store.list_keys(f"{run}/policies/"):
        found = _PAYLOAD.fullmatch(key)
        if found is not None and key not in _named(store, run, int(found[1])) and (size := store.size(key)) is not None:
            yield Garbage(
                int(found[1]), key, key_sha256(key), size, f"a try of step {int(found[1])} that never committed"
            )


def _old_checkpoints(store: Store, run: str) -> Iterator[Garbage]:
    """Of the warm start and the arms: all before the one that `latest.json` names."""
    latest: dict[str, int] = {}
    for key in store.list_keys(f"{run}/checkpoints/"):
        found = _CHECKPOINT.fullmatch(key)
        if found is None:
            continue
        folder, step = found[1], int(found[2])
        if folder not in latest:
            document = store.read_manifest(f"{folder}/latest.json")
            latest[folder] = -1 if document is None else int(unseal(document, folder)["step"])
        if step < latest[folder] and (size := store.size(key)) is not None:
            yield Garbage(0, key, key_sha256(key), size, f"checkpoint {latest[folder]} came after it")


def _named(store: Store, run: str, step: int) -> set[str]:
    """The payload keys that the step's manifest and anchor name."""
    found = find_manifest(store, run, step)
    if found is None:
        return set()
    anchor = find_anchor(store, *found)
    return {payload_key(store, run, one.payload) for one in (found[0], anchor) if one is not None}


def _hours_known(store: Store, run: str, key: str, now: datetime) -> float:
    """Since `collect` first saw an object that no document named; 0 when it has not."""
    document = store.read_manifest(_seen_key(run, key))
    if document is None:
        return 0.0
    seen = datetime.fromisoformat(unseal(document, store.uri(_seen_key(run, key)))["seen_at"])
    return (now - seen).total_seconds() / 3600


def _seen_key(run: str, key: str) -> str:
    return f"{run}/pruned/suspects/{key_sha256(key)}.json"


def _manifest(store: Store, run: str, step: int) -> tuple[Manifest, Ref]:
    found = find_manifest(store, run, step)
    assert found is not None, "nothing deletes a manifest"
    return found


def _output(run: str, step: int, ref: Ref, reason: str) -> Garbage:
    return Garbage(step, stage_key(run, step, ref.uri.rpartition("/")[2]), ref.sha256, ref.size_bytes, reason)
