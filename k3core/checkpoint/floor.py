"""The entropy of an update: a yardstick for what a delta of it takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from k3core.checkpoint.tensors import RawTensor, Weights


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes of the two parts of the zero-order entropy of an update; see `entropy_floor`."""

    positions_bytes: float
    values_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.positions_bytes + self.values_bytes


def entropy_floor(parent: Weights, new: Weights) -> Floor:
    """What an ideal code would take that sees the XOR of two versions and nothing else, summed over tensors.

    In each tensor of n elements of which c changed, elements are taken as independent and alike:

        positions   n h2(c / n) bits
        values      c H bits, H the empirical entropy of the XOR values of the changed elements: of whole values for
                    elements of 1 or 2 bytes, and the sum over byte planes for wider ones, whose values hardly repeat

    H is the plug-in estimate: the code tables are free. With few samples it lies below the entropy of the source, so
    that a size in proportion to this floor looks worse than it is, never better.
    It bounds order-zero codes of the XOR. A code that uses the base, which the reader has, can lie below.
    """
    positions = values = 0.0
    for name in sorted(new):
        xor = _words(parent[name]) ^ _words(new[name])
        changed = xor[xor != 0]
        if not changed.size:
            continue
        share = np.array([changed.size, xor.size - changed.size])
        positions += _code_bytes(share)
        if xor.itemsize <= 2:
            values += _code_bytes(np.bincount(changed))
        else:
            values += sum(
                _code_bytes(np.bincount(plane)) for plane in changed.view(np.uint8).reshape(-1, xor.itemsize).T
            )
    return Floor(positions, values)


def _words(tensor: RawTensor) -> NDArray[np.unsignedinteger]:
    return np.frombuffer(tensor.data, f"<u{tensor.element_bytes}")


def _code_bytes(counts: NDArray[np.int64]) -> float:
    """Of all symbols together, under an ideal code for their own frequencies."""
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum()) / 8
