"""Where every tensor of a checkpoint to be written goes: decided from names and shapes alone, before the first byte."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from k3core.checkpoint.folder import CONFIG, INDEX, Checkpoint
from k3core.checkpoint.names import (
    PACKED,
    SCALE,
    Shape,
    collapse,
    expected_shapes,
    expert_matrix,
    hf_name,
    written_dtype,
    written_shape,
)
from k3core.checkpoint.safetensors_io import BITS, WORDS, Entry, encode_header
from k3core.model.config import K3Config
from k3core.model.hf_config import K3_TEXT_CLASS, Layout, to_hf

GENERATION_CONFIG = "generation_config.json"
FORMAT = {"format": "pt"}  # transformers refuses files without it


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor goes."""

    hf_name: str
    file: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class Plan:
    """cfg: as stored. headers, sizes: of each file of tensors. slots: by internal name, those of the vision parts by their
    own. documents: config.json, index, and generation_config.json where it is not copied."""

    cfg: K3Config
    headers: Mapping[str, bytes]
    sizes: Mapping[str, int]
    slots: Mapping[str, Slot]
    documents: Mapping[str, bytes]

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values()) + sum(map(len, self.documents.values()))


@dataclass(frozen=True, slots=True)
class _Tensor:
    """name: internal, or the own one of a vision part's tensor."""

    name: str
    hf_name: str
    dtype: str
    shape: Shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


def plan_new(cfg: K3Config, layout: Layout, dtype: torch.dtype, experts: torch.dtype, shard_bytes: int) -> Plan:
    """experts: type of plain expert matrices."""
    tensors = []
    for name, shape in expected_shapes(cfg).items():
        word = WORDS[
            experts if expert_matrix(name) and not name.endswith((PACKED, SCALE)) else written_dtype(name, dtype)
        ]
        tensors.append(_Tensor(name, hf_name(name, layout), word, written_shape(name, shape, layout)))
    document = _new_document(cfg, layout, dtype)
    documents = {CONFIG: _pretty(document)}
    generation = _generation_config(document)
    if generation is not None:
        documents[GENERATION_CONFIG] = _pretty(generation)
    return _sharded(cfg, tensors, shard_bytes, documents)


def plan_like(cfg: K3Config, like: Checkpoint, experts: torch.dtype, shard_bytes: int) -> Plan:
    """Files, order, types, spellings and metadata of `like`; new files of its order where experts take another form.

    Raises ValueError when cfg has other tensors than `like`.
    """
    _require_same_tensors(cfg, like)
    is_same_form = (cfg.expert_quantization is None) == (like.cfg.expert_quantization is None)
    documents = {}
    if like.cfg == cfg:
        documents[CONFIG] = (like.folder / CONFIG).read_bytes()
    else:
        documents[CONFIG] = _pretty(to_hf(cfg, like=like.document))
    if is_same_form:
        return _as_it_is(cfg, like, documents)
    own = expected_shapes(cfg)
    tensors = []
    for name in sorted(like.tensors, key=lambda each: (like.tensors[each].file, like.tensors[each].entry.offset)):
        stored = like.tensors[name]
        matrix = expert_matrix(name)
        if matrix is None:
            tensors.append(_Tensor(name, stored.hf_name, stored.entry.dtype, stored.entry.shape))
        elif not name.endswith(SCALE):
            hf_matrix = stored.hf_name[: stored.hf_name.rindex(".")]
            for suffix, word in ((".weight", WORDS[experts]), (PACKED, "U8"), (SCALE, "U8")):
                if (shape := own.get(f"{matrix}{suffix}")) is not None:
                    tensors.append(_Tensor(f"{matrix}{suffix}", f"{hf_matrix}{suffix}", word, shape))
    return _sharded(cfg, tensors, shard_bytes, documents)


def _require_same_tensors(cfg: K3Config, like: Checkpoint) -> None:
    own, theirs = (expected_shapes(replace(each, expert_quantization=None)) for each in (cfg, like.cfg))
    different = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]
    if different:
        raise ValueError(
            f"like {like.folder}: is the checkpoint of another architecture; other shapes, or there in only one of the two: "
            f"{', '.join(collapse(different))}"
        )


def _as_it_is(cfg: K3Config, like: Checkpoint, documents: dict[str, bytes]) -> Plan:
    headers, sizes = {}, {}
    for file, header in like.headers.items():
        with open(like.folder / file, "rb") as opened:
            headers[file] = opened.read(header.num_bytes)
        sizes[file] = header.num_bytes + sum(entry.num_bytes for entry in header.entries.values())
    slots = {name: Slot(stored.hf_name, stored.file, stored.entry) for name, stored in like.tensors.items()}
    if (like.folder / INDEX).exists():
        documents[INDEX] = (like.folder / INDEX).read_bytes()
    return Plan(cfg, headers, sizes, slots, documents)


def _sharded(cfg: K3Config, tensors: list[_Tensor], shard_bytes: int, documents: dict[str, bytes]) -> Plan:
    """Files filled in the given order. Inside one, wide types come first, so that every tensor lies on a multiple of its
    element's size: readers view the mapped bytes under the tensor's type."""
    shards: list[list[_Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    headers, sizes, slots, weight_map = {}, {}, {}, {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard.sort(key=lambda tensor: -BITS[tensor.dtype])
        headers[file], entries = encode_header(((t.hf_name, t.dtype, t.shape) for t in shard), FORMAT)
        sizes[file] = len(headers[file]) + sum(t.num_bytes for t in shard)
        for tensor in shard:
            slots[tensor.name] = Slot(tensor.hf_name, file, entries[tensor.hf_name])
            weight_map[tensor.hf_name] = file
    total = sum(tensor.num_bytes for tensor in tensors)
    return Plan(cfg, headers, sizes, slots, {**documents, INDEX: _index(weight_map, total)})


def _new_document(cfg: K3Config, layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    if (layout == "kimi_linear") != (cfg.family == "kimi_linear"):
        raise ValueError(f"layout {layout}: this model's family is {cfg.family}")
    document = to_hf(cfg)
    if layout == "kimi_k3_text":
        document = {**document["text_config"], "architectures": [K3_TEXT_CLASS]}
    for part in (document, document.get("text_config", {})):
        if "dtype" in part:
            part["dtype"] = str(dtype).removeprefix("torch.")
    return document


def _generation_config(document: Mapping[str, Any]) -> dict[str, Any] | None:
    ids = {key: document[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in document}
    return ids or None


def _index(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """As `_pretty` writes it; half a million entries take the encoder with an indent several seconds."""
    entries = json.dumps(dict(sorted(weight_map.items())), separators=(",\n    ", ": "))[1:-1]
    return (
        f'{{\n  "metadata": {{\n    "total_size": {total_size}\n  }},\n  "weight_map": {{\n    {entries}\n  }}\n}}\n'
    ).encode()


def _pretty(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
