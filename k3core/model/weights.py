"""Named tensors of a model under the checkpoint's names: experts one by one, views of the stacked storage."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from k3core.model.model import K3Model

_STACKED = re.compile(r"^(.*\.experts)\.(w[123])(|_packed|_scale|_lora_A|_lora_B)$")
_SUFFIX = {"": "weight", "_packed": "weight_packed", "_scale": "weight_scale", "_lora_A": "lora_A", "_lora_B": "lora_B"}
MAX_LISTED = 20  # problems; weights of another model have one for each tensor


def named_tensors(model: K3Model) -> dict[str, Tensor]:
    """Every parameter and buffer by its checkpoint name.

    `experts.E.w1.weight` is a view of row E of `experts.w1`; packed experts have `experts.E.w1.weight_packed` and
    `.weight_scale` in its place, views of `experts.w1_packed` and `experts.w1_scale`.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=False).items():
        stacked = _STACKED.match(name)
        if stacked is None:
            tensors[name] = tensor
            continue
        experts, matrix, part = stacked.groups()
        for e in range(tensor.shape[0]):
            tensors[f"{experts}.{e}.{matrix}.{_SUFFIX[part]}"] = tensor[e]
    return tensors


def is_adapter_tensor(name: str) -> bool:
    return name.endswith((".lora_A", ".lora_B"))


@torch.no_grad()
def load_tensors(model: K3Model, tensors: Mapping[str, Tensor]) -> None:
    """Copy into the model's own storage. Raises ValueError that lists missing, unexpected and misshapen tensors, up to
    MAX_LISTED of them, before anything is written."""
    own = named_tensors(model)
    _require_same_storage(own, tensors)
    problems = [f"missing {name}" for name in own if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in own]
    for name, tensor in own.items():
        other = tensors.get(name)
        if other is not None and (other.shape != tensor.shape or other.dtype != tensor.dtype):
            problems.append(
                f"{name}: {other.dtype} {tuple(other.shape)} in place of {tensor.dtype} {tuple(tensor.shape)}"
            )
    if problems:
        more = [f"and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
        raise ValueError("weights do not fit the model: " + "; ".join(problems[:MAX_LISTED] + more))
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def _require_same_storage(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Experts packed on one side only would be two problems for each of their matrices."""
    is_packed, are_packed = (any(name.endswith(".weight_packed") for name in side) for side in (own, tensors))
    if is_packed and not are_packed:
        raise ValueError(
            'weights do not fit the model: its routed experts are packed (model.expert_quantization "mxfp4"), those of '
            "the weights are not: set model.expert_quantization to none"
        )
    if are_packed and not is_packed:
        raise ValueError(
            "weights do not fit the model: their routed experts are packed, those of the model are not: set "
            'model.expert_quantization to "mxfp4", or unpack the weights'
        )
