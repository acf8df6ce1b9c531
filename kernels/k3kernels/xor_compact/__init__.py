"""Which elements of a tensor changed, and by what XOR: what a delta of it stores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from k3kernels.xor_compact import reference
from k3kernels.xor_compact.reference import Compacted as Compacted
from k3kernels.xor_compact.reference import changed_elements as changed_elements


def xor_compact(base: Tensor, new: Tensor, capacity_fraction: float = 0.25) -> Compacted:
    """The changed elements of new against base: contiguous, alike in dtype, shape and device, 1, 2 or 4 bytes each.

    Keeps up to capacity_fraction of the elements; if more changed, positions_N and values_N are None and the caller
    stores the whole XOR. On a GPU each input byte is read once, and 4 bytes of scratch memory a kept element are taken
    (8 for 4-byte elements). The result does not depend on the device, bit for bit.
    """
    if (base.dtype, base.shape, base.device) != (new.dtype, new.shape, new.device):
        raise ValueError(
            f"xor_compact takes two tensors alike, got {base.dtype} {list(base.shape)} on {base.device} and "
            f"{new.dtype} {list(new.shape)} on {new.device}: a tensor of another layout is stored whole"
        )
    if not 0 <= capacity_fraction <= 1:
        raise ValueError(f"capacity_fraction must lie in 0..1, got {capacity_fraction}")
    base, new = reference.as_patterns(base), reference.as_patterns(new)
    capacity = math.ceil(new.numel() * capacity_fraction)
    if not new.is_cuda:
        return reference.xor_compact(base, new, capacity, reference.BLOCKS[new.element_size()])
    from k3kernels.xor_compact import triton  # where there is no GPU, Triton need not be installed

    with torch.cuda.device(new.device):
        return triton.xor_compact(base, new, capacity, triton.TILES[new.element_size()])
