import itertools

import numpy as np
import pytest

from k3core.checkpoint.magnitudes import MANTISSA_BITS, Bins, choose_bounds, members, ranks_among
from k3core.checkpoint.tensors import TORCH_DTYPES


@pytest.mark.parametrize("dtype", sorted(MANTISSA_BITS))
def test_every_bit_pattern_belongs_to_one_class(dtype: str) -> None:
    width = TORCH_DTYPES[dtype].itemsize
    words = np.random.default_rng(0).integers(0, 256, 4096 * width, np.uint8).view(f"<u{width}")
    bins = Bins.of(dtype, width)
    assert bins is not None
    assert bins(words).max() < bins.number
    for bounds in ((0, 1), (0, bins.number - 1), (0, 3, 4, bins.number // 2)):
        found = np.array(list(members(words, bins, bounds)))
        assert (found.sum(0) == 1).all()
        for is_member, first, end in zip(found, bounds, (*bounds[1:], bins.number), strict=True):
            assert np.array_equal(is_member, (bins(words) >= first) & (bins(words) < end))


def test_a_dtype_without_an_exponent_has_no_classes() -> None:
    assert Bins.of("U8", 1) is None
    assert Bins.of("C64", 8) is None


def test_a_rank_counts_the_members_before() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 8, 63, 64, 65, 1000):
        is_member = rng.random(size) < 0.4
        is_member[0] = True
        positions = np.flatnonzero(is_member & (rng.random(size) < 0.5) | (np.arange(size) == 0))
        ranks, number = ranks_among(is_member, positions)
        assert number == is_member.sum()
        assert np.array_equal(np.flatnonzero(is_member)[ranks], positions)


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def test_classes_separate_small_numbers_from_large_ones_where_they_change_differently() -> None:
    rng = np.random.default_rng(0)
    base = bf16(rng.normal(0, 0.02, 100_000))
    bins = Bins.of("BF16", 2)
    assert bins is not None
    is_small = bins(base) < bins(bf16(np.array([2.0**-8])))[0]
    positions = np.flatnonzero(rng.random(base.size) < np.where(is_small, 0.5, 0.01))
    steps = np.zeros(positions.size, np.uint16)
    assert choose_bounds(base, positions, steps, bins, 1) == (0,)
    assert choose_bounds(base, positions, steps, bins, 2) == (0, 127 - 8)
    for max_classes in (3, 4, 8):
        bounds = choose_bounds(base, positions, steps, bins, max_classes)
        assert 127 - 8 in bounds
        assert len(bounds) <= max_classes
        assert all(a < b for a, b in itertools.pairwise(bounds))


def test_numbers_that_change_alike_are_one_class() -> None:
    rng = np.random.default_rng(0)
    base = bf16(rng.normal(0, 0.02, 100_000))
    bins = Bins.of("BF16", 2)
    assert bins is not None
    positions = np.flatnonzero(rng.random(base.size) < 0.1)
    assert choose_bounds(base, positions, np.zeros(positions.size, np.uint16), bins, 8) == (0,)


@pytest.mark.parametrize("dtype", sorted(MANTISSA_BITS))
def test_bounds_are_bins_of_the_dtype_for_arbitrary_bits(dtype: str) -> None:
    width = TORCH_DTYPES[dtype].itemsize
    rng = np.random.default_rng(0)
    words = rng.integers(0, 256, 3000 * width, np.uint8).view(f"<u{width}")
    bins = Bins.of(dtype, width)
    assert bins is not None
    for size in (1, 2, 100, 3000):
        positions = np.sort(rng.choice(3000, size, replace=False))
        bounds = choose_bounds(words, positions, words.take(positions) >> 1, bins, 4)
        assert bounds[0] == 0
        assert all(a < b for a, b in itertools.pairwise((*bounds, bins.number)))
