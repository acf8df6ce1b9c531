"""Kimi-Linear's format: the texts and ids of a rendered template, and ids of calls that are the policy's own."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jinja2
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from k3core.chat import ChatSettings, MalformedTurn
from k3core.tokenizer.ranks import PATTERN
from k3core.types import Message, ToolCall

TOOLS = (
    {"type": "function", "function": {"name": "grep", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "finish", "description": "Ende · 完"}},
)
# The grammar as a template over messages in the form of chat APIs, as serving engines use it.
TEMPLATE = """
{%- macro turn(class, name) -%}<|im_{{ class }}|>{{ name }}<|im_middle|>{{ caller() }}<|im_end|>{%- endmacro -%}
{%- if tools -%}
  {%- call turn("system", "tool_declare") -%}{{ tools | tojson(separators=(",", ":"), sort_keys=True) }}{%- endcall -%}
{%- endif -%}
{%- for message in messages -%}
  {%- call turn(message.role if message.role in ("user", "assistant") else "system", message.role) -%}
    {%- if message.role == "tool" -%}## Return of {{ message.tool_call_id }}{{ "\\n" }}{%- endif -%}
    {{- message.content -}}
    {%- if message.tool_calls -%}
      <|tool_calls_section_begin|>
      {%- for call in message.tool_calls -%}
        <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>
      {%- endfor -%}
      <|tool_calls_section_end|>
    {%- endif -%}
  {%- endcall -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""


def tojson(value: Any, separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Of chat templates, not of Jinja: it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=False, separators=separators, sort_keys=sort_keys)


def templated(messages: Sequence[Message], tools: Sequence[Any], add_generation_prompt: bool) -> str:
    environment = jinja2.Environment()
    environment.filters["tojson"] = tojson
    shown, calls = [], [""]
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.role == "assistant":
            calls = [f"functions.{call.name}:{n}" for n, call in enumerate(message.tool_calls)]
            entry["tool_calls"] = [
                {"id": i, "function": {"name": call.name, "arguments": call.arguments}}
                for i, call in zip(calls, message.tool_calls, strict=True)
            ]
        if message.index is not None:
            entry["tool_call_id"] = calls[message.index - 1]
        shown.append(entry)
    return environment.from_string(TEMPLATE).render(
        messages=shown, tools=tools, add_generation_prompt=add_generation_prompt
    )


def conversations(rng: random.Random) -> list[Message]:
    words = ("租户", "notice\n", "\n\n period", "", " late fee", "a:b", '{"x"', "don't", "## Return of", "0", "  ")
    messages = [Message("system", rng.choice(words)), Message("user", rng.choice(words))]
    for _ in range(rng.randint(1, 4)):
        calls = tuple(
            ToolCall(rng.choice(("grep", "read_file")), {"pattern": rng.choice(words), "n": [rng.random(), None, True]})
            for _ in range(rng.randint(0, 3))
        )
        messages.append(Message("assistant", rng.choice(words), tool_calls=calls))
        messages += [Message("tool", rng.choice(words), tool=c.name, index=n) for n, c in enumerate(calls, start=1)]
    return messages


def test_texts_and_ids_are_those_of_a_rendered_template(im: Any) -> None:
    """A serving engine renders a template to one string and encodes that, with the control tokens in it."""
    tokenizer = im.tokenizer
    spelled = {tokenizer.decode_bytes([i]): i for i in range(tokenizer.vocab_size - 256)}
    other = tiktoken.Encoding("x", pat_str=PATTERN, mergeable_ranks=spelled, special_tokens=dict(tokenizer.control))
    for seed in range(200):
        messages = conversations(random.Random(seed))
        tools = TOOLS if seed % 2 else ()
        text = templated(messages, tools, add_generation_prompt=True)
        ids = im.chat.render_messages(messages, ChatSettings(tools=tools)) + im.chat.generation_stub(False)
        assert tokenizer.decode(ids) == text
        assert ids == other.encode(text, allowed_special="all")


def test_a_whole_conversation_reads_as_kimi_linear_writes_it(im: Any) -> None:
    messages = [
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "Yes", tool_calls=(ToolCall("f", {"a": "x", "b": [1, None]}), ToolCall("g", {}))),
        Message("tool", "two", tool="g", index=2),
        Message("tool", "one\n", tool="f", index=1),
    ]
    ids = im.chat.render_messages(messages, ChatSettings(tools=({"type": "function", "function": {"name": "f"}},)))
    assert im.tokenizer.decode(ids + im.chat.generation_stub(False)).split("<|im_end|>") == [
        '<|im_system|>tool_declare<|im_middle|>[{"function":{"name":"f"},"type":"function"}]',
        "<|im_system|>system<|im_middle|>Be brief.",
        "<|im_user|>user<|im_middle|>Hi",
        "<|im_assistant|>assistant<|im_middle|>Yes<|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "x", "b": [1, null]}<|tool_call_end|>'
        "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "<|im_system|>tool<|im_middle|>## Return of functions.f:0\none\n",
        "<|im_system|>tool<|im_middle|>## Return of functions.g:1\ntwo",
        "<|im_assistant|>assistant<|im_middle|>",
    ]


def test_a_thinking_models_turns_have_a_think_block(speeches: dict[str, Any]) -> None:
    chat, decode = speeches["kimi_thinking"].chat, speeches["kimi_thinking"].tokenizer.decode
    assert decode(chat.generation_stub(True)) == "<|im_assistant|>assistant<|im_middle|><think>"
    assert decode(chat.generation_stub(False)) == "<|im_assistant|>assistant<|im_middle|><think></think>"
    assert decode(chat.render_turn(Message("assistant", "b", thinking="a"), True)) == "a</think>b<|im_end|>"
    for sampled in ("a<think>b</think>c<|im_end|>", "a</think>b</think>c<|im_end|>", "<think><|im_end|>"):
        with pytest.raises(MalformedTurn, match=r"expected <.im_end.>"):
            chat.parse_turn(speeches["kimi_thinking"].spell(sampled), True)
    with pytest.raises(MalformedTurn, match="found '</think>'"):
        chat.parse_turn(speeches["kimi_thinking"].spell("a</think>b<|im_end|>"), False)


BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|><|im_end|>"
CALL = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"


@pytest.mark.parametrize(
    ("sampled", "reason"),
    [
        ("", r"expected <\|im_end\|> at token 0, found the end"),
        ("Hello", "found the end"),
        ("a[EOS]", r"expected <\|im_end\|> at token 1, found '\[EOS\]'"),
        ("a<|im_middle|>b<|im_end|>", "found '<.im_middle.>'"),
        ("<|im_user|>user<|im_middle|>x<|im_end|>", "found '<.im_user.>'"),
        (f"{BEGIN}{END}", "expected <.tool_call_begin.>"),
        (f"{BEGIN}{CALL}", "expected <.tool_calls_section_end.> at token .*, found the end"),
        (f"{BEGIN}\n{CALL}{END}", "expected <.tool_call_begin.>"),
        (f"{BEGIN}{CALL} {END}", "expected <.tool_calls_section_end.>"),
        (f"{BEGIN}{CALL}<|tool_calls_section_end|>more<|im_end|>", "expected <.im_end.>"),
        (f"{BEGIN}{CALL}<|im_end|>", "expected <.tool_calls_section_end.>"),
        (f"{CALL}<|im_end|>", "expected <.im_end.> at token 0, found '<.tool_call_begin.>'"),
        (f"{BEGIN}<|tool_call_begin|>functions.f:0<|tool_call_end|>{END}", "expected <.tool_call_argument_begin.>"),
        (f"{BEGIN}<|tool_call_begin|>f<|tool_call_argument_begin|>{{}}{END}", "expected <.tool_call_end.>"),
        ("Yes<|im_end|>!", "1 tokens after <.im_end.>"),
    ],
)
def test_a_broken_structure_is_named(im: Any, sampled: str, reason: str) -> None:
    with pytest.raises(MalformedTurn, match=reason):
        im.chat.parse_turn(im.spell(sampled), False)


def one_call(written: str, arguments: str) -> str:
    call = f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    return f"{BEGIN}{call}{END}"


@pytest.mark.parametrize(
    ("written", "arguments", "name", "error"),
    [
        ("call_59adf5614cfe4f4b", "{}", "", "its id 'call_59adf5614cfe4f4b' is not of the form functions.NAME:NUMBER"),
        ("functions.f", "{}", "", "its id 'functions.f' is not"),
        ("functions.f:", "{}", "", "its id 'functions.f:' is not"),
        ("functions.f:1x", "{}", "", "is not of the form"),
        ("f:0", "{}", "", "its id 'f:0' is not"),
        ("", "{}", "", "its id '' is not"),
        ("functions.f:0", "", "f", "its arguments are not JSON"),
        ("functions.f:0", "{", "f", "its arguments are not JSON"),
        ("functions.f:0", "[1]", "f", "its arguments must be an object but are array"),
        ("functions.f:0", '{"a":1,"a":1}', "f", "its arguments are not JSON: a key is repeated"),
        ("functions.f:0", '{"a":NaN}', "f", "NaN is not JSON"),
        ("functions.f:0", '{"a":1e999}', "f", "1e999 is too large"),
        ("functions.f:0", '{"a":"\\ud800"}', "f", "lone surrogate"),
        ("functions.f:0", '{"a":' + "9" * 5000 + "}", "f", "are not JSON"),
    ],
)
def test_a_call_that_cannot_be_carried_out_says_why(
    im: Any, written: str, arguments: str, name: str, error: str
) -> None:
    ids = im.spell(one_call(written, arguments))
    turn = im.chat.parse_turn(ids, False)
    (call,) = turn.tool_calls
    assert (call.name, call.arguments, call.unparsed) == (name, None, arguments)
    assert error in (call.error or "")
    assert im.tokenizer.decode(im.chat.render_turn(turn, False)) == im.tokenizer.decode(ids)


def test_arguments_that_are_not_utf8_fail_their_call_but_content_is_shown(im: Any) -> None:
    half = im.tokenizer.encode_bytes(b"\xc3")
    before, after = one_call("functions.f:0", '{"a":"HERE"}').split("HERE")
    turn = im.chat.parse_turn([*half, *im.spell(before), *half, *im.spell(after)], False)
    assert turn.content == "\ufffd"
    assert turn.tool_calls == (ToolCall("f", None, error="its arguments are not UTF-8"),)


def test_white_space_around_ids_and_arguments_is_accepted(im: Any) -> None:
    (call,) = im.chat.parse_turn(im.spell(one_call(" functions.f:0\n", '\n{ "a": 1 }\n')), False).tool_calls
    assert call == ToolCall("f", {"a": 1}, id=" functions.f:0\n")


def test_an_id_that_the_policy_chose_is_kept_and_its_result_repeats_it(im: Any) -> None:
    """Released models count calls over the whole conversation, or answer with ids of other clients."""
    calls = "".join(
        f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for written in ("functions.f:7", "call_9", "functions.f:7", "functions.g:3")
    )
    ids = im.spell(f"{BEGIN}{calls}{END}")
    turn = im.chat.parse_turn(ids, False)
    assert [(call.name, call.id) for call in turn.tool_calls] == [
        ("f", "functions.f:7"),
        ("", "call_9"),
        ("f", "functions.f:7"),
        ("g", None),
    ]
    assert im.tokenizer.decode(im.chat.render_turn(turn, False)) == im.tokenizer.decode(ids)
    results = [Message("tool", f"{n}", tool=call.name, index=n) for n, call in enumerate(turn.tool_calls, start=1)]
    context = im.chat.render_tool_results(results, turn.tool_calls)
    returned = [text.split("of ")[1] for text in im.tokenizer.decode(context).split("<|im_end|>")[:-1]]
    assert returned == ["functions.f:7\n1", "call_9\n2", "functions.f:7\n3", "functions.g:3\n4"]
    assert im.chat.read_messages(context, turn.tool_calls) == results
    assert im.chat.render_messages([turn, *results]) == im.chat.render_messages([turn]) + context


@given(name=st.text(max_size=8), number=st.integers(0, 10**6))
def test_any_name_is_read_from_its_id(im: Any, name: str, number: int) -> None:
    ids = im.chat.render_turn(
        Message("assistant", tool_calls=(ToolCall(name, {}, id=f"functions.{name}:{number}"),)), False
    )
    (call,) = im.chat.parse_turn(ids, False).tool_calls
    assert (call.name, call.arguments) == (name, {})
    assert call.id == (None if number == 0 else f"functions.{name}:{number}")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (
            {"thinking_effort": "low"},
            r"thinking_effort: the chat format IM \(Kimi-Linear\) cannot say it; leave it out",
        ),
        ({"tool_choice": "required"}, "tool_choice: the chat format IM .* cannot say it; leave it out"),
        ({"response_format": "json_object"}, "response_format: the chat format IM .* cannot say it"),
    ],
)
def test_a_setting_that_the_format_cannot_say_is_refused(im: Any, asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        im.chat.render_messages([Message("user", "x")], ChatSettings(**asked))


def test_a_system_message_of_another_type_is_refused(im: Any) -> None:
    declared = Message("system", "[]", type="tool-declare")
    assert im.chat.read_messages(im.chat.render_messages([declared])) == [declared]
    with pytest.raises(ValueError, match="has no system message of type 'tool-choice'"):
        im.chat.render_messages([Message("system", "x", type="tool-choice")])


@pytest.mark.parametrize(
    "text",
    [
        "<|im_user|>system<|im_middle|>x<|im_end|>",
        "<|im_system|>user<|im_middle|>x<|im_end|>",
        "<|im_assistant|>user<|im_middle|>x<|im_end|>",
        "<|im_system|>tool<|im_middle|>x<|im_end|>",
        "<|im_system|>tool<|im_middle|>## Return of f\nx<|im_end|>",
    ],
)
def test_a_message_of_no_role_is_not_read(im: Any, text: str) -> None:
    with pytest.raises(MalformedTurn):
        im.chat.read_messages(im.spell(text))


def test_a_result_without_its_turn_is_read_by_its_id(im: Any) -> None:
    text = "<|im_system|>tool<|im_middle|>## Return of functions.grep:4\nfound<|im_end|>"
    assert im.chat.read_messages(im.spell(text)) == [Message("tool", "found", tool="grep", index=5)]
