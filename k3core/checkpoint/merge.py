"""An adapter added into its base's weights, tensor by tensor: W' = W + scale B A, rounded once to W's type."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from k3core.checkpoint.adapter import Adapter, require_adapter, require_same_base
from k3core.checkpoint.adapter_keys import matrix_path
from k3core.checkpoint.names import PACKED, SCALE, collapse
from k3core.model.lora import lora_matrices
from k3core.model.model import K3Model
from k3core.model.weights import is_adapter_tensor, named_tensors
from k3kernels.mxfp4 import GROUP, repack, unpack

PackedExperts = Literal["bf16", "mxfp4"]

BLOCK = 1 << 24  # elements at a time: 64 MiB of fp32, and some such for what is measured of them


@dataclass(frozen=True, slots=True)
class MergedTensor:
    """name: of the matrix. stored: its type now (`bfloat16`, `mxfp4`, ...).

    Of num_elements, the update is not zero in num_updated, and rounding left num_unchanged of these as they were.
    rounding_error: |W' - (W + U)| over |U| with U the update and root mean squares: 1 when nothing of it was kept.
    """

    name: str
    stored: str
    num_elements: int
    num_updated: int
    num_unchanged: int
    rounding_error: float


@dataclass(frozen=True, slots=True)
class MergeReport:
    """merged: every targeted matrix. num_tensors, num_parameters: of all weights that passed, the merged included."""

    merged: tuple[MergedTensor, ...]
    num_tensors: int
    num_parameters: int

    @property
    def num_merged_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.merged)

    @property
    def num_updated(self) -> int:
        return sum(tensor.num_updated for tensor in self.merged)

    @property
    def num_unchanged(self) -> int:
        return sum(tensor.num_unchanged for tensor in self.merged)

    @property
    def worst(self) -> MergedTensor:
        """Of the largest rounding error."""
        return max(self.merged, key=lambda tensor: tensor.rounding_error)

    def lines(self) -> list[str]:
        """For a person."""
        stored = ", ".join(f"{n} as {word}" for word, n in sorted(Counter(t.stored for t in self.merged).items()))
        return [
            f"merged {len(self.merged)} of {self.num_tensors} tensors, "
            f"{self.num_merged_parameters} of {self.num_parameters} parameters ({stored})",
            f"rounding left {self.num_unchanged} of {self.num_updated} updated elements as they were",
            f"largest rounding error {self.worst.rounding_error:.2g} of the update, in {self.worst.name}",
        ]


def merged(name: str, weight: Tensor, adapter: Adapter) -> tuple[Tensor, MergedTensor]:
    """The matrix `name` (`layers.0.self_attn.q_proj`, or `...experts.0.w1` of one expert), merged.

    Computed in fp32, or fp64 where the weight is. Raises ValueError for another shape than the adapter's, and where
    the sum is not finite in the weight's type.
    """
    out, stats = torch.empty_like(weight), _Stats()
    for rows, exact, update in _sums(name, weight, adapter):
        out[rows] = exact.to(weight.dtype)
        stats.add(weight[rows], out[rows], update)
    return out, stats.of(name, str(weight.dtype).removeprefix("torch."))


def merged_packed(
    name: str, packed: Tensor, scale: Tensor, adapter: Adapter, store: PackedExperts
) -> tuple[tuple[Tensor, ...], MergedTensor]:
    """As `merged` for a matrix in MXFP4: (weight,) in bf16, or (packed, scale) with the bytes of groups that the
    update leaves alone."""
    old = unpack(packed, scale, torch.float32)
    values = torch.cat([exact for _, exact, _ in _sums(name, old, adapter)])
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{name}: W + scale B A is not finite")
    tensors: tuple[Tensor, ...]
    if store == "bf16":
        tensors = (values.to(torch.bfloat16),)
        new = tensors[0].float()
    else:
        codes, scales = _nearest_packed(values, packed, scale)
        tensors, new = (codes, scales), unpack(codes, scales, torch.float32)
    stats = _Stats()
    for rows, _, update in _sums(name, old, adapter):
        stats.add(old[rows], new[rows], update)
    return tensors, stats.of(name, "bfloat16" if store == "bf16" else "mxfp4")


def _nearest_packed(values: Tensor, packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Of each group what is nearer to its values, its old bytes or it packed anew: where an update is far too small for
    the grid, another scale would do more harm than leaving the update out."""
    codes, scales = repack(values, packed, scale)
    stays = _group_errors(values, packed, scale) <= _group_errors(values, codes, scales)
    codes = torch.where(stays.repeat_interleave(GROUP // 2, -1), packed, codes)
    return codes, torch.where(stays, scale, scales)


def _group_errors(values: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return (unpack(codes, scales, torch.float32) - values).square().unflatten(-1, (-1, GROUP)).sum(-1)


def _sums(name: str, weight: Tensor, adapter: Adapter) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, W + U, U) of a matrix, block by block."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    A, B = (adapter.tensors[f"{name}.{factor}"].to(weight.device, wide) for factor in ("lora_A", "lora_B"))
    if tuple(weight.shape) != (B.shape[0], A.shape[1]):
        raise ValueError(f"{name}: the weight is {list(weight.shape)}, the adapter's {[B.shape[0], A.shape[1]]}")
    factor = adapter.lora.scale(matrix_path(name))
    step = max(1, BLOCK // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        update = factor * (B[rows] @ A)
        yield rows, weight[rows].to(wide) + update, update


class _Stats:
    def __init__(self) -> None:
        self.num_elements = self.num_updated = self.num_unchanged = 0
        self.error = self.size = 0.0

    def add(self, before: Tensor, after: Tensor, update: Tensor) -> None:
        is_updated = update != 0
        self.num_elements += update.numel()
        self.num_updated += int(is_updated.sum())
        self.num_unchanged += int((is_updated & (before == after)).sum())
        # In fp64, since in the sum's own type an fp32 weight would show no error at all.
        wide = update.double()
        self.error += float((after.double() - before.double() - wide).square().sum())
        self.size += float(wide.square().sum())

    def of(self, name: str, stored: str) -> MergedTensor:
        if not math.isfinite(self.error):
            raise ValueError(f"{name}: W + scale B A is not finite in {stored}")
        error = math.sqrt(self.error / self.size) if self.size else 0.0
        return MergedTensor(name, stored, self.num_elements, self.num_updated, self.num_unchanged, error)


class Merge:
    """Weights on their way, with the targeted ones merged: iterate it once, for example as `save_checkpoint`'s tensors.

    weights: (internal name, tensor) of the base in any order. Targeted experts that are packed come out as store says;
    save those with experts="bf16" or "keep". Ends with ValueError when a targeted matrix never came.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], adapter: Adapter, store: PackedExperts = "bf16") -> None:
        self._weights, self._adapter, self._store = weights, adapter, store
        self._missing = dict.fromkeys(name.rpartition(".")[0] for name in adapter.tensors)
        self._merged: list[MergedTensor] = []
        self._num_tensors = self._num_parameters = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        halves: dict[str, Tensor] = {}
        for name, tensor in self._weights:
            _require_base(name)
            self._count(name, tensor)
            matrix, _, suffix = name.rpartition(".")
            if matrix not in self._missing:
                yield name, tensor
            elif suffix == "weight":
                require_same_base(self._adapter, name, tensor)
                out, record = merged(matrix, tensor, self._adapter)
                self._done(record)
                yield name, out
            elif f".{suffix}" in (PACKED, SCALE):
                halves[name] = tensor
                if f"{matrix}{PACKED}" in halves and f"{matrix}{SCALE}" in halves:
                    yield from self._packed(matrix, halves.pop(f"{matrix}{PACKED}"), halves.pop(f"{matrix}{SCALE}"))
            else:
                yield name, tensor
        if self._missing:
            names = ", ".join(collapse(self._missing))
            raise ValueError(f"not merged, since the base's weights never came: {names}")

    def _packed(self, matrix: str, packed: Tensor, scale: Tensor) -> Iterator[tuple[str, Tensor]]:
        tensors, record = merged_packed(matrix, packed, scale, self._adapter, self._store)
        self._done(record)
        suffixes = (".weight",) if self._store == "bf16" else (PACKED, SCALE)
        yield from ((f"{matrix}{suffix}", tensor) for suffix, tensor in zip(suffixes, tensors, strict=True))

    def _count(self, name: str, tensor: Tensor) -> None:
        if name.endswith(SCALE):  # of the packed matrix, which counts once
            return
        self._num_tensors += 1
        self._num_parameters += tensor.numel() * (2 if name.endswith(PACKED) else 1)

    def _done(self, record: MergedTensor) -> None:
        self._merged.append(record)
        del self._missing[record.name]

    def report(self) -> MergeReport:
        """Once all weights have passed."""
        assert not self._missing, self._missing
        return MergeReport(tuple(self._merged), self._num_tensors, self._num_parameters)


def _require_base(name: str) -> None:
    if is_adapter_tensor(name):
        raise ValueError(f"{name}: an adapter's, among the weights to merge into; detach_lora, or leave it out")


def merge_adapter(model: K3Model, adapter: Adapter) -> MergeReport:
    """In place; packed experts stay packed. The model must carry no adapter itself (`detach_lora`).

    Raises ValueError before anything is merged when the adapter does not fit the model; where a sum is not finite, the
    model is left in part merged.
    """
    require_adapter(adapter, lora_matrices(model))
    own = named_tensors(model)
    for name in own:
        _require_base(name)
    for name in adapter.repeated:
        require_same_base(adapter, name, own[name])
    merge = Merge(own.items(), adapter, "mxfp4")
    with torch.no_grad():
        for name, tensor in merge:
            if tensor is not own[name]:
                own[name].copy_(tensor)
    return merge.report()
