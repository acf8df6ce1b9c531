"""Which tensors of a model keep at least fp32, whatever type its weights have."""

from __future__ import annotations

import torch
from torch import nn

# Gates, taps, the output norm's weight and the router's selection bias: in bf16 they move decays and expert choices
# (the released checkpoints store them in fp32 or ask for it), and together they are a few megabytes.
FP32_KEPT = ("A_log", "dt_bias", "conv1d.weight", "e_score_correction_bias", "o_norm.weight")
ADAPTER = ("lora_A", "lora_B")  # trained: an update of 1e-5 would vanish in a bf16 factor


def is_fp32_kept(name: str) -> bool:
    return name.endswith(FP32_KEPT + ADAPTER)


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type of tensor `name` in a model of type `dtype`."""
    return torch.promote_types(dtype, torch.float32) if is_fp32_kept(name) else dtype


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """In place, every floating point parameter and buffer to `stored_dtype`; packed codes and scales (uint8) stay.

    Raises ValueError for a dtype that is not a floating point type.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"a model's dtype must be a floating point type, got {dtype}: use torch.bfloat16 or float32")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(stored_dtype(name, dtype))
