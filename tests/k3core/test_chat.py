"""k3core.chat: one format to render, train on and parse; texts are never structure; sampled ids stay as they are."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3core.chat import (
    History,
    MalformedTurn,
    Marker,
    generation_stub,
    parse_turn,
    pieces,
    render_messages,
    render_tool_results,
    render_turn,
    training_texts,
    turn_pieces,
)
from k3core.tokenizer import CONTROL_TOKENS, Tokenizer
from k3core.types import Message, ToolCall

PARTIES = ("Alder Works", "Birch Supply", "Cobalt Labs", "Dune Freight", "Elm Capital", "Fjord Media")
TOPICS = ("liability cap", "payment term", "notice period", "confidentiality term", "late fee", "renewal term")
FILES = ("nda.md", "msa.md", "lease.md", "sow.md", "license.md", "loan.md")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("grep", "read", "write", "finish")
]
BOILERPLATE = (
    *("message", ' role="', "assistant", "response", "tools", "call", ' tool="', ' index="'),
    *("argument", ' key="', ' type="', "string", '"'),
)


def call_turn(name: str, **arguments: Any) -> Message:
    return Message("assistant", tool_calls=(ToolCall(name, arguments),))


def contract_review(rng: random.Random) -> list[Message]:
    """One conversation in the manner of the default environment: find a clause, compare, write, finish."""
    party, topic, file = rng.choice(PARTIES), rng.choice(TOPICS), rng.choice(FILES)
    value, limit = rng.randint(5, 120), rng.randint(5, 120)
    clauses = "\n".join(
        f"{n}. The parties agree that the {rng.choice(TOPICS)} is {rng.randint(5, 120)} days after written notice."
        for n in range(1, 5)
    )
    memo = (
        f"file: {file}\nclause: 3\nvalue: {value}\nverdict: {'ok' if value <= limit else 'breach'}\nfallback: {limit}"
    )
    return [
        Message("user", f"Check the {topic} of the agreement with {party} against playbook.md and write memo.md."),
        call_turn("grep", pattern=party),
        Message("tool", f"{file}:1: Agreement with {party}\n{clauses}", tool="grep", index=1),
        call_turn("grep", pattern=topic),
        Message("tool", f"{file}:3: {topic}: {value} days\nplaybook.md:2: {topic}: {limit}", tool="grep", index=1),
        call_turn("write", path="memo.md", text=memo),
        Message("tool", "written", tool="write", index=1),
        call_turn("finish"),
    ]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    rng = random.Random(0)
    return Tokenizer.train((text for _ in range(200) for text in training_texts(contract_review(rng))), vocab_size=512)


@pytest.fixture(scope="module")
def spell(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Ids of a string in which control tokens' names do mean control tokens: what a policy could sample."""
    names = re.compile("(" + "|".join(map(re.escape, CONTROL_TOKENS)) + ")")

    def ids_of(text: str) -> list[int]:
        return [
            token_id
            for part in names.split(text)
            for token_id in ([tokenizer.control[part]] if part in tokenizer.control else tokenizer.encode_text(part))
        ]

    return ids_of


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
# Texts that would matter if they were structure.
TEXT = st.text(max_size=12) | st.lists(
    st.sampled_from([*CONTROL_TOKENS, "message", "response", "argument", '"', "&quot;", "&", ' index="2"', "\n"]),
    max_size=5,
).map("".join)
CALLS = st.builds(ToolCall, name=TEXT, arguments=st.dictionaries(TEXT, TEXT | JSON, max_size=3))
TURNS = st.builds(
    Message,
    role=st.just("assistant"),
    content=TEXT,
    tool_calls=st.lists(CALLS, max_size=3).map(tuple),
)


def exactly(message: Message) -> tuple[Any, ...]:
    """As a value in which 1, 1.0 and True differ."""
    calls = [(c.name, list(c.arguments or ()), json.dumps(c.arguments, sort_keys=True)) for c in message.tool_calls]
    return (message, calls)


def misspelled(ids: Sequence[int], tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Other tokens for the same bytes; control tokens stay. BPE decoding is many to one, and a policy may use all."""
    of_bytes = {tokenizer.decode_bytes([i]): i for i in range(tokenizer.vocab_size) if not tokenizer.is_control(i)}
    longest = max(map(len, of_bytes))
    out: list[int] = []
    run: list[int] = []
    for token_id in [*ids, tokenizer.pad]:
        if not tokenizer.is_control(token_id):
            run.append(token_id)
            continue
        data = tokenizer.decode_bytes(run)
        while data:
            head = rng.choice([data[:n] for n in range(1, longest + 1) if data[:n] in of_bytes])
            out.append(of_bytes[head])
            data = data[len(head) :]
        out.append(token_id)
        run = []
    return out[:-1]


def sampled_spans(history: History) -> list[list[int]]:
    spans: list[list[int]] = []
    previous = False
    for token_id, sampled in zip(history.tokens, history.loss_mask, strict=True):
        if sampled and not previous:
            spans.append([])
        if sampled:
            spans[-1].append(token_id)
        previous = sampled
    return spans


def test_every_piece_of_a_call_is_encoded_by_itself(tokenizer: Tokenizer) -> None:
    parts = list(turn_pieces(call_turn("grep", n=1), thinking=False))
    start = parts.index("call") - 1
    call = [Marker.OPEN, "call", ' tool="', "grep", '"', ' index="', "1", '"', Marker.SEP]
    assert parts[start : start + len(call)] == call
    ids = [
        token_id
        for part in parts
        for token_id in ([tokenizer.control[part.value]] if isinstance(part, Marker) else tokenizer.encode_text(part))
    ]
    assert render_turn(call_turn("grep", n=1), tokenizer, thinking=False) == ids


def test_a_whole_conversation_reads_as_k3_writes_it(tokenizer: Tokenizer) -> None:
    messages = [
        Message("system", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "Yes", thinking="hm", tool_calls=(ToolCall("f", {"a": "x", "b": {"d": 1, "c": None}}),)),
        Message("tool", "ok", tool="f", index=1),
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    ids = render_messages(messages, tokenizer, tools, thinking=True, thinking_effort="low")
    assert tokenizer.decode(ids).split("<|end_of_msg|>") == [
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\n\n'
        "These are the tools that you may call, as JSON.\n\n```json\n"
        '[{"function":{"name":"f"},"type":"function"}]\n```<|close|>message<|sep|>',
        '<|open|>message role="system" type="thinking-effort"<|sep|>low<|close|>message<|sep|>',
        '<|open|>message role="system"<|sep|>Be brief.<|close|>message<|sep|>',
        '<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|>',
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>hm<|close|>think<|sep|>'
        "<|open|>response<|sep|>Yes<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="a" type="string"<|sep|>x<|close|>argument<|sep|>'
        '<|open|>argument key="b" type="object"<|sep|>{"c":null,"d":1}<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        '<|open|>message role="tool" tool="f" index="1"<|sep|>ok<|close|>message<|sep|>',
        "",
    ]


def test_boilerplate_is_one_token_a_piece_and_a_short_call_costs_37_tokens(tokenizer: Tokenizer) -> None:
    assert {text: len(tokenizer.encode_text(text)) for text in BOILERPLATE} == dict.fromkeys(BOILERPLATE, 1)
    for value in ("Alder Works", "late fee", "zebra"):
        turn = render_turn(call_turn("grep", pattern=value), tokenizer, thinking=False)
        assert len(turn) == 37 + len(tokenizer.encode_text(value))
    assert len(generation_stub(tokenizer, thinking=False)) == 9


def test_training_texts_are_the_texts_that_rendering_encodes(tokenizer: Tokenizer) -> None:
    messages = contract_review(random.Random(1))
    texts = list(training_texts(messages, TOOLS))
    assert texts == [p for p in pieces(messages, TOOLS) if isinstance(p, str) and p]
    encoded = [token_id for text in texts for token_id in tokenizer.encode_text(text)]
    assert encoded == [i for i in render_messages(messages, tokenizer, TOOLS) if not tokenizer.is_control(i)]


@settings(deadline=None)
@given(turn=TURNS, thinking=st.booleans(), thought=TEXT)
def test_stub_and_turn_are_the_message(tokenizer: Tokenizer, turn: Message, thinking: bool, thought: str) -> None:
    turn = replace(turn, thinking=thought if thinking else None)
    whole = render_messages([turn], tokenizer, thinking=thinking)
    assert generation_stub(tokenizer, thinking) + render_turn(turn, tokenizer, thinking) == whole


@settings(deadline=None, max_examples=300)
@given(turn=TURNS, thinking=st.booleans(), thought=TEXT)
def test_a_rendered_turn_parses_to_itself(tokenizer: Tokenizer, turn: Message, thinking: bool, thought: str) -> None:
    turn = replace(turn, thinking=thought if thinking else None)
    parsed = parse_turn(render_turn(turn, tokenizer, thinking), tokenizer, thinking)
    assert exactly(parsed) == exactly(turn)


@settings(deadline=None)
@given(turn=TURNS, seed=st.integers(0, 2**32))
def test_a_turn_in_other_tokens_parses_to_the_same_message(tokenizer: Tokenizer, turn: Message, seed: int) -> None:
    ids = misspelled(render_turn(turn, tokenizer, thinking=False), tokenizer, random.Random(seed))
    assert exactly(parse_turn(ids, tokenizer, thinking=False)) == exactly(turn)


@settings(deadline=None)
@given(name=st.sampled_from(CONTROL_TOKENS), before=TEXT, after=TEXT)
def test_no_text_anywhere_adds_structure(tokenizer: Tokenizer, name: str, before: str, after: str) -> None:
    def conversation(text: str) -> list[int]:
        tools = [{"function": {"name": text, "description": text}}]
        call = ToolCall(text, {text: text, text + "2": [text], text + "3": {text: text}})
        messages = [
            Message("system", text, type=text),
            Message("user", text),
            Message("assistant", text, thinking=text, tool_calls=(call,)),
            Message("tool", text, tool=text, index=1),
        ]
        ids = render_messages(messages, tokenizer, tools, thinking=True)
        return [token_id for token_id in ids if tokenizer.is_control(token_id)]

    assert conversation(before + name + after) == conversation("harmless")


def test_an_attribute_value_cannot_close_its_quotes(tokenizer: Tokenizer) -> None:
    turn = Message("assistant", tool_calls=(ToolCall('grep" index="7', {'a" type="null': "&quot;<|sep|>"}),))
    ids = render_turn(turn, tokenizer, thinking=False)
    assert 'tool="grep&quot; index=&quot;7" index="1"' in tokenizer.decode(ids)
    assert parse_turn(ids, tokenizer, thinking=False) == turn


@pytest.mark.parametrize("thinking", [False, True])
def test_a_turn_cut_at_any_token_or_continued_is_malformed(tokenizer: Tokenizer, thinking: bool) -> None:
    calls = (ToolCall("grep", {"pattern": "late fee", "max": 3, "deep": {"a": [None]}}), ToolCall("finish", {}))
    turn = Message("assistant", "Looking.", thinking="So." if thinking else None, tool_calls=calls)
    ids = render_turn(turn, tokenizer, thinking)
    for length in range(len(ids)):
        with pytest.raises(MalformedTurn):
            parse_turn(ids[:length], tokenizer, thinking)
    for extra in (0, tokenizer.end_of_msg, tokenizer.eos, tokenizer.open):
        with pytest.raises(MalformedTurn):
            parse_turn([*ids, extra], tokenizer, thinking)
    assert parse_turn(ids, tokenizer, thinking) == turn


@settings(deadline=None, max_examples=300)
@given(turn=TURNS, thinking=st.booleans(), data=st.data())
def test_whatever_is_sampled_parses_or_is_malformed_and_nothing_else(
    tokenizer: Tokenizer, turn: Message, thinking: bool, data: st.DataObject
) -> None:
    ids = render_turn(turn, tokenizer, thinking)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(len(ids) - 1, 0)))
        new = data.draw(st.integers(-1, tokenizer.vocab_size) | st.sampled_from(list(tokenizer.control.values())))
        ids = ids[:at] + data.draw(st.sampled_from([[], [new], [*ids[at : at + 1], new]])) + ids[at + 1 :]
    try:
        parsed = parse_turn(ids, tokenizer, thinking)
    except MalformedTurn:
        return
    assert all((call.arguments is None) == (call.error is not None) for call in parsed.tool_calls)
    allowed = {tokenizer.open, tokenizer.close, tokenizer.sep, tokenizer.end_of_msg}
    assert {i for i in ids if tokenizer.is_control(i)} <= allowed


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
def test_a_broken_structure_is_named(
    tokenizer: Tokenizer, spell: Callable[[str], list[int]], sampled: str, reason: str
) -> None:
    with pytest.raises(MalformedTurn, match=reason):
        parse_turn(spell(sampled), tokenizer, thinking=False)


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
def test_a_call_that_cannot_be_carried_out_says_why(
    tokenizer: Tokenizer, spell: Callable[[str], list[int]], call: str, name: str, error: str
) -> None:
    (parsed,) = parse_turn(spell(one_call(call)), tokenizer, thinking=False).tool_calls
    assert (parsed.name, parsed.arguments) == (name, None)
    assert parsed.error is not None
    assert re.search(re.escape(error), parsed.error)


def test_a_string_argument_that_is_not_utf8_fails_its_call_but_content_is_shown(
    tokenizer: Tokenizer, spell: Callable[[str], list[int]]
) -> None:
    half = tokenizer.encode_bytes(b"\xc3")
    before, after = one_call(F + argument("HERE", "string")).split("HERE")
    turn = parse_turn([*half, *spell(before), *half, *spell(after)], tokenizer, thinking=False)
    assert turn.content == "\ufffd"
    assert turn.tool_calls == (ToolCall("f", None, error="argument 'a' is not UTF-8"),)


def test_a_malformed_call_leaves_the_other_calls_of_its_turn_alone(
    tokenizer: Tokenizer, spell: Callable[[str], list[int]]
) -> None:
    calls = f'{F}junk<|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|>' + argument("[1,null]", "array")
    good, bad = reversed(parse_turn(spell(one_call(calls)), tokenizer, thinking=False).tool_calls)
    assert bad.error is not None
    assert good == ToolCall("g", {"a": [1, None]})


def test_a_json_block_is_the_other_form_of_arguments(tokenizer: Tokenizer, spell: Callable[[str], list[int]]) -> None:
    (call,) = parse_turn(spell(one_call(F + json_block(' {"a": [1], "b": "x"}'))), tokenizer, False).tool_calls
    assert call == ToolCall("f", {"a": [1], "b": "x"})


def test_a_turn_that_skips_thinking_is_accepted(tokenizer: Tokenizer, spell: Callable[[str], list[int]]) -> None:
    skipped = parse_turn(spell(f"Yes{RESPONSE}{END}"), tokenizer, thinking=True)
    assert skipped == Message("assistant", "Yes", thinking=None)
    empty = parse_turn(spell(f"<|close|>think<|sep|><|open|>response<|sep|>Yes{RESPONSE}{END}"), tokenizer, True)
    assert empty == Message("assistant", "Yes", thinking="")
    with pytest.raises(MalformedTurn, match=r"expected <.open.>"):
        parse_turn(spell(f"<|close|>think<|sep|>Yes{RESPONSE}{END}"), tokenizer, thinking=True)


def test_arguments_are_rendered_by_their_type(tokenizer: Tokenizer) -> None:
    arguments = {"s": "1", "i": 1, "f": 1.0, "b": True, "n": None, "o": {"z": 1, "a": {"y": 2, "b": 3}}, "l": [1, "é"]}
    text = tokenizer.decode(render_turn(call_turn("f", **arguments), tokenizer, thinking=False))
    assert re.findall(r'key="(\w)" type="(\w+)"<\|sep\|>(.*?)<\|close\|>', text) == [
        ("s", "string", "1"),
        ("i", "number", "1"),
        ("f", "number", "1.0"),
        ("b", "boolean", "true"),
        ("n", "null", "null"),
        ("o", "object", '{"a":{"b":3,"y":2},"z":1}'),
        ("l", "array", '[1,"é"]'),
    ]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (call_turn("f", a=float("nan")), "Out of range float"),
        (call_turn("f", a=b"bytes"), "type bytes has no XTML type"),
        (Message("assistant", tool_calls=(ToolCall("f", None, error="bad"),)), "keep its sampled ids"),
        (Message("assistant", thinking="hm"), "thinking is off"),
        (Message("user", thinking="hm"), "only an assistant message"),
        (Message("user", tool_calls=(ToolCall("f", {}),)), "only an assistant message"),
        (Message("tool", "x", tool="f"), "needs `tool` and `index`"),
        (Message("user", "x", tool="f", index=1), "only a message of role 'tool' answers a call"),
        (Message("assistant", "x", type="note"), "only a system message has a type"),
        (Message("tool", "x", tool="f", index=0), "needs `tool` and `index`"),
    ],
)
def test_a_message_that_the_format_cannot_say_is_refused(tokenizer: Tokenizer, message: Message, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        render_messages([message], tokenizer)


def test_results_are_put_into_call_order(tokenizer: Tokenizer) -> None:
    results = [Message("tool", f"result {n}", tool="grep", index=n) for n in range(1, 12)]
    shuffled = random.Random(0).sample(results, len(results))
    assert render_tool_results(shuffled, tokenizer) == render_tool_results(results, tokenizer)
    before, after = Message("user", "a"), Message("user", "b")
    in_order = render_messages([before, *results, after], tokenizer)
    assert render_messages([before, *shuffled, after], tokenizer) == in_order
    assert in_order == [
        token_id for message in [before, *results, after] for token_id in render_messages([message], tokenizer)
    ]
    with pytest.raises(ValueError, match="answer the same call"):
        render_tool_results([results[0], results[0]], tokenizer)
    with pytest.raises(ValueError, match="not 'user'"):
        render_tool_results([before], tokenizer)


def test_the_history_says_who_made_each_token() -> None:
    history = History()
    history.append_context([5, 6])
    history.append_sampled(token_id for token_id in [7, 7, 8])
    history.append_context([])
    history.append_context([5])
    assert history.tokens == [5, 6, 7, 7, 8, 5]
    assert history.loss_mask == [False, False, True, True, True, False]
    history.tokens.append(9)
    history.loss_mask.append(True)
    assert len(history) == len(history.tokens) == len(history.loss_mask) == 6


def test_sampled_tokens_of_200_random_episodes_stay_exactly_as_they_were_sampled(tokenizer: Tokenizer) -> None:
    """trl #5224: decoding a turn and encoding it again puts gradients on tokens that were never sampled."""
    num_changed_by_reencoding = 0
    for seed in range(200):
        rng = random.Random(seed)
        thinking = bool(seed % 2)
        history = History()
        history.append_context(render_messages([Message("user", rng.choice(TOPICS))], tokenizer, thinking=thinking))
        sampled: list[list[int]] = []
        context = history.tokens
        for _ in range(rng.randint(1, 4)):
            calls = tuple(
                ToolCall("grep", {"pattern": rng.choice(PARTIES), "max": rng.randint(1, 99)})
                for _ in range(rng.randint(0, 3))
            )
            turn = Message("assistant", rng.choice(TOPICS), "Well." if thinking else None, calls)
            stub = generation_stub(tokenizer, thinking)
            history.append_context(stub)
            prefix = history.tokens
            ids = misspelled(render_turn(turn, tokenizer, thinking), tokenizer, rng)
            sampled.append(ids)
            history.append_sampled(ids)

            assert history.tokens == prefix + ids
            parsed = parse_turn(history.tokens[len(prefix) :], tokenizer, thinking)
            assert parsed == turn
            num_changed_by_reencoding += render_turn(parsed, tokenizer, thinking) != ids

            results = [Message("tool", rng.choice(FILES), tool="grep", index=n + 1) for n in range(len(calls))]
            suffix = render_tool_results(rng.sample(results, len(results)), tokenizer)
            history.append_context(suffix)
            context += stub + suffix
        assert sampled_spans(history) == sampled
        unsampled = [i for i, made in zip(history.tokens, history.loss_mask, strict=True) if not made]
        assert unsampled == context
    assert num_changed_by_reencoding >= 200
