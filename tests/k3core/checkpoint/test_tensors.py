import hashlib

import numpy as np
import pytest
import safetensors.torch
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from k3core.checkpoint.tensors import (
    TORCH_DTYPES,
    RawTensor,
    Weights,
    combine_digests,
    from_safetensors,
    from_torch,
    tensor_digest,
    to_safetensors,
    to_torch,
    weights_sha256,
)
from k3core.errors import IntegrityError


@st.composite
def weights_of_any_kind(draw: st.DrawFn) -> Weights:
    """Arbitrary bytes under every dtype: NaN payloads, -0.0, infinities, 0-d and zero-size tensors among them."""
    weights = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=6), max_size=4, unique=True)):
        word = draw(st.sampled_from(sorted(TORCH_DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        size = int(np.prod(shape, dtype=int)) * TORCH_DTYPES[word].itemsize
        # A bool has two valid bytes; torch keeps others, but they are not values.
        byte = st.integers(0, 1 if word == "BOOL" else 255)
        weights[name] = RawTensor(word, shape, bytes(draw(st.lists(byte, min_size=size, max_size=size))))
    return weights


@settings(deadline=None)
@given(weights_of_any_kind())
def test_torch_returns_every_bit(weights: Weights) -> None:
    assert from_torch(to_torch(weights)) == weights


@settings(deadline=None)
@given(weights_of_any_kind())
def test_safetensors_returns_every_bit(weights: Weights) -> None:
    assert from_safetensors(to_safetensors(weights)) == weights


@pytest.mark.parametrize("bits", [0x7FC1, 0xFFFF, 0x8000, 0x0001, 0x7F80], ids=hex)
def test_a_bfloat16_keeps_its_bits(bits: int) -> None:
    tensor = torch.tensor([bits], dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    raw = from_torch({"w": tensor})["w"]
    assert raw == RawTensor("BF16", (1,), bits.to_bytes(2, "little"))
    assert int(to_torch({"w": raw})["w"].view(torch.uint16)[0]) == bits


def test_the_official_reader_loads_what_is_written() -> None:
    state = {"a": torch.randn(3, 5), "b": torch.tensor(-0.0), "c": torch.empty(0, 4, dtype=torch.bfloat16)}
    loaded = safetensors.torch.load(to_safetensors(from_torch(state)))
    assert {n: (t.dtype, t.shape) for n, t in loaded.items()} == {n: (t.dtype, t.shape) for n, t in state.items()}
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert torch.signbit(loaded["b"])


def test_what_the_official_writer_wrote_is_read() -> None:
    state = {"a": torch.arange(6, dtype=torch.int64).reshape(2, 3), "b": torch.ones(2, dtype=torch.float8_e4m3fn)}
    assert from_safetensors(safetensors.torch.save(state)) == from_torch(state)


def test_views_are_read_as_their_values() -> None:
    matrix = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    views = {"transposed": matrix.T, "strided": matrix[:, ::2], "conjugate": torch.tensor([1 + 2j]).conj()}
    back = to_torch(from_torch(views))
    assert all(torch.equal(back[name], views[name].resolve_conj()) for name in views)


def test_tied_tensors_are_both_kept() -> None:
    shared = torch.ones(4)
    assert from_safetensors(to_safetensors(from_torch({"a": shared, "b": shared}))).keys() == {"a", "b"}


def test_the_order_of_names_changes_neither_file_nor_digest() -> None:
    a, b = RawTensor("U8", (1,), b"a"), RawTensor("F32", (1,), b"bbbb")
    assert to_safetensors({"x": a, "y": b}) == to_safetensors({"y": b, "x": a})
    assert weights_sha256({"x": a, "y": b}) == weights_sha256({"y": b, "x": a})


def test_the_digest_covers_name_dtype_shape_and_bytes() -> None:
    versions: list[Weights] = [
        {"w": RawTensor("U8", (4,), b"abcd")},
        {"v": RawTensor("U8", (4,), b"abcd")},
        {"w": RawTensor("I8", (4,), b"abcd")},
        {"w": RawTensor("U8", (2, 2), b"abcd")},
        {"w": RawTensor("U8", (4,), b"abce")},
        {"w": RawTensor("U8", (4,), b"abcd"), "x": RawTensor("U8", (0,), b"")},
        {},
    ]
    assert len({weights_sha256(weights) for weights in versions}) == len(versions)


def test_the_identity_is_the_sha256_of_a_canonical_document_of_the_blake3_of_each_tensor() -> None:
    a, b = RawTensor("U8", (1,), b"a"), RawTensor("F32", (1, 1), b"bbbb")
    digests = {
        "x": blake3(b"('x', 'U8', (1,))" + b"a").hexdigest(),
        "y": blake3(b"('y', 'F32', (1, 1))" + b"bbbb").hexdigest(),
    }
    assert {"x": tensor_digest("x", a), "y": tensor_digest("y", b)} == digests
    document = f'{{"x":"{digests["x"]}","y":"{digests["y"]}"}}'
    assert weights_sha256({"y": b, "x": a}) == combine_digests(digests) == hashlib.sha256(document.encode()).hexdigest()


def test_read_only_memory_holds_a_tensor_as_bytes_do() -> None:
    held = RawTensor("U8", (4,), memoryview(bytearray(b"abcd")).toreadonly())
    owned = RawTensor("U8", (4,), b"abcd")
    assert held == owned
    assert tensor_digest("w", held) == tensor_digest("w", owned)
    assert to_safetensors({"w": held}) == to_safetensors({"w": owned})


def test_a_dtype_without_a_word_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"tensor 'w' is torch\.complex128"):
        from_torch({"w": torch.zeros(1, dtype=torch.complex128)})


def test_a_file_cut_at_any_length_is_refused_by_name() -> None:
    data = to_safetensors({"w": RawTensor("BF16", (2, 3), bytes(range(12)))})
    for length in range(len(data)):
        with pytest.raises(IntegrityError, match=r"^some\.safetensors: "):
            from_safetensors(data[:length], "some.safetensors")
