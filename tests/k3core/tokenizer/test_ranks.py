"""A checkpoint's tiktoken.model gives the ids that other implementations give."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import regex
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tiktoken.load import load_tiktoken_bpe
from transformers.convert_slow_tokenizer import TikTokenConverter

from k3core.tokenizer import Tokenizer, ranks
from k3core.tokenizer.ranks import MAX_CHARS, MAX_RUN, PATTERN

NUM_RANKS = 900
ALPHABET = (
    "ab ZéÉßsS租户中文\n\r\t .,;:<|>[]{}0123456789'\"_&=\u0301\u200d\u3000\x85\x1c\u2028ΑαЖжあアّعǅʰ\U0001f600\U00020000"
)
WORDS = (
    "HeIsJSON",
    "don't",
    "DON'T",
    "x.read_file()\n\n two",
    "1234567 12",
    "租户Tenant必须",
    "  \n \t\r\n",
    "a\u0301b",
    "²Ⅷ٣",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    rng = random.Random(0)
    texts = ["".join(rng.choice(ALPHABET) for _ in range(40)) for _ in range(200)] + [*WORDS] * 20
    write_kimi_folder = request.getfixturevalue("write_kimi_folder")
    path: Path = write_kimi_folder(tmp_path_factory.mktemp("k3"), "k3", texts, NUM_RANKS)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def other(folder: Path, tokenizer: Tokenizer, monkeypatch_module: pytest.MonkeyPatch) -> tiktoken.Encoding:
    """As the released tokenizer builds it: tiktoken's own reader, and the control tokens as special ones."""
    monkeypatch_module.setenv("TIKTOKEN_CACHE_DIR", "")
    ranks = load_tiktoken_bpe(str(folder / "tiktoken.model"))
    return tiktoken.Encoding("k3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=dict(tokenizer.control))


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def cut(text: str, limit: int) -> Iterator[str]:
    """Character by character: a new part where more than `limit` in a row are white space, or are not."""
    length, is_space, start = 0, text[:1].isspace(), 0
    for i, character in enumerate(text):
        if character.isspace() == is_space:
            length += 1
        else:
            length, is_space = 1, character.isspace()
        if length > limit:
            yield text[start:i]
            start, length = i, 1
    yield text[start:]


def reference_ids(text: str, encoding: tiktoken.Encoding) -> list[int]:
    return [
        token_id
        for begin in range(0, len(text), MAX_CHARS)
        for part in cut(text[begin : begin + MAX_CHARS], MAX_RUN)
        for token_id in encoding.encode(part, disallowed_special=())
    ]


TEXT = st.text() | st.text(alphabet=ALPHABET) | st.lists(st.sampled_from(WORDS)).map("".join)


@given(text=TEXT)
def test_the_ids_are_those_of_a_tiktoken_encoding_with_special_tokens(
    tokenizer: Tokenizer, other: tiktoken.Encoding, text: str
) -> None:
    assert tokenizer.encode_text(text) == reference_ids(text, other)


def test_the_ids_are_those_of_the_conversion_in_transformers(tokenizer: Tokenizer, folder: Path) -> None:
    converted = TikTokenConverter(
        vocab_file=str(folder / "tiktoken.model"), pattern=PATTERN, extra_special_tokens=list(tokenizer.control)
    ).converted()
    converted.encode_special_tokens = True
    rng = random.Random(1)
    texts = ["".join(rng.choice(ALPHABET) for _ in range(rng.randint(0, 80))) for _ in range(2000)]
    texts += ["".join(rng.choices(WORDS, k=8)) for _ in range(500)]
    for text in texts:
        assert converted.encode(text, add_special_tokens=False).ids == tokenizer.encode_text(text), text
    assert {name: converted.token_to_id(name) for name in tokenizer.control} == dict(tokenizer.control)


def test_a_converted_folder_gives_the_same_ids(tokenizer: Tokenizer, folder: Path, tmp_path: Path) -> None:
    """The same vocabulary as ranks and, through transformers, as a tokenizer.json."""
    TikTokenConverter(
        vocab_file=str(folder / "tiktoken.model"), pattern=PATTERN, extra_special_tokens=list(tokenizer.control)
    ).converted().save(str(tmp_path / "tokenizer.json"))
    converted = Tokenizer.from_folder(tmp_path)
    assert dict(converted.control) == dict(tokenizer.control)
    for text in (*WORDS, "".join(WORDS), "<|open|>[EOS]<|reserved_token_999|>"):
        assert converted.encode_text(text) == tokenizer.encode_text(text)


# Long enough to be cut, with a border that the pattern alone would not draw.
@pytest.mark.parametrize("unit", ["a", " ", "\n", "中", "7", "!", "aB", "\U0001f600", " \t", "\u0301", "'s"])
@pytest.mark.parametrize("length", [MAX_RUN - 1, MAX_RUN, MAX_RUN + 1, 2 * MAX_RUN + 7])
def test_long_runs_are_cut_where_the_release_cuts_them(
    tokenizer: Tokenizer, other: tiktoken.Encoding, unit: str, length: int
) -> None:
    text = (unit * length)[:length]
    for around in (text, f"x {text} y", f"ab\n{text}"):
        assert tokenizer.encode_text(around) == reference_ids(around, other)


def test_a_cut_changes_ids_so_it_has_to_be_where_the_release_makes_it(
    tokenizer: Tokenizer, other: tiktoken.Encoding
) -> None:
    text = "123" * (MAX_RUN // 3) + "12"
    assert len(text) == MAX_RUN + 1
    assert tokenizer.encode_text(text) != other.encode(text, disallowed_special=())


def test_very_long_texts_are_cut_by_length_too_and_stay_whole(tokenizer: Tokenizer, other: tiktoken.Encoding) -> None:
    rng = random.Random(2)
    words = "".join(rng.choices(WORDS, k=MAX_CHARS // 4))
    text = "z" * (MAX_CHARS - 10) + words + " " * (MAX_RUN + 5) + words
    assert len(text) > 2 * MAX_CHARS
    ids = tokenizer.encode_text(text)
    assert ids == reference_ids(text, other)
    assert tokenizer.decode(ids) == text


@given(text=st.text(alphabet=" a\x1c\x1f\x85\u200b\u2028\u3000\n"))
def test_runs_are_of_what_python_calls_white_space(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "MAX_RUN", 3)
        patch.setattr(ranks, "MAX_CHARS", 11)
        expected = [part for i in range(0, len(text), 11) for part in cut(text[i : i + 11], 3)]
        assert [part for part in ranks._parts(text) if part] == [part for part in expected if part]


def test_the_slots_after_the_ranks_are_control_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == NUM_RANKS + 256
    assert list(tokenizer.control.values()) == list(range(NUM_RANKS, NUM_RANKS + 256))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.end_of_msg) == (NUM_RANKS, NUM_RANKS + 1, NUM_RANKS + 2)
    assert (tokenizer.open, tokenizer.close, tokenizer.sep) == (NUM_RANKS + 3, NUM_RANKS + 4, NUM_RANKS + 5)
    assert tokenizer.pad == NUM_RANKS + 255
    assert tokenizer.decode([NUM_RANKS + 8, NUM_RANKS + 253]) == "<|reserved_token_908|><|reserved_token_1153|>"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("HeIsJSON", ["He", "Is", "JSON"]),
        ("租户Tenant必须", ["租户", "Tenant", "必须"]),
        ("1234567 12", ["123", "456", "7", " ", "12"]),
        ("don't DON'T", ["don't", " DON'T"]),
        (" two  three", [" two", " ", " three"]),
        ("a()\n\n b", ["a", "()\n\n", " b"]),
        ("x \n\ty", ["x", " \n", "\ty"]),
        (' role="user"', [" role", '="', "user", '"']),
    ],
)
def test_words_are_told_apart_as_kimis_tokenizers_do(tokenizer: Tokenizer, text: str, words: list[str]) -> None:
    assert regex.findall(PATTERN, text, flags=regex.V1) == words
    assert tokenizer.encode_text(text) == [token_id for word in words for token_id in tokenizer.encode_text(word)]
