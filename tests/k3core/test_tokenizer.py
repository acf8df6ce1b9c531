"""k3core.tokenizer: lossless, deterministic, and deaf to control tokens' names in texts."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3core.tokenizer import CONTROL_TOKENS, Tokenizer

TEXTS = [
    f'The tenant pays {rent} EUR a month; notice is {days} days, don\'t be late. message role="user" 租户必须付款'
    for rent, days in zip(range(700, 760), range(10, 70), strict=True)
]
CONTROL_NAMES = st.sampled_from(CONTROL_TOKENS)
SMALLEST = 256 + len(CONTROL_TOKENS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, vocab_size=400)


@settings(deadline=None)
@given(text=st.text())
def test_any_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


@settings(deadline=None)
@given(data=st.binary())
def test_any_bytes_survive_encoding_and_decoding(tokenizer: Tokenizer, data: bytes) -> None:
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data


def test_every_single_byte_and_every_token_is_lossless(tokenizer: Tokenizer) -> None:
    assert all(tokenizer.decode_bytes(tokenizer.encode_bytes(bytes([b]))) == bytes([b]) for b in range(256))
    spelled = [tokenizer.decode_bytes([token_id]) for token_id in range(tokenizer.vocab_size)]
    assert len(set(spelled)) == tokenizer.vocab_size
    assert b"" not in spelled


@settings(deadline=None)
@given(before=st.text(max_size=5), name=CONTROL_NAMES, after=st.text(max_size=5))
def test_a_control_tokens_name_in_a_text_is_only_text(tokenizer: Tokenizer, before: str, name: str, after: str) -> None:
    ids = tokenizer.encode_text(before + name + after)
    assert not any(tokenizer.is_control(token_id) for token_id in ids)
    assert tokenizer.decode(ids) == before + name + after


def test_texts_that_repeat_a_control_tokens_name_do_not_teach_it_as_a_merge() -> None:
    trained = Tokenizer.train(["<|open|>[EOS]<|end_of_msg|> <|open|> message[EOS]"] * 50, vocab_size=SMALLEST + 20)
    for name in CONTROL_TOKENS:
        assert trained.control[name] not in trained.encode_text(name)


def test_control_tokens_are_the_last_ids_and_decode_to_their_names(tokenizer: Tokenizer) -> None:
    assert list(tokenizer.control) == list(CONTROL_TOKENS)
    assert list(tokenizer.control.values()) == list(range(400 - len(CONTROL_TOKENS), 400))
    assert tokenizer.decode([tokenizer.open, *tokenizer.encode_text("é"), tokenizer.end_of_msg]) == (
        "<|open|>é<|end_of_msg|>"
    )
    named = (tokenizer.bos, tokenizer.eos, tokenizer.close, tokenizer.sep, tokenizer.pad)
    assert tokenizer.decode(named) == "[BOS][EOS]<|close|><|sep|>[PAD]"


def test_broken_utf8_is_shown_and_kept_apart_from_what_follows(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode_bytes("é".encode()[:1])
    assert tokenizer.decode([*half, tokenizer.sep]) == "\ufffd<|sep|>"
    assert tokenizer.decode_bytes(half) == b"\xc3"


def test_digits_go_by_three_and_an_attribute_opening_is_one_word() -> None:
    trained = Tokenizer.train(["1234567", ' role="', ' role="user'] * 9, vocab_size=SMALLEST + 13)
    assert [trained.decode([i]) for i in trained.encode_text("1234567")] == ["123", "456", "7"]
    assert len(trained.encode_text(' role="')) == 1
    assert trained.decode([trained.encode_text(' role="user')[0]]) == ' role="'


def test_a_word_takes_one_leading_mark_and_stops_before_newlines_and_punctuation() -> None:
    trained = Tokenizer.train(["x.read_file()\n\n two"] * 9, vocab_size=SMALLEST + 14)
    words = [trained.decode([i]) for i in trained.encode_text("x.read_file()\n\n two")]
    assert words == ["x", ".read", "_file", "()\n\n", " two"]


def test_training_twice_in_different_processes_gives_the_same_bytes(tokenizer: Tokenizer) -> None:
    script = (
        "import sys, json; from k3core.tokenizer import Tokenizer;"
        "print(Tokenizer.train(json.loads(sys.stdin.read()), 400).sha256)"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            input=json.dumps(TEXTS),
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            timeout=60,
        )
        assert done.stdout.strip() == tokenizer.sha256


def test_bytes_and_pickle_carry_the_whole_tokenizer(tokenizer: Tokenizer) -> None:
    for other in (Tokenizer.from_bytes(tokenizer.to_bytes()), pickle.loads(pickle.dumps(tokenizer))):
        assert (other.to_bytes(), other.sha256) == (tokenizer.to_bytes(), tokenizer.sha256)
        assert other.encode_text("<|open|> 1234 [EOS]") == tokenizer.encode_text("<|open|> 1234 [EOS]")
        assert other.control == tokenizer.control


def test_other_texts_give_another_digest(tokenizer: Tokenizer) -> None:
    assert Tokenizer.train(TEXTS[:30], 380).sha256 != tokenizer.sha256


def test_a_vocabulary_that_the_texts_cannot_fill_is_refused_with_what_they_can() -> None:
    with pytest.raises(ValueError, match=rf"yield only 2: give more text or set vocab_size={SMALLEST + 2}"):
        Tokenizer.train(["ab", "cd"], vocab_size=SMALLEST + 100)
    assert Tokenizer.train(["ab", "cd"], vocab_size=SMALLEST + 2).vocab_size == SMALLEST + 2


def test_a_vocabulary_without_room_for_bytes_and_control_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=f"need {SMALLEST}"):
        Tokenizer.train(TEXTS, vocab_size=SMALLEST - 1)
    assert Tokenizer.train([], vocab_size=SMALLEST).encode_text("é") != []


def test_a_file_whose_control_token_is_not_special_is_refused(tokenizer: Tokenizer) -> None:
    data = tokenizer.to_bytes()
    assert b'"special":true' in data
    with pytest.raises(ValueError, match="mark it special"):
        Tokenizer.from_bytes(data.replace(b'"special":true', b'"special":false'))


def test_a_file_without_a_control_token_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"lacks the control tokens <\|sep\|>"):
        Tokenizer.from_bytes(tokenizer.to_bytes().replace(b"<|sep|>", b"<|gap|>"))


def test_an_id_outside_the_vocabulary_and_a_lone_surrogate_are_refused(tokenizer: Tokenizer) -> None:
    for token_id in (-1, 400):
        with pytest.raises(ValueError, match="outside the vocabulary of 400"):
            tokenizer.decode([token_id])
    with pytest.raises(ValueError, match="lone surrogate at 1"):
        tokenizer.encode_text("a\ud800")
