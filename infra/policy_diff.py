"""Two versions side by side, tensor by tensor: how many elements have other bits, and how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from k3core.checkpoint.tensors import RawTensor, Weights, to_torch

_BLOCK = 1 << 22  # elements at a time: a difference in float64 is up to eight times as large as what it compares


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """num_changed: elements whose bits differ. max_abs: of their difference; NaN where a side is not finite."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_elements: int
    num_changed: int
    max_abs: float


@dataclass(frozen=True, slots=True)
class Difference:
    """tensors: of both, the largest difference first; only_a, only_b, reshaped: names, in order."""

    tensors: tuple[TensorDifference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    reshaped: tuple[str, ...]

    def by_dtype(self) -> dict[str, TensorDifference]:
        return {dtype: _total(dtype, (t for t in self.tensors if t.dtype == dtype)) for dtype in self.dtypes()}

    def dtypes(self) -> list[str]:
        return sorted({tensor.dtype for tensor in self.tensors})


def difference(a: Weights, b: Weights) -> Difference:
    both = sorted(a.keys() & b.keys())
    same = [name for name in both if (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape)]
    tensors = [_difference(name, a[name], b[name]) for name in same]
    # NaN first: what is not finite is the largest difference there is.
    tensors.sort(key=lambda t: (math.isnan(t.max_abs), t.max_abs, t.num_changed), reverse=True)
    return Difference(
        tuple(tensors),
        tuple(sorted(a.keys() - b.keys())),
        tuple(sorted(b.keys() - a.keys())),
        tuple(name for name in both if name not in set(same)),
    )


def _difference(name: str, a: RawTensor, b: RawTensor) -> TensorDifference:
    pair = to_torch({"a": a, "b": b})
    left, right = pair["a"].reshape(-1), pair["b"].reshape(-1)
    num_changed, max_abs = 0, 0.0
    for start in range(0, a.num_elements, _BLOCK):
        x, y = left[start : start + _BLOCK], right[start : start + _BLOCK]
        changed = (x.view(torch.uint8) != y.view(torch.uint8)).reshape(len(x), -1).any(-1)
        num_changed += int(changed.sum())
        if changed.any():
            wide = torch.complex128 if x.dtype.is_complex else torch.float64
            gap = float((x[changed].to(wide) - y[changed].to(wide)).abs().max())
            max_abs = math.nan if math.isnan(max_abs) or not math.isfinite(gap) else max(max_abs, gap)
    return TensorDifference(name, a.dtype, a.shape, a.num_elements, num_changed, max_abs)


def _total(name: str, tensors: Iterable[TensorDifference]) -> TensorDifference:
    found = list(tensors)
    gaps = [tensor.max_abs for tensor in found]
    return TensorDifference(
        name=f"{len(found)} tensors",
        dtype=name,
        shape=(),
        num_elements=sum(tensor.num_elements for tensor in found),
        num_changed=sum(tensor.num_changed for tensor in found),
        max_abs=math.nan if any(map(math.isnan, gaps)) else max(gaps, default=0.0),
    )
