"""What holds in every chat format: one description to render and parse; texts are never structure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3core.chat import (
    ChatFormat,
    ChatSettings,
    MalformedTurn,
    chat_format,
    generation_stub,
    parse_turn,
    render_messages,
    render_tool_results,
    render_turn,
)
from k3core.tokenizer import Tokenizer
from k3core.types import Message, ToolCall

ENGINE_STOPS = {"trained": "<|end_of_msg|>", "k3": "<|end_of_msg|>", "kimi_linear": "<|im_end|>"}
TOOLS = tuple({"type": "function", "function": {"name": name}} for name in ("grep", "finish"))


def exactly(message: Message) -> tuple[Any, ...]:
    """As a value in which 1, 1.0 and True differ, and without the words of errors."""
    calls = [(c.name, c.id, c.unparsed, list(c.arguments or ()), json.dumps(c.arguments)) for c in message.tool_calls]
    return (message.role, message.content, message.thinking, calls)


def thinking_of(chat: ChatFormat) -> list[bool]:
    return [False, True] if chat.has_thinking else [False]


def draw_turn(data: st.DataObject, chat: ChatFormat, turns: Any, texts: Any) -> tuple[Message, bool]:
    thinking = data.draw(st.sampled_from(thinking_of(chat)))
    return replace(data.draw(turns), thinking=data.draw(texts) if thinking else None), thinking


def test_the_format_is_told_by_the_control_tokens(speeches: dict[str, Any]) -> None:
    assert {name: s.chat.grammar.name for name, s in speeches.items()} == {
        "trained": "XTML (K3)",
        "k3": "XTML (K3)",
        "kimi_linear": "IM (Kimi-Linear)",
        "kimi_thinking": "IM (Kimi-Linear)",
    }
    assert {name: s.chat.has_thinking for name, s in speeches.items()} == {
        "trained": True,
        "k3": True,
        "kimi_linear": False,
        "kimi_thinking": True,
    }
    for name, stop in ENGINE_STOPS.items():
        assert speeches[name].chat.stop_token == speeches[name].tokenizer.control[stop]


def test_a_tokenizer_without_a_chat_format_is_told_what_each_needs(speeches: dict[str, Any]) -> None:
    data = speeches["trained"].tokenizer.to_bytes().replace(b"<|sep|>", b"<|gap|>")
    with pytest.raises(ValueError) as caught:
        chat_format(Tokenizer.from_bytes(data))
    assert "XTML (K3) needs <|sep|>; IM (Kimi-Linear) needs <|im_system|>, <|im_user|>, " in str(caught.value)
    assert "bring the tokenizer of a K3 or Kimi-Linear checkpoint" in str(caught.value)
    assert "\n" not in str(caught.value)


@given(data=st.data())
def test_stub_and_turn_are_the_message(speech: Any, turns: Any, texts: Any, data: st.DataObject) -> None:
    turn, thinking = draw_turn(data, speech.chat, turns, texts)
    whole = speech.chat.render_messages([turn], ChatSettings(thinking))
    assert speech.chat.generation_stub(thinking) + speech.chat.render_turn(turn, thinking) == whole
    assert whole[-1] == speech.chat.stop_token


@settings(max_examples=300)
@given(data=st.data())
def test_a_rendered_turn_parses_to_itself(speech: Any, turns: Any, texts: Any, data: st.DataObject) -> None:
    turn, thinking = draw_turn(data, speech.chat, turns, texts)
    parsed = speech.chat.parse_turn(speech.chat.render_turn(turn, thinking), thinking)
    assert exactly(parsed) == exactly(turn)
    assert all((call.error is None) == (call.arguments is not None) for call in parsed.tool_calls)


@given(data=st.data(), seed=st.integers(0, 2**32))
def test_a_turn_in_other_tokens_parses_to_the_same_message_and_is_the_same_text(
    speech: Any, turns: Any, texts: Any, data: st.DataObject, seed: int
) -> None:
    turn, thinking = draw_turn(data, speech.chat, turns, texts)
    ids = speech.misspell(speech.chat.render_turn(turn, thinking), random.Random(seed))
    parsed = speech.chat.parse_turn(ids, thinking)
    assert exactly(parsed) == exactly(turn)
    assert speech.tokenizer.decode(speech.chat.render_turn(parsed, thinking)) == speech.tokenizer.decode(ids)


@given(data=st.data())
def test_no_text_anywhere_adds_structure(speech: Any, texts: Any, data: st.DataObject) -> None:
    chat, thinking = speech.chat, speech.chat.has_thinking
    name = data.draw(st.sampled_from(list(speech.tokenizer.control)))

    def conversation(text: str) -> list[int]:
        call = ToolCall(text, {text: text, text + "2": [text], text + "3": {text: text}})
        unreadable = ToolCall(text, None, unparsed=text)
        messages = [
            Message("system", text),
            Message("user", text),
            Message("assistant", text, thinking=text if thinking else None, tool_calls=(call, unreadable)),
            Message("tool", text, tool=text, index=1),
        ]
        asked = ChatSettings(thinking, tools=({"function": {"name": text, text: text}},))
        return [token_id for token_id in chat.render_messages(messages, asked) if speech.tokenizer.is_control(token_id)]

    assert conversation(data.draw(texts) + name + data.draw(texts)) == conversation("harmless")


def test_a_turn_cut_at_any_token_or_continued_is_malformed(speech: Any) -> None:
    calls = (ToolCall("grep", {"pattern": "late fee", "max": 3, "deep": {"a": [None]}}), ToolCall("finish", {}))
    for thinking in thinking_of(speech.chat):
        turn = Message("assistant", "Looking.", thinking="So." if thinking else None, tool_calls=calls)
        ids = speech.chat.render_turn(turn, thinking)
        for length in range(len(ids)):
            with pytest.raises(MalformedTurn):
                speech.chat.parse_turn(ids[:length], thinking)
        for extra in (0, speech.chat.stop_token, speech.tokenizer.eos, speech.tokenizer.bos):
            with pytest.raises(MalformedTurn):
                speech.chat.parse_turn([*ids, extra], thinking)
        assert speech.chat.parse_turn(ids, thinking) == turn


def parses_or_is_malformed(speech: Any, ids: list[int], thinking: bool) -> None:
    """And what parses holds no other control tokens than the format's, and survives being rendered and parsed again."""
    try:
        parsed = speech.chat.parse_turn(ids, thinking)
    except MalformedTurn as error:
        reason = str(error)
    else:
        reason = ""
    if reason:
        assert "\n" not in reason
        return
    assert all((call.arguments is None) == (call.error is not None) for call in parsed.tool_calls)
    allowed = {speech.tokenizer.control[control.name] for control in speech.chat.grammar.controls}
    if speech.chat.has_thinking and "<think>" in speech.tokenizer.control:
        allowed.add(speech.tokenizer.control["</think>"])
    assert {i for i in ids if speech.tokenizer.is_control(i)} <= allowed
    if all(call.arguments is not None or call.unparsed is not None for call in parsed.tool_calls):
        with_thought = parsed if not thinking or parsed.thinking is not None else replace(parsed, thinking="")
        again = speech.chat.parse_turn(speech.chat.render_turn(with_thought, thinking), thinking)
        assert exactly(again) == exactly(with_thought)


@settings(max_examples=300)
@given(data=st.data())
def test_whatever_is_sampled_parses_or_is_malformed_and_nothing_else(
    speech: Any, turns: Any, texts: Any, data: st.DataObject
) -> None:
    turn, thinking = draw_turn(data, speech.chat, turns, texts)
    ids = speech.chat.render_turn(turn, thinking)
    markers = [speech.tokenizer.control[control.name] for control in speech.chat.grammar.controls]
    new = st.integers(-1, speech.tokenizer.vocab_size) | st.sampled_from(markers)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(len(ids) - 1, 0)))
        one = data.draw(new)
        ids = ids[:at] + data.draw(st.sampled_from([[], [one], [*ids[at : at + 1], one]])) + ids[at + 1 :]
    parses_or_is_malformed(speech, ids, thinking)


@settings(max_examples=300)
@given(data=st.data())
def test_any_ids_at_all_parse_or_are_malformed(speech: Any, data: st.DataObject) -> None:
    markers = [speech.tokenizer.control[control.name] for control in speech.chat.grammar.controls]
    some = st.sampled_from(markers) | st.integers(-3, speech.tokenizer.vocab_size + 2)
    words = st.sampled_from(["response", "tools", "call", 'call tool="f" index="1"', "functions.f:0", "{}", "message"])
    ids = data.draw(st.lists(some.map(lambda i: [i]) | words.map(speech.tokenizer.encode_text), max_size=30))
    for thinking in thinking_of(speech.chat):
        parses_or_is_malformed(speech, [i for part in ids for i in part], thinking)


def test_a_turn_that_skips_thinking_is_accepted(thinker: Any) -> None:
    plain = Message("assistant", "Yes", tool_calls=(ToolCall("f", {}),))
    skipped = thinker.chat.render_turn(plain, False)
    assert thinker.chat.parse_turn(skipped, True) == plain
    empty = replace(plain, thinking="")
    assert thinker.chat.parse_turn(thinker.chat.render_turn(empty, True), True) == empty


def test_history_keeps_the_think_channel_and_gives_one_to_who_has_none(thinker: Any) -> None:
    conversation = [Message("assistant", "a", thinking="hm"), Message("user", "b"), Message("assistant", "c")]
    text = thinker.tokenizer.decode(thinker.chat.render_messages(conversation, ChatSettings(True)))
    opened, closed = ("<think>", "</think>") if "<think>" in text else ("think<|sep|>", "<|close|>think")
    assert f"{opened}hm{closed}" in text
    assert f"{opened}{closed}" in text


def test_a_format_without_a_think_channel_says_so(im: Any) -> None:
    for call in (
        lambda: im.chat.generation_stub(True),
        lambda: im.chat.render_turn(Message("assistant", "x"), True),
        lambda: im.chat.parse_turn([im.chat.stop_token], True),
        lambda: im.chat.render_messages([Message("assistant", "x")], ChatSettings(True)),
    ):
        with pytest.raises(ValueError, match=r"thinking: the tokenizer lacks <think> and </think>, .*; turn it off"):
            call()
    assert not im.chat.thinks_after(im.chat.generation_stub(False))


def test_the_stub_says_whether_the_policy_may_think(speech: Any) -> None:
    for thinking in thinking_of(speech.chat):
        assert speech.chat.thinks_after([5, 6, *speech.chat.generation_stub(thinking)]) == thinking
    assert not speech.chat.thinks_after([])


def test_unreadable_arguments_are_rendered_as_they_are_and_read_back(speech: Any) -> None:
    calls = (ToolCall("f", {"a": 1}), ToolCall("g", None, "bad", unparsed='{"a": 1'), ToolCall("h", {}))
    ids = speech.chat.render_turn(Message("assistant", tool_calls=calls), False)
    assert '{"a": 1<|' in speech.tokenizer.decode(ids)
    first, second, third = speech.chat.parse_turn(ids, False).tool_calls
    assert (first, third) == (calls[0], calls[2])
    assert (second.name, second.arguments, second.unparsed) == ("g", None, '{"a": 1')
    assert "not JSON" in (second.error or "")


@pytest.mark.parametrize("text", ["[1]", "null", '"s"', '{"a":1,"a":2}', '{"a":NaN}', "", "{} {}"])
def test_arguments_that_are_no_json_object_are_kept_as_text(speech: Any, text: str) -> None:
    turn = Message("assistant", tool_calls=(ToolCall("g", None, unparsed=text),))
    (call,) = speech.chat.parse_turn(speech.chat.render_turn(turn, False), False).tool_calls
    assert (call.arguments, call.unparsed) == (None, text)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("assistant", tool_calls=(ToolCall("f", {"a": float("nan")}),)), "Out of range float"),
        (Message("assistant", tool_calls=(ToolCall("f", {"a": [b"bytes"]}),)), "cannot be written as JSON"),
        (Message("assistant", tool_calls=(ToolCall("f", None, error="bad"),)), "keep its sampled ids"),
        (Message("assistant", thinking="hm"), "thinking is off"),
        (Message("user", thinking="hm"), "only an assistant message"),
        (Message("user", tool_calls=(ToolCall("f", {}),)), "only an assistant message"),
        (Message("tool", "x", tool="f", index=1, thinking="hm"), "only an assistant message"),
        (Message("tool", "x", tool="f"), "needs `tool` and `index`"),
        (Message("tool", "x", index=1), "needs `tool` and `index`"),
        (Message("tool", "x", tool="f", index=0), "needs `tool` and `index`"),
        (Message("user", "x", tool="f", index=1), "only a message of role 'tool' answers a call"),
        (Message("assistant", "x", type="note"), "only a system message has a type"),
        (Message("user", "\ud800"), "lone surrogate at 0"),
    ],
)
def test_a_message_that_the_format_cannot_say_is_refused_in_one_line(
    speech: Any, message: Message, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        speech.chat.render_messages([message])
    assert "\n" not in str(caught.value)


def test_deeply_nested_arguments_are_refused_and_malformed_but_never_crash(speech: Any) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        speech.chat.render_turn(Message("assistant", tool_calls=(ToolCall("f", {"a": deep}),)), False)
    ids = speech.chat.render_turn(Message("assistant", tool_calls=(ToolCall("f", None, unparsed="[" * 99_999),)), False)
    (call,) = speech.chat.parse_turn(ids, False).tool_calls
    assert "nested too deeply" in (call.error or "")


def test_results_are_put_into_call_order(speech: Any) -> None:
    chat = speech.chat
    results = [Message("tool", f"result {n}", tool="grep", index=n) for n in range(1, 12)]
    shuffled = random.Random(0).sample(results, len(results))
    assert chat.render_tool_results(shuffled) == chat.render_tool_results(results)
    before, after = Message("user", "a"), Message("user", "b")
    in_order = chat.render_messages([before, *results, after])
    assert chat.render_messages([before, *shuffled, after]) == in_order
    assert in_order == [
        token_id for message in [before, *results, after] for token_id in chat.render_messages([message])
    ]
    with pytest.raises(ValueError, match="answer the same call"):
        chat.render_tool_results([results[0], results[0]])
    with pytest.raises(ValueError, match="not 'user'"):
        chat.render_tool_results([before])


def test_a_result_has_to_answer_a_call_of_its_turn(speech: Any) -> None:
    turn = Message("assistant", tool_calls=(ToolCall("grep", {}), ToolCall("read", {})))
    second = Message("tool", "x", tool="read", index=2)
    assert speech.chat.render_messages([turn, second]) == (
        speech.chat.render_messages([turn]) + speech.chat.render_tool_results([second], turn.tool_calls)
    )
    for wrong, reason in (
        (replace(second, index=3), "answers call 3, but the turn before it makes 2"),
        (replace(second, tool="grep"), "a tool result of 'grep' answers call 2, which is of 'read'"),
    ):
        with pytest.raises(ValueError, match=reason):
            speech.chat.render_messages([turn, wrong])
        with pytest.raises(ValueError, match=reason):
            speech.chat.render_tool_results([wrong], turn.tool_calls)


@given(data=st.data())
def test_rendered_messages_are_read_back(speech: Any, turns: Any, texts: Any, data: st.DataObject) -> None:
    chat, calls = speech.chat, data.draw(turns).tool_calls
    turn = Message("assistant", data.draw(texts), tool_calls=calls)
    opening = [Message("system", data.draw(texts)), Message("user", data.draw(texts)), turn]
    stub = chat.generation_stub(chat.has_thinking)
    read = chat.read_messages([*chat.render_messages(opening), *stub])
    assert [exactly(message) for message in read] == [exactly(message) for message in opening]
    results = [Message("tool", data.draw(texts), tool=c.name, index=n) for n, c in enumerate(calls, start=1)]
    assert chat.read_messages([*chat.render_tool_results(results, calls), *stub], calls) == results
    assert chat.read_messages(stub) == []


def test_ids_that_are_no_messages_are_not_read(speech: Any) -> None:
    for ids in ([speech.chat.stop_token], [*speech.tokenizer.encode_text("x"), speech.chat.stop_token]):
        with pytest.raises(MalformedTurn):
            speech.chat.read_messages(ids)


def test_declared_tools_are_read_back_as_a_system_message(speech: Any) -> None:
    declared, user = speech.chat.read_messages(
        speech.chat.render_messages([Message("user", "Hi")], ChatSettings(tools=TOOLS))
    )
    assert (declared.role, declared.type, user) == ("system", "tool-declare", Message("user", "Hi"))
    shown = '[{"function":{"name":"grep"},"type":"function"},{"function":{"name":"finish"},"type":"function"}]'
    assert shown in declared.content


def test_the_functions_speak_the_tokenizers_own_format(
    speech: Any, conversation: Callable[[random.Random], list[Message]]
) -> None:
    chat, tokenizer = speech.chat, speech.tokenizer
    messages = conversation(random.Random(2))
    thinking = chat.has_thinking
    asked = ChatSettings(thinking, TOOLS)
    assert render_messages(messages, tokenizer, TOOLS, thinking) == chat.render_messages(messages, asked)
    assert generation_stub(tokenizer, thinking) == chat.generation_stub(thinking)
    ids = render_turn(messages[1], tokenizer, thinking)
    assert ids == chat.render_turn(messages[1], thinking)
    assert parse_turn(ids, tokenizer, thinking) == chat.parse_turn(ids, thinking)
    calls = (ToolCall("grep", {}, id="functions.grep:9"),)
    assert render_tool_results([messages[2]], tokenizer, calls) == chat.render_tool_results([messages[2]], calls)
