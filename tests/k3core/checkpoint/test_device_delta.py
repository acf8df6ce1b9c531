"""The delta of tensors that stay where they are, against the delta of their bytes. Equality throughout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from k3core.checkpoint import delta, device
from k3core.checkpoint.delta import CHUNK_BYTES, apply_delta, encode_delta
from k3core.checkpoint.device import INTEGERS, encode_device_delta
from k3core.checkpoint.tensors import TORCH_DTYPES, from_torch, tensor_digest
from k3core.errors import IntegrityError
from k3kernels.xor_compact.reference import BLOCKS

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.uint8]
State = dict[str, Tensor]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=gen)
    return (raw & 1 if dtype is torch.bool else raw).view(dtype).reshape(shape)


def changed(tensor: Tensor, density: float, gen: torch.Generator) -> Tensor:
    """Steps of 1 to 3 in the last place, or any bits."""
    if tensor.dtype is torch.bool:
        return tensor ^ (torch.rand(tensor.shape, generator=gen) < density)
    bits = tensor.reshape(-1).view(INTEGERS[tensor.element_size()])
    other = bits + torch.randint(1, 4, bits.shape, generator=gen).to(bits.dtype)
    return (
        torch.where(torch.rand(bits.shape, generator=gen) < density, other, bits)
        .view(tensor.dtype)
        .reshape(tensor.shape)
    )


def versions(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, density: float) -> tuple[State, State]:
    gen = torch.Generator().manual_seed(0)
    parent = {name: random_bits(shape, dtype, gen) for name, shape in shapes.items()}
    return parent, {name: changed(tensor, density, gen) for name, tensor in parent.items()}


def digests(state: State) -> dict[str, str]:
    return {name: tensor_digest(name, raw) for name, raw in from_torch(state).items()}


def assert_same(parent: State, new: State, *, to: str = "cpu", max_classes: int = 1, **options: object) -> int:
    """The number of changed elements."""
    want = encode_delta(from_torch(parent), from_torch(new), max_classes=max_classes)
    there = [{name: tensor.to(to) for name, tensor in state.items()} for state in (parent, new)]
    got = encode_device_delta(*there, parent_digests=digests(parent), max_classes=max_classes, **options)  # type: ignore[arg-type]
    assert got == want
    payload, entries = got
    assert apply_delta(from_torch(parent), entries, payload, "f") == from_torch(new)
    return sum(entry.num_changed for entry in entries)


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 KiB, and below 1 KiB tensors share one, so that a few thousand elements have several."""
    monkeypatch.setattr(delta, "CHUNK_BYTES", 64 << 10)
    monkeypatch.setattr(delta, "SMALL_BYTES", 1 << 10)


@pytest.mark.parametrize("max_classes", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("small_frames")
def test_tensors_around_frames_and_blocks_give_the_bytes_of_the_host_codec(dtype, max_classes):
    block, frame = BLOCKS[dtype.itemsize], delta.CHUNK_BYTES // dtype.itemsize
    sizes = [size + by for size in (block, 2 * block, frame, 2 * frame) for by in (-1, 0, 1)]
    parent, new = versions({f"w{size}": (size,) for size in sizes}, dtype, 0.03)
    assert assert_same(parent, new, max_classes=max_classes) > 0


def test_classes_by_magnitude_give_the_same_bytes_and_pay() -> None:
    gen = torch.Generator().manual_seed(0)
    weights = 0.02 * torch.randn(40_000, generator=gen)
    after = weights + 2e-5 * torch.randn(40_000, generator=gen).clamp(-1, 1)
    parent, new = {"w": weights.bfloat16()}, {"w": after.bfloat16()}
    assert_same(parent, new, max_classes=3)
    one, three = (
        encode_device_delta(parent, new, parent_digests=digests(parent), max_classes=classes)[0] for classes in (1, 3)
    )
    assert len(three) < 0.9 * len(one)


def test_frames_of_the_size_that_is_published_give_the_same_bytes() -> None:
    parent, new = versions({"w": (CHUNK_BYTES // 2 + 1,)}, torch.bfloat16, 0.01)
    assert assert_same(parent, new) > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("small_frames")
def test_small_tensors_share_a_frame_and_keep_their_own_digests(dtype):
    shapes = {
        "a": (),
        "b": (7,),
        "c": (0,),
        "d": (3, 5),
        "e": (1,),
        "f": (2, 0),
        **{f"g{i:03d}": (9,) for i in range(3)},
    }
    parent, new = versions(shapes, dtype, 0.3)
    new["b"] = parent["b"]
    assert assert_same(parent, new) > 0
    many, later = versions({f"{i:04d}": (200,) for i in range(700)}, dtype, 0.1)
    assert assert_same(many, later) > 0


@pytest.mark.parametrize("capacity_fraction", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("density", [0.0, 0.24, 0.26, 1.0])
@pytest.mark.usefixtures("small_frames")
def test_none_changed_all_changed_and_more_than_the_capacity_give_the_same_bytes(density, capacity_fraction):
    parent, new = versions({"w": (3, 20_000), "s": (10,), "t": (20,)}, torch.bfloat16, density)
    num_changed = assert_same(parent, new, capacity_fraction=capacity_fraction)
    assert density not in (0.0, 1.0) or num_changed == density * 60_030


@pytest.mark.parametrize("max_classes", [1, 3])
@given(st.sampled_from(sorted(TORCH_DTYPES)), st.integers(0, 400), st.sampled_from([0.0, 0.05, 0.5]))
def test_every_dtype_of_the_codec_is_taken(max_classes, word, size, density):
    gen = torch.Generator().manual_seed(size)
    parent = {"w": random_bits((size,), TORCH_DTYPES[word], gen), "x": random_bits((2, 3), TORCH_DTYPES[word], gen)}
    assert_same(
        parent, {name: changed(tensor, density, gen) for name, tensor in parent.items()}, max_classes=max_classes
    )


def test_views_are_taken_by_their_values() -> None:
    gen = torch.Generator().manual_seed(0)
    base = random_bits((300, 40), torch.bfloat16, gen)
    other = torch.complex(torch.randn(5, generator=gen), torch.randn(5, generator=gen))
    parent = {"w": base.t(), "conj": other.conj(), "neg": torch._neg_view(other.real.clone())}
    after = torch.complex(other.real + 1, other.imag)
    new = {"w": changed(base, 0.1, gen).t(), "conj": after.conj(), "neg": torch._neg_view(after.real.clone())}
    assert assert_same(parent, new) > 0


@pytest.mark.usefixtures("small_frames")
def test_threads_and_digests_that_are_handed_in_change_no_byte() -> None:
    parent, new = versions({"w": (90_000,), "v": (50_000,), "s": (9,)}, torch.float32, 0.02)
    assert_same(parent, new, num_threads=3)
    assert_same(parent, new, result_digests=digests(new))


@pytest.mark.usefixtures("small_frames")
def test_only_what_changed_comes_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, new = versions({"w": (60_000,), "v": (50_000,), "s": (9,), "t": (99,)}, torch.bfloat16, 0.02)
    new["t"] = changed(parent["t"], 1.0, torch.Generator())
    new["v"] = parent["v"]
    before, after = digests(parent), digests(new)
    sizes: list[int] = []
    to_host = device._to_host
    monkeypatch.setattr(device, "_to_host", lambda integers: sizes.append(integers.numel()) or to_host(integers))
    monkeypatch.setattr(device, "tensor_digest", lambda *_: pytest.fail("hashed again"))
    encode_device_delta(parent, new, parent_digests=before, result_digests=after)
    assert max(sizes) < 0.03 * 60_000
    hashed: list[str] = []
    monkeypatch.setattr(device, "tensor_digest", lambda name, of: hashed.append(name) or tensor_digest(name, of))
    new["s"] = parent["s"]
    encode_device_delta(parent, new, parent_digests=before)
    assert hashed == ["w", "t"]


def test_digests_that_the_bits_contradict_are_refused() -> None:
    parent, new = versions({"w": (100,), "v": (100,)}, torch.bfloat16, 1.0)
    new["v"] = parent["v"]
    for wrong in (
        {"parent_digests": digests(new)},
        {"parent_digests": digests(parent), "result_digests": digests(parent)},
    ):
        with pytest.raises(IntegrityError, match=r"^tensor 'w': expected digests that differ .* found 100 changed"):
            encode_device_delta(parent, new, **wrong)
    other = {**digests(new), "v": "0" * 64}
    with pytest.raises(IntegrityError, match=r"^tensor 'v': .* found 0 changed elements"):
        encode_device_delta(parent, new, parent_digests=digests(parent), result_digests=other)


def test_what_cannot_be_a_delta_is_refused() -> None:
    parent, new = versions({"w": (10,)}, torch.bfloat16, 0.5)
    for other in ({}, {"w": new["w"].float()}, {"w": new["w"].reshape(2, 5)}, {**new, "x": new["w"]}):
        with pytest.raises(ValueError, match="publish this version in full"):
            encode_device_delta(parent, other, parent_digests=digests(parent))
    with pytest.raises(ValueError, match=r"^parent_digests: expected the digest of every tensor, found none of w"):
        encode_device_delta(parent, new, parent_digests={})
    with pytest.raises(ValueError, match=r"^result_digests: expected the digest"):
        encode_device_delta(parent, new, parent_digests=digests(parent), result_digests={})
    with pytest.raises(ValueError, match=r"^tensor 'w' is torch.complex128"):
        encode_device_delta({"w": torch.zeros(1, dtype=torch.complex128)}, new, parent_digests={})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("max_classes", [1, 3])
def test_a_gpu_gives_the_bytes_of_the_host_codec(max_classes):
    for dtype in DTYPES:
        parent, new = versions({"w": (CHUNK_BYTES + 1,), "dense": (99_999,), "s": (10,), "t": (20,)}, dtype, 0.02)
        new["dense"] = changed(parent["dense"], 0.9, torch.Generator().manual_seed(1))
        assert assert_same(parent, new, to="cuda", max_classes=max_classes, num_threads=2) > 0
