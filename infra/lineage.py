"""Where a version comes from: every document and file behind it, followed by reference and checked.

The records of stages name what they read (`inputs`) and made (`outputs`), so the graph is read, never guessed: from a
version to the update that made it, the scores, the rollouts, the version that sampled them, down to the warm start.
Nothing is listed; what no reference names (publications, evaluations, the ledger) is found by its key and is sealed.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from infra.ledger import Ledger
from infra.pruned import find_mark
from infra.stages.record import StageRecord, parse_record, stage_key
from infra.store import Store
from infra.version_chain import find_steps, policy_key
from k3core.checkpoint.chain import Manifest
from k3core.errors import IntegrityError
from k3core.sealed import parse_canonical
from k3core.types import Ref

Kind = Literal["policy", "anchor", "record", "ledger", "file"]
State = Literal["ok", "missing", "altered", "pruned", "unchecked"]
OnBytes = Callable[[int, int], None]  # (checked, of)

RECORD_ROLES = frozenset({"trained", "score", "rollout"})
POLICY_ROLES = frozenset({"policy", "parent", "start", "manifest"})
BLOCK = 8 << 20


@dataclass(frozen=True, slots=True)
class Node:
    """A document or a file. made_of: role -> id of what it was made of; made: what came of it, by role.

    ref: None for a document that is found by key and missing, and for ledger entries, which carry their own digest.
    state: `pruned` is missing by a policy that says so; `unchecked` means that nobody looked. problem: one line, with
    the uri. facts: what the document says, as JSON values; none of a file and of what could not be read.
    """

    id: str
    kind: Kind
    title: str
    ref: Ref | None
    state: State
    problem: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    made_of: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ancestry:
    """A graph, so that a shared ancestor stands in it once. nodes: by id, in the order in which they were met."""

    root: str
    nodes: Mapping[str, Node]

    @property
    def problems(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.state in ("missing", "altered")]

    @property
    def policies(self) -> list[Node]:
        """The version itself, then those it descends from, the youngest first."""
        found = [node for node in self.nodes.values() if node.kind == "policy"]
        return sorted(found, key=lambda node: -int(node.facts["step"]))

    def own(self, policy: Node) -> list[Node]:
        """What belongs to this version and to no other: all that it was made of, up to the versions before it."""
        found: dict[str, Node] = {}
        waiting = [policy.id]
        while waiting:
            node = self.nodes[waiting.pop()]
            if node.id not in found and (node.kind != "policy" or node.id == policy.id):
                found[node.id] = node
                waiting += [*node.made_of.values(), *node.made.values()]
        return list(found.values())

    def to_json(self) -> dict[str, Any]:
        return {"root": self.root, "nodes": [asdict(node) for node in self.nodes.values()]}


def ancestry(
    store: Store, run: str, step: int, *, check: bool = True, on_bytes: OnBytes = lambda _checked, _of: None
) -> Ancestry:
    """Everything behind `run`@`step`. Documents are verified in any case, files read and hashed only with `check`.

    For a run that holds scores alone, everything behind the scores that version `step` would be made of.
    Raises ValueError when there is neither.
    """
    walk = _Walk(store)
    root = walk.start(run, step)
    walk.follow()
    nodes = dict(walk.nodes)
    if check:
        nodes |= {node.id: node for node in _checked(store, list(nodes.values()), on_bytes)}
    return Ancestry(root, nodes)


def origin_of(store: Store, run: str) -> dict[str, Any] | None:
    """{"run", "step", "record"} of what the run redoes; None for a run that started by itself."""
    pinned = store.read_manifest(f"{run}/run.json")
    origin: dict[str, Any] | None = None if pinned is None else pinned.get("from")
    return origin


def newest_step(store: Store, run: str) -> int | None:
    """None for a run without versions."""
    return max(find_steps(store, run), default=None)


@dataclass(slots=True)
class _Walk:
    """Takes references off a queue, reads what they name, and puts those inside it on the queue."""

    store: Store
    nodes: dict[str, Node] = field(default_factory=dict)
    queue: deque[Callable[[], None]] = field(default_factory=deque)

    def start(self, run: str, step: int) -> str:
        """The root's id. The record of a publication counts as well as its manifest: either may be what is missing."""
        manifest = self.store.read(policy_key(run, step, "manifest.json"))
        if manifest is not None:
            return self._policy(self.store.ref(policy_key(run, step, "manifest.json"), manifest))
        record = self._read_by_key(stage_key(run, step, "publish.json"))[0]
        if record is not None and record.policy is not None:
            return self._policy(record.policy.weights)
        origin = origin_of(self.store, run)
        if origin is not None:
            old = parse_record(self.store.get(Ref(**origin["record"])), origin["record"]["uri"])
            key = stage_key(run, step - 1, f"score-{old.provenance.get('attempt', 0)}.json")
            if step > 0 and self.store.read(key) is not None:
                return self._record_by_key(key)
        newest = newest_step(self.store, run)
        have = "no version yet" if newest is None else f"versions up to {newest}"
        if origin is not None and newest is None:
            have = f"the scores of step {origin['step']}"
        raise ValueError(f"run {run!r} has no version {step}: it has {have}; say where it lies with --root")

    def follow(self) -> None:
        while self.queue:
            self.queue.popleft()()

    def _add(self, node: Node) -> str:
        self.nodes[node.id] = node
        return node.id

    def _policy(self, ref: Ref) -> str:
        id_ = _id(ref)
        if id_ not in self.nodes:
            run, step = _run_and_step(key_of(self.store, ref))
            self._add(Node(id_, "policy", f"{run}@{step}", ref, "unchecked", facts={"run": run, "step": step}))
            self.queue.append(lambda: self._open_policy(self.nodes[id_]))
        return id_

    def _open_policy(self, node: Node) -> None:
        assert node.ref is not None
        run, step = str(node.facts["run"]), int(node.facts["step"])
        made_of = {"record": self._record_by_key(stage_key(run, step, "publish.json"), of=node.ref)}
        made: dict[str, str] = {}
        facts = dict(node.facts)
        state, problem, data = _read(self.store, node.ref)
        if data is not None:
            try:
                manifest = Manifest.from_json(parse_canonical(data, node.ref.uri), node.ref.uri)
                if (manifest.run, manifest.step) != (run, step):
                    raise IntegrityError(f"{node.ref.uri}: expected {run}@{step}, found {manifest.run}@{manifest.step}")
            except IntegrityError as error:
                state, problem = "altered", str(error)
            else:
                facts |= _facts(manifest)
                made["payload"] = self._file(manifest.payload, f"payload of {node.title}")
                if manifest.parent is not None:
                    made_of["delta_parent"] = self._policy(manifest.parent.manifest)
                if manifest.kind == "adapter":
                    key = policy_key(run, 0, "manifest.json")
                    base = self.store.read(key)
                    if base is None:
                        state, problem = "missing", f"{self.store.uri(key)}: missing; the adapter stands on it"
                    else:
                        made_of["base"] = self._policy(self.store.ref(key, base))
        anchor = policy_key(run, step, "anchor.json")
        if (whole := self.store.read(anchor)) is not None:
            made["anchor"] = self._anchor(self.store.ref(anchor, whole), whole, f"whole copy of {node.title}")
        evaluation = stage_key(run, step, "evaluate.json")
        if self.store.read(evaluation) is not None:
            made["evaluation"] = self._record_by_key(evaluation, of=node.ref)
        self._add(replace(node, state=state, problem=problem, facts=facts, made_of=made_of, made=made))

    def _anchor(self, ref: Ref, data: bytes, title: str) -> str:
        """The copy that stands in for a delta's chain."""
        node = Node(_id(ref), "anchor", title, ref, "ok")
        try:
            manifest = Manifest.from_json(parse_canonical(data, ref.uri), ref.uri)
        except IntegrityError as error:
            return self._add(replace(node, state="altered", problem=str(error)))
        made = {"payload": self._file(manifest.payload, f"payload of the {title}")}
        return self._add(replace(node, facts=_facts(manifest), made=made))

    def _record(self, ref: Ref, role: str) -> str:
        id_ = _id(ref)
        if id_ not in self.nodes:
            self._add(Node(id_, "record", role, ref, "unchecked"))
            self.queue.append(lambda: self._open_record(self.nodes[id_]))
        return id_

    def _open_record(self, node: Node) -> None:
        assert node.ref is not None
        state, problem, data = _read(self.store, node.ref)
        record = None
        if data is not None:
            try:
                record = parse_record(data, node.ref.uri)
            except IntegrityError as error:
                state, problem = "altered", str(error)
        self._add(self._described(replace(node, state=state, problem=problem), record))

    def _record_by_key(self, key: str, of: Ref | None = None) -> str:
        """of: the manifest that the record must be about."""
        record, ref, state, problem = self._read_by_key(key)
        id_ = self.store.uri(key) if ref is None else _id(ref)
        if id_ not in self.nodes:
            if record is not None and of is not None and (record.policy is None or record.policy.weights != of):
                about = "none" if record.policy is None else record.policy.weights.sha256
                state, problem = "altered", f"{self.store.uri(key)}: expected manifest {of.sha256}, found {about}"
            title = key.rsplit("/", 1)[1].removesuffix(".json")
            self._add(self._described(Node(id_, "record", title, ref, state, problem), record))
        return id_

    def _read_by_key(self, key: str) -> tuple[StageRecord | None, Ref | None, State, str | None]:
        data = self.store.read(key)
        if data is None:
            return None, None, "missing", f"{self.store.uri(key)}: missing"
        ref = self.store.ref(key, data)
        try:
            return parse_record(data, ref.uri), ref, "ok", None
        except IntegrityError as error:
            return None, ref, "altered", str(error)

    def _described(self, node: Node, record: StageRecord | None) -> Node:
        """With what the record says and refers to."""
        if record is None:
            return node
        title = f"{record.stage} {record.run}@{record.step}"
        facts = {
            "stage": record.stage,
            "run": record.run,
            "step": record.step,
            "seconds": record.seconds,
            "finished_ms": record.finished_ms,
            "metrics": {name: value if value == value else repr(value) for name, value in record.metrics.items()},
            "notes": dict(record.notes),
            "provenance": dict(record.provenance),
            "says_inputs": record.inputs is not None,
        }
        made = {role: self._of_role(role, ref, title, is_maker=True) for role, ref in record.outputs.items()}
        made_of = {role: self._of_role(role, ref, record.run) for role, ref in (record.inputs or {}).items()}
        if record.stage == "update":
            made["ledger"] = self._ledger(record, node.ref)
        return replace(node, title=title, facts=facts, made_of=made_of, made=made)

    def _of_role(self, role: str, ref: Ref, of: str, is_maker: bool = False) -> str:
        if role in POLICY_ROLES:
            return self._policy(ref)
        if role in RECORD_ROLES:
            return self._record(ref, role)
        return self._file(ref, f"{role} of {of}", is_maker)

    def _file(self, ref: Ref, title: str, is_maker: bool = False) -> str:
        """Called after the stage that made it, when that is met too."""
        if is_maker or _id(ref) not in self.nodes:
            self._add(Node(_id(ref), "file", title, ref, "unchecked"))
        return _id(ref)

    def _ledger(self, record: StageRecord, ref: Ref | None) -> str:
        """The entry must be of this batch and name this very record."""
        id_ = f"ledger {record.run}@{record.step}"
        where = f"{self.store.uri(record.run)}: ledger entry of step {record.step}"
        state: State = "ok"
        problem, entry = None, None
        try:
            entry = Ledger(self.store, record.run).get(record.step)
        except IntegrityError as error:
            state, problem = "altered", str(error)
        else:
            if entry is None:
                state, problem = "missing", f"{where}: missing"
            elif entry["batch_sha256"] != record.notes.get("batch_sha256"):
                state, problem = "altered", f"{where}: expected batch {record.notes.get('batch_sha256')}, found another"
            elif ref is not None and Ref(**entry["result"]["record"]) != ref:
                state, problem = (
                    "altered",
                    f"{where}: expected record {ref.uri}, found {entry['result']['record']['uri']}",
                )
        return self._add(Node(id_, "ledger", id_, None, state, problem, facts=entry or {}))


def _checked(store: Store, nodes: list[Node], on_bytes: OnBytes) -> Iterator[Node]:
    """The files among `nodes`, each read in blocks and held against its reference."""
    files = [node for node in nodes if node.kind == "file" and node.ref is not None]
    total = sum(node.ref.size_bytes for node in files if node.ref is not None)
    before = 0
    for node in files:
        assert node.ref is not None

        def on_done(done: int, start: int = before) -> None:
            on_bytes(start + done, total)

        state, problem = _examine(store, node.ref, on_done)
        before += node.ref.size_bytes
        on_bytes(before, total)
        yield replace(node, state=state, problem=problem)


def _read(store: Store, ref: Ref) -> tuple[State, str | None, bytes | None]:
    state, problem = _examine(store, ref)
    return state, problem, store.get(ref) if state == "ok" else None


def _examine(store: Store, ref: Ref, on_done: Callable[[int], None] = lambda _done: None) -> tuple[State, str | None]:
    """In blocks: a payload may be larger than the memory."""
    key = key_of(store, ref)
    size = _size(store, ref, key)
    if size is None:
        mark = None if key == ref.uri else find_mark(store, key.split("/")[0], ref.sha256, key)
        if mark is None:
            return "missing", f"{ref.uri}: missing; expected {ref.size_bytes} bytes"
        return "pruned", f"{ref.uri}: {mark.sentence()}"
    if size != ref.size_bytes:
        return "altered", f"{ref.uri}: expected {ref.size_bytes} bytes, found {size}"
    digest = hashlib.sha256()
    for start in range(0, size, BLOCK):
        stop = min(start + BLOCK, size)
        digest.update(store.get_range(ref, start, stop))
        on_done(stop)
    if digest.hexdigest() != ref.sha256:
        return "altered", f"{ref.uri}: expected sha256 {ref.sha256}, found {digest.hexdigest()}"
    return "ok", None


def _size(store: Store, ref: Ref, key: str) -> int | None:
    """Of the object where the reference says it is, which may be in another store's folder."""
    if key != ref.uri:
        return store.size(key)
    folder, _, name = ref.uri.rpartition("/")
    return Store(folder, store.options).size(name)


def key_of(store: Store, ref: Ref) -> str:
    """The reference's key in this store; its whole uri when it lies elsewhere."""
    return ref.uri.removeprefix(store.uri("x").removesuffix("x"))


def _run_and_step(key: str) -> tuple[str, int]:
    """Of a manifest's key, which holds also when the manifest cannot be read."""
    match = re.search(r"([^/]+)/policies/(\d+)/manifest\.json$", key)
    if match is None:
        raise IntegrityError(f"{key}: expected the key of a version's manifest")
    is_elsewhere = "://" in key
    return match[1] if is_elsewhere else key[: match.end(1)], int(match[2])


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "run": manifest.run,
        "step": manifest.step,
        "kind": manifest.kind,
        "weights_sha256": manifest.weights_sha256,
        "full_size_bytes": manifest.full_size_bytes,
        "tags": dict(manifest.tags),
    }


def _id(ref: Ref) -> str:
    return f"{ref.uri}#{ref.sha256[:12]}"
