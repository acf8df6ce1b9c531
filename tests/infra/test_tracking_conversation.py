"""Episodes taken apart again, chosen for a trace, and put into a table: no MLflow here."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from infra.tracking import Evaluation, Graded, select
from infra.tracking.conversation import conversation_of
from infra.tracking.evaluation import Traced, table_json, trace_id
from k3core.chat import generation_stub, render_messages, render_tool_results, render_turn
from k3core.chat.im import THINK, THINK_END, Im
from k3core.tokenizer import Tokenizer
from k3core.tokenizer.ranks import Ranks
from k3core.types import (
    CriterionResult,
    Message,
    PolicyVersion,
    Prompt,
    Ref,
    SamplingParams,
    Score,
    StopReason,
    ToolCall,
    Trajectory,
    Verdict,
)

OPENING = (Message("system", "You review."), Message("user", 'Find <|open|> "Acme" & report.'))
CALLS = Message(
    "assistant", "Looking.", tool_calls=(ToolCall("grep", {"pattern": "a"}), ToolCall("read", {"path": "b"}))
)
ANSWERS = (
    Message("tool", "error: no such file", tool="read", index=2),
    Message("tool", "x.md:a", tool="grep", index=1),
)
FINISH = Message("assistant", "", tool_calls=(ToolCall("finish", {}),))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["You review the agreements and report what you find there."] * 4, 300)


@pytest.fixture(scope="module")
def kimi_linear() -> Tokenizer:
    names = (*Im.controls, THINK, THINK_END)
    slots = {300 + n: control.name for n, control in enumerate(names)}
    return Tokenizer(Ranks([bytes([byte]) for byte in range(256)], slots))


def trajectory(parts: Sequence[tuple[list[int], bool]], **changes: object) -> Trajectory:
    """parts: ids, and whether the policy sampled them; each sampled part has the log-probability -1, -2, ..."""
    tokens = [token for ids, _ in parts for token in ids]
    mask = [sampled for ids, sampled in parts for _ in ids]
    logprobs, number = [], 0
    for ids, sampled in parts:
        number += sampled
        logprobs += [-float(number) if sampled else 0.0] * len(ids)
    values: dict[str, object] = {
        "prompt_id": "contracts/0", "sample": 0, "seed": 2**63 + 1, "tokens_T": np.array(tokens, dtype=np.int32),
        "loss_mask_T": np.array(mask, dtype=bool), "rollout_logprobs_T": np.array(logprobs, dtype=np.float32),
        "routed_experts_TLk": np.zeros((len(tokens), 0, 0), dtype=np.uint8),
        "policy_step_T": np.where(mask, 1, -1).astype(np.int32), "sampling": SamplingParams(),
        "stop_reason": "finished", "num_turns": number, "num_tool_calls": 0,
    }  # fmt: skip
    return Trajectory(**(values | changes))  # type: ignore[arg-type]


def test_a_turn_that_a_stop_of_the_sampling_ended_is_read_with_the_end_that_follows_it(tokenizer: Tokenizer) -> None:
    *cut, end = render_turn(CALLS, tokenizer, thinking=False)
    stub = generation_stub(tokenizer, thinking=False)
    opening, answers = render_messages(OPENING, tokenizer), render_tool_results(ANSWERS, tokenizer)
    parts = [([*opening, *stub], False), (cut, True), ([end, *answers, *stub], False), (cut[:2], True)]
    read = conversation_of(trajectory(parts), tokenizer)
    assert read.turns[0].message == CALLS
    assert [called.output for called in read.turns[0].calls] == ["x.md:a", "error: no such file"]
    assert read.turns[0].num_sampled == len(cut)
    assert read.turns[1].message is None


@pytest.mark.parametrize("thinking", [False, True])
def test_turns_calls_and_answers_are_read_back_from_the_tokens(tokenizer: Tokenizer, thinking: bool) -> None:
    first = Message("assistant", CALLS.content, thinking="Hm." if thinking else None, tool_calls=CALLS.tool_calls)
    last = Message("assistant", "", thinking="" if thinking else None, tool_calls=FINISH.tool_calls)
    stub = generation_stub(tokenizer, thinking)
    context = [*render_messages(OPENING, tokenizer, thinking=thinking), *stub]
    turns = [render_turn(turn, tokenizer, thinking) for turn in (first, last)]
    between = [*render_tool_results(ANSWERS, tokenizer), *stub]
    read = conversation_of(
        trajectory([(context, False), (turns[0], True), (between, False), (turns[1], True)]), tokenizer
    )
    assert read.opening == OPENING
    assert [turn.message for turn in read.turns] == [first, last]
    assert [(called.call.name, called.output, called.is_error) for called in read.turns[0].calls] == [
        ("grep", "x.md:a", False),
        ("read", "error: no such file", True),
    ]
    assert [called.output for called in read.turns[1].calls] == [None]
    assert [turn.num_context for turn in read.turns] == [len(context), len(context + turns[0] + between)]
    assert [turn.mean_logprob for turn in read.turns] == [-1.0, -2.0]


@pytest.mark.parametrize("thinking", [False, True])
def test_turns_of_kimi_linears_format_are_read_back_by_the_ids_of_their_calls(
    kimi_linear: Tokenizer, thinking: bool
) -> None:
    calls = (ToolCall("grep", {"pattern": "a"}, id="functions.grep:5"), ToolCall("read", {"path": "b"}))
    turn = Message("assistant", "Looking.", thinking="Hm." if thinking else None, tool_calls=calls)
    stub = generation_stub(kimi_linear, thinking)
    context = [*render_messages(OPENING, kimi_linear, thinking=thinking), *stub]
    sampled = render_turn(turn, kimi_linear, thinking)
    between = [*render_tool_results(ANSWERS, kimi_linear, calls), *stub]
    cut = kimi_linear.encode_text("unfinished")
    read = conversation_of(trajectory([(context, False), (sampled, True), (between, False), (cut, True)]), kimi_linear)
    assert (read.opening, [turn.message for turn in read.turns]) == (OPENING, [turn, None])
    assert [(called.call.name, called.output) for called in read.turns[0].calls] == [
        ("grep", "x.md:a"),
        ("read", "error: no such file"),
    ]


def test_what_is_no_turn_stays_readable_and_has_no_message(tokenizer: Tokenizer) -> None:
    context = [*render_messages(OPENING, tokenizer), *generation_stub(tokenizer, False)]
    cut = render_turn(CALLS, tokenizer, False)[:-3]
    (turn,) = conversation_of(trajectory([(context, False), (cut, True)]), tokenizer).turns
    assert turn.message is None
    assert turn.calls == ()
    assert turn.text.startswith("Looking.<|close|>")


def test_an_episode_that_broke_before_its_first_turn_is_its_prompt(tokenizer: Tokenizer) -> None:
    context = [*render_messages(OPENING, tokenizer), *generation_stub(tokenizer, False)]
    read = conversation_of(trajectory([(context, False)]), tokenizer)
    assert (read.opening, read.turns) == (OPENING, ())


def episode(
    prompt: str,
    sample: int,
    reward: float | None,
    stop: StopReason = "finished",
    verdicts: Sequence[Verdict] = ("fail",),
) -> Graded:
    criteria = tuple(CriterionResult(f"C{n}", f"title {n}", verdict, "why") for n, verdict in enumerate(verdicts))
    reason = None if reward is not None else "infrastructure_error"
    score = Score(reward, reward, None if reward is None else reward == 1, criteria, reason)
    made = trajectory([([1, 2], False), ([3], True)], prompt_id=prompt, sample=sample, stop_reason=stop)
    return Graded(Prompt(prompt, "contracts", OPENING, {}), made, score)


EPISODES = [
    episode("b", 0, 0.4), episode("b", 1, 1.0), episode("a", 0, 0.0), episode("a", 1, 0.6),
    episode("c", 0, 0.2, "max_tokens"), episode("c", 1, None, "infrastructure_error", ()),
]  # fmt: skip


def chosen(count: int, episodes: Sequence[Graded] = EPISODES) -> dict[str, str]:
    return {graded.key: role for role, graded in select(episodes, count)}


def test_best_worst_median_truncated_and_broken_are_chosen_then_the_same_prompts_for_every_version() -> None:
    roles = {"b#1": "best", "a#0": "worst", "b#0": "median", "c#0": "truncated", "c#1": "infrastructure error"}
    assert chosen(5) == roles
    assert list(chosen(2)) == ["b#1", "a#0"]
    assert chosen(0) == {}
    healthy = EPISODES[:4]
    assert chosen(9, healthy) == {"b#1": "best", "a#0": "worst", "b#0": "median"}
    others = [episode("d", 0, 0.5), *healthy]
    assert chosen(9, others)["b#0"] == "same for every version"
    assert chosen(9, EPISODES[::-1]).items() >= roles.items()


def test_nothing_graded_still_shows_what_broke() -> None:
    assert chosen(5, [EPISODES[5]]) == {"c#1": "infrastructure error"}


def test_a_prompt_is_told_from_another_run_and_step_by_its_trace_id() -> None:
    ids = {trace_id(run, step, graded) for run in ("r1", "r2") for step in (1, 2) for graded in EPISODES}
    assert len(ids) == 4 * len(EPISODES)
    assert all(identity.startswith("tr-") and len(identity) == 35 for identity in ids)


def test_the_table_has_a_row_for_each_episode_and_null_where_there_is_no_grade(tokenizer: Tokenizer) -> None:
    policy = PolicyVersion("demo", 3, "base", Ref("s3://b/m.json", "c" * 64, 1), "a" * 64, None)
    context = [*render_messages(OPENING, tokenizer), *generation_stub(tokenizer, False)]
    traced = Traced("best", EPISODES[1], conversation_of(trajectory([(context, False)]), tokenizer))
    evaluation = Evaluation(policy, "suite", "d" * 64, "rule/1", True, 0, tuple(EPISODES), (traced,))
    table = json.loads(table_json("run", evaluation))
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert table["columns"][:2] == ["episode", "outcome"]
    assert len({row["episode"] for row in rows}) == len(EPISODES)
    assert [(row["reward"], row["all pass"], row["title 0"]) for row in rows][1:] == [
        (1.0, "pass", "fail"),
        (0.0, "fail", "fail"),
        (0.6, "fail", "fail"),
        (0.2, "fail", "fail"),
        (None, None, None),
    ]
    assert rows[5]["outcome"] == "not graded (infrastructure_error), infrastructure_error"
    assert [row["trace"] for row in rows if row["trace"]] == [trace_id("run", 3, EPISODES[1])]
    assert {row["step"] for row in rows} == {3}
