"""Products of rows sorted by expert with matrices that stay as they are stored, MXFP4 or bf16: in CUDA C++ on Hopper.

Codes are unpacked on their way to the tensor cores, so a matrix is read once, at a quarter of bf16's bytes, and never
written. A pair of matrices (w1 and w3) is one launch, and the second step of LoRA is part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3kernels.linear.triton import max_tiles
from k3kernels.moe import grouped
from k3kernels.moe.matrices import Matrices, PackedMatrices
from k3kernels.moe.pairs import Pairs
from k3kernels.nvrtc import CudaSource, load

MAX_ROWS = 160  # of a block: an expert's rows are divided evenly among as few blocks as that allows
ROUNDED = 16
WIDE, DEPTH = 256, 64  # what widths and ranks have to be multiples of
CUDA = CudaSource(Path(__file__).with_name("packed.cu"), "packed_product_kernel", threads=512, shared_bytes=231_424)


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to the product with each matrix of a stack: z_m [P, r], sorted as the rows are, times factor m.

    factors bf16: [E, out, r] of a product, [E, r, in] of an input's gradient. r is a multiple of DEPTH.
    """

    z: Sequence[Tensor]
    factors: Sequence[Tensor]


def row_tiles(pairs: Pairs) -> Tensor:
    """[tiles, 3] int32: expert, first row, number of rows; those that no row needs come last, with none."""
    edges, E, P = pairs.edges, pairs.num_experts, pairs.order_P.numel()
    counts = edges.diff()
    tiles = (counts + MAX_ROWS - 1) // MAX_ROWS
    lasts = tiles.cumsum(0)
    tile = torch.arange(max_tiles(P, E, MAX_ROWS), device=edges.device)
    expert = torch.searchsorted(lasts, tile, right=True).clamp(max=E - 1)
    size = (counts + tiles - 1) // tiles.clamp(min=1)
    size = ((size + ROUNDED - 1) // ROUNDED * ROUNDED)[expert]
    first = edges[expert] + (tile - (lasts - tiles)[expert]) * size
    rows = torch.minimum(size, edges[expert + 1] - first)
    return torch.stack([expert, first, torch.where(tile < lasts[-1], rows, 0)], 1).int()


def takes(matrices: Sequence[Matrices]) -> bool:
    """Whether the kernel can multiply with these, forward and backward: on Hopper, MXFP4 or bf16, contiguous, widths
    multiples of WIDE."""
    return all(
        _is_on_hopper(x) for w in matrices for x in ((w.packed, w.scale) if isinstance(w, PackedMatrices) else (w,))
    ) and all(n % WIDE == 0 for w in matrices for n in w.shape[1:])


def _is_on_hopper(x: object) -> bool:
    return (
        isinstance(x, Tensor)
        and x.is_cuda
        and x.is_contiguous()
        and x.dtype in (torch.uint8, torch.bfloat16)
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


@dataclass(frozen=True, slots=True)
class Products:
    """For one division of the rows into experts."""

    pairs: Pairs
    tiles: Tensor

    @classmethod
    def of(cls, pairs: Pairs) -> Products:
        return cls(pairs, row_tiles(pairs))

    def product(
        self, x: Tensor, matrices: Sequence[Matrices], low_rank: LowRank | None = None, gathers: bool = False
    ) -> list[Tensor]:
        """x w_e^T [P, out] for each of one or two matrices [E, out, in]; bf16.

        x [P, in] sorted by expert, or with gathers [T, in], whose rows are taken by token. Rows without an expert are
        not written.
        """
        ys = [x.new_empty(self.pairs.order_P.numel(), matrices[0].shape[1]) for _ in matrices]
        self._launch([x] * len(matrices), matrices, low_rank, gathers, ys, is_transposed=False)
        return ys

    def inputs_gradient(
        self, ys: Sequence[Tensor], matrices: Sequence[Matrices], low_rank: LowRank | None = None, gathers: bool = False
    ) -> Tensor:
        """The sum over one or two matrices [E, out, in] of y w_e [P, in]; ys as x of `product`."""
        x_PI = ys[0].new_empty(self.pairs.order_P.numel(), matrices[0].shape[2])
        self._launch(ys, matrices, low_rank, gathers, [x_PI], is_transposed=True)
        return x_PI

    def _launch(
        self,
        xs: Sequence[Tensor],
        matrices: Sequence[Matrices],
        low_rank: LowRank | None,
        gathers: bool,
        outs: Sequence[Tensor],
        is_transposed: bool,
    ) -> None:
        _, outer, inner = matrices[0].shape
        rank = 0 if low_rank is None else low_rank.z[0].shape[1]
        assert rank % DEPTH == 0, rank
        num_places, device = self.pairs.order_P.numel(), xs[0].device
        if num_places == 0:
            return
        tokens = self.pairs.order_P // self.pairs.num_slots if gathers else None
        kernel = load(CUDA, device.index, defines(isinstance(matrices[0], PackedMatrices), is_transposed))
        stored = [w.packed if isinstance(w, PackedMatrices) else w for w in matrices]
        scales = [w.scale if isinstance(w, PackedMatrices) else None for w in matrices]
        num_blocks = self.tiles.shape[0] * (inner if is_transposed else outer * len(matrices)) // WIDE
        grid = min(num_blocks, torch.cuda.get_device_properties(device).multi_processor_count)
        zs, factors = (low_rank.z, low_rank.factors) if low_rank is not None else ((), ())
        tensors = (*_two(xs), tokens, *_two(stored), *_two(scales), *_two(zs), *_two(factors), self.tiles, *_two(outs))
        for x in tensors:
            assert x is None or (isinstance(x, Tensor) and x.is_contiguous()), x
        kernel(grid, [*tensors, self.tiles.shape[0], outer, inner, len(matrices), rank])


def in_training(pairs: Pairs) -> grouped.Products:
    """For `train`, of stacked bf16 matrices; of few rows an expert these tiles leave less unused."""
    products = Products.of(pairs)
    return grouped.Products(
        gated=lambda x, w1, w3, _: products.product(x, (w1, w3)),
        down=lambda x, w, _: products.product(x, (w,))[0],
        hidden=lambda y, w, _: products.inputs_gradient([y], (w,)),
        inputs=lambda y1, w1, y3, w3, _: products.inputs_gradient([y1, y3], (w1, w3)),
    )


def defines(is_packed: bool, is_transposed: bool) -> tuple[tuple[str, int], ...]:
    return ("IS_PACKED", int(is_packed)), ("TRANSPOSED", int(is_transposed)), ("MAX_ROWS", MAX_ROWS)


def _two(items: Sequence[Any]) -> tuple[Tensor | None, Tensor | None]:
    """Of one, or of none, the second place stays empty."""
    first, second, *_ = (*items, None, None)
    return first, second
