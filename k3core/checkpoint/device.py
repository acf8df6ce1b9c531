"""Deltas of weights that stay where they are: they are compared on their GPU, and only what changed comes to the host.

`delta.encode_delta` takes both versions as bytes on the host. Here `xor_compact` finds the changes on the device, and the
host gets counts, positions, XOR values and the base at those positions. Cutting, coding and entries are `delta` and
`frame`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from k3core.checkpoint.delta import (
    DeltaEntry,
    Layout,
    Layouts,
    check_same_layouts,
    cut_frames,
    group_tensors,
    join_frames,
    open_threads,
)
from k3core.checkpoint.frame import encode_changes, encode_one_class
from k3core.checkpoint.magnitudes import Bins, Words
from k3core.checkpoint.positions import Ranks, indices
from k3core.checkpoint.tensors import DTYPE_WORDS, TORCH_DTYPES, RawTensor, tensor_digest
from k3core.errors import IntegrityError
from k3kernels.xor_compact import changed_elements, xor_compact

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> a dtype for its bits that every operation of torch takes."""
COMPACTED_BYTES = (1, 2, 4)
"""Of the elements that xor_compact takes; 8-byte ones are compared on the host."""


class _Changes(NamedTuple):
    """before: the base at positions. xor: not 0."""

    positions: Ranks
    before: Words
    xor: Words


class _Frame(NamedTuple):
    """What one frame is coded from. base: of all its num_elements, for classes by `bins`; both None for one class."""

    num_elements: int
    changes: _Changes
    base: Words | None
    bins: Bins | None


def encode_device_delta(
    parent: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    level: int = 1,
    *,
    parent_digests: Mapping[str, str],
    result_digests: Mapping[str, str] | None = None,
    max_classes: int = 1,
    num_threads: int = 1,
    capacity_fraction: float = 0.25,
) -> tuple[bytes, tuple[DeltaEntry, ...]]:
    """What `encode_delta` gives for `from_torch` of both versions, byte for byte. Nobody may write to them meanwhile.

    parent_digests, result_digests: `tensor_digest` of each tensor. Without result_digests (a caller that stored the new
    weights has them) each tensor that changed is copied to the host, one after the other, to be hashed: the comparison
    stays on the device, that traffic does not go away. A tensor without a change has its parent's digest.
    What comes to the host as a whole besides: both versions of a tensor (or of small ones that share a frame) of which
    more than capacity_fraction of the elements changed, or whose elements have 8 bytes; and the base of what changed if
    max_classes is above 1, since classes need every element's magnitude.
    The calling thread compares, copies and hashes, num_threads others code frames meanwhile; what waits for them is
    held on the host.
    Raises ValueError as `encode_delta`, for dtypes as `from_torch`, for versions on two devices, and for a tensor
    without a digest; IntegrityError naming the tensor when its digests say that it changed and its bits do not, or the
    other way round.
    """
    layouts = _layouts(new)
    check_same_layouts(_layouts(parent), layouts)
    _check_named("parent_digests", parent_digests, layouts)
    if result_digests is not None:
        _check_named("result_digests", result_digests, layouts)
    groups = list(group_tensors(layouts))
    results: dict[str, str] = {}

    def compare() -> Iterator[_Frame]:
        for names in groups:
            before, after = (_end_to_end([weights[name] for name in names]) for weights in (parent, new))
            changes = _find_changes(before, after, capacity_fraction)
            results.update(_result_digests(names, layouts, after, changes, parent_digests, result_digests))
            bins = Bins.of(layouts[names[0]].dtype, before.element_size()) if max_classes > 1 else None
            base = _to_host(before) if bins is not None and changes.positions.size else None
            for first, end in cut_frames(layouts, names):
                yield _Frame(end - first, _cut(changes, first, end), None if base is None else base[first:end], bins)

    def encode(frame: _Frame) -> tuple[bytes, int]:
        positions, before, xor = frame.changes
        if frame.base is None:
            return encode_one_class(positions, frame.num_elements, before, xor, level), positions.size
        return encode_changes(frame.base, positions, xor, frame.bins, level, max_classes), positions.size

    with open_threads(num_threads) as threads:
        frames = threads.map(encode, compare())  # several threads: `compare` runs in this one, ahead of them
    return join_frames(layouts, groups, frames, parent_digests, results)


def _layouts(weights: Mapping[str, Tensor]) -> dict[str, Layout]:
    for name, tensor in weights.items():
        if tensor.dtype not in DTYPE_WORDS or tensor.layout is not torch.strided:
            raise ValueError(
                f"tensor {name!r} is {tensor.dtype}, {tensor.layout}: publish a dense tensor of one of "
                f"{', '.join(TORCH_DTYPES)}"
            )
    return {name: Layout(DTYPE_WORDS[tensor.dtype], tuple(tensor.shape)) for name, tensor in weights.items()}


def _check_named(what: str, digests: Mapping[str, str], layouts: Layouts) -> None:
    if missing := sorted(layouts.keys() - digests.keys()):
        raise ValueError(f"{what}: expected the digest of every tensor, found none of {', '.join(missing[:3])}")


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """The bits of tensors of one dtype as one flat run of integers, on the first one's device; a view of a single one."""
    # resolve_*: as in `from_torch`.
    plain = (tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors)
    flat = [tensor.reshape(-1).view(INTEGERS[tensor.element_size()]) for tensor in plain]
    return flat[0] if len(flat) == 1 else torch.cat([part.to(flat[0].device) for part in flat])


def _find_changes(before: Tensor, after: Tensor, capacity_fraction: float) -> _Changes:
    """Compared where they are; on the host when elements are too wide or too many of them changed."""
    compacted = None
    if before.element_size() in COMPACTED_BYTES:
        compacted = xor_compact(before, after, capacity_fraction)
    if compacted is None or compacted.positions_N is None:
        base, result = _to_host(before), _to_host(after)
        positions = indices(base != result)
        return _Changes(positions, base.take(positions), base.take(positions) ^ result.take(positions))
    at_N, _ = changed_elements(compacted)
    changed_before = _to_host(before[at_N])
    # Positions within blocks have two bytes, in the tensor eight: the host works those out again.
    positions_N, values_N = changed_elements(compacted.to("cpu"))
    return _Changes(positions_N.numpy(), changed_before, _to_host(values_N))


def _result_digests(
    names: Sequence[str],
    layouts: Layouts,
    after: Tensor,
    changes: _Changes,
    parent_digests: Mapping[str, str],
    known: Mapping[str, str] | None,
) -> dict[str, str]:
    """Of tensors that lie end to end in `after`. Raises IntegrityError for digests that the changes contradict."""
    host = _to_host(after) if known is None and changes.positions.size else None
    results: dict[str, str] = {}
    first = 0
    for name in names:
        end = first + layouts[name].num_elements
        num_changed = _cut(changes, first, end).positions.size
        if known is not None:
            results[name] = known[name]
        elif host is None or not num_changed:
            results[name] = parent_digests[name]
        else:
            data = host[first:end].view(np.uint8).data
            results[name] = tensor_digest(name, RawTensor(layouts[name].dtype, layouts[name].shape, data))
        if (results[name] != parent_digests[name]) != bool(num_changed):
            raise IntegrityError(
                f"tensor {name!r}: expected digests that differ if elements changed, found {num_changed} changed "
                f"elements, {parent_digests[name]} before and {results[name]} after: the digests are of other weights"
            )
        first = end
    return results


def _cut(changes: _Changes, first: int, end: int) -> _Changes:
    """Those of the elements first to end, counted from first."""
    low, high = np.searchsorted(changes.positions, (first, end))
    return _Changes(changes.positions[low:high] - first, changes.before[low:high], changes.xor[low:high])


def _to_host(integers: Tensor) -> Words:
    """A view of what is there already."""
    return integers.cpu().numpy().view(f"<u{integers.element_size()}")
