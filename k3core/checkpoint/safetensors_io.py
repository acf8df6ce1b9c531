"""safetensors files without mmap: a checked header, tensors read into storage that exists, tensors written one by one.

The format: u64 little-endian header length, a JSON object {name: {dtype, shape, data_offsets}, "__metadata__": {...}},
then the tensors' bytes without holes. Reading through mmap would count every page of a checkpoint as this process's
memory, and the format's library writes a file only from tensors that are all in memory.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3core.errors import IntegrityError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
CHUNK_BYTES = 4 << 20  # read, checked and converted at once, so that it stays in the processor's cache
MAX_OPEN_FILES = 8
METADATA = "__metadata__"

BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
WORDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
DTYPES = {word: dtype for dtype, word in WORDS.items()}

E8M0_NAN = 255

Check = Callable[[Tensor], int | None]
"""The first element of a flat chunk that must not be there; None when all may."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file. `offset` counts from the file's first byte."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """entries in the order of the JSON object; num_bytes is where data begins."""

    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]
    num_bytes: int


def read_header(path: Path) -> Header:
    """Checked against the file's size; no data is read.

    Raises ValueError for what is no readable file, IntegrityError listing what is wrong with the header otherwise.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(f"{path}: expected a safetensors file, found something else under this name")
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise IntegrityError(
                    f"{path}: expected a header of at most {MAX_HEADER_BYTES} bytes within the file, "
                    f"found {size} bytes in all and a header length of {length}: cut short, or no safetensors file"
                )
            text = file.read(length)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    document = _parse(path, text)
    metadata = document.pop(METADATA, {})
    problems = []
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        problems.append(f"{METADATA} is no object of strings")
    entries: dict[str, Entry] = {}
    for name, value in document.items():
        entry = _entry(value, 8 + length)
        if isinstance(entry, Entry):
            entries[name] = entry
        else:
            problems.append(f"{name}: {entry}")
    if not problems:
        problems = _placement_problems(entries, 8 + length, size)
    if problems:
        raise IntegrityError("\n".join(f"{path}: {problem}" for problem in problems))
    return Header(metadata, entries, 8 + length)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in found if names.count(name) > 1)
            raise ValueError(f"{twice!r} is there twice")
        return found

    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: expected a JSON header, found {len(text)} other bytes: {error}") from error
    if not isinstance(document, dict):
        raise IntegrityError(f"{path}: expected a JSON object as header, found {type(document).__name__}")
    return document


def _entry(value: object, data_start: int) -> Entry | str:
    """What is wrong with it, when something is."""
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        return "expected dtype, shape and data_offsets"
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        return f"dtype {dtype!r} is not known"
    if not _is_sizes(shape):
        return f"shape {shape!r} is no list of sizes"
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets {offsets!r} are no range"
    bits = math.prod(shape) * BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        return f"{dtype} {shape} takes {bits / 8:.16g} bytes, data_offsets {offsets} hold {offsets[1] - offsets[0]}"
    return Entry(dtype, tuple(shape), data_start + offsets[0], offsets[1] - offsets[0])


def _is_sizes(value: object) -> bool:
    # type(), since JSON's true is an int to Python; the bound keeps products printable.
    return isinstance(value, list) and len(value) <= 8 and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _placement_problems(entries: Mapping[str, Entry], data_start: int, size: int) -> list[str]:
    end = data_start
    problems = []
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if entry.offset != end:
            kind = "overlaps the tensor before it" if entry.offset < end else "leaves a hole before it"
            problems.append(f"{name} begins at byte {entry.offset} and {kind}, which ends at {end}")
        end = max(end, entry.offset + entry.num_bytes)
    if end > size:
        problems.append(f"the header describes {end} bytes, the file has {size}: cut short; fetch it again")
    if end < size:
        problems.append(f"the header describes {end} bytes, the file has {size}: what follows belongs to nothing")
    return problems


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Entry]]:
    """The bytes before the data of (name, dtype, shape) laid out in this order, and where each tensor goes.

    The same bytes for the same arguments; data begins at a multiple of 8.
    """
    document: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        num_bytes = math.prod(shape) * BITS[dtype] // 8
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    entries = {}
    for name, value in document.items():
        if name != METADATA:
            start, stop = value["data_offsets"]
            entries[name] = Entry(value["dtype"], tuple(value["shape"]), 8 + len(text) + start, stop - start)
    return len(text).to_bytes(8, "little") + text, entries


def first_non_finite(chunk: Tensor) -> int | None:
    """Check of floating point numbers."""
    low, high = torch.aminmax(chunk)  # NaN propagates, so two numbers tell; isfinite is 10 to 30 times slower
    if math.isfinite(low) and math.isfinite(high):
        return None
    return int((~torch.isfinite(chunk)).nonzero()[0])


def first_nan_scale(chunk: Tensor) -> int | None:
    """Check of E8M0 scales, whose byte 255 is NaN."""
    return int((chunk == E8M0_NAN).nonzero()[0]) if int(chunk.max()) == E8M0_NAN else None


class TensorReader:
    """Reads tensors of the files of one folder, through at most one staging buffer of CHUNK_BYTES.

    A context manager, since it keeps the files that it read last open.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._staging: Tensor | None = None
        self._open: dict[str, int] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exception: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def read(self, file: str, name: str, entry: Entry, target: Tensor, check: Check | None) -> None:
        """Into target's own storage: contiguous, of as many elements, of any type and device.

        name is for messages. Raises IntegrityError for what `check` refuses and for bytes that do not come.
        """
        assert target.is_contiguous(), name
        dtype = DTYPES[entry.dtype]
        flat = target.detach().reshape(-1)
        assert flat.numel() * dtype.itemsize == entry.num_bytes, (name, entry, target.shape)
        is_direct = target.dtype == dtype and target.device.type == "cpu"
        for start in range(0, entry.num_bytes, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, entry.num_bytes)
            first, last = start // dtype.itemsize, stop // dtype.itemsize
            place = flat[first:last] if is_direct else self._stage(stop - start, target.device).view(dtype)
            self._read_bytes(file, name, place.view(torch.uint8), entry.offset + start)
            if check is not None and (bad := check(place)) is not None:
                at = _unravel(first + bad, entry.shape)
                raise IntegrityError(f"{self.folder / file}: {name} holds {_said(place[bad])} at {at}")
            if not is_direct:
                flat[first:last].copy_(place)

    def raw(self, file: str, name: str, offset: int, num_bytes: int) -> memoryview:
        """At most CHUNK_BYTES of a file, valid until the next call."""
        place = self._stage(num_bytes, torch.device("cpu"))
        self._read_bytes(file, name, place, offset)
        return place.numpy().data

    def _stage(self, num_bytes: int, device: torch.device) -> Tensor:
        if self._staging is None:
            self._staging = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return self._staging[:num_bytes]

    def _read_bytes(self, file: str, name: str, place: Tensor, offset: int) -> None:
        view = place.numpy().data
        done = 0
        try:
            fd = self._descriptor(file)
            while done < len(view):
                count = os.preadv(fd, [view[done:]], offset + done)
                if count == 0:
                    raise IntegrityError(f"{self.folder / file}: {name} ends at byte {offset + done}: the file shrank")
                done += count
        except OSError as error:
            raise IntegrityError(f"{self.folder / file}: {name} cannot be read: {error.strerror}") from error

    def _descriptor(self, file: str) -> int:
        fd = self._open.get(file)
        if fd is None:
            if len(self._open) == MAX_OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            fd = self._open[file] = os.open(self.folder / file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return fd


def write_tensor(fd: int, name: str, entry: Entry, tensor: Tensor, check: Check | None) -> bool:
    """At the entry's place, converted to its type, which rounds to nearest even. Returns whether any value changed.

    Raises ValueError for what `check` refuses, before or after the rounding.
    """
    dtype = DTYPES[entry.dtype]
    assert tensor.numel() * dtype.itemsize == entry.num_bytes, (name, entry, tensor.shape)
    flat = tensor.detach().reshape(-1)
    may_round = torch.promote_types(tensor.dtype, dtype) != dtype
    step = CHUNK_BYTES // max(dtype.itemsize, tensor.dtype.itemsize)
    is_rounded = False
    for first in range(0, flat.numel(), step):
        given = flat[first : first + step]
        stored = given.to(dtype)
        if check is not None and (bad := check(stored)) is not None:
            value, at = _said(given[bad]), _unravel(first + bad, tuple(tensor.shape))
            raise ValueError(f"{name} holds {value} at {at}, {_said(stored[bad])} in {entry.dtype}: not written")
        if may_round and not is_rounded:
            is_rounded = not torch.equal(stored.to(given.dtype), given)
        host = stored.to("cpu").contiguous().view(torch.uint8)
        write_bytes(fd, host.numpy().data, entry.offset + first * dtype.itemsize)
    return is_rounded


def write_bytes(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def _unravel(index: int, shape: tuple[int, ...]) -> list[int]:
    place = []
    for size in reversed(shape):
        place.append(index % size)
        index //= size
    return place[::-1]


def _said(element: Tensor) -> str:
    value = element.item()
    return f"NaN (byte {value})" if element.dtype == torch.uint8 else f"{value}"
