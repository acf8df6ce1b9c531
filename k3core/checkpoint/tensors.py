"""Weights as bytes: what is published, compared and hashed, blind to what the numbers mean."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import safetensors
import safetensors.torch
import torch
from blake3 import blake3

from k3core.errors import IntegrityError
from k3core.sealed import canonical_json

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_WORDS: dict[torch.dtype, str] = {dtype: word for word, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor's little-endian, row-major bytes, not to be written to. `dtype` is a safetensors word: F32, BF16, ..."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def __post_init__(self) -> None:
        assert self.dtype in TORCH_DTYPES, f"unknown dtype {self.dtype}"
        assert len(self.data) == self.num_elements * self.element_bytes, (
            f"{self.dtype}{list(self.shape)} does not fit {len(self.data)} bytes"
        )

    @property
    def element_bytes(self) -> int:
        return TORCH_DTYPES[self.dtype].itemsize

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


Weights = Mapping[str, RawTensor]


def from_torch(state: Mapping[str, torch.Tensor]) -> dict[str, RawTensor]:
    """A copy on the host, bit for bit. Raises ValueError for a dtype or layout that safetensors does not have."""
    weights: dict[str, RawTensor] = {}
    for name, tensor in state.items():
        word = DTYPE_WORDS.get(tensor.dtype)
        if word is None or tensor.layout is not torch.strided:
            raise ValueError(
                f"tensor {name!r} is {tensor.dtype}, {tensor.layout}: publish a dense tensor of one of "
                f"{', '.join(TORCH_DTYPES)}"
            )
        # resolve_*: a lazily conjugated or negated view holds other bytes than its values.
        host = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        # Flat first: a 0-d tensor cannot be viewed under an element of another size.
        weights[name] = RawTensor(word, tuple(tensor.shape), host.reshape(-1).view(torch.uint8).numpy().tobytes())
    return weights


def to_torch(weights: Weights) -> dict[str, torch.Tensor]:
    """Fresh, writable CPU tensors, bit for bit."""
    return {name: _tensor(raw) for name, raw in weights.items()}


def _tensor(raw: RawTensor) -> torch.Tensor:
    dtype = TORCH_DTYPES[raw.dtype]
    if not raw.data:  # frombuffer refuses an empty buffer
        return torch.empty(raw.shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw.data), dtype=dtype).reshape(raw.shape)


def tensor_digest(name: str, tensor: RawTensor) -> str:
    """BLAKE3 of name, dtype, shape and bytes, in hexadecimal."""
    digest = blake3(repr((name, tensor.dtype, tensor.shape)).encode())
    digest.update(tensor.data)
    return digest.hexdigest()


def combine_digests(digests: Mapping[str, str]) -> str:
    """`weights_sha256` from the `tensor_digest` of each tensor."""
    return hashlib.sha256(canonical_json(digests)).hexdigest()


def weights_sha256(weights: Weights) -> str:
    """The identity of a version: SHA-256 of the canonical JSON document {name: tensor_digest}.

    It covers every name, dtype, shape and byte, whatever the order of the mapping; the bytes go through BLAKE3, which
    is several times faster, and only the digests through SHA-256.
    """
    return combine_digests({name: tensor_digest(name, tensor) for name, tensor in weights.items()})


def same_layout(a: Weights, b: Weights) -> bool:
    """Equal names, dtypes and shapes."""
    return {n: (t.dtype, t.shape) for n, t in a.items()} == {n: (t.dtype, t.shape) for n, t in b.items()}


def to_safetensors(weights: Weights) -> bytes:
    """One safetensors file, the same bytes whatever the order of the mapping."""
    return safetensors.torch.save(to_torch({name: weights[name] for name in sorted(weights)}))


def from_safetensors(data: bytes, file: str = "safetensors bytes") -> dict[str, RawTensor]:
    """Raises IntegrityError naming `file` when it is not a whole safetensors file, ValueError for an unknown dtype."""
    try:
        tensors = safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        raise IntegrityError(f"{file}: expected a safetensors file, found {len(data)} other bytes: {error}") from error
    weights: dict[str, RawTensor] = {}
    for name, tensor in tensors:
        if tensor["dtype"] not in TORCH_DTYPES:
            raise ValueError(f"{file}: tensor {name!r} is {tensor['dtype']}, expected one of {', '.join(TORCH_DTYPES)}")
        weights[name] = RawTensor(tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
    return weights
