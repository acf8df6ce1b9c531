"""Conversations for the warm start: the whole procedure, and four bad habits to be trained away.

Habits make the warm-started policy what a base model is: able to do the work, not reliable at it. The share of
experts sets the reward that RL starts from.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Literal

from k3core.envs.contracts import (
    HEADINGS,
    MEMO,
    NUM_CLAUSES,
    PLAYBOOK,
    VALUES,
    VERDICTS,
    ContractsEnvironment,
    ContractsEpisode,
    format_memo,
    generate,
)
from k3core.types import Message, Prompt, ToolCall

Style = Literal["expert", "guess", "any_contract", "wrong_clause", "no_playbook"]
_ENVIRONMENT = ContractsEnvironment()
HABITS: tuple[Style, ...] = ("guess", "any_contract", "wrong_clause", "no_playbook")
HABIT_WEIGHTS = (4, 1, 1, 1)  # mostly guesses, as a policy that saves itself the work would


def demonstrate(prompt: Prompt, style: Style, rng: random.Random) -> tuple[Message, ...]:
    """The prompt's messages, then turns and what the tools really answered, up to the turn that finishes.

    The messages that answer that last turn are left out, as in a trajectory: nobody reads them. Needs a prompt made
    by `generate`.
    """
    party, topic = prompt.hidden["question"]["party"], prompt.hidden["question"]["topic"]
    answer: dict[str, str] = prompt.hidden["answer"]
    find_party = _grep(party)
    with ContractsEnvironment().start(prompt) as episode:
        match style:
            case "expert":
                look_up = (_grep(topic, answer["file"]), _grep(topic, PLAYBOOK))
                seen = (*_call(episode, find_party), *_call(episode, *look_up))
                memo = answer
            case "guess":
                seen = ()
                memo = {"file": rng.choice(sorted(HEADINGS)), **_random_clause(rng), **_random_opinion(rng)}
            case "any_contract":
                seen = _call(episode, _grep(topic))
                memo = rng.choice([memo for memo in _memos(prompt) if memo["topic"] == topic])
            case "wrong_clause":
                own = [memo for memo in _memos(prompt) if memo["file"] == answer["file"] and memo["topic"] != topic]
                memo = rng.choice(own)
                look_up = (_grep(memo["topic"], answer["file"]), _grep(memo["topic"], PLAYBOOK))
                seen = (*_call(episode, find_party), *_call(episode, *look_up))
            case "no_playbook":
                seen = (*_call(episode, find_party), *_call(episode, _grep(topic, answer["file"])))
                memo = {**answer, **_random_opinion(rng)}
        last = _turn(ToolCall("write", {"path": MEMO, "content": format_memo(memo)}), ToolCall("finish", {}))
        _, stop_reason = episode.step(last)
        assert stop_reason == "finished"
    return (*prompt.messages, *seen, last)


def mixture(seed: int, index: int, expert_share: float) -> tuple[Prompt, Style, tuple[Message, ...]]:
    """The index-th demonstration of a warm start: expert with probability `expert_share`, else a habit."""
    if not 0 <= expert_share <= 1:
        raise ValueError(f"expert_share: must lie in 0..1, not {expert_share}")
    prompt = generate(seed, index, "warm")
    rng = random.Random(f"demonstration/{seed}/{index}")
    style: Style = "expert" if rng.random() < expert_share else rng.choices(HABITS, HABIT_WEIGHTS)[0]
    return prompt, style, demonstrate(prompt, style, rng)


def _turn(*calls: ToolCall) -> Message:
    return Message("assistant", tool_calls=calls)


def _call(episode: ContractsEpisode, *calls: ToolCall) -> tuple[Message, ...]:
    turn = _turn(*calls)
    answers, stop_reason = episode.step(turn)
    assert stop_reason is None
    return (turn, *answers)


def _grep(pattern: str, path: str | None = None) -> ToolCall:
    return ToolCall("grep", {"pattern": pattern} if path is None else {"pattern": pattern, "path": path})


def _memos(prompt: Prompt) -> list[dict[str, str]]:
    """What an honest reader would write about each clause of each agreement; `topic` beside the memo's fields."""
    documents: Mapping[str, str] = prompt.hidden["documents"]
    limits = dict(line.split(" max ") for line in documents[PLAYBOOK].splitlines())
    memos: list[dict[str, str]] = []
    for file in sorted(documents.keys() & HEADINGS.keys()):
        for line in documents[file].splitlines()[1:]:
            clause, topic, value = line.split(" ")
            fallback = limits[topic]
            verdict = VERDICTS[int(value) > int(fallback)]
            clause = clause.removesuffix(".")
            memos.append(
                {
                    "topic": topic,
                    "file": file,
                    "clause": clause,
                    "value": value,
                    "verdict": verdict,
                    "fallback": fallback,
                }
            )
    return memos


def _random_clause(rng: random.Random) -> dict[str, str]:
    return {"clause": str(rng.randint(1, NUM_CLAUSES)), "value": str(rng.choice(VALUES))}


def _random_opinion(rng: random.Random) -> dict[str, str]:
    return {"verdict": rng.choice(VERDICTS), "fallback": str(rng.choice(VALUES))}
