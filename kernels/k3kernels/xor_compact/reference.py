"""Which elements of a tensor changed, and by what XOR: the definition, in plain PyTorch on the CPU.

Elements are compared as bit patterns, so that -0.0 differs from 0.0 and NaN payloads count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PATTERNS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
"""Bytes of an element -> the dtype of its bit pattern."""
SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""The same widths in dtypes that every operation takes."""
BLOCKS = {1: 16384, 2: 8192, 4: 4096}
"""Bytes of an element -> elements of a block: 16 KiB, of base and of new."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """The changed elements of a tensor of num_elements, in ascending order.

    counts_B int32: changed elements in each run of `block` elements (the last one may be shorter).
    positions_N uint16: where in its block; values_N: XOR pattern, uint8, uint16 or uint32. Both are None when more
    elements changed than the capacity that was asked for; counts_B is exact all the same.
    """

    num_elements: int
    block: int
    counts_B: Tensor
    positions_N: Tensor | None
    values_N: Tensor | None

    @property
    def num_changed(self) -> int:
        return int(self.counts_B.sum(dtype=torch.int64))

    def to(self, device: torch.device | str) -> Compacted:
        positions_N = None if self.positions_N is None else self.positions_N.to(device)
        values_N = None if self.values_N is None else self.values_N.to(device)
        return Compacted(self.num_elements, self.block, self.counts_B.to(device), positions_N, values_N)


def xor_compact(base: Tensor, new: Tensor, capacity: int, block: int) -> Compacted:
    """Defines the op. base and new are patterns (`as_patterns`) of equal length."""
    xor = base.view(SIGNED[base.element_size()]) ^ new.view(SIGNED[new.element_size()])
    changed_N = torch.nonzero(xor).squeeze(1)
    counts_B = torch.bincount(changed_N // block, minlength=-(-xor.numel() // block)).to(torch.int32)
    if changed_N.numel() > capacity:
        return Compacted(xor.numel(), block, counts_B, None, None)
    positions_N = (changed_N % block).to(torch.int32).to(torch.int16).view(torch.uint16)
    return Compacted(xor.numel(), block, counts_B, positions_N, xor[changed_N].view(base.dtype))


def as_patterns(tensor: Tensor) -> Tensor:
    """The same memory as one flat run of unsigned integers."""
    if tensor.element_size() not in PATTERNS or not tensor.is_contiguous():
        raise ValueError(
            f"xor_compact takes contiguous elements of 1, 2 or 4 bytes, got {tensor.dtype} "
            f"{list(tensor.shape)} with strides {list(tensor.stride())}: pass tensor.contiguous(), or view it as bytes"
        )
    return tensor.detach().reshape(-1).view(PATTERNS[tensor.element_size()])


def changed_elements(compacted: Compacted) -> tuple[Tensor, Tensor]:
    """Positions in the whole tensor, int64 and ascending, and their XOR values: what a gap or bitmap stream encodes."""
    if compacted.positions_N is None or compacted.values_N is None:
        raise ValueError(
            f"{compacted.num_changed} of {compacted.num_elements} elements changed, more than the capacity: "
            "store the whole XOR, or call xor_compact with a larger capacity_fraction"
        )
    counts_B = compacted.counts_B.to(torch.int64)
    starts_B = torch.arange(counts_B.numel(), device=counts_B.device) * compacted.block
    local_N = compacted.positions_N.view(torch.int16).to(torch.int64) & 0xFFFF
    return torch.repeat_interleave(starts_B, counts_B) + local_N, compacted.values_N
