"""Which form of an operation computes: the eager one, or a kernel in which a token's bits do not depend on the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

Mode = Literal["torch", "kernels", "invariant"]
# For all threads: a backward pass that computes a layer again runs in one of its own. Not by whether there is a gradient:
# a trainer's passes with and without one must round alike, or its first ratio is not 1.
_mode: Mode = "torch"


@contextmanager
def batch_invariant(is_on: bool = True) -> Iterator[None]:
    """On a GPU, operations run in kernels; with is_on products of matrices too, whose sums then have one order for any
    number of rows. On the CPU that is always so."""
    global _mode
    before, _mode = _mode, "invariant" if is_on else "kernels"
    try:
        yield
    finally:
        _mode = before


def is_batch_invariant() -> bool:
    return _mode == "invariant"


def uses_kernel(x: Tensor) -> bool:
    return _mode != "torch" and _is_known(x)


def uses_invariant_product(x: Tensor) -> bool:
    return _mode == "invariant" and _is_known(x)


def _is_known(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float32)
