"""One matrix of every expert, stacked or packed, and the low-rank pair above it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from k3kernels.mxfp4 import unpack


class Matrices(Protocol):
    """What the routed computation asks of a matrix of E experts: its shape (E, out, in), and one expert's [out, in].

    A stacked tensor [E, out, in] is one.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, e: int, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """MXFP4, unpacked one expert at a time and each time anew: nothing is kept, and nothing has a gradient."""

    packed: Tensor  # uint8 [E, out, in/2]
    scale: Tensor  # uint8 [E, out, in/32]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        E, out_features, half = self.packed.shape
        return E, out_features, half * 2

    def __getitem__(self, e: int, /) -> Tensor:
        return unpack(self.packed[e], self.scale[e], self.dtype)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """Adds scale (x A_e^T) B_e^T to what expert e's matrix gives (arXiv 2106.09685); r is the rank."""

    A_ErI: Tensor
    B_EOr: Tensor
    scale: float


ExpertLora = tuple[LoraPair | None, LoraPair | None, LoraPair | None]  # above w1, w3 and w2
NO_LORA: ExpertLora = (None, None, None)
