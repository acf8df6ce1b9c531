"""A subset of 0..n-1 in nearly as few bits as its density allows: gaps while it is sparse, else a bit for each number.

A random subset of density p costs n h2(p) bits at least; for p from 0.0005 to 0.9995, what is stored takes 2 % and some
50 bytes more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]
"""Ascending numbers without repetition."""
Compress = Callable[[bytes], bytes]
Decompress = Callable[[memoryview, int, int], bytes]
"""frame, smallest and largest size that it may inflate to. Raises ValueError."""

ALL, GAPS, BITMAP, OTHERS = range(4)  # OTHERS: the gaps of the numbers that are not in the subset
ESCAPE = 255  # in a stream of gaps: 255 further, and the gap goes on

# Where gaps and bitmap are so near each other that both are tried; beyond, the density decides.
_BOTH_FROM, _BOTH_TO = 0.1, 0.3


def indices(is_in: NDArray[np.bool_]) -> Ranks:
    """np.flatnonzero, which takes up to three times as long between 1 and 12 % of trues."""
    whole = is_in.size & ~7
    if is_in.size < 4096 or 8 * np.count_nonzero(is_in) > is_in.size:
        return np.flatnonzero(is_in)
    eights = np.flatnonzero(is_in[:whole].view(np.uint64) != 0)
    within = np.flatnonzero(is_in[:whole].reshape(-1, 8).take(eights, axis=0))
    found = (eights.take(within >> 3) << 3) + (within & 7)
    return np.concatenate([found, np.flatnonzero(is_in[whole:]) + whole]) if is_in[whole:].any() else found


class Subset(NamedTuple):
    """shift: low bits of each gap that are stored as they are, before the compressed frame of the quotients."""

    kind: int
    shift: int
    stored: bytes


def encode_subset(ranks: Ranks, n: int, compress: Compress, kinds: tuple[int, ...] | None = None) -> Subset:
    """The smallest of `kinds`; by default of those that the density makes worth trying. ranks: 1 to n of them."""
    if ranks.size == n:
        return Subset(ALL, 0, b"")
    tried = [_encode(kind, ranks, n, compress) for kind in kinds or _candidates(ranks.size / n)]
    return min(tried, key=lambda subset: len(subset.stored))


def decode_subset(kind: int, shift: int, count: int, n: int, stored: memoryview, decompress: Decompress) -> Ranks:
    """Raises ValueError, saying what was expected and found, for bytes that are no subset of `count` of `n`."""
    if not 0 < count <= n:
        raise ValueError(f"expected 1 to {n} elements, found {count}")
    if kind == ALL:
        if count != n or stored:
            raise ValueError(f"expected all {n} elements and nothing stored, found {count}, {len(stored)} bytes")
        return np.arange(n)
    if kind == GAPS:
        ranks = _from_gaps(stored, count, n, shift, decompress)
    elif kind == BITMAP:
        size = (n + 7) // 8
        bits = np.unpackbits(np.frombuffer(decompress(stored, size, size), np.uint8), bitorder="little")
        ranks = indices(bits.view(np.bool_))
    elif kind == OTHERS and count < n:
        is_in = np.ones(n, np.bool_)
        is_in[_from_gaps(stored, n - count, n, shift, decompress)] = False
        ranks = indices(is_in)
    else:
        raise ValueError(f"expected a kind of positions from {ALL} to {OTHERS}, found {kind}")
    if ranks.size != count or ranks[-1] >= n:
        raise ValueError(f"expected {count} positions below {n}, found {ranks.size}")
    return ranks


def _candidates(density: float) -> tuple[int, ...]:
    if density < _BOTH_FROM:
        return (GAPS,)
    if density < _BOTH_TO:
        return (GAPS, BITMAP)
    if density < 1 - _BOTH_TO:
        return (BITMAP,)
    return (BITMAP, OTHERS) if density < 1 - _BOTH_FROM else (OTHERS,)


def _encode(kind: int, ranks: Ranks, n: int, compress: Compress) -> Subset:
    if kind == GAPS:
        return Subset(GAPS, *_to_gaps(ranks, compress))
    is_in = np.zeros(n, np.bool_)
    is_in[ranks] = True
    if kind == BITMAP:
        return Subset(BITMAP, 0, compress(np.packbits(is_in, bitorder="little").tobytes()))
    assert kind == OTHERS
    return Subset(OTHERS, *_to_gaps(indices(~is_in), compress))


def _to_gaps(ranks: Ranks, compress: Compress) -> tuple[int, bytes]:
    """Golomb-Rice: of each gap the low bits as they are, since they are all but uniform; the quotient as bytes."""
    gaps = np.empty_like(ranks)
    gaps[0] = ranks[0]
    np.subtract(ranks[1:], ranks[:-1], out=gaps[1:])
    gaps[1:] -= 1
    shift = _shift(int(ranks[-1]), ranks.size)
    low = b"".join(np.packbits((gaps >> bit).astype(np.uint8) & 1).tobytes() for bit in range(shift))
    quotients = gaps >> shift if shift else gaps
    if int(quotients.max()) < ESCAPE:
        return shift, low + compress(quotients.astype(np.uint8).tobytes())
    escapes, rest = np.divmod(quotients, ESCAPE)
    ends = np.cumsum(escapes + 1) - 1
    stream = np.full(ends[-1] + 1, ESCAPE, np.uint8)
    stream[ends] = rest
    return shift, low + compress(stream.tobytes())


def _shift(last: int, count: int) -> int:
    """Quotients of 4 to 8 on average; none while whole gaps fit a byte, where the compressor does as well."""
    mean = last // count
    return mean.bit_length() - 3 if mean >= 128 else 0


def _from_gaps(stored: memoryview, count: int, n: int, shift: int, decompress: Decompress) -> Ranks:
    if shift > (n // count).bit_length():
        raise ValueError(f"expected gaps shifted by {(n // count).bit_length()} bits at most, found {shift}")
    low_bytes = (count + 7) // 8
    # Positions increase, so that all escapes together cannot span more than the whole.
    longest = count + (n >> shift) // ESCAPE
    stream = np.frombuffer(decompress(stored[shift * low_bytes :], count, longest), np.uint8)
    if stream.size == count and stream.max() < ESCAPE:
        ranks = stream.astype(np.int64)
    else:
        ends = np.flatnonzero(stream != ESCAPE)
        if ends.size != count:
            raise ValueError(f"expected {count} gaps, found {ends.size}")
        ranks = np.cumsum(stream, dtype=np.int64)[ends]
        ranks[1:] -= ranks[:-1].copy()
    ranks <<= shift
    for bit in range(shift):
        packed = np.frombuffer(stored[bit * low_bytes : (bit + 1) * low_bytes], np.uint8)
        ranks |= np.unpackbits(packed, count=count).astype(np.int64) << bit
    ranks += 1
    np.cumsum(ranks, out=ranks)
    ranks -= 1
    if ranks[-1] >= n:
        raise ValueError(f"expected positions below {n}, found {ranks[-1]}")
    return ranks
