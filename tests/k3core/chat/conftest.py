"""Every chat format in the tokenizers that it may come with."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st

from k3core.chat import ChatFormat, chat_format, training_texts
from k3core.tokenizer import CONTROL_TOKENS, Tokenizer
from k3core.types import Message, ToolCall

PARTIES = ("Alder Works", "Birch Supply", "Cobalt Labs", "Dune Freight", "Elm Capital", "Fjord Media")
TOPICS = ("liability cap", "payment term", "notice period", "confidentiality term", "late fee", "renewal term")
FILES = ("nda.md", "msa.md", "lease.md", "sow.md", "license.md", "loan.md")


@dataclass(frozen=True)
class Speech:
    """A chat format, its tokenizer, and what a policy could sample.

    spell: ids of a string in which control tokens' names do mean control tokens.
    misspell: other tokens for the same bytes; control tokens stay. BPE decoding is many to one.
    """

    chat: ChatFormat
    tokenizer: Tokenizer

    def spell(self, text: str) -> list[int]:
        names = re.compile("(" + "|".join(map(re.escape, self.tokenizer.control)) + ")")
        return [
            token_id
            for part in names.split(text)
            for token_id in (
                [self.tokenizer.control[part]] if part in self.tokenizer.control else self.tokenizer.encode_text(part)
            )
        ]

    def misspell(self, ids: Sequence[int], rng: random.Random) -> list[int]:
        tokenizer = self.tokenizer
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


@pytest.fixture(scope="session")
def conversation() -> Callable[[random.Random], list[Message]]:
    return contract_review


@pytest.fixture(scope="session")
def speeches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Speech]:
    """trained: XTML with a tokenizer learnt here; k3: XTML; kimi_linear: IM; kimi_thinking: IM with a think channel."""
    rng = random.Random(0)
    conversations = [contract_review(rng) for _ in range(200)]
    write_kimi_folder = request.getfixturevalue("write_kimi_folder")
    tokenizers = {"trained": Tokenizer.train((t for c in conversations for t in training_texts(c)), vocab_size=512)}
    for family in ("k3", "kimi_linear", "kimi_thinking"):
        tokenizers[family] = Tokenizer.from_folder(write_kimi_folder(tmp_path_factory.mktemp(family), family))
    return {name: Speech(chat_format(tokenizer), tokenizer) for name, tokenizer in tokenizers.items()}


@pytest.fixture(scope="session", params=["trained", "k3", "kimi_linear", "kimi_thinking"])
def speech(request: pytest.FixtureRequest, speeches: dict[str, Speech]) -> Speech:
    return speeches[request.param]


@pytest.fixture(scope="session", params=["trained", "k3", "kimi_thinking"])
def thinker(request: pytest.FixtureRequest, speeches: dict[str, Speech]) -> Speech:
    return speeches[request.param]


@pytest.fixture(scope="session")
def xtml(speeches: dict[str, Speech]) -> Speech:
    return speeches["trained"]


@pytest.fixture(scope="session")
def im(speeches: dict[str, Speech]) -> Speech:
    return speeches["kimi_linear"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
# Texts that would matter if they were structure.
STRUCTURE = (
    *CONTROL_TOKENS, "<|im_end|>", "<|im_middle|>", "<|tool_call_begin|>", "<|tool_calls_section_end|>", "</think>",
    "message", "response", "argument", "functions.f:0", "## Return of functions.f:0\n", '"', "&quot;", "&", ":", "{",
    ' index="2"', "\n",
)  # fmt: skip
TEXT = st.text(max_size=12) | st.lists(st.sampled_from(STRUCTURE), max_size=5).map("".join)
CALLS = st.builds(ToolCall, name=TEXT, arguments=st.dictionaries(TEXT, TEXT | JSON, max_size=3))
UNREADABLE = st.builds(
    lambda name, text: ToolCall(name, None, unparsed="{!" + text),
    name=TEXT,
    text=st.text(alphabet='x"}<|>', max_size=5),
)
TURNS = st.builds(
    Message,
    role=st.just("assistant"),
    content=TEXT,
    tool_calls=st.lists(CALLS | UNREADABLE, max_size=3).map(tuple),
)


@pytest.fixture(scope="session")
def texts() -> st.SearchStrategy[str]:
    return TEXT


@pytest.fixture(scope="session")
def turns() -> st.SearchStrategy[Message]:
    return TURNS
