"""The on-disk format of Harvey's Legal Agent Benchmark (LAB), read by path and written for generated prompts.

    tasks/<area>/<slug>[/scenario-NN]/task.json
    tasks/<area>/<slug>[/scenario-NN]/documents/...

Keys of ours that LAB's readers ignore: criteria[].check, .requires, .weight, .critical; question, answer,
system_prompt.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from k3core.envs.contracts import NAME
from k3core.rewards.rubric import parse_criteria
from k3core.types import Message, Prompt, Score

_CRITERION_KEYS = (
    "id",
    "title",
    "match_criteria",
    "deliverables",
    "sources",
    "evaluation_options",
    "weight",
    "critical",
    "check",
    "requires",
)
_OPTIONAL_KEYS = ("work_type", "tags", "question", "answer")


class _Task(BaseModel):
    """task.json; keys that are not listed are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")
    title: str
    instructions: str
    criteria: list[dict[str, Any]]
    deliverables: dict[str, str] = {}
    work_type: str | None = None
    tags: list[str] | None = None
    system_prompt: str | None = None
    question: dict[str, str] | None = None
    answer: dict[str, str] | None = None


def read_tasks(root: Path) -> tuple[Prompt, ...]:
    """All tasks below root/tasks, by path. A prompt's id is its path there.

    Text documents are in hidden["documents"]; of binary ones hidden["binary_documents"] has the absolute path, which
    must still be there when an episode starts. Raises ValueError naming file and key.
    """
    tasks = root / "tasks"
    files = sorted(tasks.rglob("task.json"), key=lambda file: file.relative_to(tasks).parts)
    if not files:
        raise ValueError(f"{tasks}: no task.json below it; give the folder that holds tasks/")
    return tuple(_read_task(file, file.parent.relative_to(tasks).as_posix()) for file in files)


def _read_task(file: Path, prompt_id: str) -> Prompt:
    try:
        task = _Task.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{file}: {'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None
    criteria = [_criterion_row(row, task.deliverables) for row in task.criteria]
    parse_criteria(criteria, where=str(file))
    hidden: dict[str, Any] = {"title": task.title, "deliverables": task.deliverables, "criteria": criteria}
    hidden.update({key: getattr(task, key) for key in _OPTIONAL_KEYS if getattr(task, key) is not None})
    documents, binary = _read_documents(file.parent / "documents")
    hidden["documents"] = documents
    if binary:
        hidden["binary_documents"] = binary
    messages: tuple[Message, ...] = (Message("user", task.instructions),)
    if task.system_prompt is not None:
        messages = (Message("system", task.system_prompt), *messages)
    return Prompt(prompt_id, NAME, messages, hidden)


def _criterion_row(row: dict[str, Any], deliverables: dict[str, str]) -> dict[str, Any]:
    """Names of deliverables become file names. A criterion that names none is about all of them."""
    kept = {key: row[key] for key in _CRITERION_KEYS if key in row}
    names = kept.get("deliverables") or list(deliverables)
    if isinstance(names, list):  # anything else is refused with the rest of the row
        kept["deliverables"] = [deliverables.get(name, name) if isinstance(name, str) else name for name in names]
    return kept


def _read_documents(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    documents: dict[str, str] = {}
    binary: dict[str, str] = {}
    for file in sorted(folder.rglob("*")):
        if file.is_symlink():
            raise ValueError(f"{file}: is a link; documents are laid out for the agent, so they must be plain files")
        if not file.is_file():
            continue
        name = file.relative_to(folder).as_posix()
        data = file.read_bytes()
        try:
            documents[name] = data.decode()
        except UnicodeDecodeError:
            binary[name] = str(file.resolve())
    return documents, binary


def write_task(root: Path, prompt: Prompt) -> Path:
    """Returns the task.json written. Raises ValueError for a prompt that the format cannot hold, FileExistsError."""
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)+", prompt.id):
        raise ValueError(f"prompt {prompt.id}: id: must be <area>/<slug>")
    if prompt.hidden.get("binary_documents"):
        raise ValueError(f"prompt {prompt.id}: binary_documents: only prompts with text documents are written")
    roles = [message.role for message in prompt.messages]
    if roles not in (["user"], ["system", "user"]):
        raise ValueError(f"prompt {prompt.id}: messages: must be one user message, a system message before it at most")
    task: dict[str, Any] = {
        "title": prompt.hidden["title"],
        "instructions": prompt.messages[-1].content,
        "deliverables": prompt.hidden["deliverables"],
        "criteria": prompt.hidden["criteria"],
    }
    task.update({key: prompt.hidden[key] for key in _OPTIONAL_KEYS if key in prompt.hidden})
    if len(roles) == 2:
        task["system_prompt"] = prompt.messages[0].content
    folder = root / "tasks" / prompt.id
    folder.mkdir(parents=True)
    for name, text in prompt.hidden["documents"].items():
        document = folder / "documents" / name
        document.parent.mkdir(parents=True, exist_ok=True)
        document.write_bytes(text.encode())
    path = folder / "task.json"
    path.write_text(json.dumps(task, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def write_scores(path: Path, score: Score) -> None:
    """LAB's scores.json: its score is 1 only if every criterion passed. `reward` and `fraction` are keys of ours.

    Of an ungraded episode score and all_pass are null, never 0.
    """
    num_passed = sum(result.verdict == "pass" for result in score.criteria)
    scores: dict[str, Any] = {
        "score": None if score.all_pass is None else float(score.all_pass),
        "max_score": 1.0,
        "summary": f"{num_passed} of {len(score.criteria)} criteria passed"
        if score.reason is None
        else f"not graded: {score.reason}",
        "all_pass": score.all_pass,
        "n_criteria": len(score.criteria),
        "n_passed": num_passed,
        "criteria_results": [
            {"id": result.id, "title": result.title, "verdict": result.verdict, "reasoning": result.reasoning}
            for result in score.criteria
        ],
        "reward": score.value,
        "fraction": score.fraction,
    }
    path.write_text(json.dumps(scores, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
