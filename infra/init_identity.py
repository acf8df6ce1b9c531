"""Which checkpoint a run started from, so that it is told when its folder has changed since.

Two documents: the heads of its files, taken in milliseconds before the run starts, and digests of the tensors, taken
while they are read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3core.checkpoint.folder import CONFIG, INDEX
from k3core.checkpoint.hf import Checkpoint, open_checkpoint
from k3core.checkpoint.hf_read import fresh_tensor
from k3core.checkpoint.safetensors_io import MAX_HEADER_BYTES, TensorReader
from k3core.checkpoint.tensors import DTYPE_WORDS, RawTensor, combine_digests, tensor_digest
from k3core.sealed import canonical_json

# Of the tokenizer: what decides the ids of a text.
SMALL_FILES = (CONFIG, INDEX, "tokenizer.json", "tiktoken.model", "tokenizer_config.json")
WEIGHTS = ".safetensors"


@dataclass(frozen=True, slots=True)
class Head:
    """Of one file. sha256: of its header where it holds tensors, else of the whole."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Contents:
    """What was read of one file of tensors: sha256 over their digests; the file's size and time when it was read."""

    sha256: str
    size_bytes: int
    mtime_ns: int


def heads_of(checkpoint: Checkpoint) -> dict[str, Head]:
    """By file name: config.json, index, tokenizer, and every file of tensors."""
    small = [name for name in SMALL_FILES if (checkpoint.folder / name).is_file()]
    return {name: _head(checkpoint.folder / name) for name in (*small, *sorted(checkpoint.headers))}


def heads_sha256(heads: Mapping[str, Head]) -> str:
    return hashlib.sha256(canonical_json({name: asdict(head) for name, head in heads.items()})).hexdigest()


def changed_heads(folder: Path, heads: Mapping[str, Head]) -> Iterator[str]:
    """The files of `folder` that are missing or no longer what they were."""
    for name, head in heads.items():
        path = folder / name
        if not path.is_file():
            yield f"{path}: missing"
        elif path.stat().st_size != head.size_bytes:
            yield f"{path}: {path.stat().st_size} bytes in place of {head.size_bytes}"
        elif _head(path) != head:
            yield f"{path}: another {'header' if name.endswith(WEIGHTS) else 'content'}"


def digest_of(name: str, stored: Tensor) -> str:
    """Of a tensor as `iter_tensors` gives it."""
    data = stored.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return tensor_digest(name, RawTensor(DTYPE_WORDS[stored.dtype], tuple(stored.shape), data))


def contents_of(checkpoint: Checkpoint, digests: Mapping[str, str]) -> dict[str, Contents]:
    """By file name. digests: `digest_of` every tensor of the model, by internal name."""
    by_file: dict[str, dict[str, str]] = {}
    for name, stored in checkpoint.model_tensors.items():
        by_file.setdefault(stored.file, {})[name] = digests[name]
    return {file: _contents(checkpoint.folder / file, found) for file, found in sorted(by_file.items())}


def changed_contents(folder: Path, contents: Mapping[str, Contents]) -> Iterator[str]:
    """The files of `folder` that hold other tensors than were read. Those whose size and time are as they were then
    are not read again."""
    touched = [name for name, then in contents.items() if _stamp(folder / name) != (then.size_bytes, then.mtime_ns)]
    if not touched:
        return
    checkpoint = open_checkpoint(folder)
    with TensorReader(folder) as reader:
        for file in touched:
            names = [name for name, stored in checkpoint.model_tensors.items() if stored.file == file]
            # Not whether numbers are finite, only whether they are the same: a changed one may be any.
            digests = {name: digest_of(name, fresh_tensor(reader, checkpoint, name, False)) for name in names}
            if combine_digests(digests) != contents[file].sha256:
                yield f"{folder / file}: other tensors"


def to_document(described: Mapping[str, Head] | Mapping[str, Contents]) -> dict[str, Any]:
    return {name: asdict(one) for name, one in described.items()}


def _head(path: Path) -> Head:
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        length = size_bytes
        if path.name.endswith(WEIGHTS):
            length = 8 + min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)
            file.seek(0)
        return Head(size_bytes, hashlib.sha256(file.read(length)).hexdigest())


def _contents(path: Path, digests: Mapping[str, str]) -> Contents:
    return Contents(combine_digests(digests), *_stamp(path))


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
