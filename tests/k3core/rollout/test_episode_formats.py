"""An episode speaks the chat format of its tokenizer, and a demonstration of it has the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from k3core.chat import ChatFormat, ChatSettings, chat_format
from k3core.envs.contracts import ContractsEnvironment, generate
from k3core.envs.environment import Limits
from k3core.rl.supervised import demonstration
from k3core.rollout.episodes import EpisodeSpec, run_episode
from k3core.rollout.protocol import GenerateRequest, Generation
from k3core.tokenizer import Tokenizer
from k3core.types import Message, SamplingParams, ToolCall, Trajectory

LIMITS = Limits(max_tokens=20_000, max_turn_tokens=5_000)
PROMPT = generate(0, 0, "train")
TOOLS = tuple(tool.declaration for tool in ContractsEnvironment(LIMITS).tools)


class Says:
    """An engine that says these turns."""

    def __init__(self, turns: Sequence[list[int]], end_of_turn: int) -> None:
        self._turns = iter(turns)
        self._end_of_turn = end_of_turn

    async def generate(self, request: GenerateRequest) -> Generation:
        tokens = next(self._turns)[: request.sampling.max_tokens]
        return Generation(
            tokens_T=np.array(tokens, dtype=np.int32),
            logprobs_T=np.zeros(len(tokens), dtype=np.float32),
            policy_step_T=np.zeros(len(tokens), dtype=np.int32),
            raw_logprobs_T=np.zeros(0, np.float32),
            supports=(),
            num_cached=0,
            routed_experts_TLk=np.zeros((0, 1, 1), dtype=np.uint8),
            routed_layers=("layers.1.block_sparse_moe",),
            stop="end_of_turn" if tokens[-1] == self._end_of_turn else "max_tokens",
        )

    def load(self, step: int, tensors: object) -> None:
        raise AssertionError((step, tensors))

    def release(self, sequence: str) -> None:
        assert sequence == f"{PROMPT.id}#0"


@pytest.fixture(scope="module", params=["k3", "kimi_linear", "kimi_thinking"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    write: Callable[[Path, str], Path] = request.getfixturevalue("write_kimi_folder")
    return Tokenizer.from_folder(write(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def chat(tokenizer: Tokenizer) -> ChatFormat:
    return chat_format(tokenizer)


def play(tokenizer: Tokenizer, turns: Sequence[list[int]], settings: ChatSettings) -> Trajectory:
    chat = chat_format(tokenizer)
    episode = run_episode(
        Says(turns, chat.stop_token),  # type: ignore[arg-type]
        ContractsEnvironment(LIMITS),
        tokenizer,
        EpisodeSpec(PROMPT, 0, seed=0),
        SamplingParams(max_tokens=5_000),
        LIMITS,
        settings,
    )
    return asyncio.run(episode)


@pytest.mark.parametrize("tools", [(), TOOLS])
def test_an_episodes_tokens_are_the_conversation_in_the_tokenizers_format(
    tokenizer: Tokenizer, chat: ChatFormat, tools: tuple[dict[str, object], ...]
) -> None:
    thought = "Hm." if chat.has_thinking else None
    settings = ChatSettings(chat.has_thinking, tools)
    search = (ToolCall("grep", {"pattern": "payment"}), ToolCall("read", {"path": "playbook.md", "limit": 2}))
    turns = [
        Message("assistant", "Looking.", thought, search),
        Message("assistant", "", thought, (ToolCall("finish", {}),)),
    ]
    trajectory = play(tokenizer, [chat.render_turn(turn, settings.thinking) for turn in turns], settings)
    assert (trajectory.stop_reason, trajectory.num_turns, trajectory.num_tool_calls) == ("finished", 2, 3)

    with ContractsEnvironment(LIMITS).start(PROMPT) as episode:
        results, _ = episode.step(turns[0])
    conversation = [*PROMPT.messages, turns[0], *results, turns[1]]
    assert trajectory.tokens_T.tolist() == chat.render_messages(conversation, settings)
    shown = demonstration(conversation, tokenizer, settings)
    assert list(shown.tokens) == trajectory.tokens_T.tolist()
    assert list(shown.loss_mask) == trajectory.loss_mask_T.tolist()
    text = tokenizer.decode(trajectory.tokens_T.tolist())
    assert ('"name":"grep"' in text) == bool(tools)


def test_a_call_that_cannot_be_carried_out_gets_an_error_and_the_episode_goes_on(
    tokenizer: Tokenizer, chat: ChatFormat
) -> None:
    settings = ChatSettings(chat.has_thinking)
    thought = "" if chat.has_thinking else None
    broken = Message("assistant", "", thought, (ToolCall("grep", None, unparsed='{"pattern": '),))
    finish = Message("assistant", "", thought, (ToolCall("finish", {}),))
    sampled = [chat.render_turn(turn, settings.thinking) for turn in (broken, finish)]
    trajectory = play(tokenizer, sampled, settings)
    assert trajectory.stop_reason == "finished"
    assert "not JSON" in tokenizer.decode(trajectory.tokens_T[~trajectory.loss_mask_T].tolist())
    assert trajectory.tokens_T[trajectory.loss_mask_T].tolist() == sampled[0] + sampled[1]


def test_a_result_repeats_the_id_that_the_policy_sampled(tokenizer: Tokenizer, chat: ChatFormat) -> None:
    settings = ChatSettings(chat.has_thinking)
    thought = "" if chat.has_thinking else None
    call = ToolCall("grep", {"pattern": "payment"}, id="functions.grep:12")
    turns = [Message("assistant", "", thought, (call,)), Message("assistant", "Done.", thought)]
    trajectory = play(tokenizer, [chat.render_turn(turn, settings.thinking) for turn in turns], settings)
    context = tokenizer.decode(trajectory.tokens_T[~trajectory.loss_mask_T].tolist())
    repeats_ids = "<|im_end|>" in tokenizer.control
    assert ("<|im_middle|>## Return of functions.grep:12\n" in context) == repeats_ids
    assert trajectory.stop_reason == "no_tool_call"


def test_what_is_no_turn_of_the_format_ends_the_episode(tokenizer: Tokenizer, chat: ChatFormat) -> None:
    turn = chat.render_turn(Message("assistant", "Yes"), False)
    trajectory = play(tokenizer, [[tokenizer.bos, *turn]], ChatSettings())
    assert trajectory.stop_reason == "parse_error"
