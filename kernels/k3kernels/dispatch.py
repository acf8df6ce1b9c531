"""Which form of an operation computes: the eager one, or a kernel in which a token's bits do not depend on the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_is_batch_invariant = False  # for all threads: a backward pass that computes a layer again runs in one of its own


@contextmanager
def batch_invariant(is_on: bool = True) -> Iterator[None]:
    """On a GPU, products of matrices too run in kernels whose sums have one order for any number of rows. On the CPU this
    is always so."""
    global _is_batch_invariant
    before, _is_batch_invariant = _is_batch_invariant, is_on
    try:
        yield
    finally:
        _is_batch_invariant = before


def is_batch_invariant() -> bool:
    return _is_batch_invariant


def uses_kernel(x: Tensor) -> bool:
    """On a GPU in bf16 or fp32, without a gradient or where bits must not depend on the batch."""
    is_known = x.is_cuda and x.dtype in (torch.bfloat16, torch.float32)
    return is_known and (_is_batch_invariant or not torch.is_grad_enabled())


def uses_invariant_product(x: Tensor) -> bool:
    return _is_batch_invariant and x.is_cuda and x.dtype in (torch.bfloat16, torch.float32)
