"""An ancestry as a person reads it: the last versions as trees, those before them a line each, what is wrong last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from infra.doctor import size
from infra.lineage import Ancestry, Node, State

SHORT = 12  # digits of a digest
NARROW = 8  # in the table
STYLES: Mapping[State, str] = {"missing": "bold red", "altered": "bold red", "pruned": "yellow"}  # the worst first
STARTS = {"warm_start": "warm start", "adopt": "adopted"}


def render(found: Ancestry, depth: int, is_checked: bool) -> Group:
    """depth: how many versions are shown in full."""
    versions = found.policies
    view = _View(found)
    parts: list[RenderableType] = []
    if found.nodes[found.root].kind != "policy":  # a run that holds scores alone
        parts += [view.record(found.nodes[found.root]), Text()]
    for node in versions[:depth]:
        parts += [view.version(node), Text()]
    if versions[depth:]:
        parts += [view.table(versions[depth:]), Text()]
    parts += [Text(line) for line in (*view.foundations(), "", *closing(found, is_checked))]
    return Group(*parts)


def closing(found: Ancestry, is_checked: bool) -> list[str]:
    """What was checked, and a line for each thing that is not what it must be."""
    files = [node for node in found.nodes.values() if node.ref is not None]
    amount = f"{len(files)} documents and files, {size(sum(node.ref.size_bytes for node in files if node.ref))}"
    pruned = sum(node.state == "pruned" for node in found.nodes.values())
    aside = f"; {pruned} pruned on purpose" if pruned else ""
    silent = [node.title for node in found.nodes.values() if node.facts.get("says_inputs") is False]
    lines = [f"{title}: recorded before records said what they read; its lineage ends there" for title in silent]
    if problems := found.problems:
        lines += [f"{node.state}: {node.problem} ({node.title})" for node in problems]
        return [*lines, f"{len(problems)} of {amount}: not what they must be{aside}"]
    if not is_checked:
        return [*lines, f"{amount}: documents verified, files not read (--check reads them){aside}"]
    return [*lines, f"{amount}: all are what they must be{aside}"]


@dataclass(slots=True)
class _View:
    """Remembers what was drawn: an ancestor that several share is drawn once."""

    found: Ancestry
    drawn: set[str] = field(default_factory=set)

    def version(self, policy: Node) -> Tree:
        facts = policy.facts
        self.drawn.add(policy.id)
        head = Text.assemble((policy.title, "bold"), f"  {facts.get('kind', '?')}")
        if "delta_parent" in policy.made_of:
            head.append(f" on {self.found.nodes[policy.made_of['delta_parent']].title}")
        if facts.get("kind") == "adapter":
            head.append(f" on {facts['run']}@0")
        if "weights_sha256" in facts:
            head.append(f"  {size(facts['full_size_bytes'])} of weights, {facts['weights_sha256'][:SHORT]}")
        tree = Tree(_marked(head, policy.state))
        for role in ("payload", "anchor", "evaluation"):
            self._add(tree, role, policy.made.get(role))
        record = self.found.nodes.get(policy.made_of.get("record", ""))
        if record is not None:
            self.drawn.add(record.id)
            if record.state != "ok" or "adopted" in record.facts.get("provenance", {}):
                self._add(tree, "made by", record.id, again=True)
            elif "trained" in record.made_of:
                self._add(tree, "made by", record.made_of["trained"])
        return tree

    def record(self, record: Node) -> Tree:
        tree = Tree(_marked(Text(record.title, "bold"), record.state))
        self._add(tree, "", record.id)
        return tree

    def _add(self, tree: Tree, role: str, id_: str | None, again: bool = False) -> None:
        if id_ is None:
            return
        node = self.found.nodes[id_]
        if node.kind == "policy":
            tree.add(Text(f"{role} {node.title}"))
            return
        if node.id in self.drawn and not again:
            tree.add(Text(f"{node.title} (above)", "dim"))
            return
        self.drawn.add(node.id)
        lines = describe(node, role)
        text = _marked(Text(lines[0]), node.state)
        for line in lines[1:]:
            text.append(f"\n{line}", "dim")
        branch = tree.add(text)
        for name, made in node.made.items():
            if self.found.nodes[made].kind in ("file", "ledger"):
                self._add(branch, name, made)
        for name in ("score", "rollout"):
            self._add(branch, name, node.made_of.get(name))
        if node.facts.get("stage") == "rollout":
            self._add(branch, "by", node.made_of.get("policy"))

    def table(self, versions: Sequence[Node]) -> Table:
        columns = ("earlier", "", "reward", "kept", "clipped", "drift", "eval", "weights", "")
        rows = [self._row(policy) for policy in versions]
        is_whole = not any(str(row[-1]) for row in rows)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for number, column in enumerate(columns[:-1] if is_whole else columns):
            table.add_column(column, justify="right" if 2 <= number <= 6 else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(row[:-1] if is_whole else row))
        return table

    def _row(self, policy: Node) -> tuple[RenderableType, ...]:
        own = self.found.own(policy)
        by_stage = {node.facts.get("stage"): node.facts.get("metrics", {}) for node in own}
        score, update = by_stage.get("score", {}), by_stage.get("update", {})
        start = next((words for stage, words in STARTS.items() if stage in by_stage), "-")
        states = {node.state for node in own}
        state: State | None = next((state for state in STYLES if state in states), None)
        return (
            policy.title,
            str(policy.facts.get("kind", "?")),
            _number(score, "rollout/reward", ".3f") if score else start,
            _kept(score),
            _number(update, "gspo/clip_fraction", ".1%"),
            _number(update, "drift/numeric/abs_max", ".0e"),
            _with_error(by_stage.get("evaluate", {})),
            str(policy.facts.get("weights_sha256", "?"))[:NARROW],
            Text(state, STYLES[state]) if state else "",
        )

    def foundations(self) -> list[str]:
        """The warm start and what was pinned, which every version shares."""
        lines: list[str] = []
        for node in self.found.nodes.values():
            if node.facts.get("stage") == "warm_start" and node.id not in self.drawn:
                lines += describe(node, "")
        for word in ("config", "tokenizer", "init"):
            for node in self.found.nodes.values():
                if node.kind == "file" and node.title.startswith(f"{word} of ") and node.ref is not None:
                    lines.append(f"{node.title}: {node.ref.sha256[:SHORT]}, {node.ref.uri}")
        return lines


def describe(node: Node, role: str) -> list[str]:
    """One line, and a second one for what was in force."""
    if node.kind == "file" and node.ref is not None:
        return [f"{role}  {size(node.ref.size_bytes)}  {node.ref.sha256[:SHORT]}"]
    if node.kind == "anchor" and node.ref is not None:
        return [f"whole copy  {node.ref.sha256[:SHORT]}"]
    facts = node.facts
    if node.kind == "ledger" or not facts:
        batch = f"  batch {facts['batch_sha256'][:SHORT]}" if facts else ""
        return [f"{role or node.title}{batch}"]
    lines = {
        "update": _update,
        "score": _score,
        "rollout": _rollout,
        "evaluate": _evaluation,
        "warm_start": _warm_start,
        "adopt": _adopted,
    }.get(str(facts["stage"]), _other)(facts)
    return [f"{lines[0]}  ({facts['seconds']:.1f} s)", *lines[1:]]


def _update(facts: Mapping[str, Any]) -> list[str]:
    m, p = facts["metrics"], facts["provenance"]
    what = f"update  clipped {_number(m, 'gspo/clip_fraction', '.1%')}"
    what += f", drift at most {_number(m, 'drift/numeric/abs_max', '.0e')}"
    what += f", gradient norm {_number(m, 'train/grad_norm', '.2g')}"
    if facts["notes"].get("vetoes"):
        what += f", refused: {facts['notes']['vetoes']}"
    gspo, train, trainer = p.get("gspo", {}), p.get("train", {}), p.get("trainer", {})
    return [
        what,
        f"learning rate {_number(m, 'train/learning_rate', 'g')}, {train.get('mode', '?')}, "
        f"clip -{gspo.get('clip_low', '?')} +{gspo.get('clip_high', '?')}, {_build(trainer)}",
    ]


def _score(facts: Mapping[str, Any]) -> list[str]:
    m, p = facts["metrics"], facts["provenance"]
    return [
        f"scores  reward {_number(m, 'rollout/reward', '.3f')}, all-pass {_number(m, 'rollout/all_pass', '.2f')}, "
        f"groups kept {_kept(m)}",
        f"rubric {_digest(p.get('rubric_sha256'))}, judge {_judges(p)}, {_settings(p.get('reward', {}))}",
    ]


def _rollout(facts: Mapping[str, Any]) -> list[str]:
    p = facts["provenance"]
    sampling, prompts = p.get("sampling", {}), p.get("prompts", {})
    count = len(prompts.get("ids", ()))
    attempt = f", attempt {p['attempt'] + 1}" if p.get("attempt") else ""
    return [
        f"rollouts  {count} prompts x {p.get('group_size', '?')}, temperature {sampling.get('temperature', '?')}, "
        f"prompts {_digest(prompts.get('sha256'))}{attempt}",
        _build(p.get("engine", {})),
    ]


def _evaluation(facts: Mapping[str, Any]) -> list[str]:
    m, p = facts["metrics"], facts["provenance"]
    suite = p.get("suite", {})
    return [
        f"evaluated  reward {_with_error(m)}, all-pass {_number(m, 'eval/all_pass', '.2f')}",
        f"suite {suite.get('name', '?')} {_digest(suite.get('sha256'))}, "
        f"{len(p.get('prompts', {}).get('ids', ()))} prompts x {suite.get('samples', '?')}, judge {_judges(p)}",
    ]


def _warm_start(facts: Mapping[str, Any]) -> list[str]:
    settings = facts["provenance"].get("warm_start", {})
    loss = _number(facts["metrics"], "warm_start/loss", ".3f")
    trained = f"{settings.get('steps', '?')} supervised steps of {settings.get('rows', '?')}, loss {loss}"
    init = facts["provenance"].get("init")
    if init is None:
        return [f"warm start  {trained}"]
    start = f"warm start  from {init['folder']} {_digest(init['heads_sha256'])}"
    return [f"{start}, then {trained}" if settings.get("steps") else start]


def _adopted(facts: Mapping[str, Any]) -> list[str]:
    return [f"adopted from {facts['provenance']['adopted']}: the same weights in a run of their own"]


def _other(facts: Mapping[str, Any]) -> list[str]:
    return [f"{facts['stage']} {facts['run']}@{facts['step']}"]


def _marked(text: Text, state: State) -> Text:
    return text.append(f"  {state.upper()}", STYLES[state]) if state in STYLES else text


def _number(values: Mapping[str, Any], name: str, form: str) -> str:
    value = values.get(name)
    return format(value, form) if isinstance(value, (int, float)) else "-" if value is None else str(value)


def _with_error(metrics: Mapping[str, Any]) -> str:
    if "eval/reward" not in metrics:
        return "-"
    return f"{_number(metrics, 'eval/reward', '.3f')} ± {_number(metrics, 'eval/reward_stderr', '.3f')}"


def _kept(metrics: Mapping[str, Any]) -> str:
    groups = [value for name, value in metrics.items() if name.startswith("groups/") and "trajectories" not in name]
    return f"{metrics['groups/kept']:.0f}/{sum(groups):.0f}" if "groups/kept" in metrics else "-"


def _digest(sha256: str | None) -> str:
    return "?" if sha256 is None else sha256[:SHORT]


def _judges(provenance: Mapping[str, Any]) -> str:
    return ", ".join(f"{judge['id']} {_digest(judge['code_sha256'])}" for judge in provenance.get("judges", ())) or "?"


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _build(build: Mapping[str, Any]) -> str:
    return f"{build.get('class', '?')} {_digest(build.get('code_sha256'))}, torch {build.get('torch', '?')}"
