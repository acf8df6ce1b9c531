"""K3's XTML: what it looks like, what is no turn, and which calls cannot be carried out."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from k3core.chat import ChatSettings, MalformedTurn, Wording, chat_format, training_texts
from k3core.chat.reader import Control
from k3core.chat.settings import THINKING_EFFORTS
from k3core.chat.xtml import OPEN, SEP, Xtml
from k3core.types import Message, ToolCall

TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("grep", "read", "write", "finish")
)
BOILERPLATE = (
    *("message", ' role="', "assistant", "response", "tools", "call", ' tool="', ' index="'),
    *("argument", ' key="', ' type="', "string", '"'),
)
THINKING = ChatSettings(thinking=True)


def call_turn(name: str, **arguments: Any) -> Message:
    return Message("assistant", tool_calls=(ToolCall(name, arguments),))


def test_every_piece_of_a_call_is_encoded_by_itself(xtml: Any) -> None:
    parts = list(Xtml().turn_pieces(call_turn("grep", n=1), thinking=False))
    start = parts.index("call") - 1
    call = [OPEN, "call", ' tool="', "grep", '"', ' index="', "1", '"', SEP]
    assert parts[start : start + len(call)] == call
    ids = [
        token_id
        for part in parts
        for token_id in (
            [xtml.tokenizer.control[part.name]] if isinstance(part, Control) else xtml.tokenizer.encode_text(part)
        )
    ]
    assert xtml.chat.render_turn(call_turn("grep", n=1), False) == ids


def test_a_whole_conversation_reads_as_k3_writes_it(xtml: Any) -> None:
    messages = [
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "Yes", thinking="hm", tool_calls=(ToolCall("f", {"a": "x", "b": {"d": 1, "c": None}}),)),
        Message("tool", "ok", tool="f", index=1),
    ]
    asked = ChatSettings(
        thinking=True,
        tools=({"type": "function", "function": {"name": "f"}},),
        thinking_effort="low",
        tool_choice="none",
        response_format={"type": "object", "required": ["a"]},
    )
    wording = Wording("# T\n", "effort {effort}", "must", "must not", "json", "schema\n")
    chat = chat_format(xtml.tokenizer, wording)
    ids = chat.render_messages(messages, asked) + chat.generation_stub(thinking=True)
    assert xtml.tokenizer.decode(ids).split("<|end_of_msg|>") == [
        '<|open|>message role="system" type="tool-declare"<|sep|># T\n```json\n'
        '[{"function":{"name":"f"},"type":"function"}]\n```<|close|>message<|sep|>',
        '<|open|>message role="system" type="thinking-effort"<|sep|>effort low<|close|>message<|sep|>',
        '<|open|>message role="system"<|sep|>Be brief.<|close|>message<|sep|>',
        '<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|>',
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>hm<|close|>think<|sep|>'
        "<|open|>response<|sep|>Yes<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a" type="string"<|sep|>x<|close|>argument<|sep|>'
        '<|open|>argument key="b" type="object"<|sep|>{"d": 1, "c": null}<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        '<|open|>message role="tool" tool="f" index="1"<|sep|>ok<|close|>message<|sep|>',
        '<|open|>message role="system" type="tool-choice"<|sep|>must not<|close|>message<|sep|>',
        '<|open|>message role="system" type="response-format"<|sep|>schema\n```json\n'
        '{"required":["a"],"type":"object"}\n```<|close|>message<|sep|>',
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
    ]


def test_the_projects_own_wording_says_what_was_asked(xtml: Any) -> None:
    def body(**asked: Any) -> str:
        (message,) = xtml.chat.read_messages(xtml.chat.render_messages([], ChatSettings(**asked)))
        assert message.role == "system"
        return f"{message.type}: {message.content}"

    for effort in THINKING_EFFORTS:
        assert f"`thinking_effort={effort}`" in body(thinking=True, thinking_effort=effort)
    assert body(tools=TOOLS).startswith("tool-declare: # Tools\n\nThese are the tools")
    assert body(tool_choice="required").startswith("tool-choice: The next message must call a tool")
    assert body(tool_choice="none").startswith("tool-choice: The next message must not call")
    assert "`response_format=json_object`" in body(response_format="json_object")
    assert '```json\n{"type":"object"}\n```' in body(response_format={"type": "object"})


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"thinking_effort": "low"}, "thinking_effort: thinking is off; turn it on or leave the effort out"),
        (
            {"thinking": True, "thinking_effort": "huge"},
            "thinking_effort: must be one of low, medium, high, max, not 'h",
        ),
        ({"tool_choice": "auto"}, "tool_choice: must be one of required, none, not 'auto'"),
        ({"response_format": "text"}, "response_format: must be 'json_object' or a JSON schema, not 'text'"),
        ({"response_format": {"a": float("inf")}}, "Out of range float"),
        ({"tools": ({"name": b"f"},)}, "cannot be written as JSON"),
    ],
)
def test_a_setting_that_cannot_be_said_is_refused(xtml: Any, asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        xtml.chat.render_messages([], ChatSettings(**asked))
    assert "\n" not in str(caught.value)


def test_boilerplate_is_one_token_a_piece_and_a_short_call_costs_37_tokens(xtml: Any) -> None:
    encode = xtml.tokenizer.encode_text
    assert {text: len(encode(text)) for text in BOILERPLATE} == dict.fromkeys(BOILERPLATE, 1)
    for value in ("Alder Works", "late fee", "zebra"):
        assert len(xtml.chat.render_turn(call_turn("grep", pattern=value), False)) == 37 + len(encode(value))
    assert len(xtml.chat.generation_stub(thinking=False)) == 9


def test_training_texts_are_the_texts_that_rendering_encodes(
    xtml: Any, conversation: Callable[[random.Random], list[Message]]
) -> None:
    messages, asked = conversation(random.Random(1)), ChatSettings(tools=TOOLS)
    texts = list(training_texts(messages, asked))
    assert texts == [p for p in Xtml().pieces(messages, asked) if isinstance(p, str) and p]
    encoded = [token_id for text in texts for token_id in xtml.tokenizer.encode_text(text)]
    rendered = xtml.chat.render_messages(messages, asked)
    assert encoded == [i for i in rendered if not xtml.tokenizer.is_control(i)]


def test_an_attribute_value_cannot_close_its_quotes(xtml: Any) -> None:
    turn = Message("assistant", tool_calls=(ToolCall('grep" index="7', {'a" type="null': "&quot;<|sep|>"}),))
    ids = xtml.chat.render_turn(turn, False)
    assert 'tool="grep&quot; index=&quot;7" index="1"' in xtml.tokenizer.decode(ids)
    assert xtml.chat.parse_turn(ids, False) == turn


RESPONSE = "<|close|>response<|sep|>"
END = "<|close|>message<|sep|><|end_of_msg|>"
CALL = '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>'


@pytest.mark.parametrize(
    ("sampled", "reason"),
    [
        ("", r"expected <\|close\|> at token 0, found the end"),
        ("Hello", "found the end"),
        ("Hello[EOS]", r"found '\[EOS\]'"),
        (f"a[PAD]{RESPONSE}{END}", r"found '\[PAD\]'"),
        (f"<|close|>reply<|sep|>{END}", "'reply' is closed where 'response' is open"),
        (f"<|close|>think<|sep|>{RESPONSE}{END}", "'think' is closed"),
        (f"{RESPONSE}\n{END}", "expected <.close.>"),
        (f"{RESPONSE}{RESPONSE}{END}", "'response' is closed where 'message' is open"),
        (f"{RESPONSE}<|open|>response<|sep|>{RESPONSE}{END}", "'response' is opened where 'tools' belongs"),
        (f'{RESPONSE}<|open|>tools n="1"<|sep|>{CALL}<|close|>tools<|sep|>{END}', "where 'tools' belongs"),
        (f"{RESPONSE}<|open|>tools<|sep|><|close|>tools<|sep|>{END}", "expected <.open.>"),
        (f"{RESPONSE}<|open|>tools<|sep|>{CALL} <|close|>tools<|sep|>{END}", "expected <.close.>"),
        (f"{RESPONSE}<|open|>tools<|sep|>x{CALL}<|close|>tools<|sep|>{END}", "expected <.open.>"),
        (f"{RESPONSE}<|open|>tools<|sep|>{CALL}{END}", "'message' is closed where 'tools' is open"),
        (f"{RESPONSE}<|open|>tools<|sep|><|open|>tool<|sep|><|close|>tool<|sep|>", "where a call belongs"),
        (f"{RESPONSE}<|close|>message<|sep|>", "found the end"),
        (f"{RESPONSE}{END} ", "1 tokens after <.end_of_msg.>"),
        (f"a<|open|>b<|sep|>{RESPONSE}{END}", "expected <.close.>"),
    ],
)
def test_a_broken_structure_is_named(xtml: Any, sampled: str, reason: str) -> None:
    with pytest.raises(MalformedTurn, match=reason):
        xtml.chat.parse_turn(xtml.spell(sampled), False)


def one_call(call: str) -> str:
    return f"{RESPONSE}<|open|>tools<|sep|>{call}<|close|>call<|sep|><|close|>tools<|sep|>{END}"


def argument(value: str, kind: str, key: str = "a") -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def json_block(value: str) -> str:
    return f'<|open|>json type="object"<|sep|>{value}<|close|>json<|sep|>'


F = '<|open|>call tool="f" index="1"<|sep|>'


@pytest.mark.parametrize(
    ("call", "name", "error"),
    [
        ("<|open|>call<|sep|>", "", "'call' needs the attributes tool, index and no others"),
        ('<|open|>call index="1" tool="f"<|sep|>', "", "needs the attributes"),
        ('<|open|>call tool="f" index="1" x="y"<|sep|>', "", "needs the attributes"),
        ('<|open|>call tool="f" tool="g" index="1"<|sep|>', "", "needs the attributes"),
        ('<|open|>call tool="a&b" index="1"<|sep|>', "", "needs the attributes"),
        ('<|open|>call tool="f" index="1<|sep|>', "", "needs the attributes"),
        ('<|open|>call tool="f" index="2"<|sep|>', "f", "its index is '2', not '1'"),
        ('<|open|>call tool="f" index="01"<|sep|>', "f", "its index is '01', not '1'"),
        (F + "junk", "f", "text outside its arguments"),
        (F + argument("x", "string") + "\n", "f", "text outside its arguments"),
        (F + argument("x", "text"), "f", "has the type 'text', not one of string, number"),
        (F + argument("x", "string") * 2, "f", "argument 'a' is repeated"),
        (F + argument("one", "number"), "f", "argument 'a' is not JSON"),
        (F + argument("", "number"), "f", "not JSON"),
        (F + argument("true", "number"), "f", "declared number but is boolean"),
        (F + argument("1", "boolean"), "f", "declared boolean but is number"),
        (F + argument("0", "null"), "f", "declared null but is number"),
        (F + argument("[]", "object"), "f", "declared object but is array"),
        (F + argument('"s"', "array"), "f", "declared array but is string"),
        (F + argument("NaN", "number"), "f", "NaN is not JSON"),
        (F + argument("[-Infinity]", "array"), "f", "-Infinity is not JSON"),
        (F + argument("1e999", "number"), "f", "1e999 is too large"),
        (F + argument("9" * 5000, "number"), "f", "is not JSON"),
        (F + argument('{"k":{"x":1,"x":2}}', "object"), "f", "a key is repeated"),
        (F + argument("{} {}", "object"), "f", "not JSON"),
        (F + argument('["\\ud800"]', "array"), "f", "lone surrogate"),
        (F + argument("[" * 99_999, "array"), "f", "nested too deeply"),
        (F + json_block("[1]"), "f", "the json block is declared object but is array"),
        (F + json_block('{"a":1,"a":1}'), "f", "a key is repeated"),
        (F + json_block("{"), "f", "the json block is not JSON"),
        (F + json_block("{}") + argument("x", "string"), "f", "stands beside other arguments"),
        (F + argument("x", "string") + json_block("{}"), "f", "stands beside other arguments"),
        (F + '<|open|>json type="array"<|sep|>[]<|close|>json<|sep|>', "f", "has the type 'array'"),
        (F + "<|open|>note<|sep|>x<|close|>note<|sep|>", "f", "'note' is neither an argument nor a json block"),
        (F + '<|open|>argument key="a"<|sep|>x<|close|>argument<|sep|>', "f", "'argument' needs the attributes"),
    ],
)
def test_a_call_that_cannot_be_carried_out_says_why(xtml: Any, call: str, name: str, error: str) -> None:
    (parsed,) = xtml.chat.parse_turn(xtml.spell(one_call(call)), False).tool_calls
    assert (parsed.name, parsed.arguments) == (name, None)
    assert parsed.error is not None
    assert re.search(re.escape(error), parsed.error)


def test_a_string_argument_that_is_not_utf8_fails_its_call_but_content_is_shown(xtml: Any) -> None:
    half = xtml.tokenizer.encode_bytes(b"\xc3")
    before, after = one_call(F + argument("HERE", "string")).split("HERE")
    turn = xtml.chat.parse_turn([*half, *xtml.spell(before), *half, *xtml.spell(after)], False)
    assert turn.content == "\ufffd"
    assert turn.tool_calls == (ToolCall("f", None, error="argument 'a' is not UTF-8"),)


def test_a_malformed_call_leaves_the_other_calls_of_its_turn_alone(xtml: Any) -> None:
    calls = f'{F}junk<|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|>' + argument("[1,null]", "array")
    good, bad = reversed(xtml.chat.parse_turn(xtml.spell(one_call(calls)), False).tool_calls)
    assert bad.error is not None
    assert good == ToolCall("g", {"a": [1, None]})


def test_a_json_block_is_the_other_form_of_arguments(xtml: Any) -> None:
    (call,) = xtml.chat.parse_turn(xtml.spell(one_call(F + json_block(' {"a": [1], "b": "x"}'))), False).tool_calls
    assert call == ToolCall("f", {"a": [1], "b": "x"})


def test_a_turn_that_skips_thinking_is_accepted(xtml: Any) -> None:
    skipped = xtml.chat.parse_turn(xtml.spell(f"Yes{RESPONSE}{END}"), True)
    assert skipped == Message("assistant", "Yes", thinking=None)
    empty = xtml.chat.parse_turn(xtml.spell(f"<|close|>think<|sep|><|open|>response<|sep|>Yes{RESPONSE}{END}"), True)
    assert empty == Message("assistant", "Yes", thinking="")
    with pytest.raises(MalformedTurn, match=r"expected <.open.>"):
        xtml.chat.parse_turn(xtml.spell(f"<|close|>think<|sep|>Yes{RESPONSE}{END}"), True)


def test_arguments_are_rendered_by_their_type(xtml: Any) -> None:
    arguments = {"s": "1", "i": 1, "f": 1.0, "b": True, "n": None, "o": {"z": 1, "a": {"y": 2, "b": 3}}, "l": [1, "é"]}
    text = xtml.tokenizer.decode(xtml.chat.render_turn(call_turn("f", **arguments), False))
    assert re.findall(r'key="(\w)" type="(\w+)"<\|sep\|>(.*?)<\|close\|>', text) == [
        ("s", "string", "1"),
        ("i", "number", "1"),
        ("f", "number", "1.0"),
        ("b", "boolean", "true"),
        ("n", "null", "null"),
        ("o", "object", '{"z": 1, "a": {"y": 2, "b": 3}}'),
        ("l", "array", '[1, "é"]'),
    ]


def test_what_could_not_be_read_is_a_json_block(xtml: Any) -> None:
    call = ToolCall("f", None, unparsed='{"a":')
    ids = xtml.chat.render_turn(Message("assistant", tool_calls=(call,)), False)
    assert xtml.tokenizer.decode(ids) == one_call(F + json_block('{"a":'))


def test_an_argument_needs_a_name_and_a_type_of_jsons(xtml: Any) -> None:
    for arguments, reason in (({"a": b"x"}, "type bytes has no XTML type"), ({1: "x"}, "the argument 1 has no name")):
        with pytest.raises(ValueError, match=reason):
            xtml.chat.render_turn(Message("assistant", tool_calls=(ToolCall("f", arguments),)), False)


def test_a_typed_system_message_keeps_its_type(xtml: Any) -> None:
    message = Message("system", "x", type='no"te')
    ids = xtml.chat.render_messages([message])
    assert 'role="system" type="no&quot;te"<|sep|>x<' in xtml.tokenizer.decode(ids)
    assert xtml.chat.read_messages(ids) == [message]


@pytest.mark.parametrize(
    "header", ['message role="king"', "message", 'note role="user"', 'message role="tool" tool="f"']
)
def test_a_message_of_no_role_is_not_read(xtml: Any, header: str) -> None:
    with pytest.raises(MalformedTurn, match="opens no message"):
        xtml.chat.read_messages(xtml.spell(f"<|open|>{header}<|sep|>x{END}"))
