"""Weights in a safetensors file without a copy in memory: mapped to read, or laid out like another and mapped to write."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3core.checkpoint.tensors import TORCH_DTYPES, RawTensor
from k3core.errors import IntegrityError

_LENGTH = 8  # bytes of the header's length, little-endian; then the header, JSON; then the tensors
MAX_HEADER_BYTES = 100_000_000  # the format's own bound


@dataclass(frozen=True, slots=True)
class _Place:
    """Bytes [start, stop) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def map_weights(path: Path) -> dict[str, RawTensor]:
    """Views of the file, which stays mapped while one of them is in use, also after it was unlinked.

    Raises IntegrityError naming the file when it is no whole safetensors file. What the bytes are is for digests.
    """
    with path.open("rb") as file:
        places = _places(path, file.read(_LENGTH), file.read, os.fstat(file.fileno()).st_size)
        if not places:
            return {}
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return {name: RawTensor(place.dtype, place.shape, view[place.start : place.stop]) for name, place in places.items()}


@dataclass(frozen=True, slots=True)
class Laid:
    """A new file with another's header and room for its tensors. views: by name, to write to; zero at first."""

    views: Mapping[str, memoryview]
    _map: mmap.mmap

    def flush(self) -> None:
        """What was written is in the file; not necessarily on the disk."""
        self._map.flush()


def lay_out_like(like: Path, path: Path) -> Laid:
    """Creates `path`, which must not exist."""
    with like.open("rb") as source, path.open("xb+") as file:
        size_bytes = os.fstat(source.fileno()).st_size
        length = source.read(_LENGTH)
        places = _places(like, length, source.read, size_bytes)
        source.seek(0)
        file.write(source.read(_LENGTH + int.from_bytes(length, "little")))
        file.truncate(size_bytes)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE)
    view = memoryview(mapped)
    return Laid({name: view[place.start : place.stop] for name, place in places.items()}, mapped)


def _places(path: Path, length: bytes, read: Any, size_bytes: int) -> dict[str, _Place]:
    """Where each tensor lies: end to end, from behind the header to the end of the file."""
    header_bytes = int.from_bytes(length, "little")
    try:
        if len(length) < _LENGTH or header_bytes > min(MAX_HEADER_BYTES, size_bytes - _LENGTH):
            raise ValueError(f"a header of {header_bytes} bytes")
        header = json.loads(read(header_bytes))
        first = _LENGTH + header_bytes
        places = {name: _place(entry, first) for name, entry in header.items() if name != "__metadata__"}
        end = first
        for place in sorted(places.values(), key=lambda place: (place.start, place.stop)):
            if place.start != end:
                raise ValueError(f"a tensor at byte {place.start}, not at {end}")
            end = place.stop
        if end != size_bytes:
            raise ValueError(f"tensors up to byte {end}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{path}: expected a safetensors file of {size_bytes} bytes, found {error}") from error
    return places


def _place(entry: Mapping[str, Any], first: int) -> _Place:
    dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in TORCH_DTYPES or stop - start != math.prod(shape) * TORCH_DTYPES[dtype].itemsize:
        raise ValueError(f"{dtype}{list(shape)} in {stop - start} bytes")
    return _Place(dtype, shape, first + start, first + stop)
