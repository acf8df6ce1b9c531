"""k3core.tokenizer: lossless, deterministic, and deaf to control tokens' names in texts, whatever its vocabulary."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from k3core.tokenizer import CONTROL_TOKENS, Tokenizer

TEXTS = [
    f'The tenant pays {rent} EUR a month; notice is {days} days, don\'t be late. message role="user" 租户必须付款'
    for rent, days in zip(range(700, 760), range(10, 70), strict=True)
]
SMALLEST = 256 + len(CONTROL_TOKENS)
FORMS = ("trained", "k3", "kimi_linear")


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train(TEXTS, vocab_size=400)


@pytest.fixture(scope="module", params=FORMS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "trained":
        trained: Tokenizer = request.getfixturevalue("trained")
        return trained
    write_kimi_folder = request.getfixturevalue("write_kimi_folder")
    return Tokenizer.from_folder(write_kimi_folder(tmp_path_factory.mktemp(request.param), request.param))


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
    assert tokenizer.encode_text("") == tokenizer.encode_bytes(b"") == []
    assert tokenizer.decode([]) == ""


@settings(deadline=None)
@given(before=st.text(max_size=5), data=st.data(), after=st.text(max_size=5))
def test_a_control_tokens_name_in_a_text_is_only_text(
    tokenizer: Tokenizer, before: str, data: st.DataObject, after: str
) -> None:
    name = data.draw(st.sampled_from(list(tokenizer.control)))
    ids = tokenizer.encode_text(before + name + after)
    assert not any(tokenizer.is_control(token_id) for token_id in ids)
    assert tokenizer.decode(ids) == before + name + after


def test_no_control_tokens_name_is_encoded_as_one_in_either_familys_spelling(tokenizer: Tokenizer) -> None:
    names = {*CONTROL_TOKENS, "<|im_end|>", "<|tool_call_begin|>", "<|reserved_token_856|>", *tokenizer.control}
    together = "".join(sorted(names))
    for text in (*names, together, together.encode().decode("latin-1"), f" {together} "):
        assert not any(map(tokenizer.is_control, tokenizer.encode_text(text))), text
        assert not any(map(tokenizer.is_control, tokenizer.encode_bytes(text.encode() + b"\xff"))), text


def test_texts_that_repeat_a_control_tokens_name_do_not_teach_it_as_a_merge() -> None:
    trained = Tokenizer.train(["<|open|>[EOS]<|end_of_msg|> <|open|> message[EOS]"] * 50, vocab_size=SMALLEST + 20)
    for name in CONTROL_TOKENS:
        assert trained.control[name] not in trained.encode_text(name)


def test_control_tokens_are_the_last_ids_and_decode_to_their_names(trained: Tokenizer) -> None:
    assert list(trained.control) == list(CONTROL_TOKENS)
    assert list(trained.control.values()) == list(range(400 - len(CONTROL_TOKENS), 400))
    assert trained.decode([trained.open, *trained.encode_text("é"), trained.end_of_msg]) == "<|open|>é<|end_of_msg|>"
    named = (trained.bos, trained.eos, trained.close, trained.sep, trained.pad)
    assert trained.decode(named) == "[BOS][EOS]<|close|><|sep|>[PAD]"


def test_broken_utf8_is_shown_and_kept_apart_from_what_follows(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode_bytes("é".encode()[:1])
    assert tokenizer.decode([*half, tokenizer.pad]) == "\ufffd[PAD]"
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


def test_training_twice_in_different_processes_gives_the_same_bytes(trained: Tokenizer) -> None:
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
        assert done.stdout.strip() == trained.sha256


def test_bytes_and_pickle_carry_the_whole_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.to_bytes())
    json.loads(tokenizer.to_bytes())  # as the file's name says
    for other in (
        Tokenizer.from_bytes(tokenizer.to_bytes()),
        pickle.loads(pickle.dumps(tokenizer)),
        Tokenizer.from_folder(tmp_path),
    ):
        assert (other.to_bytes(), other.sha256) == (tokenizer.to_bytes(), tokenizer.sha256)
        assert other.encode_text("<|open|> 1234 [EOS] 租户") == tokenizer.encode_text("<|open|> 1234 [EOS] 租户")
        assert (other.control, other.vocab_size) == (tokenizer.control, tokenizer.vocab_size)


def test_other_texts_give_another_digest(trained: Tokenizer) -> None:
    assert Tokenizer.train(TEXTS[:30], 380).sha256 != trained.sha256


def test_a_vocabulary_that_the_texts_cannot_fill_is_refused_with_what_they_can() -> None:
    with pytest.raises(ValueError, match=rf"yield only 2: give more text or set vocab_size={SMALLEST + 2}"):
        Tokenizer.train(["ab", "cd"], vocab_size=SMALLEST + 100)
    assert Tokenizer.train(["ab", "cd"], vocab_size=SMALLEST + 2).vocab_size == SMALLEST + 2


def test_a_vocabulary_without_room_for_bytes_and_control_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=f"need {SMALLEST}"):
        Tokenizer.train(TEXTS, vocab_size=SMALLEST - 1)
    assert Tokenizer.train([], vocab_size=SMALLEST).encode_text("é") != []


def test_an_id_outside_the_vocabulary_and_a_lone_surrogate_are_refused(tokenizer: Tokenizer) -> None:
    for token_id in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"outside the vocabulary of {tokenizer.vocab_size}"):
            tokenizer.decode([token_id])
    with pytest.raises(ValueError, match="lone surrogate at 1"):
        tokenizer.encode_text("a\ud800")


def changed(tokenizer: Tokenizer, change: dict[str, object]) -> bytes:
    return json.dumps(json.loads(tokenizer.to_bytes()) | change).encode()


def test_a_file_whose_control_token_is_not_special_is_refused(trained: Tokenizer) -> None:
    data = trained.to_bytes()
    assert b'"special":true' in data
    with pytest.raises(ValueError, match="mark it special"):
        Tokenizer.from_bytes(data.replace(b'"special":true', b'"special":false'))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Strip", "strip_left": False, "strip_right": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
    ],
)
def test_a_file_that_would_change_texts_is_refused(trained: Tokenizer, change: dict[str, object]) -> None:
    assert normalizers.NFC().normalize_str("e\u0301") != "e\u0301"
    with pytest.raises(ValueError, match="the tokenizer changes texts"):
        Tokenizer.from_bytes(changed(trained, change))


def test_a_file_that_truncates_or_pads_encodes_everything_all_the_same(trained: Tokenizer) -> None:
    library = tokenizers.Tokenizer.from_str(trained.to_bytes().decode())
    library.enable_truncation(max_length=3)
    library.enable_padding(length=50)
    other = Tokenizer.from_bytes(library.to_str().encode())
    assert other.encode_text(TEXTS[0]) == trained.encode_text(TEXTS[0])
    assert other.sha256 == trained.sha256


def test_ids_left_out_above_the_merges_are_reserved_and_below_them_refused(trained: Tokenizer) -> None:
    document = json.loads(trained.to_bytes())
    document["added_tokens"][-1]["id"] += 5
    with pytest.raises(ValueError, match=r"'\[PAD\]' has the id 404 in the file but would get 399"):
        Tokenizer.from_bytes(json.dumps(document).encode())
    document["model"]["vocab"] |= {entry["content"]: entry["id"] for entry in document["added_tokens"]}
    sparse = Tokenizer.from_bytes(json.dumps(document).encode())
    assert (sparse.vocab_size, sparse.pad) == (405, 404)
    assert sparse.decode([399, 403]) == "<|reserved_token_399|><|reserved_token_403|>"
    assert sparse.is_control(399)
    first = next(iter(document["model"]["vocab"]))
    document["model"]["vocab"][first] = 402
    with pytest.raises(ValueError, match=r"no token has the id \d+"):
        Tokenizer.from_bytes(json.dumps(document).encode())


def test_a_file_of_another_kind_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json: "):
        Tokenizer.from_folder(tmp_path)
    words = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": words}))
    with pytest.raises(ValueError, match=r"tokenizer\.json: the tokenizer lacks some of the 256 byte symbols"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json: "):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_a_tokenizer_says_which_files_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds neither tiktoken\.model nor tokenizer\.json; copy"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match="absent: no such folder"):
        Tokenizer.from_folder(str(tmp_path / "absent"))
