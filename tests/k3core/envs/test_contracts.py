from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from k3core.envs.contracts import (
    HEADINGS,
    MEMO,
    PARTIES,
    SYSTEM_PROMPT,
    TOPICS,
    VALUES,
    ContractsConfig,
    ContractsEnvironment,
    ContractsEpisode,
    Split,
    generate,
)
from k3core.envs.environment import Environment, Episode, InfrastructureError, Limits
from k3core.types import Message, Prompt, ToolCall

SPLITS: tuple[Split, ...] = ("train", "eval", "warm")


def turn(*calls: ToolCall) -> Message:
    return Message("assistant", tool_calls=calls)


GREP = ToolCall("grep", {"pattern": "payment"})
FINISH = ToolCall("finish", {})


def start(prompt: Prompt | None = None, **limits: int) -> ContractsEpisode:
    return ContractsEnvironment(Limits(**limits)).start(prompt or generate(0, 0, "train"))


def test_splits_and_seeds_share_no_workspace() -> None:
    prompts = [generate(seed, n, split) for split in SPLITS for seed in (0, 1) for n in range(300)]
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({json.dumps(prompt.hidden["documents"], sort_keys=True) for prompt in prompts}) == len(prompts)


def test_another_process_generates_the_same_prompt() -> None:
    code = "from k3core.envs.contracts import generate; print(generate(3, 7, 'train').hidden)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(generate(3, 7, "train").hidden)


def test_the_answer_follows_from_the_documents() -> None:
    for n in range(200):
        hidden = generate(0, n, "train").hidden
        documents, answer, question = hidden["documents"], hidden["answer"], hidden["question"]
        assert len(documents) == 4
        assert {*documents} - {*HEADINGS} == {"playbook.md"}
        assert [name for name, text in documents.items() if question["party"] in text] == [answer["file"]]
        clause = documents[answer["file"]].splitlines()[int(answer["clause"])]
        assert clause == f"{answer['clause']}. {question['topic']} {answer['value']}"
        assert f"{question['topic']} max {answer['fallback']}\n" in documents["playbook.md"]
        assert answer["verdict"] == ("breach" if int(answer["value"]) > int(answer["fallback"]) else "ok")


def test_a_value_copied_from_a_wrong_line_is_always_wrong_and_the_topic_alone_misleads() -> None:
    for n in range(200):
        hidden = generate(1, n, "train").hidden
        lines = [line for text in hidden["documents"].values() for line in text.splitlines() if line[-1].isdigit()]
        numbers = [line.split()[-1] for line in lines]
        assert len(set(numbers)) == len(numbers) == 3 * 4 + 6
        assert sum(hidden["question"]["topic"] in line for line in lines) >= 3


def test_verdicts_are_balanced_and_every_answer_occurs() -> None:
    answers = [generate(0, n, "train").hidden["answer"] for n in range(400)]
    assert sum(answer["verdict"] == "breach" for answer in answers) == 200
    assert {answer["file"] for answer in answers} == {*HEADINGS}
    assert {answer["clause"] for answer in answers} == {"1", "2", "3", "4"}
    assert {int(answer["value"]) for answer in answers} == {*VALUES}


def test_a_search_for_a_name_or_topic_finds_nothing_else() -> None:
    words = [*PARTIES, *TOPICS, *HEADINGS.values(), *HEADINGS, "playbook.md", "with", "max", "ok", "breach"]
    for one, other in itertools.permutations(words, 2):
        if one in (*PARTIES, *TOPICS):
            assert one not in other


def test_the_answer_and_the_rubric_are_not_in_the_messages_or_the_workspace() -> None:
    prompt = generate(0, 0, "train")
    assert [message.role for message in prompt.messages] == ["user"]
    with start(prompt) as episode:
        (listing,), _ = episode.step(turn(ToolCall("glob", {"pattern": "**"})))
        assert listing.content.split("\n") == sorted(prompt.hidden["documents"])
        for path in ("task.json", "../task.json", "documents"):
            (answer,), _ = episode.step(turn(ToolCall("read", {"path": path})))
            assert answer.content.startswith("error: ")
        (found,), _ = episode.step(turn(ToolCall("grep", {"pattern": "criteria|match|PASS|answer"})))
        assert found.content == "no matches"


def test_a_system_prompt_comes_first_and_changes_nothing_else() -> None:
    plain, told = generate(0, 0, "train"), generate(0, 0, "train", ContractsConfig(SYSTEM_PROMPT))
    assert told.messages == (Message("system", SYSTEM_PROMPT), *plain.messages)
    assert told.hidden == plain.hidden


def test_tool_messages_name_tool_and_one_based_index() -> None:
    with start() as episode:
        messages, stop_reason = episode.step(turn(GREP, ToolCall("bash", {}), GREP))
        assert [(message.role, message.tool, message.index) for message in messages] == [
            ("tool", "grep", 1),
            ("tool", "bash", 2),
            ("tool", "grep", 3),
        ]
        assert messages[1].content == "error: unknown tool"
        assert stop_reason is None
        assert episode.num_tool_calls == 3


def test_finish_ends_the_episode_and_later_calls_are_not_run() -> None:
    with start(max_turns=1) as episode:
        late = ToolCall("write", {"path": MEMO, "content": "late"})
        messages, stop_reason = episode.step(turn(GREP, FINISH, late))
        assert (len(messages), stop_reason) == (2, "finished")
        assert episode.deliverables() == {}


def test_a_finish_with_wrong_arguments_does_not_end_it() -> None:
    with start() as episode:
        messages, stop_reason = episode.step(turn(ToolCall("finish", {"x": 1})))
        assert messages[0].content.startswith("error: x: ")
        assert stop_reason is None


def test_a_turn_without_calls_ends_the_episode() -> None:
    with start() as episode:
        assert episode.step(Message("assistant", "done")) == ((), "no_tool_call")


def test_turns_and_calls_a_turn_are_bounded() -> None:
    with start(max_turns=2, max_calls_per_turn=2) as episode:
        messages, stop_reason = episode.step(turn(GREP, GREP, ToolCall("write", {"path": MEMO, "content": "x"})))
        assert messages[2].content == "error: at most 2 calls a turn"
        assert stop_reason is None
        assert episode.step(turn(GREP))[1] == "max_turns"
        assert episode.deliverables() == {}
        with pytest.raises(AssertionError, match="max_turns"):
            episode.step(turn(GREP))


def test_deliverables_are_the_files_that_criteria_name() -> None:
    with start() as episode:
        write = [ToolCall("write", {"path": path, "content": path}) for path in (MEMO, "notes.md")]
        episode.step(turn(*write, FINISH))
        assert episode.deliverables() == {MEMO: MEMO}


def test_an_untouched_document_is_not_delivered() -> None:
    prompt = generate(0, 0, "train")
    rows = [{**row, "deliverables": ["playbook.md"]} for row in prompt.hidden["criteria"]]
    prompt = Prompt(prompt.id, prompt.environment, prompt.messages, {**prompt.hidden, "criteria": rows})
    with start(prompt) as episode:
        assert episode.deliverables() == {}
        episode.step(turn(ToolCall("edit", {"path": "playbook.md", "old": "payment", "new": "payments"})))
        assert list(episode.deliverables()) == ["playbook.md"]


@pytest.mark.parametrize("call", [GREP, FINISH, ToolCall("write", {"path": MEMO, "content": "x"})])
def test_a_killed_workspace_is_our_fault(call: ToolCall) -> None:
    with start() as episode:
        shutil.rmtree(episode._workspace.resolve(MEMO)[1].parents[1])
        with pytest.raises(InfrastructureError):
            episode.step(turn(call))
        with pytest.raises(InfrastructureError):
            episode.deliverables()


def test_an_episode_leaves_no_directory_behind() -> None:
    with start() as episode:
        home: Path = episode._workspace.resolve(MEMO)[1].parents[1]
        assert home.exists()
    assert not home.exists()


def test_two_episodes_of_one_prompt_do_not_meet() -> None:
    with start() as one, start() as other:
        one.step(turn(ToolCall("write", {"path": MEMO, "content": "x"}), FINISH))
        assert other.deliverables() == {}


def test_a_prompt_of_another_environment_is_refused() -> None:
    prompt = generate(0, 0, "train")
    with pytest.raises(ValueError, match="environment is 'other', not 'contracts'"):
        start(Prompt(prompt.id, "other", prompt.messages, prompt.hidden))


def test_the_environments_digest_depends_on_its_limits() -> None:
    environment: Environment = ContractsEnvironment()
    episode: Episode = environment.start(generate(0, 0, "train"))
    episode.close()
    assert environment.sha256 == ContractsEnvironment(Limits()).sha256
    assert environment.sha256 != ContractsEnvironment(Limits(max_turns=7)).sha256


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"limits\.max_turns: must be positive, not 0"):
        Limits(max_turns=0)
