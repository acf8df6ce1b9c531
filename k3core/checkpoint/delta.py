"""Deltas: a new version of the weights against its parent's, bit for bit.

An optimizer step leaves most elements of a served checkpoint untouched, so that *where* and *by how much* take far
fewer bytes than the weights (`frame`). A payload is frames, one after the other. A frame covers a chunk of one large
tensor, or several small tensors of a dtype, and is decoded with their base alone: in parallel, or after a ranged read.

A difference fits any base of the right length, so that a delta is right never follows from the data: the digests of
base and result decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from k3core.checkpoint.frame import decode_frame, encode_frame
from k3core.checkpoint.magnitudes import Bins, Words
from k3core.checkpoint.tensors import TORCH_DTYPES, RawTensor, Weights, tensor_digest
from k3core.errors import IntegrityError

CHUNK_BYTES = 4 << 20
"""Of tensor bytes in a frame. Larger frames are hardly smaller when stored, and take more memory at a time."""
SMALL_BYTES = 64 << 10
"""Tensors below share a frame, since its headers and code tables would outweigh what changed in one of them."""

ReadRange = Callable[[int, int], bytes | memoryview]
"""offset, size -> those bytes of the payload. Raises IntegrityError when it does not have them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a tensor, wherever its elements are. dtype is a safetensors word."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def element_bytes(self) -> int:
        return TORCH_DTYPES[self.dtype].itemsize

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


Layouts = Mapping[str, Layout]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """base_digest and result_digest are `tensor_digest` before and after."""

    name: str
    shape: tuple[int, ...]
    base_digest: str
    result_digest: str


class FrameAt(NamedTuple):
    """offset and size in the payload; the elements first to end of its entry. A frame of 0 bytes changes nothing."""

    offset: int
    size: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class DeltaEntry:
    """One large tensor, or several small ones end to end; num_changed counts elements.

    Each frame holds frame_elements of them, the last one may hold fewer; several tensors are one frame. Frames lie one
    after the other in the payload, from `offset`.
    """

    dtype: str
    tensors: tuple[TensorEntry, ...]
    num_changed: int
    frame_elements: int
    offset: int
    frame_sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def size_bytes(self) -> int:
        return sum(self.frame_sizes)

    @property
    def frames(self) -> Iterator[FrameAt]:
        offset, num_elements = self.offset, self.num_elements
        for index, size in enumerate(self.frame_sizes):
            first = index * self.frame_elements
            yield FrameAt(offset, size, first, min(first + self.frame_elements, num_elements))
            offset += size


def encode_delta(
    parent: Weights,
    new: Weights,
    level: int = 1,
    *,
    max_classes: int = 1,
    num_threads: int = 1,
    parent_digests: Mapping[str, str] | None = None,
) -> tuple[bytes, tuple[DeltaEntry, ...]]:
    """The payload and how to read it; equal inputs give equal bytes, whatever num_threads.

    max_classes: magnitude classes a frame. Three save 15 to 25 % of the bytes of a bf16 update, and take two to
    three times as long. parent_digests: `tensor_digest` of each tensor of the parent, when it was just verified.
    Raises ValueError when names, dtypes or shapes differ: such a version is published in full.
    """
    parent_layouts, layouts = (
        {name: Layout(tensor.dtype, tensor.shape) for name, tensor in weights.items()} for weights in (parent, new)
    )
    check_same_layouts(parent_layouts, layouts)
    with open_threads(num_threads) as threads:
        results = _digests(new, threads)
        bases = _digests(parent, threads) if parent_digests is None else parent_digests
        groups = list(group_tensors(layouts))
        chunks = [(names, first, end) for names in groups for first, end in cut_frames(layouts, names)]

        def encode(chunk: tuple[tuple[str, ...], int, int]) -> tuple[bytes, int]:
            names, first, end = chunk
            if all(bases[name] == results[name] for name in names):
                return b"", 0
            before, after = ([weights[name] for name in names] for weights in (parent, new))
            bins = Bins.of(after[0].dtype, after[0].element_bytes)
            return encode_frame(_words(before, first, end), _words(after, first, end), bins, level, max_classes)

        return join_frames(layouts, groups, threads.map(encode, chunks), bases, results)


def check_same_layouts(parent: Layouts, new: Layouts) -> None:
    """Raises ValueError when names, dtypes or shapes differ."""
    differing = sorted(name for name in parent.keys() | new.keys() if parent.get(name) != new.get(name))
    if differing:
        raise ValueError(
            f"a delta needs the parent's names, dtypes and shapes, but {len(differing)} tensors differ "
            f"({', '.join(differing[:3])}): publish this version in full"
        )


def join_frames(
    layouts: Layouts,
    groups: Sequence[tuple[str, ...]],
    frames: Sequence[tuple[bytes, int]],
    bases: Mapping[str, str],
    results: Mapping[str, str],
) -> tuple[bytes, tuple[DeltaEntry, ...]]:
    """The payload and how to read it. frames: of all groups, each with the number of elements that changed."""
    entries: list[DeltaEntry] = []
    offset, left = 0, iter(frames)
    for names in groups:
        mine = [next(left) for _ in cut_frames(layouts, names)]
        entries.append(
            DeltaEntry(
                dtype=layouts[names[0]].dtype,
                tensors=tuple(TensorEntry(name, layouts[name].shape, bases[name], results[name]) for name in names),
                num_changed=sum(num_changed for _, num_changed in mine),
                frame_elements=CHUNK_BYTES // layouts[names[0]].element_bytes,
                offset=offset,
                frame_sizes=tuple(len(stored) for stored, _ in mine),
            )
        )
        offset += entries[-1].size_bytes
    return b"".join(stored for stored, _ in frames), tuple(entries)


def apply_delta(
    parent: Weights,
    entries: Sequence[DeltaEntry],
    payload: bytes,
    file: str,
    *,
    num_threads: int = 1,
    out: Mapping[str, memoryview] | None = None,
) -> dict[str, RawTensor]:
    """The new version, from a whole payload. Otherwise as `apply_entries`."""
    names = [tensor.name for entry in entries for tensor in entry.tensors]
    if len(set(names)) != len(names) or set(names) != set(parent):
        odd = sorted(set(names) ^ set(parent)) or [name for name in names if names.count(name) > 1]
        raise IntegrityError(f"{file}: expected one entry for each tensor of the base, found otherwise for {odd[:3]}")
    end = 0
    for entry in entries:
        if entry.offset != end or min(entry.frame_sizes, default=0) < 0:
            raise IntegrityError(f"{file}: expected an entry at byte {end}, found one at {entry.offset}")
        end += entry.size_bytes
    if len(payload) != end:
        raise IntegrityError(f"{file}: expected {end} bytes, found {len(payload)}")
    view = memoryview(payload)
    return apply_entries(parent, entries, lambda at, size: view[at : at + size], file, num_threads=num_threads, out=out)


def apply_entries(
    parent: Weights,
    entries: Sequence[DeltaEntry],
    read: ReadRange,
    file: str,
    *,
    num_threads: int = 1,
    out: Mapping[str, memoryview] | None = None,
) -> dict[str, RawTensor]:
    """The new version of the tensors of some entries, which reads their frames alone.

    Each base is held against its digest before, each frame against its checksum, each result against its digest.
    out: by name, writable memory of the tensor's size for the result, other than the base's; what it holds after an
    error is undefined. Without it memory is allocated, and a tensor of an entry that changed nothing is the parent's.
    Beyond bases and results, a thread takes a frame and its elements' bytes once, for a sparse update of bf16, to some
    20 times, when all of them are single bytes that changed.
    Raises IntegrityError naming `file` (the payload) and the tensor for another base, and for payload or entries that
    are not as they were encoded; ValueError for memory of another size.
    """
    with open_threads(num_threads) as threads:
        tensors = [(entry, tensor) for entry in entries for tensor in entry.tensors]
        threads.map(lambda pair: _check_base(parent, *pair, file), tensors)
        for entry in entries:
            _check_frames(entry, file)
        targets = {
            tensor.name: _target(tensor.name, parent[tensor.name], out)
            for entry, tensor in tensors
            if out is not None or entry.size_bytes
        }
        frames = [(entry, frame) for entry in entries if entry.tensors[0].name in targets for frame in entry.frames]
        counts = iter(threads.map(lambda pair: _apply_frame(parent, *pair, read, targets, file), frames))
        for entry in entries:
            found = sum(next(counts) for _ in entry.frames) if entry.tensors[0].name in targets else 0
            if found != entry.num_changed:
                where = _where(file, entry)
                raise IntegrityError(f"{where}: expected {entry.num_changed} changed elements, found {found}")
        results = {
            tensor.name: RawTensor(entry.dtype, tensor.shape, memoryview(targets[tensor.name]).toreadonly())
            if tensor.name in targets
            else parent[tensor.name]
            for entry, tensor in tensors
        }
        threads.map(lambda pair: _check_result(parent, results, pair[1], file), tensors)
    return results


def _check_base(parent: Weights, entry: DeltaEntry, tensor: TensorEntry, file: str) -> None:
    where = f"{file}: tensor {tensor.name!r}"
    base = parent.get(tensor.name)
    if base is None:
        raise IntegrityError(f"{where}: expected a base {entry.dtype}{list(tensor.shape)}, found no such tensor")
    if (base.dtype, base.shape) != (entry.dtype, tensor.shape):
        raise IntegrityError(
            f"{where}: expected a base {entry.dtype}{list(tensor.shape)}, found {base.dtype}{list(base.shape)}"
        )
    found = tensor_digest(tensor.name, base)
    if found != tensor.base_digest:
        raise IntegrityError(f"{where}: base: expected digest {tensor.base_digest}, found {found}")


def _check_result(parent: Weights, results: Weights, tensor: TensorEntry, file: str) -> None:
    result = results[tensor.name]
    # What is still the parent's was just hashed as the base.
    found = tensor.base_digest if result is parent[tensor.name] else tensor_digest(tensor.name, result)
    if found != tensor.result_digest:
        where = f"{file}: tensor {tensor.name!r}"
        raise IntegrityError(f"{where}: result: expected digest {tensor.result_digest}, found {found}")


def _check_frames(entry: DeltaEntry, file: str) -> None:
    if not entry.tensors:
        raise IntegrityError(f"{file}: expected tensors in every entry, found an entry without any")
    where = _where(file, entry)
    if entry.frame_elements < 1 or min(entry.frame_sizes, default=0) < 0:
        raise IntegrityError(
            f"{where}: expected frames of an element at least and sizes from 0, "
            f"found {entry.frame_elements} and {min(entry.frame_sizes, default=0)}"
        )
    expected = -(-entry.num_elements // entry.frame_elements)
    if len(entry.frame_sizes) != expected or (expected > 1 and len(entry.tensors) > 1):
        raise IntegrityError(
            f"{where}: expected {expected} frames, and one for several tensors, "
            f"found {len(entry.frame_sizes)} for {len(entry.tensors)} tensors"
        )


def _target(name: str, base: RawTensor, out: Mapping[str, memoryview] | None) -> memoryview:
    """Bytes for the result."""
    if out is None:
        return np.empty(len(base.data), np.uint8).data
    if name not in out or out[name].nbytes != len(base.data) or out[name].readonly:
        raise ValueError(f"out[{name!r}]: expected {len(base.data)} writable bytes")
    return out[name].cast("B") if len(base.data) else memoryview(bytearray())


def _apply_frame(
    parent: Weights, entry: DeltaEntry, frame: FrameAt, read: ReadRange, targets: Mapping[str, memoryview], file: str
) -> int:
    """Writes the elements of one frame; returns how many changed."""
    names = [tensor.name for tensor in entry.tensors]
    base = _words([parent[name] for name in names], frame.first, frame.end)
    width = base.itemsize
    if len(names) == 1:
        result: Words = np.frombuffer(targets[names[0]], base.dtype)[frame.first : frame.end]
    else:
        result = np.empty_like(base)
    np.copyto(result, base)
    num_changed = 0
    if frame.size:
        stored = read(frame.offset, frame.size)
        if len(stored) != frame.size:
            raise IntegrityError(
                f"{_where(file, entry)}: expected {frame.size} bytes at {frame.offset}, found {len(stored)}"
            )
        bins = Bins.of(entry.dtype, width)
        num_changed = decode_frame(stored, base, result, bins, _where(file, entry))
    if len(names) > 1:
        data, at = result.data.cast("B"), 0
        for name in names:
            size = len(targets[name])
            targets[name][:] = data[at : at + size]
            at += size
    return num_changed


def _where(file: str, entry: DeltaEntry) -> str:
    others = f" and {len(entry.tensors) - 1} others" if len(entry.tensors) > 1 else ""
    return f"{file}: tensor {entry.tensors[0].name!r}{others}"


def group_tensors(layouts: Layouts) -> Iterator[tuple[str, ...]]:
    """Which tensors make an entry, by name; small ones of a dtype together until they fill a frame."""
    small: dict[str, list[str]] = {}
    filled: dict[str, int] = {}
    for name in sorted(layouts):
        tensor = layouts[name]
        size = tensor.num_elements * tensor.element_bytes
        if size >= SMALL_BYTES:
            yield (name,)
            continue
        if filled.get(tensor.dtype, 0) + size > CHUNK_BYTES:
            yield tuple(small.pop(tensor.dtype))
            filled[tensor.dtype] = 0
        small.setdefault(tensor.dtype, []).append(name)
        filled[tensor.dtype] = filled.get(tensor.dtype, 0) + size
    for names in small.values():
        yield tuple(names)


def cut_frames(layouts: Layouts, names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """First and end element of each frame of an entry."""
    num_elements = sum(layouts[name].num_elements for name in names)
    step = CHUNK_BYTES // layouts[names[0]].element_bytes
    for first in range(0, num_elements, step):
        yield first, min(first + step, num_elements)


def _words(tensors: Sequence[RawTensor], first: int, end: int) -> Words:
    """Elements first to end of tensors that lie end to end; a view of a single one."""
    width = TORCH_DTYPES[tensors[0].dtype].itemsize
    if len(tensors) == 1:
        return np.frombuffer(tensors[0].data, f"<u{width}", end - first, first * width)
    return np.frombuffer(b"".join(tensor.data for tensor in tensors), f"<u{width}", end - first, first * width)


T = TypeVar("T")
R = TypeVar("R")


class Threads:
    """Applies a function to items, in the calling thread alone or in several; results in the order of the items."""

    def __init__(self, pool: ThreadPoolExecutor | None) -> None:
        self._pool = pool

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        return list((self._pool.map if self._pool else map)(function, items))


@contextmanager
def open_threads(number: int) -> Iterator[Threads]:
    if number < 1:
        raise ValueError(f"num_threads must be at least 1, found {number}")
    if number == 1:
        yield Threads(None)
        return
    with ThreadPoolExecutor(number) as pool:
        yield Threads(pool)


def _digests(weights: Weights, threads: Threads) -> dict[str, str]:
    return dict(threads.map(lambda item: (item[0], tensor_digest(*item)), weights.items()))
