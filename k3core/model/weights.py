"""Named tensors of a model under the checkpoint's names: experts one by one, views of the stacked parameters."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from k3core.model.model import K3Model

_STACKED = re.compile(r"^(.*\.experts)\.(w[123])(_lora_[AB])?$")


def named_tensors(model: K3Model) -> dict[str, Tensor]:
    """Every parameter and buffer by its checkpoint name; `experts.E.w1.weight` is a view of row E of `experts.w1`."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=False).items():
        stacked = _STACKED.match(name)
        if stacked is None:
            tensors[name] = tensor
            continue
        experts, matrix, lora = stacked.groups()
        suffix = f".{lora[1:]}" if lora else ".weight"
        for e in range(tensor.shape[0]):
            tensors[f"{experts}.{e}.{matrix}{suffix}"] = tensor[e]
    return tensors


def is_adapter_tensor(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


@torch.no_grad()
def load_tensors(model: K3Model, tensors: dict[str, Tensor]) -> None:
    """Copy into the model's own storage. Raises ValueError that lists every missing, unexpected or misshapen tensor
    before anything is written."""
    own = named_tensors(model)
    problems = [f"missing {name}" for name in own if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in own]
    for name, tensor in own.items():
        other = tensors.get(name)
        if other is not None and (other.shape != tensor.shape or other.dtype != tensor.dtype):
            problems.append(
                f"{name}: {other.dtype} {tuple(other.shape)} in place of {tensor.dtype} {tuple(tensor.shape)}"
            )
    if problems:
        raise ValueError("weights do not fit the model: " + "; ".join(problems))
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
