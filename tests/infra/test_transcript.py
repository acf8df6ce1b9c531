from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infra.transcript import ChatMessage, Piece, messages_of

FRAGMENTS = [
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    "<|im_system|>",
    "<|im_user|>",
    "<|im_middle|>",
    "<|im_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "</think>",
    "tool",
    "## Return of functions.f:0\n",
    'message role="tool"',
    "message",
    "think",
    "a < b",
    "\n",
    "<|",
]


def text_of(messages: list[ChatMessage]) -> str:
    return "".join(piece.start + piece.text + piece.end for message in messages for piece in message.pieces)


@given(st.lists(st.sampled_from(FRAGMENTS)).map("".join))
def test_the_pieces_are_the_text_however_malformed(text: str) -> None:
    assert text_of(messages_of(text)) == text


def test_messages_are_told_apart_by_role_and_tool() -> None:
    text = (
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>Look.<|close|>think<|sep|>'
        "<|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="tool" tool="grep" index="1"<|sep|>found<|close|>message<|sep|><|end_of_msg|>'
    )
    assistant, tool = messages_of(text)
    assert (assistant.role, assistant.detail, tool.role, tool.detail) == ("assistant", "", "tool", "grep")
    assert assistant.pieces[1:4] == (
        Piece("<|open|>", "think", "<|sep|>"),
        Piece("", "Look.", ""),
        Piece("<|close|>", "think", "<|sep|>"),
    )


def test_text_after_the_end_of_a_message_belongs_to_no_role() -> None:
    text = '<|open|>message role="tool"<|sep|>x<|close|>message<|sep|><|end_of_msg|>stray'
    assert [message.role for message in messages_of(text)] == ["tool", ""]


def test_an_unfinished_message_keeps_its_role() -> None:
    assert messages_of('<|open|>message role="assistant"<|sep|><|open|>thi')[0].role == "assistant"


def test_messages_of_kimi_linears_format_are_told_apart_too() -> None:
    text = (
        "<|im_system|>tool_declare<|im_middle|>[]<|im_end|><|im_system|>system<|im_middle|>Be brief.<|im_end|>"
        "<|im_user|>user<|im_middle|>Hi<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>Look.</think><|tool_calls_section_begin|><|tool_call_begin|>"
        "functions.grep:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.grep:0\nfound<|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of call_1\nlost<|im_end|>stray"
    )
    messages = messages_of(text)
    assert [(message.role, message.detail) for message in messages] == [
        ("system", "tool_declare"),
        ("system", ""),
        ("user", ""),
        ("assistant", ""),
        ("tool", "grep"),
        ("tool", ""),
        ("", ""),
    ]
    assert messages[3].pieces[:6] == (
        Piece("<|im_assistant|>", "assistant", "<|im_middle|>"),
        Piece("<think>", "", ""),
        Piece("", "Look.", ""),
        Piece("</think>", "", ""),
        Piece("<|tool_calls_section_begin|>", "", ""),
        Piece("<|tool_call_begin|>", "functions.grep:0", "<|tool_call_argument_begin|>"),
    )
    assert text_of(messages) == text
