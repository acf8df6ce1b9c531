from __future__ import annotations

import random
from collections import Counter
from statistics import mean

import numpy as np
import pytest

from k3core.envs.contracts import TOPICS, ContractsEnvironment, generate
from k3core.envs.demonstrations import HABITS, Style, demonstrate, mixture
from k3core.rewards.judge import RuleJudge, grade
from k3core.rewards.rubric import RewardConfig
from k3core.types import Message, Prompt, SamplingParams, Score, ToolCall, Trajectory


def replay(prompt: Prompt, messages: tuple[Message, ...]) -> tuple[Score, list[Message]]:
    """Play the assistant turns again: their score, and every message but the answers to the last turn."""
    played = list(prompt.messages)
    with ContractsEnvironment().start(prompt) as episode:
        turns = [message for message in messages if message.role == "assistant"]
        for turn in turns:
            answers, stop_reason = episode.step(turn)
            played += [turn, *(answers if turn is not turns[-1] else ())]
        assert stop_reason is not None
        empty = np.zeros(0, dtype=np.int32)
        trajectory = Trajectory(
            prompt.id,
            0,
            0,
            empty,
            empty.astype(bool),
            empty.astype(np.float32),
            empty.astype(np.uint8).reshape(0, 0, 0),
            empty,
            SamplingParams(),
            stop_reason,
            len(turns),
            episode.num_tool_calls,
            episode.deliverables(),
        )
    return grade(prompt, trajectory, RuleJudge(), RewardConfig()), played


def scores(style: Style, n: int) -> list[Score]:
    prompts = [generate(5, index, "warm") for index in range(n)]
    return [replay(prompt, demonstrate(prompt, style, random.Random(prompt.id)))[0] for prompt in prompts]


def test_every_expert_demonstration_passes_everything_in_three_turns() -> None:
    for score in scores("expert", 50):
        assert (score.value, score.fraction, score.all_pass) == (1.0, 1.0, True)
    messages = demonstrate(generate(5, 0, "warm"), "expert", random.Random(0))
    assert [message.role for message in messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]


@pytest.mark.parametrize(
    ("style", "low", "high"),
    [("guess", 0.13, 0.25), ("any_contract", 0.35, 0.65), ("wrong_clause", 0.2, 0.35), ("no_playbook", 0.53, 0.68)],
)
def test_every_bad_habit_is_worth_less_than_the_procedure(style: Style, low: float, high: float) -> None:
    values = [score.value for score in scores(style, 100) if score.value is not None]
    assert len(values) == 100
    assert low < mean(values) < high


def test_a_wrong_clause_and_a_missing_playbook_hardly_ever_pass_everything() -> None:
    assert not any(score.all_pass for score in scores("wrong_clause", 100))
    assert sum(bool(score.all_pass) for score in scores("no_playbook", 100)) < 10


@pytest.mark.parametrize("style", ["expert", *HABITS])
def test_tool_messages_are_what_the_tools_return(style: Style) -> None:
    prompt = generate(6, 1, "warm")
    messages = demonstrate(prompt, style, random.Random(1))
    assert replay(prompt, messages)[1] == list(messages)
    assert messages[-1].tool_calls[-1].name == "finish"


@pytest.mark.parametrize(
    ("style", "calls"),
    [
        ("expert", [["grep party"], ["grep topic", "grep topic"], ["write", "finish"]]),
        ("guess", [["write", "finish"]]),
        ("any_contract", [["grep topic"], ["write", "finish"]]),
        ("wrong_clause", [["grep party"], ["grep other", "grep other"], ["write", "finish"]]),
        ("no_playbook", [["grep party"], ["grep topic"], ["write", "finish"]]),
    ],
)
def test_each_style_looks_only_where_its_name_says(style: Style, calls: list[list[str]]) -> None:
    prompt = generate(6, 2, "warm")
    words = dict.fromkeys(TOPICS, "other") | {word: name for name, word in prompt.hidden["question"].items()}

    def describe(call: ToolCall) -> str:
        assert call.arguments is not None
        return f"{call.name} {words[call.arguments['pattern']]}" if call.name == "grep" else call.name

    messages = demonstrate(prompt, style, random.Random(0))
    assert [[describe(call) for call in m.tool_calls] for m in messages if m.role == "assistant"] == calls


def test_a_mixture_is_deterministic_and_has_the_share_asked_for() -> None:
    drawn = [mixture(0, n, 0.45) for n in range(400)]
    assert drawn[:20] == [mixture(0, n, 0.45) for n in range(20)]
    styles = Counter(style for _, style, _ in drawn)
    assert abs(styles["expert"] / 400 - 0.45) < 0.08
    assert min(styles[style] for style in HABITS) > 20
    assert drawn[0][0] != mixture(1, 0, 0.45)[0]
    assert {mixture(0, n, 1.0)[1] for n in range(20)} == {"expert"}
    with pytest.raises(ValueError, match=r"expert_share: must lie in 0\.\.1"):
        mixture(0, 0, 45)


def test_demonstrations_use_warm_prompts_only() -> None:
    assert mixture(0, 3, 0.5)[0] == generate(0, 3, "warm")
