"""Files of the safetensors format: headers that are checked, tensors read into place and written one by one."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3core.checkpoint import safetensors_io
from k3core.checkpoint.safetensors_io import (
    BITS,
    DTYPES,
    Entry,
    Header,
    TensorReader,
    encode_header,
    first_nan_scale,
    first_non_finite,
    read_header,
    write_bytes,
    write_tensor,
)
from k3core.errors import IntegrityError

FILE = "x.safetensors"


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b": torch.randn(5, 7, generator=generator),
        "a.ü": torch.randn(3, generator=generator).bfloat16(),
        "c": torch.arange(7, dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
    }


def write(path: Path, content: dict[str, Tensor], metadata: dict[str, str]) -> Header:
    words = {dtype: word for word, dtype in DTYPES.items()}
    order = sorted(content, key=lambda name: -content[name].element_size())
    header, entries = encode_header(((n, words[content[n].dtype], tuple(content[n].shape)) for n in order), metadata)
    with open(path, "wb") as file:
        write_bytes(file.fileno(), header, 0)
        for name, entry in entries.items():
            write_tensor(file.fileno(), name, entry, content[name], None)
    return read_header(path)


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def tensor(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_the_library_reads_what_is_written_here(tmp_path: Path) -> None:
    write(tmp_path / FILE, tensors(), {"format": "pt"})
    loaded = load_file(tmp_path / FILE)
    assert loaded.keys() == tensors().keys()
    assert all(torch.equal(loaded[name], value) for name, value in tensors().items())
    with safetensors.safe_open(tmp_path / FILE, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_what_the_library_writes_is_read_here(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / FILE, metadata={"format": "pt"})
    header = read_header(tmp_path / FILE)
    assert header.metadata == {"format": "pt"}
    with TensorReader(tmp_path) as reader:
        for name, value in tensors().items():
            target = torch.full_like(value, 7)
            reader.read(FILE, name, header.entries[name], target, None)
            assert torch.equal(target, value)


def test_a_header_is_its_own_encoding(tmp_path: Path) -> None:
    header = write(tmp_path / FILE, tensors(), {"format": "pt"})
    again, entries = encode_header(((n, e.dtype, e.shape) for n, e in header.entries.items()), header.metadata)
    assert (tmp_path / FILE).read_bytes()[: header.num_bytes] == again
    assert entries == header.entries
    assert header.num_bytes % 8 == 0


@pytest.mark.parametrize("chunk", [16, 64, 1 << 20])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tensor_is_read_into_its_place_in_any_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, wanted: torch.dtype, chunk: int
) -> None:
    monkeypatch.setattr(safetensors_io, "CHUNK_BYTES", chunk)
    value = torch.randn(9, 11, generator=torch.Generator().manual_seed(1)).to(stored)
    header = write(tmp_path / FILE, {"before": torch.zeros(3), "w": value}, {})
    stacked = torch.full((3, 9, 11), 7, dtype=wanted)
    with TensorReader(tmp_path) as reader:
        reader.read(FILE, "w", header.entries["w"], stacked[1], first_non_finite)
    assert torch.equal(stacked[1], value.to(wanted))
    assert stacked[[0, 2]].eq(7).all()


@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_a_narrower_type_is_rounded_to_nearest_even(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(safetensors_io, "CHUNK_BYTES", chunk)
    # Between 1 and 1 + 2^-7 in bf16: the ties go to the even mantissa, below and above.
    values = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 1 + 2**-7])
    want = torch.tensor([1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -1.0, 1 + 2**-7])
    header, entries = encode_header([("w", "BF16", (6,))], {})
    with open(tmp_path / FILE, "wb") as file:
        write_bytes(file.fileno(), header, 0)
        assert write_tensor(file.fileno(), "w", entries["w"], values, first_non_finite)
        assert not write_tensor(file.fileno(), "w", entries["w"], want, first_non_finite)
        assert write_tensor(file.fileno(), "w", entries["w"], values, first_non_finite)
    assert torch.equal(load_file(tmp_path / FILE)["w"].float(), want)


def test_a_transposed_tensor_is_written_row_by_row(tmp_path: Path) -> None:
    value = torch.arange(12.0).reshape(3, 4).T
    write(tmp_path / FILE, {"w": value}, {})
    assert torch.equal(load_file(tmp_path / FILE)["w"], value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [0, 1, 511, 998, 999])
def test_the_first_number_that_is_not_finite_is_found(bad: float, dtype: torch.dtype, index: int) -> None:
    chunk = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert first_non_finite(chunk) is None
    chunk[index:] = bad
    assert first_non_finite(chunk) == index


def test_the_largest_finite_number_is_finite() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        chunk = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype)
        assert first_non_finite(chunk) is None


def test_scale_byte_255_is_nan_and_254_is_not() -> None:
    assert first_nan_scale(torch.tensor([0, 254, 254], dtype=torch.uint8)) is None
    assert first_nan_scale(torch.tensor([0, 254, 255, 255], dtype=torch.uint8)) == 2


def test_what_a_check_refuses_is_named_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_io, "CHUNK_BYTES", 16)
    value = torch.ones(3, 5)
    value[2, 1] = math.nan
    header = write(tmp_path / FILE, {"w": value}, {})
    with (
        TensorReader(tmp_path) as reader,
        pytest.raises(IntegrityError, match=r"x\.safetensors: w holds nan at \[2, 1\]"),
    ):
        reader.read(FILE, "w", header.entries["w"], torch.zeros(3, 5), first_non_finite)
    with (
        open(tmp_path / FILE, "rb+") as file,
        pytest.raises(ValueError, match=r"w holds nan at \[2, 1\].* not written"),
    ):
        write_tensor(file.fileno(), "w", header.entries["w"], value, first_non_finite)


def test_a_number_too_large_for_the_stored_type_is_not_written(tmp_path: Path) -> None:
    _, entries = encode_header([("w", "F16", (2,))], {})
    with open(tmp_path / FILE, "wb") as file, pytest.raises(ValueError, match=r"w holds 100000.0 at \[1\], inf in F16"):
        write_tensor(file.fileno(), "w", entries["w"], torch.tensor([1.0, 1e5]), first_non_finite)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    header = write(tmp_path / FILE, {"w": torch.ones(100)}, {})
    os.truncate(tmp_path / FILE, header.num_bytes + 40)
    with TensorReader(tmp_path) as reader, pytest.raises(IntegrityError, match=r"w ends at byte \d+: the file shrank"):
        reader.read(FILE, "w", header.entries["w"], torch.zeros(100), None)


def test_a_reader_keeps_few_files_open_and_closes_them(tmp_path: Path) -> None:
    headers = [write(tmp_path / f"{i}.safetensors", {"w": torch.full((2,), float(i))}, {}) for i in range(20)]
    before = len(os.listdir("/proc/self/fd"))
    with TensorReader(tmp_path) as reader:
        for i, header in enumerate(headers):
            target = torch.zeros(2)
            reader.read(f"{i}.safetensors", "w", header.entries["w"], target, None)
            assert target.eq(i).all()
        assert len(os.listdir("/proc/self/fd")) <= before + safetensors_io.MAX_OPEN_FILES
    assert len(os.listdir("/proc/self/fd")) == before


FAULTS: dict[str, tuple[Any, bytes, str]] = {
    "no JSON": (b"{]", b"", "expected a JSON header"),
    "no UTF-8": (b'{"\xff": 1}', b"", "expected a JSON header"),
    "a list": ([1], b"", "expected a JSON object as header, found list"),
    "deep": (b"[" * 100_000, b"", "expected a JSON header"),
    "a long number": (b'{"w": ' + b"9" * 5000 + b"}", b"", "expected a JSON header"),
    "a name twice": (b'{"w": {"dtype": "F32"}, "w": 1}', b"", "'w' is there twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "__metadata__ is no object of strings"),
    "metadata a list": ({"__metadata__": []}, b"", "__metadata__ is no object of strings"),
    "no entry": ({"w": 3}, b"", "w: expected dtype, shape and data_offsets"),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 4]}}, b"", "w: expected dtype, shape and data_offsets"),
    "an unknown type": ({"w": tensor("F12")}, b"1234", "w: dtype 'F12' is not known"),
    "a type that is a list": ({"w": tensor(["F32"])}, b"1234", "w: dtype ['F32'] is not known"),
    "a negative size": ({"w": tensor(shape=[-1])}, b"1234", "w: shape [-1] is no list of sizes"),
    "a true size": ({"w": tensor(shape=[True])}, b"1234", "w: shape [True] is no list of sizes"),
    "a fraction": ({"w": tensor(shape=[1.0])}, b"1234", "w: shape [1.0] is no list of sizes"),
    "huge": ({"w": tensor(shape=[2**62, 2**62])}, b"1234", "data_offsets [0, 4] hold 4"),
    "beyond 64 bits": ({"w": tensor(shape=[2**64])}, b"1234", "is no list of sizes"),
    "three offsets": ({"w": tensor(offsets=[0, 4, 8])}, b"1234", "w: data_offsets [0, 4, 8] are no range"),
    "offsets backwards": ({"w": tensor(offsets=[4, 0])}, b"1234", "w: data_offsets [4, 0] are no range"),
    "another size": ({"w": tensor(shape=[2])}, b"1234", "F32 [2] takes 8 bytes, data_offsets [0, 4] hold 4"),
    "overlap": (
        {"v": tensor(), "w": tensor(offsets=[2, 6])},
        b"123456",
        "w begins at byte 132 and overlaps the tensor before it, which ends at 134",
    ),
    "a hole": ({"v": tensor(), "w": tensor(offsets=[8, 12])}, b"123456789012", "leaves a hole before it"),
    "a hole at the start": ({"v": tensor(offsets=[4, 8])}, b"12345678", "leaves a hole before it"),
    "cut short": ({"v": tensor()}, b"123", "the file has 72: cut short; fetch it again"),
    "more than described": ({"v": tensor()}, b"12345", "what follows belongs to nothing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_header_is_refused_in_one_line(tmp_path: Path, fault: str) -> None:
    header, data, message = FAULTS[fault]
    with pytest.raises(IntegrityError) as refusal:
        read_header(raw_file(tmp_path / FILE, header, data))
    assert message in str(refusal.value)
    assert str(refusal.value).startswith(f"{tmp_path / FILE}: ")
    assert "\n" not in str(refusal.value)
    with pytest.raises(safetensors.SafetensorError):
        load_file(tmp_path / FILE)


@pytest.mark.parametrize("length", [0, 7, 2**31, 2**63, 2**64 - 1, safetensors_io.MAX_HEADER_BYTES + 1])
def test_a_header_length_that_cannot_be_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(IntegrityError):
        read_header(raw_file(tmp_path / FILE, {"w": tensor()}, b"1234", length=length))


@pytest.mark.parametrize("size", range(10))
def test_a_file_shorter_than_a_header_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / FILE).write_bytes((100).to_bytes(8, "little")[:size].ljust(size, b"{"))
    with pytest.raises(IntegrityError, match="cut short, or no safetensors file"):
        read_header(tmp_path / FILE)


def test_what_is_no_file_is_a_line_for_a_person(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_header(tmp_path / "absent")
    with pytest.raises(ValueError, match="expected a safetensors file, found something else"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    with pytest.raises(ValueError, match="expected a safetensors file, found something else"):
        read_header(tmp_path / "pipe")


@given(st.lists(st.tuples(st.sampled_from(sorted(BITS)), st.lists(st.integers(0, 4), max_size=3)), max_size=6))
def test_tensors_lie_one_after_the_other(specs: list[tuple[str, list[int]]]) -> None:
    whole = [(d, s) for d, s in specs if math.prod(s) * BITS[d] % 8 == 0]
    header, entries = encode_header(((f"t{i}", d, tuple(s)) for i, (d, s) in enumerate(whole)), {"a": "b"})
    end = len(header)
    for (dtype, shape), entry in zip(whole, entries.values(), strict=True):
        assert entry == Entry(dtype, tuple(shape), end, math.prod(shape) * BITS[dtype] // 8)
        end += entry.num_bytes
