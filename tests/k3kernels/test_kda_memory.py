"""What the chunked recurrence holds at once, counted from the shapes of every tensor made, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import finalize

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from k3kernels.kda import eager
from k3kernels.kda.reference import kda_chunked as kda_chunked_whole

Form = Callable[..., tuple[Tensor, Tensor]]

K = 128
MIB = 2**20


class Peak(TorchDispatchMode):
    """bytes and peak: of the storages that were made inside and are alive. largest: the largest one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = self.largest = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.alive | inputs:
                self.count(x.untyped_storage())
        return out

    def count(self, storage: torch.UntypedStorage) -> None:
        self.alive.add(storage._cdata)
        self.bytes += storage.nbytes()
        self.peak, self.largest = max(self.peak, self.bytes), max(self.largest, storage.nbytes())
        finalize(storage, self.forget, storage._cdata, storage.nbytes())

    def forget(self, key: int, nbytes: int) -> None:
        self.alive.discard(key)
        self.bytes -= nbytes


def held(form: Form, num_tokens: int, num_heads: int, lower_bound: float | None) -> tuple[int, int]:
    """Bytes beyond outputs and gradients at the peak of a forward and backward pass in bf16, and the largest tensor's."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(1, *shape, dtype=dtype, device="meta", requires_grad=True)

    qkv = [empty(num_tokens, num_heads, K, dtype=torch.bfloat16) for _ in range(3)]
    args = [*qkv, empty(num_tokens, num_heads, K), empty(num_tokens, num_heads), empty(num_heads, K, K)]
    with Peak() as peak:
        outputs = form(*args, 16, lower_bound, K**-0.5)
        gradients = torch.autograd.grad(outputs, args, [torch.empty_like(out) for out in outputs])
    return peak.peak - sum(x.nbytes for x in (*outputs, *gradients)), peak.largest


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_a_long_sequence_holds_a_few_times_the_bound(
    lower_bound: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/numerics.md has the same count at full size: 16,384 tokens of 32 heads, 256 MiB."""
    monkeypatch.setattr(eager, "LARGEST_BYTES", 16 * MIB)
    extra, largest = held(eager.kda_chunked, 1024, 32, lower_bound)
    whole, largest_of_whole = held(kda_chunked_whole, 1024, 32, lower_bound)
    assert largest <= 16 * MIB
    assert extra < 10 * 16 * MIB
    assert whole > 3 * extra  # 16 segments, each with a state of its own
    assert largest_of_whole > largest
