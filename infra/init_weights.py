"""The weights of a checkpoint's folder as a run begins with them: read once, one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from infra.init_identity import digest_of
from k3core.checkpoint.hf import Checkpoint, iter_tensors
from k3core.checkpoint.names import PACKED, SCALE, expected_shapes, expert_matrix, is_packed, written_dtype
from k3core.checkpoint.safetensors_io import BITS, WORDS, encode_header, write_bytes, write_tensor
from k3core.model.config import K3Config
from k3core.model.model import K3Model
from k3core.model.weights import named_tensors
from k3kernels.mxfp4 import unpack

DTYPE = torch.float32  # of a run's weights: every stored type fits into it without rounding

OnTensor = Callable[[int, int], None]  # (bytes read, of)


def run_tensors(
    checkpoint: Checkpoint, model: K3Config, digests: dict[str, str], on_tensor: OnTensor
) -> Iterator[tuple[str, Tensor]]:
    """(internal name, tensor), every one of `model` once, in the order of the checkpoint's files.

    Numbers are widened to DTYPE, which changes none; packed experts keep their bytes, or are unpacked where `model` has
    plain ones. digests: gets `digest_of` each tensor as it is stored. Raises IntegrityError naming the tensor for a
    number that is not finite.
    """
    stored_at = checkpoint.model_tensors
    total, done = sum(stored.entry.num_bytes for stored in stored_at.values()), 0
    is_unpacked = model.expert_quantization is None
    halves: dict[str, Tensor] = {}
    for name, stored in iter_tensors(checkpoint):
        digests[name] = digest_of(name, stored)
        if not is_packed(name):
            yield name, stored.to(DTYPE)
        elif not is_unpacked:
            yield name, stored
        else:
            halves[name] = stored
            matrix = expert_matrix(name)
            if f"{matrix}{PACKED}" in halves and f"{matrix}{SCALE}" in halves:
                codes, scale = halves.pop(f"{matrix}{PACKED}"), halves.pop(f"{matrix}{SCALE}")
                yield f"{matrix}.weight", unpack(codes, scale, DTYPE)
        done += stored_at[name].entry.num_bytes
        on_tensor(done, total)


@torch.no_grad()
def fill_model(model: K3Model, tensors: Iterator[tuple[str, Tensor]]) -> None:
    own = named_tensors(model)
    left = set(own)
    for name, tensor in tensors:
        own[name].copy_(tensor)
        left.remove(name)
    assert not left, f"open_checkpoint found every tensor: {sorted(left)[:3]}"


def write_file(path: Path, model: K3Config, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """One safetensors file, the same bytes whatever the order of the tensors; no two of them are held at once."""
    layout = [
        (name, WORDS[written_dtype(name, DTYPE)], tuple(shape))
        for name, shape in sorted(expected_shapes(model).items())
    ]
    layout.sort(key=lambda tensor: -BITS[tensor[1]])  # so that each lies on a multiple of its element's size
    header, entries = encode_header(layout, {})
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_bytes(descriptor, header, 0)
        left = set(entries)
        for name, tensor in tensors:
            write_tensor(descriptor, name, entries[name], tensor, None)
            left.remove(name)
        assert not left, f"open_checkpoint found every tensor: {sorted(left)[:3]}"
    finally:
        os.close(descriptor)
