import itertools

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from k3core.checkpoint import frame
from k3core.checkpoint.frame import CHECK_BYTES, decode_frame, encode_changes, encode_frame, literal_compressor
from k3core.checkpoint.magnitudes import Bins
from k3core.checkpoint.positions import BITMAP, GAPS, OTHERS
from k3core.checkpoint.tensors import TORCH_DTYPES
from k3core.errors import IntegrityError

BF16 = Bins.of("BF16", 2)


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decoded(stored: bytes, base: np.ndarray, bins: Bins | None) -> tuple[np.ndarray, int]:
    out = base.copy()
    return out, decode_frame(stored, base, out, bins, "f")


def update(size: int, lr: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    weights = rng.normal(0, 0.02, size)
    return bf16(weights), bf16(weights + lr * np.clip(rng.normal(0, 1, size), -1, 1))


@settings(deadline=None)
@given(st.data())
def test_every_bit_pattern_of_every_dtype_returns(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(TORCH_DTYPES)))
    width = TORCH_DTYPES[dtype].itemsize
    size = data.draw(st.integers(1, 300))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    base = rng.integers(0, 256, size * width, np.uint8).view(f"<u{width}")
    new = base.copy()
    where = rng.random(size) < data.draw(st.sampled_from([0.01, 0.1, 0.5, 0.9, 1.0]))
    new[where] += rng.geometric(data.draw(st.sampled_from([1.0, 0.6, 0.05])), where.sum()).astype(new.dtype)
    if data.draw(st.booleans()):
        new[where] = rng.integers(0, 256, where.sum() * width, np.uint8).view(f"<u{width}")
    bins = Bins.of(dtype, width)
    stored, num_changed = encode_frame(base, new, bins, 1, data.draw(st.integers(1, 5)))
    assert num_changed == (base != new).sum()
    if num_changed:
        found, count = decoded(stored, base, bins)
        assert np.array_equal(found, new)
        assert count == num_changed
    else:
        assert stored == b""


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_the_largest_differences_return(width: int) -> None:
    top = (1 << 8 * width) - 1
    values = [0, 1, top, top >> 1, (top >> 1) + 1, (top >> 1) + 2]
    pairs = np.array(list(itertools.product(values, values)), f"<u{width}")
    base, new = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    assert np.array_equal(decoded(encode_frame(base, new, None, 1)[0], base, None)[0], new)


@pytest.mark.parametrize("max_classes", [1, 3])
def test_positions_and_xor_from_elsewhere_give_the_same_frame(max_classes: int) -> None:
    base, new = update(5000, 1e-5)
    positions = np.flatnonzero(base ^ new)
    stored = encode_changes(base, positions, (base ^ new)[positions], BF16, 1, max_classes)
    assert stored == encode_frame(base, new, BF16, 1, max_classes)[0]


def xor_floor(base: np.ndarray, new: np.ndarray) -> float:
    xor = base ^ new
    p = np.count_nonzero(xor) / xor.size
    counts = np.bincount(xor[xor != 0])
    counts = counts[counts > 0]
    values = -(counts * np.log2(counts / counts.sum())).sum()
    return float(xor.size * -(p * np.log2(p) + (1 - p) * np.log2(1 - p)) + values) / 8


@pytest.mark.parametrize("lr", [1e-7, 1e-6, 1e-5, 1e-4])
def test_a_frame_is_smaller_than_the_entropy_of_its_xor_and_much_smaller_than_the_xor_compressed(lr: float) -> None:
    base, new = update(1 << 18, lr)
    one, three = (len(encode_frame(base, new, BF16, 1, classes)[0]) for classes in (1, 3))
    assert one < xor_floor(base, new) + 60, "headers apart"
    assert three < 0.85 * one
    assert one < len(zstandard.ZstdCompressor(level=1).compress((base ^ new).tobytes())) / 1.4


@pytest.mark.parametrize("lr", [1e-7, 3e-6, 1e-5, 3e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8"])
def test_what_density_chooses_is_within_a_percent_of_trying_every_kind(
    lr: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, 1 << 16).astype(np.float32)
    after = (weights + lr * np.clip(rng.normal(0, 1, weights.size), -1, 1)).astype(np.float32)
    if dtype == "BF16":
        base, new = bf16(weights), bf16(after)
    elif dtype == "F32":
        base, new = weights.view(np.uint32), after.view(np.uint32)
    else:
        base, new = ((values * 2000 + 128).astype(np.uint8) for values in (weights, after))
    bins = Bins.of(dtype, base.itemsize)
    chosen = len(encode_frame(base, new, bins, 1, 3)[0])
    every = (GAPS, BITMAP, OTHERS)
    choose = frame.encode_subset
    monkeypatch.setattr(frame, "encode_subset", lambda ranks, n, compress: choose(ranks, n, compress, every))
    assert chosen <= 1.01 * len(encode_frame(base, new, bins, 1, 3)[0])


def test_changes_in_some_rows_only_are_not_taken_for_scattered_ones() -> None:
    base, new = update(512 * 96, 1e-3)
    rows = np.random.default_rng(1).random(512) < 0.1
    new = np.where(np.repeat(rows, 96), new, base)
    stored, num_changed = encode_frame(base, new, BF16, 1)
    alone, _ = encode_frame(base[np.repeat(rows, 96)], new[np.repeat(rows, 96)], BF16, 1)
    assert num_changed > 4000
    assert len(stored) < len(alone) + 400, "the untouched rows cost next to nothing"


def samples() -> dict[str, tuple[np.ndarray, np.ndarray, Bins | None, bytes]]:
    """Frames of every kind of stream, small enough to alter each bit."""
    found = {}
    for name, size, lr, classes in [
        ("sparse", 600, 3e-6, 1),
        ("half", 300, 5e-5, 1),
        ("all", 100, 1e-1, 1),
        ("classes", 4000, 2e-5, 3),
    ]:
        base, new = update(size, lr, seed=3)
        found[name] = (base, new, BF16, encode_frame(base, new, BF16, 1, classes)[0])
    assert found["classes"][3][0] > 1, "expected several classes"
    return found


@pytest.mark.parametrize("name", ["sparse", "half", "all", "classes"])
def test_a_flipped_bit_anywhere_and_a_cut_at_any_length_are_refused(name: str) -> None:
    base, _, bins, stored = samples()[name]
    for position in range(len(stored)):
        altered = bytearray(stored)
        altered[position] ^= 1 << position % 8
        for broken in (bytes(altered), stored[:position], stored + stored[:1]):
            with pytest.raises(IntegrityError, match=r"^f: expected a frame that ends with its checksum"):
                decoded(broken, base, bins)


def sealed(body: bytes) -> bytes:
    """What an attacker can do: the checksum is right."""
    return body + blake3(body).digest(length=CHECK_BYTES)


@pytest.mark.parametrize("name", ["sparse", "half", "all", "classes"])
def test_altered_content_with_a_right_checksum_is_refused_or_decodes_to_something_of_the_same_size(name: str) -> None:
    base, new, bins, stored = samples()[name]
    body = stored[:-CHECK_BYTES]
    refused = 0
    for position, bit in itertools.product(range(len(body)), (1, 6)):
        altered = bytearray(body)
        altered[position] ^= 1 << bit
        try:
            found, _ = decoded(sealed(bytes(altered)), base, bins)
        except IntegrityError as error:
            assert str(error).startswith("f: expected")  # noqa: PT017
            refused += 1
        else:
            assert found.size == new.size
    assert refused > len(body) // 4
    for length in range(len(body)):
        with pytest.raises(IntegrityError, match=r"^f: expected"):
            decoded(sealed(body[:length]), base, bins)
    with pytest.raises(IntegrityError, match=r"^f: expected the end of the frame"):
        decoded(sealed(body + b"\0"), base, bins)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_refused_without_harm(body: bytes) -> None:
    base, _ = update(64, 1e-3)
    try:
        decoded(sealed(body), base, BF16)
    except IntegrityError as error:
        assert str(error).startswith("f: ")  # noqa: PT017


def lying_frame(actual_bytes: int, declared_bytes: int) -> bytes:
    """A zstd frame whose header declares another size than it inflates to."""
    stream = bytearray(zstandard.ZstdCompressor().compress(bytes(actual_bytes)))
    descriptor, field = stream[4], stream[5:9]
    assert (descriptor >> 6, descriptor >> 5 & 1) == (2, 1), "expected a 4-byte size in a single segment"
    assert int.from_bytes(field, "little") == actual_bytes
    stream[5:9] = declared_bytes.to_bytes(4, "little")
    assert zstandard.get_frame_parameters(bytes(stream)).content_size == declared_bytes
    return bytes(stream)


@pytest.mark.parametrize(
    "plane",
    [
        pytest.param(zstandard.ZstdCompressor().compress(bytes(10**8)), id="honest size, too large"),
        pytest.param(lying_frame(10**6, 1000), id="inflates to more than it declares"),
        pytest.param(lying_frame(10**5, 2**31), id="declares 2 GiB"),
        pytest.param(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)), id="no size"),
        pytest.param(2 * zstandard.ZstdCompressor().compress(bytes(1000)), id="a second frame"),
        pytest.param(b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd", id="a skippable frame"),
        pytest.param(b"not zstd", id="no frame"),
    ],
)
def test_a_stream_that_is_not_one_frame_of_the_expected_size_is_refused(
    plane: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    inflated: list[int] = []
    decompress = zstandard.ZstdDecompressor().decompress

    class Watched:
        def decompress(self, data: bytes, allow_extra_data: bool) -> bytes:
            inflated.append(zstandard.get_frame_parameters(data).content_size)
            return decompress(data, allow_extra_data=allow_extra_data)

    monkeypatch.setattr(zstandard, "ZstdDecompressor", Watched)
    base = np.zeros(1000, np.uint16)
    signs = literal_compressor(1).compress(bytes(125))
    header = frame._to_varints([1, 1, 1000, 0, 0, 0, len(signs), len(plane), 0])
    with pytest.raises(IntegrityError, match=r"^f: expected"):
        decoded(sealed(header + signs + plane), base, None)
    assert max(inflated) <= 1000, "nothing larger than the elements is ever inflated"


def test_the_stored_form_is_layers_signs_and_planes() -> None:
    """Written by hand, so that what an earlier release published stays readable."""
    compress = literal_compressor(1).compress
    base = np.array([10, 10, 10, 10, 10, 10], np.uint16)
    changed, larger = compress(bytes([0b0011_1110])), compress(bytes([0b0001_1100]))
    signs = compress(bytes([0b1010_0000]))  # highest bit first: -, +, -, +, +
    low, high = compress(bytes([0, 6, 0x30])), compress(bytes([0, 0, 1]))
    streams = [changed, larger, signs, low, high]
    header = [1, 2, 5, 2, 0, len(changed), 3, 2, 0, len(larger), len(signs), len(low), len(high)]
    stored = sealed(bytes(header) + b"".join(streams))
    # Steps less one: 0, 0, then 1 + (0, 6, 0x130).
    assert decoded(stored, base, None)[0].tolist() == [10, 10 - 1, 10 + 1, 10 - 2, 10 + 8, 10 + 0x132]


def test_a_header_number_has_seven_bits_a_byte() -> None:
    assert frame._to_varints([0, 127, 128, 300]) == bytes([0, 127, 128, 1, 0xAC, 2])
    assert frame._Reader(memoryview(bytes([0xAC, 2]))).number() == 300


@pytest.mark.parametrize(
    "numbers", [[0], [2, 0, 0], [2, 256, 0, 0], [3, 5, 5, 0, 0, 0], [1, 9], [1, 1, 2**40, 0, 0, 0, 0, 0, 0]]
)
def test_headers_that_make_no_sense_are_refused(numbers: list[int]) -> None:
    base, _ = update(64, 1e-3)
    with pytest.raises(IntegrityError, match=r"^f: expected"):
        decoded(sealed(frame._to_varints(numbers)), base, BF16)
