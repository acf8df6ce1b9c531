"""Messages <-> token ids, in the chat format that a tokenizer is for.

Structure is made of control ids alone, and every text between two of them is encoded by itself. A user, a document or
an argument that says `<|open|>` is therefore text, and no token that we encode spans two pieces.

Token in, token out: an id that the policy sampled is never decoded and encoded again. BPE is not a bijection: the
policy may spell a word with other tokens than `encode_text` would, and training on the canonical ones would put
gradients on tokens that were never sampled. So an episode grows only at its end: `History.append_sampled` takes the
engine's ids as they are, `parse_turn` reads them without changing them, and only what the environment adds
(`render_tool_results`, `generation_stub`) is encoded anew. `render_turn` is for demonstrations, which nobody sampled.

The functions here are the methods of `chat_format(tokenizer)`, for those who need one of them once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from k3core.chat.format import ChatFormat as ChatFormat
from k3core.chat.format import chat_format as chat_format
from k3core.chat.history import History as History
from k3core.chat.reader import MalformedTurn as MalformedTurn
from k3core.chat.settings import PLAIN as PLAIN
from k3core.chat.settings import ChatSettings as ChatSettings
from k3core.chat.settings import ThinkingEffort as ThinkingEffort
from k3core.chat.wording import Wording as Wording
from k3core.chat.xtml import Xtml
from k3core.tokenizer import Tokenizer
from k3core.types import Message, ToolCall


def render_messages(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = False,
) -> list[int]:
    return chat_format(tokenizer).render_messages(messages, ChatSettings(thinking, tuple(tools or ())))


def generation_stub(tokenizer: Tokenizer, thinking: bool) -> list[int]:
    return chat_format(tokenizer).generation_stub(thinking)


def render_turn(message: Message, tokenizer: Tokenizer, thinking: bool) -> list[int]:
    return chat_format(tokenizer).render_turn(message, thinking)


def render_tool_results(
    messages: Sequence[Message], tokenizer: Tokenizer, calls: Sequence[ToolCall] | None = None
) -> list[int]:
    return chat_format(tokenizer).render_tool_results(messages, calls)


def parse_turn(ids: Sequence[int], tokenizer: Tokenizer, thinking: bool) -> Message:
    return chat_format(tokenizer).parse_turn(ids, thinking)


def training_texts(messages: Sequence[Message], settings: ChatSettings = PLAIN) -> Iterator[str]:
    """The texts that rendering will encode, one by one: what `Tokenizer.train`, which learns for XTML, should see."""
    for piece in Xtml().pieces(messages, settings):
        if isinstance(piece, str) and piece:
            yield piece
