"""Contract review: the default environment. Generated workspaces, unlimited, seeded, graded without a model.

Three agreements and a playbook; the policy finds the clause of a party on a topic, compares its value with the
playbook's limit and writes a memo of five lines.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from k3core.envs.environment import Limits, ToolSpec
from k3core.envs.tools import TOOLS, run_call
from k3core.envs.workspace import ToolError, Workspace
from k3core.rewards.rubric import Criterion, parse_criteria
from k3core.types import Message, Prompt, StopReason

Split = Literal["train", "eval", "warm"]

NAME = "contracts"
MEMO = "memo.md"
PLAYBOOK = "playbook.md"
MEMO_FIELDS = ("file", "clause", "value", "verdict", "fallback")
VERDICTS = ("ok", "breach")
NUM_AGREEMENTS = 3
NUM_CLAUSES = 4
HEADINGS = {
    "nda.md": "NDA",
    "msa.md": "MSA",
    "lease.md": "Lease",
    "sow.md": "SOW",
    "license.md": "License",
    "loan.md": "Loan",
}
TOPICS = ("liability", "notice", "payment", "term", "renewal", "interest")
# No name occurs in another name, a topic or a heading, so that a search for it finds one line.
# fmt: off
PARTIES = (
    "Acme", "Birch", "Cedar", "Delta", "Ember", "Fjord", "Garnet", "Harbor",
    "Indigo", "Juniper", "Kestrel", "Lumen", "Maple", "Nimbus", "Orchid", "Pine",
    "Quartz", "Raven", "Sable", "Tundra", "Umber", "Vista", "Willow", "Zephyr",
)
# fmt: on
VALUES = (5, 7, 10, 12, 14, 15, 18, 20, 21, 24, 25, 28, 30, 36, 40, 45, 48, 50, 60, 75, 90, 100, 120, 180)

SYSTEM_PROMPT = """\
You review agreements against playbook.md, which gives the highest value that we accept for each topic. \
Find the agreement with the named party and its clause on the named topic, compare, write memo.md and finish. \
memo.md has five lines: `file` and the agreement's file name; `clause` and its number; `value` and its number; \
`verdict` and ok, or breach if the value exceeds the limit; `fallback` and the limit."""


@dataclass(frozen=True, slots=True)
class ContractsConfig:
    """system_prompt: None for a policy whose warm start taught the procedure, SYSTEM_PROMPT for any other."""

    system_prompt: str | None = None


def generate(seed: int, index: int, split: Split, cfg: ContractsConfig | None = None) -> Prompt:
    """The same prompt wherever it is called. Every second one is a breach.

    No two clauses or limits of a workspace have the same value, so a value copied from the wrong line is wrong. At
    least one other agreement has a clause on the topic.
    """
    cfg = cfg or ContractsConfig()
    prompt_id = f"{NAME}/{split}-{seed}-{index:06d}"
    # Seeded by a string: sha512 of it, on every platform. A stream of its own, also for whoever seeds with the id.
    rng = random.Random(f"workspace of {prompt_id}")
    files = rng.sample(sorted(HEADINGS), NUM_AGREEMENTS)
    parties = rng.sample(PARTIES, NUM_AGREEMENTS)
    values = rng.sample(VALUES, NUM_AGREEMENTS * NUM_CLAUSES + len(TOPICS))
    limits = dict(zip(TOPICS, values[: len(TOPICS)], strict=True))
    remaining = iter(values[len(TOPICS) :])

    topic = rng.choice(TOPICS)
    others = [other for other in TOPICS if other != topic]
    clauses: dict[str, list[tuple[str, int]]] = {}
    for n, file in enumerate(files):
        # files[0] is the one asked for, files[1] is sure to mislead, files[2] by chance.
        pool = [topic, *rng.sample(others, NUM_CLAUSES - 1)] if n < 2 else rng.sample(TOPICS, NUM_CLAUSES)
        rng.shuffle(pool)
        clauses[file] = [(name, next(remaining)) for name in pool]

    file, party = files[0], parties[0]
    number = next(n for n, (name, _) in enumerate(clauses[file], start=1) if name == topic)
    low, high = sorted((clauses[file][number - 1][1], limits[topic]))
    verdict = VERDICTS[index % 2]
    value, limits[topic] = (high, low) if verdict == "breach" else (low, high)
    clauses[file][number - 1] = (topic, value)

    documents = {
        name: _agreement(HEADINGS[name], other, clauses[name]) for name, other in zip(files, parties, strict=True)
    }
    documents[PLAYBOOK] = "".join(f"{name} max {limit}\n" for name, limit in limits.items())
    answer = {
        "file": file,
        "clause": str(number),
        "value": str(value),
        "verdict": verdict,
        "fallback": str(limits[topic]),
    }
    hidden = {
        "title": f"{HEADINGS[file]} with {party}: {topic}",
        "work_type": "review",
        "documents": documents,
        "deliverables": {MEMO: MEMO},
        "criteria": _criteria(answer),
        "question": {"party": party, "topic": topic},
        "answer": answer,
    }
    instruction = Message("user", f"Review {topic} with {party}.")
    return with_system_prompt(Prompt(prompt_id, NAME, (instruction,), hidden), cfg.system_prompt)


def with_system_prompt(prompt: Prompt, system_prompt: str | None) -> Prompt:
    if system_prompt is None:
        return prompt
    messages = (Message("system", system_prompt), *prompt.messages)
    return Prompt(prompt.id, prompt.environment, messages, prompt.hidden)


def format_memo(fields: Mapping[str, str]) -> str:
    """Without a final newline: the policy would have to sample it."""
    return "\n".join(f"{name} {fields[name]}" for name in MEMO_FIELDS)


def _agreement(heading: str, party: str, clauses: list[tuple[str, int]]) -> str:
    lines = [f"{n}. {topic} {value}" for n, (topic, value) in enumerate(clauses, start=1)]
    return "\n".join([f"{heading} with {party}", *lines, ""])


def _criteria(answer: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of LAB's task.json with the keys `check` and `requires` of ours. match_criteria says the same in words."""
    ids = {field: f"C-{n:03d}" for n, field in enumerate((*MEMO_FIELDS, "delivered"), start=1)}
    rows: list[dict[str, Any]] = []
    for field in MEMO_FIELDS:
        requires = {"file": [], "verdict": ["file", "value"]}.get(field, ["file"])
        lines = " and ".join(f"the one line `{name}` is `{name} {answer[name]}`" for name in (field, *requires))
        rows.append(
            {
                "id": ids[field],
                "title": field,
                "match_criteria": f"PASS if in {MEMO} {lines}. FAIL if not.",
                "deliverables": [MEMO],
                "check": {"field": field, "equals": answer[field]},
                "requires": [ids[name] for name in requires],
            }
        )
    rows.append(
        {
            "id": ids["delivered"],
            "title": "delivered",
            "match_criteria": f"PASS if {MEMO} has a line each for {', '.join(MEMO_FIELDS)} and no other. FAIL if not.",
            "deliverables": [MEMO],
            "check": {"fields": list(MEMO_FIELDS)},
        }
    )
    return rows


class ContractsEnvironment:
    """Lays out a prompt's documents for the six tools. Runs any prompt in LAB's form, not only generated ones."""

    name = NAME
    tools: tuple[ToolSpec, ...] = TOOLS

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        identity = {"name": NAME, "tools": [asdict(tool) for tool in TOOLS], "limits": asdict(self.limits)}
        self.sha256 = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def start(self, prompt: Prompt) -> ContractsEpisode:
        """Raises ValueError for a prompt whose files cannot be laid out, InfrastructureError for our own faults."""
        if prompt.environment != self.name:
            raise ValueError(f"prompt {prompt.id}: environment is {prompt.environment!r}, not {self.name!r}")
        return ContractsEpisode(prompt, self.limits)


class ContractsEpisode:
    def __init__(self, prompt: Prompt, limits: Limits) -> None:
        self._limits = limits
        self._criteria: tuple[Criterion, ...] = parse_criteria(prompt.hidden["criteria"], where=prompt.id)
        binary = {name: Path(path) for name, path in prompt.hidden.get("binary_documents", {}).items()}
        self._documents: dict[str, str | Path] = {**prompt.hidden["documents"], **binary}
        self._workspace = Workspace(self._documents)
        self._num_turns = 0
        self._ended: StopReason | None = None
        self.num_tool_calls = 0

    def step(self, turn: Message) -> tuple[tuple[Message, ...], StopReason | None]:
        """`finish` ends the episode at once: later calls of the same turn are not run and get no message."""
        assert turn.role == "assistant"
        assert self._ended is None, f"the episode ended: {self._ended}"
        self._num_turns += 1
        self.num_tool_calls += len(turn.tool_calls)
        messages: list[Message] = []
        if not turn.tool_calls:
            self._ended = "no_tool_call"
        for index, call in enumerate(turn.tool_calls, start=1):
            if index > self._limits.max_calls_per_turn:
                content = f"error: at most {self._limits.max_calls_per_turn} calls a turn"
            else:
                result = run_call(call, self._workspace, self._limits)
                content = result.content
                if call.name == "finish" and result.ok:
                    self._ended = "finished"
            messages.append(Message("tool", content, tool=call.name, index=index))
            if self._ended:
                break
        if self._ended is None and self._num_turns >= self._limits.max_turns:
            self._ended = "max_turns"
        return tuple(messages), self._ended

    def deliverables(self) -> dict[str, str]:
        """The files that the criteria name, or every new file if one names none. An untouched document is no work."""
        names = {name for criterion in self._criteria for name in criterion.deliverables}
        existing = self._workspace.files()
        if not all(criterion.deliverables for criterion in self._criteria):
            names.update(name for name in existing if name not in self._documents)
        texts: dict[str, str] = {}
        for name in sorted(names.intersection(existing)):
            try:
                text = self._workspace.read(name)
            except ToolError:
                continue  # no text: to the rubric the same as missing
            if text != self._documents.get(name):
                texts[name] = text
        return texts

    def close(self) -> None:
        self._workspace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
