"""The two files of a checkpoint's tokenizer: tiktoken.model, and tokenizer_config.json that names the control slots.

Every error is one line that names the file, and the line in it where there is one.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3core.tokenizer.ranks import NUM_SLOTS, Ranks
from k3core.tokenizer.vocabulary import NUM_BYTES, reserved_name

RANKS_FILE = "tiktoken.model"
SLOTS_FILE = "tokenizer_config.json"
MAX_DIGITS = 9  # of a number that can be a token id


def read_tiktoken(folder: Path) -> Ranks:
    """Raises ValueError when a file is absent, is not what it must be, or does not belong to the other."""
    tokens = _read_ranks(folder / RANKS_FILE)
    return Ranks(tokens, _read_slots(folder / SLOTS_FILE, len(tokens)))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file; copy it there from the checkpoint's page") from error


def _read_ranks(path: Path) -> list[bytes]:
    """One token a line: its bytes in base64, a blank, its rank. In rank order, as the ids are."""
    ranked: dict[int, tuple[int, bytes]] = {}
    line_of_token: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        if line.startswith(b"version https://git-lfs"):
            raise ValueError(f"{where}: a Git LFS pointer, not the file it stands for; run `git lfs pull` there")
        token, rank = _entry(line, where)
        if rank in ranked:
            raise ValueError(f"{where}: rank {rank} again, which line {ranked[rank][0]} has; download the file again")
        if token in line_of_token:
            raise ValueError(
                f"{where}: the token {token!r} again, which line {line_of_token[token]} has; download the file again"
            )
        ranked[rank] = (number, token)
        line_of_token[token] = number
    if not ranked:
        raise ValueError(f"{path}: holds no token; download the file again")
    last = max(ranked)
    if len(ranked) != last + 1:
        missing = next(rank for rank in range(last) if rank not in ranked)
        raise ValueError(
            f"{path}:{ranked[last][0]}: rank {last}, but the file has {len(ranked)} ranks and rank {missing} is missing;"
            " download the file again"
        )
    for byte in range(NUM_BYTES):
        if bytes([byte]) not in line_of_token:
            raise ValueError(f"{path}: no token is the single byte 0x{byte:02x}, so not every text could be encoded")
    return [ranked[rank][1] for rank in range(len(ranked))]


def _entry(line: bytes, where: str) -> tuple[bytes, int]:
    fields = line.split()
    if len(fields) != 2:
        raise ValueError(f"{where}: expected a token in base64 and its rank, found {_shown(line)}")
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        raise ValueError(f"{where}: {_shown(fields[0])} is not base64: {error}") from error
    if not token:
        raise ValueError(f"{where}: the token is empty")
    if not fields[1].isdigit() or len(fields[1]) > MAX_DIGITS:
        raise ValueError(f"{where}: {_shown(fields[1])} is no rank: expected a whole number from 0")
    return token, int(fields[1])


def _shown(data: bytes) -> str:
    text = data.decode(errors="replace")
    return repr(text if len(text) <= 60 else f"{text[:60]}…")


def _read_slots(path: Path, num_ranks: int) -> dict[int, str]:
    """The named ones of the ids after the ranks."""
    data = _read(path)
    try:
        document = json.loads(data, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    entries = document.get("added_tokens_decoder") if isinstance(document, Mapping) else None
    if not isinstance(entries, Mapping) or not entries:
        raise ValueError(f"{path}: added_tokens_decoder is missing: it names the control tokens by id")
    slots: dict[int, str] = {}
    for key, entry in entries.items():
        where = f"{path}: added_tokens_decoder.{key}"
        if not key.isdecimal() or len(key) > MAX_DIGITS:
            raise ValueError(f"{where}: expected a token id")
        name = entry.get("content") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where}: expected an object whose `content` is the control token's name")
        token_id = int(key)
        if not num_ranks <= token_id < num_ranks + NUM_SLOTS:
            raise ValueError(
                f"{where}: {name!r} is none of the {NUM_SLOTS} control slots {num_ranks}..{num_ranks + NUM_SLOTS - 1}"
                f" that follow the {num_ranks} ranks of {RANKS_FILE}: one of the two files is cut or of another checkpoint"
            )
        if token_id in slots:
            raise ValueError(f"{where}: this slot is named twice, {slots[token_id]!r} and {name!r}")
        slots[token_id] = name
    names: dict[str, int] = {}
    for token_id in range(num_ranks, num_ranks + NUM_SLOTS):
        name = slots.get(token_id, reserved_name(token_id))
        if name in names:
            raise ValueError(f"{path}: the slots {names[name]} and {token_id} are both named {name!r}")
        names[name] = token_id
    return slots


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return value
