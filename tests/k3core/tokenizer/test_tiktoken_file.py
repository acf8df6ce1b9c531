"""A broken file of a checkpoint's tokenizer is refused in one line that names the file and the line."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3core.tokenizer import Tokenizer

NUM_RANKS = 256
LINES = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(NUM_RANKS)]
SLOTS: dict[str, Any] = {"256": {"content": "[BOS]"}, "258": {"content": "<|end_of_msg|>"}, "511": {"content": "[PAD]"}}


def write(folder: Path, lines: list[str] | bytes, slots: object = SLOTS) -> Path:
    data = lines if isinstance(lines, bytes) else "\n".join(lines).encode()
    (folder / "tiktoken.model").write_bytes(data)
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": slots}))
    return folder


def message(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        Tokenizer.from_folder(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_order_of_lines_and_a_last_empty_line_do_not_matter(tmp_path: Path) -> None:
    plain = Tokenizer.from_folder(write(tmp_path, LINES))
    other = Tokenizer.from_folder(write(tmp_path, [*reversed(LINES), "", ""]))
    windows = Tokenizer.from_folder(write(tmp_path, "\r\n".join(LINES).encode()))
    assert plain.sha256 == other.sha256 == windows.sha256
    assert (plain.vocab_size, plain.pad) == (512, 511)
    assert plain.encode_text("é") == [0xC3, 0xA9]


def replaced(number: int, line: str) -> Callable[[], list[str]]:
    return lambda: [*LINES[: number - 1], line, *LINES[number:]]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (replaced(7, "Bg"), "tiktoken.model:7: expected a token in base64 and its rank, found 'Bg'"),
        (replaced(7, "Bg== 6 6"), "tiktoken.model:7: expected a token in base64 and its rank, found 'Bg== 6 6'"),
        (replaced(7, "B$== 6"), "tiktoken.model:7: 'B$==' is not base64: "),
        (replaced(7, "Bg= 6"), "tiktoken.model:7: 'Bg=' is not base64: "),
        (replaced(7, "Bg== six"), "tiktoken.model:7: 'six' is no rank: expected a whole number"),
        (replaced(7, "Bg== -6"), "tiktoken.model:7: '-6' is no rank"),
        (replaced(7, "Bg== " + "9" * 5000), "tiktoken.model:7: '99999"),
        (replaced(7, "Bg== 5"), "tiktoken.model:7: rank 5 again, which line 6 has; download"),
        (replaced(7, "BQ== 6"), r"tiktoken.model:7: the token b'\x05' again, which line 6 has; download"),
        (replaced(7, "Bg== 300"), "tiktoken.model:7: rank 300, but the file has 256 ranks and rank 6 is missing"),
        (lambda: [*LINES[:6], *LINES[7:]], "tiktoken.model:255: rank 255, but the file has 255 ranks and rank 6 is"),
        (replaced(7, "YWI= 6"), "tiktoken.model: no token is the single byte 0x06, so not every text could be"),
        (lambda: LINES[:200], "tiktoken.model: no token is the single byte 0xc8"),
        (list, "tiktoken.model: holds no token; download the file again"),
        (
            lambda: ["version https://git-lfs.github.com/spec/v1", "oid sha256:b6c4", "size 2795286"],
            "tiktoken.model:1: a Git LFS pointer, not the file it stands for; run `git lfs pull`",
        ),
        (lambda: ["=" * 999], "tiktoken.model:1: expected a token in base64 and its rank, found '" + "=" * 60 + "…'"),
    ],
)
def test_a_broken_rank_file_is_refused_with_its_line(tmp_path: Path, lines: Callable[[], list[str]], said: str) -> None:
    text = message(write(tmp_path, lines()))
    assert text.startswith(str(tmp_path))
    assert said in text


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    assert "tiktoken.model:257: expected a token" in message(write(tmp_path, "\n".join(LINES).encode() + b"\n\xff\xfe"))
    assert "tiktoken.model:257: '��' is not base64" in message(
        write(tmp_path, "\n".join(LINES).encode() + b"\n\xff\xfe 256")
    )


def test_an_empty_token_is_refused(tmp_path: Path) -> None:
    # What decodes to nothing is written as nothing, so that such a line has one field.
    assert "tiktoken.model:257: expected a token" in message(write(tmp_path, [*LINES, " 256"]))


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ({}, "tokenizer_config.json: added_tokens_decoder is missing"),
        (["[BOS]"], "tokenizer_config.json: added_tokens_decoder is missing"),
        ({"first": {"content": "x"}}, "added_tokens_decoder.first: expected a token id"),
        ({"-1": {"content": "x"}}, "added_tokens_decoder.-1: expected a token id"),
        ({"256": "[BOS]"}, "added_tokens_decoder.256: expected an object whose `content`"),
        ({"256": {"content": ""}}, "added_tokens_decoder.256: expected an object whose `content`"),
        ({"256": {"content": 3}}, "added_tokens_decoder.256: expected an object whose `content`"),
        (
            {"255": {"content": "x"}},
            "added_tokens_decoder.255: 'x' is none of the 256 control slots 256..511 that follow",
        ),
        (
            {"512": {"content": "x"}},
            "added_tokens_decoder.512: 'x' is none of the 256 control slots 256..511 that follow",
        ),
        ({"256": {"content": "x"}, "0256": {"content": "y"}}, "added_tokens_decoder.0256: this slot is named twice"),
        ({"256": {"content": "x"}, "300": {"content": "x"}}, "the slots 256 and 300 are both named 'x'"),
        (
            {"256": {"content": "<|reserved_token_300|>"}},
            "the slots 256 and 300 are both named '<|reserved_token_300|>'",
        ),
    ],
)
def test_broken_slots_are_refused(tmp_path: Path, slots: object, said: str) -> None:
    assert f"{tmp_path}/tokenizer_config.json: " in message(write(tmp_path, LINES, slots))
    assert said in message(tmp_path)


def test_a_cut_rank_file_does_not_fit_the_slots_names(tmp_path: Path, write_kimi_folder: Callable[..., Path]) -> None:
    folder = write_kimi_folder(tmp_path, "k3")
    lines = (folder / "tiktoken.model").read_text().splitlines()
    (folder / "tiktoken.model").write_text("\n".join(lines[:300]))
    assert re.search(
        r"tokenizer_config\.json: added_tokens_decoder\.\d+: .* 300 ranks of tiktoken\.model: one of the two files is cut",
        message(folder),
    )


def test_a_config_that_is_no_json_is_refused_with_its_line(tmp_path: Path) -> None:
    config = write(tmp_path, LINES) / "tokenizer_config.json"
    config.write_text('{\n"added_tokens_decoder": {\n"256" "x"}}')
    assert f"{config}:3: not JSON: " in message(tmp_path)
    config.write_text('{"added_tokens_decoder": {"256": {"content": "x"}, "256": {"content": "y"}}}')
    assert f"{config}: the key '256' is there twice" in message(tmp_path)
    config.write_bytes(b'{"\xff')
    assert f"{config}: not UTF-8 at byte 2" in message(tmp_path)
    config.write_text("[]")
    assert f"{config}: added_tokens_decoder is missing" in message(tmp_path)


def test_ranks_without_names_for_their_slots_are_refused(tmp_path: Path) -> None:
    config = write(tmp_path, LINES) / "tokenizer_config.json"
    config.unlink()
    assert f"{config}: no such file; copy it there" in message(tmp_path)
