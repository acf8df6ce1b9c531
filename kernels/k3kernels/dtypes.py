"""Which type an accumulation runs in."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def wider(dtype: torch.dtype) -> torch.dtype:
    """The next wider type: float32 for bf16 and fp16, float64 for float32 (and for itself)."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64


@cache  # each operation asks, and on a tiny model that shows
def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The type inside an op, between two of its rounding points: float32 for bf16 and fp16, else the type itself."""
    return torch.promote_types(dtype, torch.float32)


@cache
def constant(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor on the CPU: an operation would convert a Python number anew each time."""
    with torch.inference_mode(False):  # whoever asks first may be in it, and what is made there has no place in a graph
        return torch.tensor(value, dtype=dtype, device="cpu")
