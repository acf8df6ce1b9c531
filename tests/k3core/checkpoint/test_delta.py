import dataclasses
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3core.checkpoint import delta
from k3core.checkpoint.delta import DeltaEntry, apply_delta, apply_entries, encode_delta
from k3core.checkpoint.tensors import TORCH_DTYPES, RawTensor, Weights, tensor_digest
from k3core.errors import IntegrityError

FILE = "run/policies/000007/payload.delta"
CHUNK = 64


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors have several frames: 64 bytes each; below 24 bytes, tensors share one."""
    monkeypatch.setattr(delta, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(delta, "SMALL_BYTES", 24)


def raw(array: np.ndarray, dtype: str) -> RawTensor:
    return RawTensor(dtype, array.shape, array.tobytes())


@st.composite
def parent_and_new(draw: st.DrawFn) -> tuple[Weights, Weights]:
    """Arbitrary bits under every dtype, sizes around the chunk's, and any number of arbitrarily changed bytes."""
    parent, new = {}, {}
    for name in draw(st.lists(st.text(max_size=5), max_size=5, unique=True)):
        dtype = draw(st.sampled_from(sorted(TORCH_DTYPES)))
        width = TORCH_DTYPES[dtype].itemsize
        per_chunk = CHUNK // width
        shape = draw(
            st.sampled_from(
                [(), (0,), (3, 0, 2), (1,), (per_chunk - 1,), (per_chunk,), (per_chunk + 1,), (5, per_chunk), (2, 3)]
            )
        )
        size = int(np.prod(shape, dtype=int)) * width
        before = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, 256, size, np.uint8)
        after = before.copy()
        for position in draw(st.lists(st.integers(0, size - 1), max_size=20)) if size else []:
            after[position] = draw(st.integers(0, 255))
        parent[name] = RawTensor(dtype, shape, before.tobytes())
        new[name] = RawTensor(dtype, shape, after.tobytes())
    return parent, new


@settings(deadline=None, max_examples=200)
@given(parent_and_new(), st.integers(1, 3), st.sampled_from([1, 3]))
def test_every_bit_returns(versions: tuple[Weights, Weights], num_threads: int, max_classes: int) -> None:
    parent, new = versions
    payload, entries = encode_delta(parent, new, max_classes=max_classes, num_threads=num_threads)
    assert apply_delta(parent, entries, payload, FILE, num_threads=num_threads) == new
    assert (payload, entries) == encode_delta(parent, new, max_classes=max_classes)


def test_nan_payloads_and_signed_zeros_return() -> None:
    parent = {"w": raw(np.array([0x7FC00001, 0x80000000, 0xFFFFFFFF], np.uint32), "F32")}
    new = {"w": raw(np.array([0x7FC00002, 0x00000000, 0xFF800001], np.uint32), "F32")}
    payload, entries = encode_delta(parent, new)
    assert entries[0].num_changed == 3
    assert apply_delta(parent, entries, payload, FILE) == new


def test_tied_tensors_both_return() -> None:
    before, after = raw(np.zeros(100, np.float32), "F32"), raw(np.ones(100, np.float32), "F32")
    payload, entries = encode_delta({"a": before, "b": before}, {"a": after, "b": after})
    assert apply_delta({"a": before, "b": before}, entries, payload, FILE) == {"a": after, "b": after}


def test_unchanged_tensors_store_nothing_and_stay_the_parents() -> None:
    weights = {"w": raw(np.arange(1000, dtype=np.float32), "F32"), "s": raw(np.arange(3, dtype=np.float32), "F32")}
    payload, entries = encode_delta(weights, weights)
    assert payload == b""
    assert [(entry.num_changed, entry.size_bytes) for entry in entries] == [(0, 0), (0, 0)]
    applied = apply_delta(weights, entries, payload, FILE)
    assert all(applied[name] is weights[name] for name in weights)


def versions() -> tuple[Weights, Weights]:
    """A tensor of five frames of which one changed nothing, small ones of two dtypes, and an empty one."""
    rng = np.random.default_rng(0)
    large = rng.integers(0, 2**16, 150).astype(np.uint16)
    after = large.copy()
    after[np.r_[0:9, 40:60:3, 149]] += 1
    small = rng.normal(0, 1, (4, 5)).astype(np.float32)
    parent = {
        "large": raw(large, "BF16"),
        "frozen": raw(large, "BF16"),
        "b": raw(small[0], "F32"),
        "c": raw(np.array([7], np.uint8), "U8"),
        "d": raw(small[1], "F32"),
        "e": raw(small[2, :0], "F32"),
    }
    new = {**parent, "large": raw(after, "BF16"), "b": raw(small[3], "F32"), "c": raw(np.array([9], np.uint8), "U8")}
    return parent, new


def test_large_tensors_are_cut_into_frames_and_small_ones_of_a_dtype_share_one() -> None:
    parent, new = versions()
    payload, entries = encode_delta(parent, new)
    names = [[tensor.name for tensor in entry.tensors] for entry in entries]
    assert names == [["frozen"], ["large"], ["b", "d", "e"], ["c"]]
    large = entries[1]
    assert (large.frame_elements, len(large.frame_sizes), large.num_changed) == (32, 5, 17)
    assert [size > 0 for size in large.frame_sizes] == [True, True, False, False, True]
    assert [(frame.first, frame.end) for frame in large.frames] == [(0, 32), (32, 64), (64, 96), (96, 128), (128, 150)]
    assert next(large.frames).offset == large.offset
    assert entries[0].size_bytes == 0
    assert sum(entry.size_bytes for entry in entries) == len(payload)
    assert sum(entry.num_elements for entry in entries) == sum(tensor.num_elements for tensor in new.values())


def test_small_tensors_fill_frames_up_to_a_chunk() -> None:
    parent = {f"{i:02d}": raw(np.full(10, i, np.uint8), "U8") for i in range(15)}
    new = {name: RawTensor("U8", (10,), bytes(10)) for name in parent}
    payload, entries = encode_delta(parent, new)
    assert [len(entry.tensors) for entry in entries] == [6, 6, 3]
    assert apply_delta(parent, entries, payload, FILE) == new


def test_one_entry_is_applied_by_reading_its_frames_alone() -> None:
    parent, new = versions()
    payload, entries = encode_delta(parent, new)
    asked: list[tuple[int, int]] = []

    def read(offset: int, size: int) -> bytes:
        asked.append((offset, size))
        return payload[offset : offset + size]

    large = entries[1]
    assert apply_entries({"large": parent["large"]}, [large], read, FILE) == {"large": new["large"]}
    assert asked == [(frame.offset, frame.size) for frame in large.frames if frame.size]


def test_a_read_that_returns_too_little_is_refused() -> None:
    parent, new = versions()
    payload, entries = encode_delta(parent, new)
    with pytest.raises(IntegrityError, match=rf"^{FILE}: tensor 'large': expected \d+ bytes at \d+, found"):
        apply_entries(parent, entries, lambda offset, size: payload[offset : offset + size - 1], FILE)


def test_results_are_written_to_the_memory_that_is_given() -> None:
    parent, new = versions()
    payload, entries = encode_delta(parent, new)
    memory = {name: bytearray(len(tensor.data)) for name, tensor in parent.items()}
    out = {name: memoryview(buffer) for name, buffer in memory.items()}
    assert apply_delta(parent, entries, payload, FILE, out=out) == new
    assert {name: bytes(buffer) for name, buffer in memory.items()} == {n: bytes(t.data) for n, t in new.items()}
    floats = {**out, "b": memoryview(np.zeros(5, np.float32))}
    assert apply_delta(parent, entries, payload, FILE, out=floats) == new


@pytest.mark.parametrize("buffer", [None, memoryview(bytes(300)), memoryview(bytearray(299))])
def test_memory_that_does_not_fit_is_refused(buffer: memoryview | None) -> None:
    parent, new = versions()
    payload, entries = encode_delta(parent, new)
    out = {name: memoryview(bytearray(len(tensor.data))) for name, tensor in parent.items()}
    del out["large"]
    if buffer is not None:
        out["large"] = buffer
    with pytest.raises(ValueError, match=r"^out\['large'\]: expected 300 writable bytes"):
        apply_delta(parent, entries, payload, FILE, out=out)


def test_a_result_cannot_be_written_to() -> None:
    parent, new = versions()
    payload, entries = encode_delta(parent, new)
    data = apply_delta(parent, entries, payload, FILE)["large"].data
    assert isinstance(data, memoryview)
    assert data.readonly


def test_frames_are_coded_in_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, new = ({"w": raw(np.full(64, value, np.uint16), "BF16")} for value in (1, 2))
    together = threading.Barrier(2, timeout=60)  # each of the two frames waits until the other is at work
    encode_frame, decode_frame = delta.encode_frame, delta.decode_frame
    monkeypatch.setattr(delta, "encode_frame", lambda *args: (together.wait(), encode_frame(*args))[1])
    monkeypatch.setattr(delta, "decode_frame", lambda *args: (together.wait(), decode_frame(*args))[1])
    payload, entries = encode_delta(parent, new, num_threads=2)
    assert len(entries[0].frame_sizes) == 2
    assert apply_delta(parent, entries, payload, FILE, num_threads=2) == new


def test_zero_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="num_threads must be at least 1, found 0"):
        encode_delta({}, {}, num_threads=0)


def test_digests_of_the_parent_that_are_known_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, new = versions()
    known = {name: tensor_digest(name, tensor) for name, tensor in parent.items()}
    expected = encode_delta(parent, new)
    hashed: list[RawTensor] = []
    monkeypatch.setattr(delta, "tensor_digest", lambda name, of: hashed.append(of) or tensor_digest(name, of))
    assert encode_delta(parent, new, parent_digests=known) == expected
    assert hashed == [new[name] for name in new]


def test_applying_hashes_every_base_and_every_result_that_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, new = versions()
    payload, entries = encode_delta(parent, new)
    hashed: list[str] = []
    monkeypatch.setattr(delta, "tensor_digest", lambda name, of: hashed.append(name) or tensor_digest(name, of))
    apply_delta(parent, entries, payload, FILE)
    assert sorted(hashed) == sorted([*parent, "large", "b", "d", "e", "c"])


def test_a_delta_costs_what_changed_and_not_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rng = np.random.default_rng(0)
    before = rng.integers(0, 2**32, 200_000, np.uint32)
    after = before.copy()
    after[np.flatnonzero(rng.random(before.size) < 0.01)] += 1
    payload, _ = encode_delta({"w": raw(before, "F32")}, {"w": raw(after, "F32")})
    # 0.081 bit of place for each element: 2,020 bytes; all steps are alike, and a sign takes a bit.
    assert len(payload) < 2_020 * 1.03 + 250 + 60


def test_equal_inputs_give_equal_bytes() -> None:
    parent, new = versions()
    backwards = sorted(parent, reverse=True)
    again = encode_delta({name: parent[name] for name in backwards}, {name: new[name] for name in backwards})
    assert again == encode_delta(parent, new)


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


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_flipped_bit_at_every_position_of_the_payload_is_refused(num_threads: int) -> None:
    parent, new = versions()
    payload, entries = encode_delta(parent, new)
    for position in range(len(payload)):
        altered = bytearray(payload)
        altered[position] ^= 1 << position % 8
        with pytest.raises(IntegrityError, match=rf"^{FILE}: tensor '"):
            apply_delta(parent, entries, bytes(altered), FILE, num_threads=num_threads)


def test_a_payload_cut_at_every_length_or_grown_is_refused() -> None:
    parent, new = versions()
    payload, entries = encode_delta(parent, new)
    for altered in [payload[:length] for length in range(len(payload))] + [payload + b"\0"]:
        with pytest.raises(IntegrityError, match=rf"^{FILE}: expected {len(payload)} bytes, found {len(altered)}"):
            apply_delta(parent, entries, altered, FILE)


def test_a_flipped_bit_at_every_position_of_the_base_is_refused() -> None:
    parent, new = versions()
    payload, entries = encode_delta(parent, new)
    for name, tensor in parent.items():
        for position in range(len(tensor.data)):
            data = bytearray(tensor.data)
            data[position] ^= 1 << position % 8
            other = {**parent, name: RawTensor(tensor.dtype, tensor.shape, bytes(data))}
            with pytest.raises(IntegrityError, match=rf"^{FILE}: tensor '{name}': base"):
                apply_delta(other, entries, payload, FILE)


def test_a_missing_base_is_refused() -> None:
    parent, new = versions()
    payload, entries = encode_delta(parent, new)
    del parent["b"]
    with pytest.raises(IntegrityError, match=rf"^{FILE}: expected one entry for each tensor of the base"):
        apply_delta(parent, entries, payload, FILE)
    with pytest.raises(IntegrityError, match=rf"^{FILE}: tensor 'b': expected a base F32\[5\], found no such tensor"):
        apply_entries(parent, entries, lambda at, size: payload[at : at + size], FILE)


def test_applying_twice_is_refused_and_does_not_revert() -> None:
    parent, new = versions()
    payload, entries = encode_delta(parent, new)
    with pytest.raises(IntegrityError, match=": base"):
        apply_delta(new, entries, payload, FILE)


def altered_entries(entries: tuple[DeltaEntry, ...]) -> Iterator[tuple[DeltaEntry, ...]]:
    frozen, large, small, single = entries
    yield ()
    yield (large, small, single)
    yield (frozen, large, small, single, single)
    yield (frozen, large, large, single)
    yield (frozen, small, large, single)
    yield (dataclasses.replace(frozen, tensors=()), *entries)
    (tensor,) = large.tensors
    sizes = large.frame_sizes
    for entry in [
        *(
            dataclasses.replace(large, tensors=(dataclasses.replace(tensor, **change),))
            for change in (
                {"name": "v"},
                {"shape": (75, 2)},
                {"shape": (149,)},
                {"base_digest": tensor.result_digest},
                {"result_digest": tensor.base_digest},
                {"result_digest": "0" * 64},
            )
        ),
        dataclasses.replace(large, dtype="F16"),
        dataclasses.replace(large, num_changed=large.num_changed - 1),
        dataclasses.replace(large, num_changed=0),
        dataclasses.replace(large, num_changed=10**12),
        dataclasses.replace(large, frame_elements=0),
        dataclasses.replace(large, frame_elements=-32),
        dataclasses.replace(large, frame_elements=31),
        dataclasses.replace(large, frame_elements=33),
        dataclasses.replace(large, frame_elements=10**12),
        dataclasses.replace(large, offset=1),
        dataclasses.replace(large, offset=-1),
        dataclasses.replace(large, frame_sizes=(sum(sizes),)),
        dataclasses.replace(large, frame_sizes=(*sizes, 0)),
        dataclasses.replace(large, frame_sizes=(sizes[0] - 1, sizes[1] + 1, *sizes[2:])),
        dataclasses.replace(large, frame_sizes=(sizes[1], sizes[0], *sizes[2:])),
        dataclasses.replace(large, frame_sizes=(sizes[0] + sizes[1], 0, *sizes[2:])),
        dataclasses.replace(large, frame_sizes=(-1, sizes[0] + sizes[1] + 1, *sizes[2:])),
        dataclasses.replace(large, frame_sizes=(0, 0, 0, 0, 0)),
    ]:
        yield (frozen, entry, small, single)
    yield (frozen, large, dataclasses.replace(small, tensors=tuple(reversed(small.tensors))), single)
    yield (frozen, large, dataclasses.replace(small, frame_elements=5, frame_sizes=(*small.frame_sizes, 0)), single)
    yield (
        dataclasses.replace(frozen, tensors=(dataclasses.replace(frozen.tensors[0], result_digest="0" * 64),)),
        large,
        small,
        single,
    )


def test_altered_entries_are_refused() -> None:
    parent, new = versions()
    payload, entries = encode_delta(parent, new)
    for altered in altered_entries(entries):
        with pytest.raises(IntegrityError, match=f"^{FILE}: "):
            apply_delta(parent, altered, payload, FILE)


def test_entries_whose_names_were_exchanged_are_refused() -> None:
    """Equal bytes under two names: the digests cover the name."""
    tensor = raw(np.arange(100, dtype=np.uint8), "U8")
    after = raw(np.arange(100, dtype=np.uint8) + 1, "U8")
    payload, (x, y) = encode_delta({"x": tensor, "y": tensor}, {"x": after, "y": tensor})
    exchanged = [
        dataclasses.replace(entry, tensors=(dataclasses.replace(entry.tensors[0], name=name),))
        for entry, name in ((x, "y"), (y, "x"))
    ]
    with pytest.raises(IntegrityError, match="tensor 'y': base"):
        apply_delta({"x": tensor, "y": tensor}, exchanged, payload, FILE)
