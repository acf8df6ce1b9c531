"""Which type an accumulation runs in."""

from __future__ import annotations

import torch


def wider(dtype: torch.dtype) -> torch.dtype:
    """The next wider type: float32 for bf16 and fp16, float64 for float32 (and for itself)."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The type inside an op, between two of its rounding points: float32 for bf16 and fp16, else the type itself."""
    return torch.promote_types(dtype, torch.float32)
