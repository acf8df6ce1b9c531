"""XOR deltas: the bytes of a new version of the weights against its parent's, one tensor at a time.

An optimizer step leaves most elements of a served checkpoint untouched, so a tensor is stored as *where* (gaps or a
bitmap) and *what* (XOR values by byte plane), or whole when that is smaller. XOR is its own inverse and fits any base
of the right length, so that a delta is right never follows from the data: digests of base, stored bytes and result
decide. Each stream is one zstd frame with its content size and a checksum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

from k3core.checkpoint.tensors import RawTensor, Weights, same_layout, tensor_sha256
from k3core.errors import IntegrityError

Encoding = Literal[
    "unchanged",  # nothing stored
    "dense",  # XOR bytes
    "planes",  # XOR bytes, first bytes of all elements, then second bytes, ...
    "gaps",  # distances between changed elements; their XOR values by plane
    "bitmap",  # a bit for each element; XOR values of the changed ones by plane
]
NUM_STREAMS: dict[Encoding, int] = {"unchanged": 0, "dense": 1, "planes": 1, "gaps": 2, "bitmap": 2}

Bytes = NDArray[np.uint8]
ESCAPE = 255  # in the gap stream: 255 elements further, and the gap goes on


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """How one tensor of the new version follows from its parent's.

    num_changed counts elements; stored_sizes are bytes of each stream in the payload, in order;
    stored_sha256 digests those streams; base_ and result_sha256 are `tensor_sha256` before and after.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    encoding: Encoding
    num_changed: int
    stored_sizes: tuple[int, ...]
    stored_sha256: str
    base_sha256: str
    result_sha256: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def encode_delta(parent: Weights, new: Weights, level: int = 3) -> tuple[bytes, tuple[TensorEntry, ...]]:
    """The payload and how to read it; equal inputs give equal bytes.

    Raises ValueError when names, dtypes or shapes differ: such a version is published in full.
    """
    if not same_layout(parent, new):
        differing = sorted(
            name
            for name in parent.keys() | new.keys()
            if name not in parent or name not in new or not same_layout({"": parent[name]}, {"": new[name]})
        )
        raise ValueError(
            f"a delta needs the parent's names, dtypes and shapes, but {len(differing)} tensors differ "
            f"({', '.join(differing[:3])}): publish this version in full"
        )
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    payload: list[bytes] = []
    entries: list[TensorEntry] = []
    for name in sorted(new):
        base, result = parent[name], new[name]
        xor = np.frombuffer(base.data, np.uint8) ^ np.frombuffer(result.data, np.uint8)
        changed = _elements(xor, result.element_bytes) != 0
        encoding, streams = _smallest(xor, changed, compressor)
        payload += streams
        entries.append(
            TensorEntry(
                name=name,
                dtype=result.dtype,
                shape=result.shape,
                encoding=encoding,
                num_changed=int(np.count_nonzero(changed)),
                stored_sizes=tuple(len(stream) for stream in streams),
                stored_sha256=hashlib.sha256(b"".join(streams)).hexdigest(),
                base_sha256=tensor_sha256(name, base),
                result_sha256=tensor_sha256(name, result),
            )
        )
    return b"".join(payload), tuple(entries)


def apply_delta(parent: Weights, entries: Sequence[TensorEntry], payload: bytes, file: str) -> dict[str, RawTensor]:
    """The new version. `file` is the payload's name for messages.

    Raises IntegrityError naming the file and the tensor for another base, and for payload or entries that are not
    as they were encoded.
    """
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names) or set(names) != set(parent):
        odd = sorted(set(names) ^ set(parent)) or [name for name in names if names.count(name) > 1]
        raise IntegrityError(f"{file}: expected one entry for each tensor of the base, found otherwise for {odd[:3]}")
    expected_bytes = sum(sum(entry.stored_sizes) for entry in entries)
    if len(payload) != expected_bytes:
        raise IntegrityError(f"{file}: expected {expected_bytes} bytes, found {len(payload)}")
    weights: dict[str, RawTensor] = {}
    offset = 0
    for entry in entries:
        size_bytes = sum(entry.stored_sizes)
        weights[entry.name] = _apply_tensor(parent[entry.name], entry, payload[offset : offset + size_bytes], file)
        offset += size_bytes
    return weights


def _apply_tensor(base: RawTensor, entry: TensorEntry, stored: bytes, file: str) -> RawTensor:
    where = f"{file}: tensor {entry.name!r}"
    if (base.dtype, base.shape) != (entry.dtype, entry.shape):
        raise IntegrityError(
            f"{where}: expected a base {entry.dtype}{list(entry.shape)}, found {base.dtype}{list(base.shape)}"
        )
    _require_digest(f"{where}: base", entry.base_sha256, tensor_sha256(entry.name, base))
    _require_digest(f"{where}: stored bytes", entry.stored_sha256, hashlib.sha256(stored).hexdigest())
    if len(entry.stored_sizes) != NUM_STREAMS[entry.encoding] or min(entry.stored_sizes, default=1) < 1:
        raise IntegrityError(
            f"{where}: expected {NUM_STREAMS[entry.encoding]} streams for encoding {entry.encoding!r}, "
            f"found sizes {list(entry.stored_sizes)}"
        )
    ends = np.cumsum(entry.stored_sizes, dtype=np.int64)
    streams = [stored[end - size : end] for end, size in zip(ends.tolist(), entry.stored_sizes, strict=True)]
    result = RawTensor(entry.dtype, entry.shape, _decode(base, entry, streams, where))
    _require_digest(f"{where}: result", entry.result_sha256, tensor_sha256(entry.name, result))
    return result


def _require_digest(what: str, expected: str, found: str) -> None:
    if found != expected:
        raise IntegrityError(f"{what}: expected sha256 {expected}, found {found}")


def _smallest(
    xor: Bytes, changed: NDArray[np.bool_], compressor: zstandard.ZstdCompressor
) -> tuple[Encoding, list[bytes]]:
    """Every encoding is tried; the first of the smallest wins."""
    if not changed.any():
        return "unchanged", []
    rows = xor.reshape(changed.size, -1)
    values = compressor.compress(_to_planes(rows[changed]))
    candidates: list[tuple[Encoding, list[bytes]]] = [
        ("gaps", [compressor.compress(_to_gaps(np.flatnonzero(changed))), values]),
        ("bitmap", [compressor.compress(np.packbits(changed).tobytes()), values]),
        ("planes", [compressor.compress(_to_planes(rows))]),
        ("dense", [compressor.compress(xor.tobytes())]),
    ]
    return min(candidates, key=lambda candidate: sum(map(len, candidate[1])))


def _decode(base: RawTensor, entry: TensorEntry, streams: Sequence[bytes], where: str) -> bytes:
    if entry.encoding == "unchanged":
        _require_changed(0, entry, where)
        return base.data
    width, num_elements = base.element_bytes, entry.num_elements
    result = np.frombuffer(base.data, np.uint8).copy()
    if entry.encoding == "dense" or entry.encoding == "planes":
        raw = _decompress(streams[0], result.size, result.size, where)
        xor = np.frombuffer(raw, np.uint8) if entry.encoding == "dense" else _from_planes(raw, width)
        _require_changed(int(np.count_nonzero(_elements(xor, width))), entry, where)
        result ^= xor
        return result.tobytes()
    if not 0 < entry.num_changed <= num_elements:
        raise IntegrityError(f"{where}: expected 1 to {num_elements} changed elements, found {entry.num_changed}")
    if entry.encoding == "gaps":
        # Positions increase, so that all escapes together cannot span more than the tensor.
        longest = entry.num_changed + num_elements // ESCAPE
        positions = _from_gaps(_decompress(streams[0], entry.num_changed, longest, where))
    else:
        bitmap_bytes = (num_elements + 7) // 8
        bitmap = np.frombuffer(_decompress(streams[0], bitmap_bytes, bitmap_bytes, where), np.uint8)
        positions = np.flatnonzero(np.unpackbits(bitmap))
    _require_changed(positions.size, entry, where)
    if positions[-1] >= num_elements:
        raise IntegrityError(f"{where}: expected positions below {num_elements}, found {positions[-1]}")
    values_bytes = entry.num_changed * width
    values = _from_planes(_decompress(streams[1], values_bytes, values_bytes, where), width)
    _elements(result, width)[positions] ^= _elements(values, width)
    return result.tobytes()


def _require_changed(found: int, entry: TensorEntry, where: str) -> None:
    if found != entry.num_changed:
        raise IntegrityError(f"{where}: expected {entry.num_changed} changed elements, found {found}")


def _decompress(frame: bytes, smallest: int, largest: int, where: str) -> bytes:
    """One checksummed frame whose declared size lies within bounds that the tensor sets, checked before any output."""
    try:
        header = zstandard.get_frame_parameters(frame)
        if not smallest <= header.content_size <= largest or not header.has_checksum:
            raise IntegrityError(
                f"{where}: expected a checksummed zstd frame of {smallest} to {largest} bytes, "
                f"found one that declares {header.content_size}"
            )
        data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{where}: expected one zstd frame, found {len(frame)} other bytes: {error}") from error
    if len(data) != header.content_size:
        raise IntegrityError(f"{where}: expected {header.content_size} bytes in a zstd frame, found {len(data)}")
    return data


def _elements(data: Bytes, width: int) -> NDArray[np.unsignedinteger]:
    """The same memory as one unsigned integer for each element."""
    return data.view(f"u{width}")


def _to_planes(rows: Bytes) -> bytes:
    """rows [elements, width] -> byte 0 of every element, then byte 1, ..."""
    return rows.T.tobytes()


def _from_planes(planes: bytes, width: int) -> Bytes:
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(width, -1).T).reshape(-1)


def _to_gaps(positions: NDArray[np.int64]) -> bytes:
    """The number of unchanged elements before each changed one, as bytes of 255 and one smaller byte that ends it."""
    gaps = np.diff(positions, prepend=-1) - 1
    escapes, rest = np.divmod(gaps, ESCAPE)
    ends = np.cumsum(escapes + 1) - 1
    stream = np.full(ends[-1] + 1, ESCAPE, np.uint8)
    stream[ends] = rest
    return stream.tobytes()


def _from_gaps(data: bytes) -> NDArray[np.int64]:
    stream = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(stream != ESCAPE)
    return np.cumsum(stream, dtype=np.int64)[ends] + np.arange(ends.size)
