"""Classes of elements by the magnitude that they had before an update.

An update of a given size moves small numbers by many units in their last place and rarely rounds a large one to
another. The reader holds the base, so numbers of a magnitude can be coded among themselves, each class at its own
density and with its own code, for nothing but the bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from k3core.checkpoint.positions import Ranks

Words = NDArray[Any]
"""Elements as unsigned integers of their width."""

MANTISSA_BITS: dict[str, int] = {
    "F8_E4M3": 3,
    "F8_E4M3FNUZ": 3,
    "F8_E5M2": 2,
    "F8_E5M2FNUZ": 2,
    "F16": 10,
    "BF16": 7,
    "F32": 23,
    "F64": 52,
}
"""Of the dtypes that have a magnitude; the others are one class."""

MAX_BINS = 256
_SAMPLE = 1 << 16
_MAX_CELLS = 128  # neighbouring bins with less than this part of the elements are not told apart
_CLASS_BYTES = 48  # of headers and code tables
_WORTH = 0.004  # a further class must save this share, since each one takes time


@dataclass(frozen=True, slots=True)
class Bins:
    """Magnitude bits above `shift`: the exponent, coarser where that has more than 8 bits."""

    shift: int
    mask: int

    @property
    def number(self) -> int:
        return (self.mask >> self.shift) + 1

    @staticmethod
    def of(dtype: str, width: int) -> Bins | None:
        if dtype not in MANTISSA_BITS:
            return None
        shift = max(MANTISSA_BITS[dtype], 8 * width - 1 - 8)
        return Bins(shift, (1 << 8 * width - 1) - 1)

    def __call__(self, words: Words) -> Words:
        return (words & self.mask) >> self.shift


def choose_bounds(base: Words, positions: Ranks, steps: Words, bins: Bins, max_classes: int) -> tuple[int, ...]:
    """The first bin of each class, ascending from 0. steps: by how much the elements at `positions` changed, less one.

    At most max_classes, and no more than pay. A class of n elements of which c changed is taken to cost n h2(c/n) bits
    for the positions, and for the steps the entropy of geometric distributions with their mean.
    """
    # An odd stride, since rows have even lengths.
    stride, pick = max(1, base.size // _SAMPLE) | 1, max(1, positions.size // _SAMPLE) | 1
    at, by = bins(base.take(positions[::pick])), steps[::pick].astype(np.float64)
    changed = np.bincount(at, minlength=MAX_BINS) * float(pick)
    moved = np.bincount(at, np.minimum(by, 65536.0), MAX_BINS) * float(pick)
    elements = np.maximum(np.bincount(bins(base[::stride]), minlength=MAX_BINS) * float(stride), changed)
    filled = np.cumsum(elements)
    cells = np.flatnonzero(np.diff(np.floor(filled * _MAX_CELLS / filled[-1]), prepend=0.0))
    bits = _class_bits(*(np.cumsum(of)[cells] for of in (elements, changed, moved)))
    price = max(8.0 * _CLASS_BYTES, _WORTH * float(bits[0, -1]))

    # best[j]: bits of the first j cells in the classes so far; cut[k][j]: where the last of k + 2 classes begins.
    best, cuts, totals = bits[0], [], [float(bits[0, -1]) + price]
    for num_classes in range(2, min(max_classes, cells.size) + 1):
        options = best[:, None] + bits
        cuts.append(options.argmin(0))
        best = options.min(0)
        totals.append(float(best[-1]) + num_classes * price)
    first, bounds = cells.size, []
    for cut in reversed(cuts[: int(np.argmin(totals))]):
        first = int(cut[first])
        bounds.append(int(cells[first - 1]) + 1)
    return (0, *reversed(bounds))


def _class_bits(
    elements: NDArray[np.float64], changed: NDArray[np.float64], moved: NDArray[np.float64]
) -> NDArray[Any]:
    """[i, j] -> what cells i to j - 1 cost as one class; infinite for none. Arguments: sums up to each cell."""
    n, c, m = (np.subtract.outer(-ends, -ends) for ends in (np.insert(of, 0, 0.0) for of in (elements, changed, moved)))
    is_class = n > 0
    n, c = np.where(is_class, n, 1.0), np.where(is_class, c, 0.0)
    mean = np.where(c > 0, m, 0.0) / np.maximum(c, 1.0)  # geometric from 0: (m + 1) h2(m / (m + 1)) bits
    return np.where(is_class, n * _entropy(c / n) + c * (mean + 1) * _entropy(mean / (mean + 1)), np.inf)


def _entropy(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """h2, in bits."""
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return -p * np.log2(p) - (1 - p) * np.log2(1 - p)


def members(base: Words, bins: Bins, bounds: Sequence[int]) -> Iterator[NDArray[np.bool_]]:
    """For each of several classes, which elements belong to it. bounds: from 0, ascending, below bins.number."""
    magnitudes = base & bins.mask
    edges = [bound << bins.shift for bound in bounds]
    yield magnitudes < edges[1]
    for first, end in itertools.pairwise(edges[1:]):
        yield magnitudes - first < end - first  # unsigned: below `first` it wraps around
    yield magnitudes >= edges[-1]


def ranks_among(is_member: NDArray[np.bool_], positions: Ranks) -> tuple[Ranks, int]:
    """How many members lie before each of `positions`, which are some of them, and how many there are."""
    # The bits of whole words are counted at once, which is faster than a running sum over the elements.
    packed = np.zeros((is_member.size + 63) // 64 * 8, np.uint8)
    packed[: (is_member.size + 7) // 8] = np.packbits(is_member, bitorder="little")
    words = packed.view("<u8")
    ends = np.cumsum(np.bitwise_count(words), dtype=np.int64)
    word = positions >> 6
    low = words.take(word) << (63 - (positions & 63)).astype(np.uint64)
    # The member itself is the highest bit that is left; members up to it, less one, lie before.
    return (ends - np.bitwise_count(words)).take(word) + np.bitwise_count(low) - 1, int(ends[-1])
