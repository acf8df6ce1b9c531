"""A checkpoint's tensors into a model, or one after the other without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from k3core.checkpoint.folder import Checkpoint, Stored, open_checkpoint
from k3core.checkpoint.names import PACKED, SCALE, expected_shapes
from k3core.checkpoint.safetensors_io import DTYPES, Check, TensorReader, first_nan_scale, first_non_finite
from k3core.errors import IntegrityError
from k3core.model.model import K3Model, build_model
from k3core.model.weights import named_tensors
from k3kernels.mxfp4 import unpack

Progress = Callable[[int, int, str], None]
"""(bytes read, bytes to read, the tensor just read)"""


def load_model(
    folder: Path | str | Checkpoint,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    experts: Literal["keep", "unpacked"] = "keep",
    check_finite: bool = True,
) -> K3Model:
    """The model that a folder holds, its weights in `dtype` but for those that a model keeps in fp32.

    experts: "keep" leaves packed experts packed, "unpacked" makes plain parameters of them. Tensors come one by one:
    straight into the model where type and device agree, through one small buffer otherwise, so host memory beside the
    model stays within the largest tensor. Raises as `open_checkpoint` does; IntegrityError naming tensor and element for
    NaN in a scale or in a padding that is not zero, and, with check_finite, for any number that is not finite.
    """
    if experts not in ("keep", "unpacked"):
        raise ValueError(f"experts {experts!r}: expected keep or unpacked")
    checkpoint = folder if isinstance(folder, Checkpoint) else open_checkpoint(folder)
    cfg = checkpoint.cfg if experts == "keep" else replace(checkpoint.cfg, expert_quantization=None)
    model = build_model(cfg, dtype, device)
    own = named_tensors(model)
    assert own.keys() == expected_shapes(cfg).keys()
    stored = checkpoint.model_tensors
    total, done = sum(each.entry.num_bytes for each in stored.values()), 0
    with TensorReader(checkpoint.folder) as reader, torch.no_grad():
        for name in _in_file_order(stored):
            each = stored[name]
            done += each.entry.num_bytes
            if name in own:
                _read(reader, name, each, own[name], check_finite)
            elif name.endswith(PACKED):
                matrix = name.removesuffix(PACKED)
                target = own[f"{matrix}.weight"]
                codes, scale = (fresh_tensor(reader, checkpoint, n, check_finite) for n in (name, f"{matrix}{SCALE}"))
                wide = target.dtype if target.dtype in (torch.bfloat16, torch.float64) else torch.float32
                values = unpack(codes, scale, wide)
                if check_finite and first_non_finite(values.view(-1)) is not None:
                    raise IntegrityError(
                        f"{reader.folder / each.file}: {each.hf_name} stands for numbers beyond 2^128: "
                        f"its scales reach byte {int(scale.max())}"
                    )
                target.copy_(values)
            if progress is not None:
                progress(done, total, name)
    return model


def iter_tensors(checkpoint: Checkpoint, check_finite: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(internal name, tensor) of the text model, one at a time in the order of the files.

    Each is fresh, on the host, in the type that it is stored in and the model's shape; packed experts come as codes and
    scales. Raises IntegrityError as `load_model` does.
    """
    stored = checkpoint.model_tensors
    with TensorReader(checkpoint.folder) as reader:
        for name in _in_file_order(stored):
            yield name, fresh_tensor(reader, checkpoint, name, check_finite)


def read_tensor(checkpoint: Checkpoint, name: str, check_finite: bool = True) -> Tensor:
    """One tensor by internal name, as `iter_tensors` gives it. Raises KeyError for a name that is not there."""
    with TensorReader(checkpoint.folder) as reader:
        return fresh_tensor(reader, checkpoint, name, check_finite)


def _in_file_order(stored: Mapping[str, Stored]) -> list[str]:
    return sorted(stored, key=lambda name: (stored[name].file, stored[name].entry.offset))


def fresh_tensor(reader: TensorReader, checkpoint: Checkpoint, name: str, check_finite: bool) -> Tensor:
    """In the type that it is stored in and the model's shape."""
    stored = checkpoint.tensors[name]
    shape = (checkpoint.cfg.kda_num_heads,) if name.endswith("A_log") else stored.entry.shape
    target = torch.empty(shape, dtype=DTYPES[stored.entry.dtype])
    _read(reader, name, stored, target, check_finite)
    return target


def _read(reader: TensorReader, name: str, stored: Stored, target: Tensor, check_finite: bool) -> None:
    check = check_for(name, stored.entry.dtype, check_finite)
    shape = stored.entry.shape
    if not name.endswith("A_log"):
        reader.read(stored.file, stored.hf_name, stored.entry, target, check)
        return
    padded = torch.empty(shape, dtype=DTYPES[stored.entry.dtype])
    reader.read(stored.file, stored.hf_name, stored.entry, padded, check)
    heads, padding = padded.flatten().tensor_split([target.numel()])
    if padding.any():
        first = len(heads) + int(padding.nonzero()[0])
        raise IntegrityError(
            f"{reader.folder / stored.file}: {stored.hf_name} holds {padded[first].item()} at [{first}]: "
            f"what follows the {len(heads)} heads must be zero"
        )
    target.copy_(heads)


def check_for(name: str, dtype: str, check_finite: bool) -> Check | None:
    if name.endswith(SCALE):
        return first_nan_scale
    return first_non_finite if check_finite and dtype != "U8" else None
