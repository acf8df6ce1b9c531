from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3core.envs.contracts import SYSTEM_PROMPT, ContractsConfig, ContractsEnvironment, format_memo, generate
from k3core.envs.lab import read_tasks, write_scores, write_task
from k3core.rewards.judge import RuleJudge
from k3core.rewards.rubric import RewardConfig, aggregate, parse_criteria
from k3core.types import CriterionResult, Message, Prompt, Score, ToolCall


def lab_task(**changes: Any) -> dict[str, Any]:
    task: dict[str, Any] = {
        "title": "Review a lease",
        "instructions": "Review the lease in documents/ and write a memo.",
        "work_type": "review",
        "tags": ["lease"],
        "deliverables": {"memo": "memo.docx"},
        "criteria": [
            {
                "id": "C-001",
                "title": "names the party",
                "match_criteria": "PASS if the party is named. FAIL if not.",
                "deliverables": ["memo"],
                "sources": ["lease.docx"],
                "evaluation_options": {"strict": True},
                "unknown": 1,
            }
        ],
        "unknown": {"ignored": True},
    }
    return {key: value for key, value in {**task, **changes}.items() if value is not None}


def write_lab(root: Path, where: str, task: dict[str, Any] | str) -> Path:
    folder = root / "tasks" / where
    (folder / "documents" / "annex").mkdir(parents=True)
    (folder / "documents" / "lease.docx").write_bytes(b"PK\x03\x04\xff\xfe")
    (folder / "documents" / "annex" / "note.md").write_text("rent 5\n")
    path = folder / "task.json"
    path.write_text(task if isinstance(task, str) else json.dumps(task))
    return path


def grade_memo(prompt: Prompt, text: str) -> Score:
    criteria = parse_criteria(prompt.hidden["criteria"], where=prompt.id)
    results = []
    for criterion in criteria:
        judgement = RuleJudge().judge(criterion, {"memo.md": text})
        results.append(CriterionResult(criterion.id, criterion.title, judgement.verdict, judgement.reasoning))
    return aggregate(results, criteria, RewardConfig())


def test_generated_prompts_come_back_from_disk_the_same_and_grade_the_same(tmp_path: Path) -> None:
    prompts = [generate(0, n, split) for split in ("eval", "train") for n in range(5)]
    for prompt in prompts:
        write_task(tmp_path, prompt)
    again = read_tasks(tmp_path)
    assert again == tuple(prompts)
    for prompt, other in zip(prompts, again, strict=True):
        right, wrong = format_memo(prompt.hidden["answer"]), "file x"
        assert grade_memo(other, right) == grade_memo(prompt, right)
        assert grade_memo(other, right).value == 1.0
        assert grade_memo(other, wrong) == grade_memo(prompt, wrong)


def test_a_system_prompt_survives_the_disk(tmp_path: Path) -> None:
    prompt = generate(0, 0, "train", ContractsConfig(SYSTEM_PROMPT))
    write_task(tmp_path, prompt)
    assert read_tasks(tmp_path) == (prompt,)


def test_what_is_written_has_labs_required_keys_and_wording(tmp_path: Path) -> None:
    task = json.loads(write_task(tmp_path, generate(0, 0, "train")).read_text())
    assert {"title", "instructions", "criteria"} <= task.keys()
    assert task["deliverables"] == {"memo.md": "memo.md"}
    for row in task["criteria"]:
        assert {"id", "title", "match_criteria", "deliverables"} <= row.keys()
        assert row["match_criteria"].startswith("PASS if ")
        assert " FAIL if " in row["match_criteria"]


def test_a_lab_checkout_is_read_with_nested_scenarios_and_binary_documents(tmp_path: Path) -> None:
    write_lab(tmp_path, "real-estate/lease/scenario-02", lab_task())
    write_lab(tmp_path, "real-estate/lease/scenario-01", lab_task(work_type=None, tags=None))
    one, two = read_tasks(tmp_path)
    assert (one.id, two.id) == ("real-estate/lease/scenario-01", "real-estate/lease/scenario-02")
    assert one.messages == (Message("user", "Review the lease in documents/ and write a memo."),)
    assert one.hidden["documents"] == {"annex/note.md": "rent 5\n"}
    assert list(one.hidden["binary_documents"]) == ["lease.docx"]
    assert "work_type" not in one.hidden
    assert two.hidden["tags"] == ["lease"]
    assert two.hidden["criteria"][0]["deliverables"] == ["memo.docx"]
    assert "unknown" not in two.hidden["criteria"][0]


def test_binary_documents_are_laid_out_for_the_agent_and_its_task_is_not(tmp_path: Path) -> None:
    write_lab(tmp_path, "real-estate/lease", lab_task())
    (prompt,) = read_tasks(tmp_path)
    with ContractsEnvironment().start(prompt) as episode:
        calls = (ToolCall("glob", {"pattern": "**"}), ToolCall("write", {"path": "memo.docx", "content": "memo"}))
        (listing, _), _ = episode.step(Message("assistant", tool_calls=calls))
        assert listing.content == "annex/note.md\nlease.docx"
        assert episode.deliverables() == {"memo.docx": "memo"}


def test_a_criterion_without_deliverables_is_about_all_of_them(tmp_path: Path) -> None:
    row = {key: value for key, value in lab_task()["criteria"][0].items() if key != "deliverables"}
    write_lab(tmp_path, "a/one", lab_task(criteria=[row]))
    write_lab(tmp_path, "a/two", lab_task(criteria=[row], deliverables=None))
    one, two = read_tasks(tmp_path)
    assert one.hidden["criteria"][0]["deliverables"] == ["memo.docx"]
    assert two.hidden["criteria"][0]["deliverables"] == []
    with ContractsEnvironment().start(two) as episode:
        episode.step(Message("assistant", tool_calls=(ToolCall("write", {"path": "any.md", "content": "x"}),)))
        assert episode.deliverables() == {"any.md": "x"}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("{", "Invalid JSON"),
        (lab_task(title=None), r"task\.json: title: Field required"),
        (lab_task(criteria=None), r"task\.json: criteria: Field required"),
        (lab_task(instructions=3), r"task\.json: instructions: Input should be a valid string"),
        (lab_task(criteria=[]), r"task\.json: criteria: none has a positive weight"),
        (lab_task(criteria=[{"id": "C-001"}]), r"task\.json: criteria\[0\]\.title: Field required"),
        (lab_task(criteria=lab_task()["criteria"] * 2), r"task\.json: criteria\[1\]\.id: C-001 occurs twice"),
        (
            lab_task(criteria=[{**lab_task()["criteria"][0], "deliverables": "memo"}]),
            r"criteria\[0\]\.deliverables: Input should be a valid array",
        ),
        (
            lab_task(criteria=[{**lab_task()["criteria"][0], "weight": "2"}]),
            r"criteria\[0\]\.weight: Input should be a valid number",
        ),
    ],
)
def test_a_wrong_task_is_refused_naming_file_and_key(tmp_path: Path, task: Any, message: str) -> None:
    write_lab(tmp_path, "a/b", task)
    with pytest.raises(ValueError, match=message) as error:
        read_tasks(tmp_path)
    assert str(tmp_path / "tasks/a/b/task.json") in str(error.value)


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no task\.json below it"):
        read_tasks(tmp_path)


def test_a_linked_document_is_refused(tmp_path: Path) -> None:
    path = write_lab(tmp_path, "a/b", lab_task())
    (path.parent / "documents" / "secret.md").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"secret\.md: is a link"):
        read_tasks(tmp_path)


def test_a_task_is_never_overwritten_and_its_id_stays_below_root(tmp_path: Path) -> None:
    prompt = generate(0, 0, "train")
    write_task(tmp_path, prompt)
    with pytest.raises(FileExistsError):
        write_task(tmp_path, prompt)
    for prompt_id in ("../x/y", "/x/y", "x", "x/../y"):
        with pytest.raises(ValueError, match="must be <area>/<slug>"):
            write_task(tmp_path, Prompt(prompt_id, prompt.environment, prompt.messages, prompt.hidden))


def test_scores_are_written_as_lab_does_and_an_ungraded_one_is_null(tmp_path: Path) -> None:
    prompt = generate(0, 0, "train")
    path = tmp_path / "scores.json"
    memo = format_memo(prompt.hidden["answer"]).replace("clause ", "clause 9")
    write_scores(path, grade_memo(prompt, memo))
    scores = json.loads(path.read_text())
    assert (scores["score"], scores["max_score"], scores["all_pass"]) == (0.0, 1.0, False)
    assert (scores["n_passed"], scores["n_criteria"], scores["summary"]) == (5, 6, "5 of 6 criteria passed")
    assert scores["criteria_results"][1].keys() == {"id", "title", "verdict", "reasoning"}
    assert scores["criteria_results"][1]["verdict"] == "fail"
    write_scores(path, Score(None, None, None, (), "infrastructure_error"))
    scores = json.loads(path.read_text())
    assert (scores["score"], scores["all_pass"], scores["reward"]) == (None, None, None)
    assert scores["summary"] == "not graded: infrastructure_error"
