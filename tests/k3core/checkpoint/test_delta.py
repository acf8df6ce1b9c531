import dataclasses
import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from k3core.checkpoint.delta import NUM_STREAMS, TensorEntry, apply_delta, encode_delta
from k3core.checkpoint.tensors import TORCH_DTYPES, RawTensor, Weights
from k3core.errors import IntegrityError

FILE = "run/policies/000007/payload.delta"
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "U8": np.uint8}


def raw(array: np.ndarray, dtype: str) -> RawTensor:
    return RawTensor(dtype, array.shape, array.tobytes())


def changed_at(base: RawTensor, positions: np.ndarray, rng: np.random.Generator) -> RawTensor:
    """Every element at `positions` gets other bits in its last byte but one, as a small update does."""
    rows = np.frombuffer(base.data, np.uint8).reshape(-1, base.element_bytes).copy()
    rows[positions, max(base.element_bytes // 2 - 1, 0)] ^= rng.integers(1, 256, positions.size, np.uint8)
    return RawTensor(base.dtype, base.shape, rows.tobytes())


@st.composite
def parent_and_new(draw: st.DrawFn) -> tuple[Weights, Weights]:
    """Arbitrary bits under every dtype, and any number of arbitrarily changed bytes."""
    parent, new = {}, {}
    for name in draw(st.lists(st.text(max_size=5), max_size=4, unique=True)):
        dtype = draw(st.sampled_from(sorted(TORCH_DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        size = int(np.prod(shape, dtype=int)) * TORCH_DTYPES[dtype].itemsize
        before = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 256, size, np.uint8)
        after = before.copy()
        for position in draw(st.lists(st.integers(0, size - 1), max_size=20)) if size else []:
            after[position] = draw(st.integers(0, 255))
        parent[name] = RawTensor(dtype, shape, before.tobytes())
        new[name] = RawTensor(dtype, shape, after.tobytes())
    return parent, new


@settings(deadline=None)
@given(parent_and_new())
def test_every_bit_returns(versions: tuple[Weights, Weights]) -> None:
    parent, new = versions
    payload, entries = encode_delta(parent, new)
    assert apply_delta(parent, entries, payload, FILE) == new


def test_nan_payloads_and_signed_zeros_return() -> None:
    parent = {"w": raw(np.array([0x7FC00001, 0x80000000, 0xFFFFFFFF], np.uint32), "F32")}
    new = {"w": raw(np.array([0x7FC00002, 0x00000000, 0xFF800001], np.uint32), "F32")}
    payload, entries = encode_delta(parent, new)
    assert entries[0].num_changed == 3
    assert apply_delta(parent, entries, payload, FILE) == new


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_scalars_and_empty_tensors_return(shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape, dtype=int)) * 2
    parent = {"w": RawTensor("BF16", shape, b"\x00" * size)}
    new = {"w": RawTensor("BF16", shape, b"\x80" * size)}
    payload, entries = encode_delta(parent, new)
    assert apply_delta(parent, entries, payload, FILE) == new


def test_an_unchanged_tensor_stores_nothing() -> None:
    weights = {"w": raw(np.arange(1000, dtype=np.float32), "F32")}
    payload, entries = encode_delta(weights, weights)
    assert payload == b""
    assert (entries[0].encoding, entries[0].num_changed, entries[0].stored_sizes) == ("unchanged", 0, ())


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 765, 2000])
@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_gaps_around_the_escape_return(gap: int, dtype: str) -> None:
    rng = np.random.default_rng(gap)
    parent = {"w": raw(rng.integers(0, 100, 5000).astype(FLOATS[dtype]), dtype)}
    new = {"w": changed_at(parent["w"], np.array([gap, 2 * gap + 1]), rng)}
    payload, entries = encode_delta(parent, new)
    assert entries[0].num_changed == 2
    assert apply_delta(parent, entries, payload, FILE) == new


def delta_of(encoding: str) -> tuple[Weights, Weights, bytes, tuple[TensorEntry, ...]]:
    """A small delta whose one changed tensor is stored as `encoding`, between two that are unchanged."""
    rng = np.random.default_rng(0)
    size = 600
    base = raw(rng.integers(0, 256, (size, 2)).astype(np.uint8).view(np.uint16).reshape(-1), "BF16")
    bits = np.zeros(size, np.uint16)
    if encoding == "gaps":
        bits[rng.choice(size, 24, replace=False)] = rng.integers(1, 2**16, 24)
    elif encoding == "bitmap":
        changed = np.arange(size) % 16 < 9
        bits[changed] = rng.integers(1, 2**16, changed.sum())
    elif encoding == "planes":
        bits[:] = rng.integers(1, 8, size)
    elif encoding == "dense":
        bits[:] = np.tile(rng.integers(1, 2**16, 60), 10)
    new = RawTensor("BF16", base.shape, (np.frombuffer(base.data, np.uint16) ^ bits).tobytes())
    fixed = raw(np.arange(4, dtype=np.uint8), "U8")
    parent, result = {"a": fixed, "w": base, "z": fixed}, {"a": fixed, "w": new, "z": fixed}
    payload, entries = encode_delta(parent, result)
    assert [entry.encoding for entry in entries] == ["unchanged", encoding, "unchanged"]
    return parent, result, payload, entries


@pytest.mark.parametrize("encoding", NUM_STREAMS)
def test_each_encoding_is_chosen_where_it_is_smallest_and_returns(encoding: str) -> None:
    parent, new, payload, entries = delta_of(encoding)
    assert len(payload) == sum(entries[1].stored_sizes)
    assert apply_delta(parent, entries, payload, FILE) == new


def test_a_sparse_update_is_stored_near_its_entropy() -> None:
    rng = np.random.default_rng(0)
    parent = {"w": raw(rng.normal(0, 0.02, 200_000).astype(np.float32), "F32")}
    new = {"w": changed_at(parent["w"], np.flatnonzero(rng.random(200_000) < 0.01), rng)}
    payload, entries = encode_delta(parent, new)
    # 0.081 bit of place for each element and 8 bits of value for each changed one are 4,000 bytes.
    assert entries[0].encoding == "gaps"
    assert len(payload) < 4_000 * 1.25


def test_equal_inputs_give_equal_bytes() -> None:
    parent, new, payload, entries = delta_of("bitmap")
    backwards = sorted(parent, reverse=True)
    again = encode_delta({name: parent[name] for name in backwards}, {name: new[name] for name in backwards})
    assert again == (payload, entries)


@pytest.mark.parametrize(
    "new",
    [
        {},
        {"v": RawTensor("U8", (4,), b"abcd")},
        {"w": RawTensor("I8", (4,), b"abcd")},
        {"w": RawTensor("U8", (2, 2), b"abcd")},
        {"w": RawTensor("U8", (4,), b"abcd"), "x": RawTensor("U8", (0,), b"")},
    ],
)
def test_another_layout_needs_a_full_version(new: Weights) -> None:
    with pytest.raises(ValueError, match="publish this version in full"):
        encode_delta({"w": RawTensor("U8", (4,), b"abcd")}, new)


@pytest.mark.parametrize("encoding", ["gaps", "bitmap", "planes", "dense"])
def test_a_flipped_bit_at_every_position_of_the_payload_is_refused(encoding: str) -> None:
    parent, _, payload, entries = delta_of(encoding)
    for position in range(len(payload)):
        altered = bytearray(payload)
        altered[position] ^= 1 << position % 8
        with pytest.raises(IntegrityError, match=rf"^{FILE}: tensor 'w'"):
            apply_delta(parent, entries, bytes(altered), FILE)


def test_a_payload_cut_at_every_length_or_grown_is_refused() -> None:
    parent, _, payload, entries = delta_of("gaps")
    for altered in [payload[:length] for length in range(len(payload))] + [payload + b"\0"]:
        with pytest.raises(IntegrityError, match=rf"^{FILE}: expected {len(payload)} bytes, found {len(altered)}"):
            apply_delta(parent, entries, altered, FILE)


def test_a_flipped_bit_at_every_position_of_the_base_is_refused() -> None:
    parent, _, payload, entries = delta_of("gaps")
    for name, tensor in parent.items():
        for position in range(len(tensor.data)):
            data = bytearray(tensor.data)
            data[position] ^= 1 << position % 8
            other = {**parent, name: RawTensor(tensor.dtype, tensor.shape, bytes(data))}
            with pytest.raises(IntegrityError, match=rf"^{FILE}: tensor '{name}': base"):
                apply_delta(other, entries, payload, FILE)


def test_applying_twice_is_refused_and_does_not_revert() -> None:
    _, new, payload, entries = delta_of("gaps")
    with pytest.raises(IntegrityError, match="tensor 'w': base"):
        apply_delta(new, entries, payload, FILE)


def altered_entries(entries: tuple[TensorEntry, ...]) -> Iterator[tuple[TensorEntry, ...]]:
    a, w, z = entries
    yield ()
    yield (a, w)
    yield (a, w, z, z)
    yield (a, w, w)
    for entry in [
        dataclasses.replace(w, name="v"),
        dataclasses.replace(w, dtype="F16"),
        dataclasses.replace(w, shape=(300, 2)),
        dataclasses.replace(w, num_changed=w.num_changed - 1),
        dataclasses.replace(w, num_changed=w.num_changed + 1),
        dataclasses.replace(w, num_changed=0),
        dataclasses.replace(w, num_changed=10**12),
        dataclasses.replace(w, stored_sizes=(sum(w.stored_sizes),) if len(w.stored_sizes) > 1 else (1, 1)),
        dataclasses.replace(w, stored_sizes=(w.stored_sizes[0] - 1, *w.stored_sizes[1:])),
        dataclasses.replace(w, stored_sizes=(w.stored_sizes[0] + 1, w.stored_sizes[-1] - 1)),
        dataclasses.replace(w, stored_sizes=(-1, sum(w.stored_sizes) + 1)),
        dataclasses.replace(w, stored_sha256="0" * 64),
        dataclasses.replace(w, base_sha256=w.result_sha256),
        dataclasses.replace(w, result_sha256=w.base_sha256),
        *(dataclasses.replace(w, encoding=other) for other in NUM_STREAMS if other != w.encoding),
    ]:
        yield (a, entry, z)


@pytest.mark.parametrize("encoding", ["gaps", "bitmap", "planes", "dense"])
def test_altered_entries_are_refused(encoding: str) -> None:
    parent, _, payload, entries = delta_of(encoding)
    for altered in altered_entries(entries):
        with pytest.raises(IntegrityError, match=f"^{FILE}: "):
            apply_delta(parent, altered, payload, FILE)


def test_entries_whose_names_were_exchanged_are_refused() -> None:
    parent, _, payload, (a, w, z) = delta_of("gaps")
    exchanged = (dataclasses.replace(z, name="a"), w, dataclasses.replace(a, name="z"))
    with pytest.raises(IntegrityError, match="tensor 'a'"):
        apply_delta(parent, exchanged, payload, FILE)


def with_streams(entry: TensorEntry, *streams: bytes) -> tuple[TensorEntry, bytes]:
    """An attacker's entry: its digest of the stored bytes is right."""
    stored = b"".join(streams)
    return (
        dataclasses.replace(
            entry, stored_sizes=tuple(map(len, streams)), stored_sha256=hashlib.sha256(stored).hexdigest()
        ),
        stored,
    )


def lying_frame(actual_bytes: int, declared_bytes: int) -> bytes:
    """A frame whose header declares another size than it inflates to."""
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(bytes(actual_bytes)))
    descriptor, field = frame[4], frame[5:9]
    assert (descriptor >> 6, descriptor >> 5 & 1) == (2, 1), "expected a 4-byte size in a single segment"
    assert int.from_bytes(field, "little") == actual_bytes
    frame[5:9] = declared_bytes.to_bytes(4, "little")
    assert zstandard.get_frame_parameters(bytes(frame)).content_size == declared_bytes
    return bytes(frame)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(zstandard.ZstdCompressor(write_checksum=True).compress(bytes(10**8)), id="honest size, too large"),
        pytest.param(lying_frame(10**6, 1200), id="inflates to more than it declares"),
        pytest.param(lying_frame(10**5, 2**31), id="declares 2 GiB"),
        pytest.param(zstandard.ZstdCompressor(write_checksum=False).compress(bytes(1200)), id="no checksum"),
        pytest.param(
            zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(bytes(1200)), id="no size"
        ),
        pytest.param(
            zstandard.ZstdCompressor(write_checksum=True).compress(bytes(1200))
            + zstandard.ZstdCompressor(write_checksum=True).compress(bytes(10**6)),
            id="a second frame",
        ),
        pytest.param(b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd", id="a skippable frame"),
    ],
)
@pytest.mark.parametrize("encoding", ["gaps", "bitmap", "planes", "dense"])
def test_a_stream_that_is_not_one_frame_of_the_expected_size_is_refused(
    encoding: str, frame: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, _, payload, (a, w, z) = delta_of(encoding)
    inflated: list[int] = []
    decompress = zstandard.ZstdDecompressor().decompress

    class Watched:
        def decompress(self, data: bytes, allow_extra_data: bool) -> bytes:
            inflated.append(zstandard.get_frame_parameters(data).content_size)
            return decompress(data, allow_extra_data=allow_extra_data)

    monkeypatch.setattr(zstandard, "ZstdDecompressor", Watched)
    for index in range(len(w.stored_sizes)):
        streams = [payload[: w.stored_sizes[0]], payload[w.stored_sizes[0] :]][: len(w.stored_sizes)]
        streams[index] = frame
        entry, stored = with_streams(w, *streams)
        with pytest.raises(IntegrityError, match=f"^{FILE}: tensor 'w'"):
            apply_delta(parent, (a, entry, z), stored, FILE)
    assert max(inflated, default=0) <= 1200, "nothing larger than the tensor is ever inflated"


def test_the_right_stream_without_a_checksum_is_refused() -> None:
    parent, _, payload, (a, w, z) = delta_of("planes")
    bare = zstandard.ZstdCompressor(write_checksum=False).compress(zstandard.ZstdDecompressor().decompress(payload))
    entry, stored = with_streams(w, bare)
    with pytest.raises(IntegrityError, match=f"^{FILE}: tensor 'w': expected a checksummed zstd frame"):
        apply_delta(parent, (a, entry, z), stored, FILE)


def test_the_stored_form_is_gaps_with_escape_and_then_values_by_plane() -> None:
    """Written by hand, so that what an earlier release published stays readable."""
    parent: Weights = {"w": RawTensor("U16", (600,), bytes(1200))}
    values = np.zeros(600, np.uint16)
    values[[3, 259, 514, 515]] = [0x1122, 0x3344, 0x5566, 0x7788]
    result = RawTensor("U16", (600,), values.tobytes())
    template = encode_delta(parent, {"w": result})[1][0]
    compress = zstandard.ZstdCompressor(write_checksum=True).compress
    gaps = bytes([3, 255, 0, 254, 0])
    planes = bytes([0x22, 0x44, 0x66, 0x88, 0x11, 0x33, 0x55, 0x77])
    entry, stored = with_streams(dataclasses.replace(template, encoding="gaps"), compress(gaps), compress(planes))
    assert apply_delta(parent, (entry,), stored, FILE) == {"w": result}


def test_positions_beyond_the_tensor_are_refused() -> None:
    parent, _, payload, (a, w, z) = delta_of("gaps")
    values = payload[w.stored_sizes[0] :]
    compress = zstandard.ZstdCompressor(write_checksum=True).compress
    assert w.num_changed == 24
    for gaps in (bytes([255, 255, 100, *23 * [0]]), bytes([*23 * [0], 255]), bytes(25), bytes(24 * [26])):
        entry, stored = with_streams(w, compress(gaps), values)
        with pytest.raises(IntegrityError, match=f"^{FILE}: tensor 'w'"):
            apply_delta(parent, (a, entry, z), stored, FILE)
