import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3core.checkpoint.frame import _decompress, literal_compressor
from k3core.checkpoint.positions import ALL, BITMAP, GAPS, OTHERS, Subset, decode_subset, encode_subset, indices

compress = literal_compressor(1).compress


def returned(subset: Subset, count: int, n: int) -> np.ndarray:
    return decode_subset(subset.kind, subset.shift, count, n, memoryview(subset.stored), _decompress)


def test_indices_are_those_of_numpy_at_every_density_and_length() -> None:
    rng = np.random.default_rng(0)
    for density in (0.0, 0.001, 0.03, 0.2, 1.0):
        for size in (0, 1, 7, 4095, 4096, 4097, 4103, 10_000):
            is_in = rng.random(size) < density
            is_in[-1:] = True
            assert np.array_equal(indices(is_in), np.flatnonzero(is_in))


@settings(deadline=None)
@given(st.data())
def test_every_subset_returns_from_every_kind(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 3000))
    ranks = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=200))))
    assert np.array_equal(returned(encode_subset(ranks, n, compress), ranks.size, n), ranks)
    for kind in (GAPS, BITMAP, OTHERS):
        assert np.array_equal(returned(encode_subset(ranks, n, compress, (kind,)), ranks.size, n), ranks)


def test_all_of_them_take_nothing() -> None:
    assert encode_subset(np.arange(9), 9, compress) == Subset(ALL, 0, b"")
    assert np.array_equal(returned(Subset(ALL, 0, b""), 9, 9), np.arange(9))


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 765, 2000])
def test_gaps_around_the_escape_return(gap: int) -> None:
    # Many small gaps keep the mean, and so the shift, at 0.
    ranks = np.concatenate([np.arange(50), [50 + gap, 51 + 2 * gap]])
    subset = encode_subset(ranks, 5000, compress, (GAPS,))
    assert subset.shift == 0
    assert np.array_equal(returned(subset, ranks.size, 5000), ranks)


def test_the_stored_form_of_gaps_is_low_bits_and_then_quotients_with_escape() -> None:
    """Written by hand, so that what an earlier release published stays readable."""
    quotients = compress(bytes([3, 255, 0, 254, 0]))
    ranks = decode_subset(GAPS, 0, 4, 600, memoryview(quotients), _decompress)
    assert ranks.tolist() == [3, 259, 514, 515]
    shifted = bytes([0b1010_0000, 0b0110_0000]) + compress(bytes([1, 0, 2, 0]))
    ranks = decode_subset(GAPS, 2, 4, 600, memoryview(shifted), _decompress)
    assert ranks.tolist() == [5, 8, 20, 21], "gaps 4+1, 0+2, 8+3, 0+0"


def test_the_stored_form_of_a_bitmap_begins_with_the_lowest_bit() -> None:
    stored = memoryview(compress(bytes([0b0000_0101, 0b0000_0010])))
    assert decode_subset(BITMAP, 0, 3, 10, stored, _decompress).tolist() == [0, 2, 9]


@pytest.mark.parametrize("density", [0.0005, 0.002, 0.01, 0.05, 0.099, 0.15, 0.25, 0.301, 0.5, 0.69, 0.8, 0.95, 0.999])
def test_a_random_subset_takes_what_its_entropy_says_and_no_kind_takes_less(density: float) -> None:
    n = 1 << 19
    ranks = np.flatnonzero(np.random.default_rng(1).random(n) < density)
    chosen = len(encode_subset(ranks, n, compress).stored)
    assert chosen <= 1.01 * len(encode_subset(ranks, n, compress, (GAPS, BITMAP, OTHERS)).stored)
    p = ranks.size / n
    floor = n * -(p * np.log2(p) + (1 - p) * np.log2(1 - p)) / 8
    assert chosen <= 1.02 * floor + 50


@pytest.mark.parametrize(
    ("kind", "shift", "count", "stored"),
    [
        (GAPS, 0, 0, b""),
        (GAPS, 0, 11, compress(bytes(11))),
        (GAPS, 0, 3, compress(bytes([9, 0, 0]))),
        (GAPS, 0, 3, compress(bytes([0, 0, 255]))),
        (GAPS, 0, 3, compress(bytes(4))),
        (GAPS, 60, 3, bytes(60) + compress(bytes(3))),
        (GAPS, 1, 3, b""),
        (BITMAP, 0, 3, compress(bytes([7, 1]))),
        (BITMAP, 0, 3, compress(bytes([3, 0b1000_0000]))),
        (BITMAP, 0, 3, compress(bytes([7]))),
        (OTHERS, 0, 10, compress(b"")),
        (OTHERS, 0, 3, compress(bytes([4, 0, 0, 0, 0, 0, 0]))),
        (ALL, 0, 3, b""),
        (ALL, 0, 10, b"x"),
        (4, 0, 3, compress(bytes([7, 0]))),
    ],
)
def test_bytes_that_are_no_such_subset_of_ten_are_refused(kind: int, shift: int, count: int, stored: bytes) -> None:
    with pytest.raises(ValueError, match="expected"):
        decode_subset(kind, shift, count, 10, memoryview(stored), _decompress)
