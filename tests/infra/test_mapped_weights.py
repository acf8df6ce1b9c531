"""Files as their tensors' memory: the same tensors as a reader that copies, and no view of a file that is not whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.mapped_weights import lay_out_like, map_weights
from k3core.checkpoint.tensors import RawTensor, from_safetensors, to_safetensors, weights_sha256
from k3core.errors import IntegrityError

WEIGHTS = {
    "a": RawTensor("F32", (2, 3), bytes(range(24))),
    "b": RawTensor("BF16", (3,), b"abcdef"),
    "empty": RawTensor("F32", (0, 4), b""),
    "scalar": RawTensor("I64", (), b"12345678"),
    "small": RawTensor("U8", (1,), b"x"),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    path.write_bytes(to_safetensors(WEIGHTS))
    return path


def test_a_mapped_file_has_the_tensors_that_a_reader_gets(file: Path) -> None:
    mapped = map_weights(file)
    assert mapped == from_safetensors(file.read_bytes()) == WEIGHTS
    assert weights_sha256(mapped) == weights_sha256(WEIGHTS)
    assert isinstance(mapped["a"].data, memoryview)
    assert mapped["a"].data.readonly


def test_a_map_outlives_its_files_name(file: Path) -> None:
    mapped = map_weights(file)
    file.unlink()
    assert mapped == WEIGHTS


def test_a_file_without_tensors_is_no_map(tmp_path: Path) -> None:
    path = tmp_path / "none.safetensors"
    path.write_bytes(to_safetensors({}))
    assert map_weights(path) == {}


def test_what_is_written_to_the_views_is_the_file_that_a_writer_makes(file: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.safetensors"
    laid = lay_out_like(file, made)
    assert laid.views.keys() == WEIGHTS.keys()
    for name, view in laid.views.items():
        view[:] = bytes(WEIGHTS[name].data)[::-1]
    laid.flush()
    expected = {name: RawTensor(raw.dtype, raw.shape, bytes(raw.data)[::-1]) for name, raw in WEIGHTS.items()}
    assert made.read_bytes() == to_safetensors(expected)
    with pytest.raises(FileExistsError):
        lay_out_like(file, made)


def test_every_torn_file_is_refused(file: Path) -> None:
    data = file.read_bytes()
    for size in range(len(data)):
        file.write_bytes(data[:size])
        with pytest.raises(IntegrityError, match=r"w\.safetensors: expected a safetensors file of \d+ bytes, found"):
            map_weights(file)
    file.write_bytes(data + b"!")
    with pytest.raises(IntegrityError, match="found tensors up to byte"):
        map_weights(file)


@pytest.mark.parametrize(
    "header",
    [
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"t": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [-4, 4]}},
        {"t": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}},
        {"t": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}},
        {"t": {"dtype": "F32", "shape": [2]}},
        {"t": [0, 8]},
        {
            "t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "u": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        },
        [],
    ],
)
def test_a_header_that_does_not_fit_the_file_is_refused(tmp_path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(IntegrityError, match=r"odd\.safetensors: expected a safetensors file"):
        map_weights(path)
