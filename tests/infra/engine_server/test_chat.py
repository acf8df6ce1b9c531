"""Chats with a real tiny engine, by the OpenAI API's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from engines import (
    ANSWERED,
    ASKED,
    CALLED,
    CHAT,
    STOP,
    THOUGHT,
    TOKENIZER,
    TOOL,
    client_of,
    make_service,
    real_engine,
    taught_tensors,
)

from infra.engine_server.chat_text import ChatText
from k3core.chat import ChatSettings, chat_format
from k3core.chat.im import THINK, THINK_END, Im
from k3core.tokenizer import Tokenizer
from k3core.types import Message

SAMPLING: dict[str, Any] = {"model": "policy", "temperature": 0, "max_tokens": 120}
QUESTION = [{"role": "user", "content": ASKED.content}]


@asynccontextmanager
async def openai_client(**settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    service = make_service(real_engine(taught_tensors()), **settings)
    async with client_of(service) as http:
        yield openai.AsyncOpenAI(api_key="none", base_url="http://engine/v1", http_client=http, max_retries=0)


def with_client(**settings: Any) -> Callable[[Callable[[openai.AsyncOpenAI], Awaitable[None]]], None]:
    def run(talk: Callable[[openai.AsyncOpenAI], Awaitable[None]]) -> None:
        async def main() -> None:
            async with openai_client(**settings) as api:
                await talk(api)

        asyncio.run(main())

    return run


def test_a_tool_call_its_result_and_the_answer_go_round(tmp_path: Path) -> None:
    async def talk(api: openai.AsyncOpenAI) -> None:
        first = await api.chat.completions.create(
            messages=QUESTION, tools=[TOOL], extra_body={"return_token_ids": True}, **SAMPLING
        )
        message = first.choices[0].message
        assert (first.choices[0].finish_reason, message.content) == ("tool_calls", CALLED.content)
        assert [call.function.name for call in message.tool_calls] == ["weather"]
        assert json.loads(message.tool_calls[0].function.arguments) == CALLED.tool_calls[0].arguments
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3 degrees"}
        second = await api.chat.completions.create(
            messages=[*QUESTION, message, result], tools=[TOOL], extra_body={"return_token_ids": True}, **SAMPLING
        )
        assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", ANSWERED.content)
        assert second.choices[0].message.tool_calls is None
        assert second.usage.prompt_tokens_details.cached_tokens > 0

        settings = ChatSettings(tools=(TOOL,))
        rendered = CHAT.render_messages([ASKED], settings) + CHAT.generation_stub(False)
        assert first.prompt_token_ids == rendered
        lines = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
        for line, answer in zip(lines, (first, second), strict=True):
            assert line["prompt_ids"] == answer.prompt_token_ids
            assert line["output_ids"] == answer.choices[0].token_ids
        assert lines[0]["output_ids"] == CHAT.render_turn(CALLED, thinking=False)
        assert lines[1]["prompt_ids"][: len(rendered)] == rendered

    with_client(record_path=tmp_path / "record")(talk)


def test_a_stream_tells_the_role_the_content_and_the_calls_in_this_order() -> None:
    async def talk(api: openai.AsyncOpenAI) -> None:
        stream = await api.chat.completions.create(
            messages=QUESTION,
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=1,
            **SAMPLING,
        )
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == CALLED.content
        assert sum(bool(delta.content) for delta in deltas) > 1
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert [call.function.name for call in calls] == ["weather"]
        assert json.loads(calls[0].function.arguments) == CALLED.tool_calls[0].arguments
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        heard = [c for chunk in chunks if chunk.choices for c in (chunk.choices[0].logprobs or _NO_LOGPROBS).content]
        assert chunks[-1].usage.completion_tokens == len(heard)
        assert [len(entry.top_logprobs) for entry in heard] == [1] * len(heard)
        assert b"".join(bytes(entry.bytes) for entry in heard) == TOKENIZER.decode_bytes(
            CHAT.render_turn(CALLED, thinking=False)
        )

    with_client()(talk)


class _NO_LOGPROBS:
    content = ()


def test_reasoning_is_apart_from_the_content_streamed_or_not() -> None:
    async def talk(api: openai.AsyncOpenAI) -> None:
        wanted = {"messages": QUESTION, "extra_body": {"chat_template_kwargs": {"thinking": True}}, **SAMPLING}
        message = (await api.chat.completions.create(**wanted)).choices[0].message
        assert (message.content, message.reasoning_content) == (THOUGHT.content, THOUGHT.thinking)
        chunks = [chunk.choices[0].delta async for chunk in await api.chat.completions.create(stream=True, **wanted)]
        assert "".join(delta.content or "" for delta in chunks) == THOUGHT.content
        told = [delta.model_extra.get("reasoning_content") for delta in chunks]
        assert [reasoning for reasoning in told if reasoning] == [THOUGHT.thinking]

    with_client()(talk)


def test_a_cut_turn_is_plain_content_and_says_length() -> None:
    async def talk(api: openai.AsyncOpenAI) -> None:
        num_tokens = len(TOKENIZER.encode_text(CALLED.content)) + 4
        cut = await api.chat.completions.create(
            messages=QUESTION, tools=[TOOL], **{**SAMPLING, "max_tokens": num_tokens}
        )
        assert cut.choices[0].finish_reason == "length"
        content = TOKENIZER.decode(CHAT.render_turn(CALLED, thinking=False)[:num_tokens])
        assert cut.choices[0].message.content == content
        assert cut.choices[0].message.tool_calls is None
        stopped = await api.chat.completions.create(messages=QUESTION, tools=[TOOL], stop=["me "], **SAMPLING)
        assert (stopped.choices[0].finish_reason, stopped.choices[0].message.content) == ("stop", "let ")
        assert stopped.choices[0].stop_reason == "me "

    with_client()(talk)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": []}, "messages: expected a list"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role: 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]: type"),
        ({"messages": [{"role": "tool", "tool_call_id": "x", "content": "a"}]}, "messages[0].tool_call_id: 'x'"),
        ({"tool_choice": "required", "tools": [TOOL]}, 'tool_choice "required"'),
        ({"tools": [{"type": "retrieval"}]}, "tools: expected"),
        ({"n": 2}, "n 2: not served"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 5}, "top_logprobs 5: only the sampled"),
        ({"reasoning_effort": "high"}, "thinking_effort: thinking is off"),
        ({"temperature": -1}, "temperature -1.0"),
    ],
)
def test_what_is_not_served_is_refused_in_a_line_that_names_it(change: dict[str, Any], said: str) -> None:
    async def talk(api: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refusal:
            await api.chat.completions.create(**{"messages": QUESTION, **SAMPLING, **change})
        assert said in refusal.value.body["message"]

    with_client()(talk)


def test_content_in_parts_is_the_text_of_its_parts() -> None:
    async def talk(api: openai.AsyncOpenAI) -> None:
        parts = [{"type": "text", "text": ASKED.content[:5]}, {"type": "text", "text": ASKED.content[5:]}]
        answer = await api.chat.completions.create(
            messages=[{"role": "user", "content": parts}], tools=[TOOL], tool_choice="auto", **SAMPLING
        )
        assert answer.choices[0].message.content == CALLED.content

    with_client()(talk)


def im_tokenizer() -> Tokenizer:
    """The same merges, with the control tokens of a Kimi-Linear model that thinks in place of K3's."""
    document = json.loads(TOKENIZER.to_bytes())
    names = [control.name for control in (*Im.controls, THINK, THINK_END)]
    entries = document["added_tokens"]
    kept = [entry for entry in entries if not entry["content"].startswith("<|")]
    first = len(document["model"]["vocab"])
    document["added_tokens"] = [
        {**entries[0], "content": name, "id": first + n}
        for n, name in enumerate([*(entry["content"] for entry in kept), *names])
    ]
    return Tokenizer.from_bytes(json.dumps(document).encode())


@pytest.fixture(scope="module", params=["xtml", "im"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZER if request.param == "xtml" else im_tokenizer()


SAID = [ANSWERED, CALLED, THOUGHT, Message("assistant", "half a 語 and <|open|>")]


@pytest.mark.parametrize(("message", "thinking"), [(m, t) for m in SAID for t in (False, True) if t or not m.thinking])
@pytest.mark.parametrize("cut", [0, 1, 3, 7])
def test_what_was_streamed_begins_the_turn_wherever_it_is_cut(
    tokenizer: Tokenizer, message: Message, cut: int, thinking: bool
) -> None:
    chat = chat_format(tokenizer)
    ids = chat.render_turn(message, thinking)
    text = ChatText(tokenizer, chat, thinking, strings=["<nowhere>"])
    told = ""
    for token in ids[: len(ids) - cut]:
        text.feed(token)
        assert text.content.startswith(told)
        told = text.content
    text.finish()
    turn = text.turn()
    assert turn.content.startswith(told)
    if not cut:
        assert (turn.content, turn.reasoning, turn.calls) == (
            message.content,
            message.thinking or ("" if thinking else None),
            message.tool_calls,
        )
        assert told == message.content


def test_a_turn_that_skips_its_think_channel_is_content() -> None:
    text = ChatText(TOKENIZER, CHAT, thinking=True)
    for token in CHAT.render_turn(ANSWERED, thinking=False):
        text.feed(token)
        assert text.content == ""
    text.finish()
    assert (text.turn().content, text.turn().reasoning) == (ANSWERED.content, None)


def test_garbage_after_the_think_channel_keeps_what_was_told() -> None:
    text = ChatText(TOKENIZER, CHAT, thinking=True)
    for token in [*CHAT.render_turn(THOUGHT, thinking=True)[:-3], TOKENIZER.open, TOKENIZER.open, STOP]:
        text.feed(token)
    text.finish()
    turn = text.turn()
    assert turn.reasoning == THOUGHT.thinking
    assert turn.content.startswith(f"{THOUGHT.content}<|close|>response")
    assert turn.calls == ()
