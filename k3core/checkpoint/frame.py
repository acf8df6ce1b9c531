"""One frame of a delta: the XOR of a stretch of elements with their base, decodable with that stretch of the base alone.

Elements are unsigned integers of their width. The reader has the base, so an XOR x of an element b is stored as the
difference (b ^ x) - b modulo 2^width, which says the same in fewer bits: a float that moved by one unit in its last
place differs by 1 or -1, while its XOR depends on how far the carry ran. By magnitude class (`magnitudes`), a frame
holds

    layers      which elements changed; while most of the steps are 1, which of those differ by more than 1;
                by more than 2; ...  Each is a subset (`positions`).
    signs       of the differences, a bit each
    planes      what is left of |difference| in the last layer: all low bytes, then all second bytes, ...

Streams are zstd frames that declare their size. Before them stand counts and sizes, as unsigned LEB128 numbers; at the
end, 8 bytes of the frame's BLAKE3.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from k3core.checkpoint.magnitudes import Bins, Words, choose_bounds, members, ranks_among
from k3core.checkpoint.positions import Ranks, decode_subset, encode_subset, indices
from k3core.errors import IntegrityError

CHECK_BYTES = 8

# zstd takes a bit at least for each byte. While more than this share of the steps are the smallest possible, a layer
# that tells those from the others takes less.
_LAYER_SHARE = 0.45
MAX_LAYERS = 8


def encode_frame(base: Words, new: Words, bins: Bins | None, level: int, max_classes: int = 1) -> tuple[bytes, int]:
    """The frame, empty when nothing changed, and how many elements changed.

    base, new: equally many unsigned integers of one width. bins: None for a dtype without a magnitude.
    """
    positions = indices(base != new)
    xor = base.take(positions) ^ new.take(positions)
    return encode_changes(base, positions, xor, bins, level, max_classes), positions.size


def encode_changes(
    base: Words, positions: Ranks, xor: Words, bins: Bins | None, level: int, max_classes: int = 1
) -> bytes:
    """As `encode_frame`, from the elements that changed and their XOR, which is not 0."""
    if not positions.size:
        return b""
    before = base.take(positions)
    steps, is_negative = _split((before ^ xor) - before)
    bounds: tuple[int, ...] = (0,)
    if bins is not None and max_classes > 1:
        bounds = choose_bounds(base, positions, steps, bins, max_classes)
    if bins is None or len(bounds) == 1:
        return _one_class(positions, base.size, steps, is_negative, level)
    compressor = literal_compressor(level)
    numbers: list[int] = [len(bounds), *bounds[1:]]
    streams: list[bytes] = []
    of_changed = members(before, bins, bounds)
    for is_member, is_mine in zip(members(base, bins, bounds), of_changed, strict=True):
        mine = indices(is_mine)
        if not mine.size:
            numbers.append(0)
            continue
        ranks, n = ranks_among(is_member, positions.take(mine))
        _encode_class(ranks, n, steps.take(mine), is_negative.take(mine), compressor, numbers, streams)
    return _seal(numbers, streams)


def encode_one_class(positions: Ranks, num_elements: int, before: Words, xor: Words, level: int) -> bytes:
    """As `encode_changes` of num_elements with max_classes 1, which needs the base where it changed alone: `before`."""
    if not positions.size:
        return b""
    return _one_class(positions, num_elements, *_split((before ^ xor) - before), level)


def decode_frame(stored: bytes | memoryview, base: Words, out: Words, bins: Bins | None, where: str) -> int:
    """Turns `out`, a copy of `base`, into the new elements; returns how many changed.

    Raises IntegrityError, which begins with `where`, for bytes that are no frame of so many elements.
    """
    view = memoryview(stored)
    body, check = view[:-CHECK_BYTES], view[-CHECK_BYTES:]
    if blake3(body).digest(length=CHECK_BYTES) != check:
        raise IntegrityError(f"{where}: expected a frame that ends with its checksum, found {len(view)} other bytes")
    try:
        return _decode(_Reader(body), base, out, bins)
    except ValueError as error:
        raise IntegrityError(f"{where}: {error}") from error


def literal_compressor(level: int) -> zstandard.ZstdCompressor:
    """zstd that codes bytes by frequency and looks for long repeats only: short ones are chance in such streams."""
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, min_match=7, hash_log=8, write_checksum=False, write_content_size=True
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def _one_class(positions: Ranks, n: int, steps: Words, is_negative: NDArray[np.bool_], level: int) -> bytes:
    numbers, streams = [1], list[bytes]()
    _encode_class(positions, n, steps, is_negative, literal_compressor(level), numbers, streams)
    return _seal(numbers, streams)


def _seal(numbers: Iterable[int], streams: Iterable[bytes]) -> bytes:
    body = b"".join([_to_varints(numbers), *streams])
    return body + blake3(body).digest(length=CHECK_BYTES)


def _encode_class(
    ranks: Ranks,
    n: int,
    steps: Words,
    is_negative: NDArray[np.bool_],
    compressor: zstandard.ZstdCompressor,
    numbers: list[int],
    streams: list[bytes],
) -> None:
    """Appends what a class of n elements needs, of which those at `ranks` changed."""
    layers: list[int] = []
    num_layers = 0
    while True:
        subset = encode_subset(ranks, n, compressor.compress)
        layers += [ranks.size, subset.kind, subset.shift, len(subset.stored)]
        streams.append(subset.stored)
        num_layers += 1
        ranks, n = indices(steps != 0), ranks.size
        if not ranks.size or ranks.size > (1 - _LAYER_SHARE) * n or num_layers == MAX_LAYERS:
            break
        steps = steps.take(ranks) - steps.dtype.type(1)
    rest = [compressor.compress(np.packbits(is_negative).tobytes())]
    rest += [compressor.compress(plane.tobytes()) if plane.any() else b"" for plane in _to_planes(steps)]
    numbers += [num_layers, *layers, *map(len, rest)]
    streams += rest


def _decode(reader: _Reader, base: Words, out: Words, bins: Bins | None) -> int:
    width = base.itemsize
    num_classes = reader.number()
    num_bins = 1 if bins is None else bins.number
    if not 0 < num_classes <= num_bins:
        raise ValueError(f"expected 1 to {num_bins} classes, found {num_classes}")
    bounds = [0, *(reader.number() for _ in range(num_classes - 1))]
    if any(a >= b for a, b in itertools.pairwise([*bounds, num_bins])):
        raise ValueError(f"expected ascending bounds of classes below {num_bins}, found {bounds}")
    headers = [_ClassHeader.read(reader, width) for _ in bounds]
    num_changed = 0
    is_members = iter((None,)) if bins is None or num_classes == 1 else members(base, bins, bounds)
    for header, is_member in zip(headers, is_members, strict=True):
        if header.layers:
            positions = None if is_member is None else indices(is_member)
            num_changed += _decode_class(reader, header, positions, out)
    reader.end()
    return num_changed


def _decode_class(reader: _Reader, header: _ClassHeader, positions: Ranks | None, out: Words) -> int:
    """positions: of the members of the class; None for all elements. Returns how many changed."""
    n = out.size if positions is None else positions.size
    layers: list[Ranks] = []
    for layer in header.layers:
        stored = reader.bytes(layer.size)
        layers.append(decode_subset(layer.kind, layer.shift, layer.num_chosen, n, stored, _decompress))
        n = layer.num_chosen
    num_changed = header.layers[0].num_chosen
    sign_bytes = (num_changed + 7) // 8
    signs = _decompress(reader.bytes(header.signs_size), sign_bytes, sign_bytes)
    is_negative = np.unpackbits(np.frombuffer(signs, np.uint8), count=num_changed)
    steps = np.zeros(n, out.dtype)
    for plane, size in enumerate(header.plane_sizes):
        if size:
            raw = np.frombuffer(_decompress(reader.bytes(size), n, n), np.uint8)
            steps |= raw.astype(out.dtype) << (8 * plane)
    for ranks, below in zip(reversed(layers[1:]), reversed(header.layers[:-1]), strict=True):
        inner, steps = steps, np.zeros(below.num_chosen, out.dtype)
        steps[ranks] = inner + out.dtype.type(1)
    # Where negative, all bits of `flip` are set: -s is (s - 1) with its bits flipped.
    flip = np.negative(is_negative.astype(out.dtype))
    steps ^= flip
    steps += np.uint8(1) - is_negative
    at = layers[0] if positions is None else positions.take(layers[0])
    out[at] = out.take(at) + steps
    return num_changed


class _Layer(NamedTuple):
    num_chosen: int
    kind: int
    shift: int
    size: int


class _ClassHeader(NamedTuple):
    """No layers when nothing of the class changed."""

    layers: tuple[_Layer, ...]
    signs_size: int
    plane_sizes: tuple[int, ...]

    @staticmethod
    def read(reader: _Reader, width: int) -> _ClassHeader:
        num_layers = reader.number()
        if num_layers > MAX_LAYERS:
            raise ValueError(f"expected {MAX_LAYERS} layers at most, found {num_layers}")
        if num_layers == 0:
            return _ClassHeader((), 0, ())
        layers = tuple(_Layer(*(reader.number() for _ in range(4))) for _ in range(num_layers))
        return _ClassHeader(layers, reader.number(), tuple(reader.number() for _ in range(width)))


class _Reader:
    """The header's numbers one by one, then the streams. Raises ValueError where they end."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

    def number(self) -> int:
        value = shift = 0
        while self._at < len(self._body) and shift < 63:
            byte = self._body[self._at]
            self._at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
        raise ValueError(f"expected a number before byte {self._at} of the frame, found none")

    def bytes(self, size: int) -> memoryview:
        if size > len(self._body) - self._at:
            raise ValueError(f"expected {size} bytes at byte {self._at} of the frame, found its end")
        self._at += size
        return self._body[self._at - size : self._at]

    def end(self) -> None:
        if self._at != len(self._body):
            raise ValueError(f"expected the end of the frame, found {len(self._body) - self._at} bytes more")


def _to_varints(numbers: Iterable[int]) -> bytes:
    data = bytearray()
    for number in numbers:
        while number >= 128:
            data.append(number & 127 | 128)
            number >>= 7
        data.append(number)
    return bytes(data)


def _split(differences: Words) -> tuple[Words, NDArray[np.bool_]]:
    """|difference| - 1, and which differences are negative, taken as signed integers."""
    signed = differences.view(f"i{differences.itemsize}")
    return np.abs(signed).view(differences.dtype) - differences.dtype.type(1), signed < 0


def _to_planes(steps: Words) -> Iterator[NDArray[np.uint8]]:
    for plane in range(steps.itemsize):
        yield (steps >> (8 * plane)).astype(np.uint8)


def _decompress(frame: memoryview, smallest: int, largest: int) -> bytes:
    """One zstd frame whose declared size lies within bounds that the elements set, checked before any output."""
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
        if not smallest <= declared <= largest:
            raise ValueError(
                f"expected a zstd frame of {smallest} to {largest} bytes, found one that declares {declared}"
            )
        data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"expected one zstd frame, found {len(frame)} other bytes: {error}") from error
    if len(data) != declared:
        raise ValueError(f"expected {declared} bytes in a zstd frame, found {len(data)}")
    return data
