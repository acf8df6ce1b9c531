from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infra.transcript import ChatMessage, Piece, messages_of

FRAGMENTS = [
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
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
