"""Where tensors lie, for kernels whose sums must have one order."""

from __future__ import annotations

from torch import Tensor

ALIGNMENT = (
    16  # bytes; Triton compiles one kernel for pointers that are multiples of it and another for those that are not
)


def aligned(x: Tensor) -> Tensor:
    """x, contiguous and at a multiple of 16 bytes; copied where it is not.

    How threads share a row, and with that the order of its sum, follows from what the compiler knows of the pointers.
    """
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
