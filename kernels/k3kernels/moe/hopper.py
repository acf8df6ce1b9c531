"""Products of rows sorted by expert with matrices as they are stored, bf16 or MXFP4: CUDA C++ for Hopper.

To some 250 rows an expert a grouped product waits for its matrix, not for the tensor cores: so stages are filled by TMA far
ahead, two blocks share their rows, and a tile is as high as an expert's rows need. MXFP4 is read once, at a quarter of bf16's
bytes, and unpacked in registers. The activation and the second step of LoRA are part of the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from k3kernels.moe import grouped
from k3kernels.moe.grouped import Betas, Gated
from k3kernels.moe.matrices import Matrices, PackedMatrices
from k3kernels.moe.pairs import Pairs
from k3kernels.moe.row_tiles import row_tiles
from k3kernels.nvrtc import CudaSource, TensorMap, load, tensor_map

MAX_ROWS = 176  # of a block; each of a cluster's two fetches half
WIDE, DEPTH = (
    256,
    64,
)  # outputs of a block, two of which are a cluster, and a step of the sum: what ranks are multiples of
PRODUCT = CudaSource(Path(__file__).with_name("products.cu"), "products_kernel", threads=384, shared_bytes=231_424)
WEIGHTS = CudaSource(
    Path(__file__).with_name("weights.cu"), "weights_gradient_kernel", threads=384, shared_bytes=231_424
)


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to the product with each of one or two matrices: z_m [P, r], sorted as the rows are, times factor m.

    factors bf16: [E, out, r] of a product, [E, r, in] of an input's gradient. r is a multiple of DEPTH.
    """

    z: Sequence[Tensor]
    factors: Sequence[Tensor]


def takes(matrices: Sequence[Matrices]) -> bool:
    """Whether the kernels can multiply with these, forward and backward: on Hopper, MXFP4 or bf16, contiguous, widths
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
    """For one division of the rows into experts. Rows, bf16, are sorted by expert; those without one are not written."""

    pairs: Pairs
    tiles: Tensor

    @classmethod
    def of(cls, pairs: Pairs) -> Products:
        return cls(pairs, row_tiles(pairs, MAX_ROWS))

    def gated(
        self,
        x_PR: Tensor,
        w1_EFR: Matrices,
        w3_EFR: Matrices,
        betas: Betas,
        keeps: bool,
        low_rank: LowRank | None = None,
    ) -> Gated:
        """gate, up (None where not kept) and h [P, F]; an activation without two bounds is a pass of its own."""
        if betas is None or betas[1] is None:
            gate_PF, up_PF = (
                self.product(x_PR, w, None if low_rank is None else LowRank(low_rank.z[m:], low_rank.factors[m:]))
                for m, w in enumerate((w1_EFR, w3_EFR))
            )
            return gate_PF, up_PF, grouped.activate(gate_PF, up_PF, self.pairs, betas)
        h_PF = x_PR.new_empty(x_PR.shape[0], w1_EFR.shape[1])
        kept = (torch.empty_like(h_PF), torch.empty_like(h_PF)) if keeps else (None, None)
        self._launch([x_PR], [w1_EFR, w3_EFR], low_rank, (h_PF, *kept), (float(betas[0]), float(betas[1])))
        return *kept, h_PF

    def product(self, x_PI: Tensor, w_EOI: Matrices, low_rank: LowRank | None = None) -> Tensor:
        """x w_e^T [P, out]."""
        y_PO = x_PI.new_empty(x_PI.shape[0], w_EOI.shape[1])
        self._launch([x_PI], [w_EOI], low_rank, (y_PO, None, None))
        return y_PO

    def inputs_gradient(
        self, ys: Sequence[Tensor], matrices: Sequence[Matrices], low_rank: LowRank | None = None
    ) -> Tensor:
        """The sum over one or two matrices [E, out, in] of y w_e [P, in]."""
        x_PI = ys[0].new_empty(ys[0].shape[0], matrices[0].shape[2])
        self._launch(ys, matrices, low_rank, (x_PI, None, None), is_transposed=True)
        return x_PI

    def weights_gradient(self, y_PN: Tensor, x_PK: Tensor) -> Tensor:
        """[E, N, K]: the sum of y^T x over each expert's rows, zeros where it has none."""
        (_, N), K, E = y_PN.shape, x_PK.shape[1], self.pairs.num_experts
        out_ENK = y_PN.new_empty(E, N, K)
        maps = [tensor_map(y_PN, 64, 4), tensor_map(x_PK, 64, 2), tensor_map(out_ENK, 128, 2)]
        load(WEIGHTS, _index(y_PN))(_multiprocessors(y_PN), [*maps, self.pairs.edges, E, N, K])
        return out_ENK

    def _launch(
        self,
        xs: Sequence[Tensor],
        matrices: Sequence[Matrices],
        low_rank: LowRank | None,
        results: tuple[Tensor, Tensor | None, Tensor | None],
        betas: tuple[float, float] | None = None,
        is_transposed: bool = False,
    ) -> None:
        _, outer, inner = matrices[0].shape
        rank = 0 if low_rank is None else low_rank.z[0].shape[1]
        assert rank % DEPTH == 0, rank
        if xs[0].shape[0] == 0:
            return
        is_packed, is_gated = isinstance(matrices[0], PackedMatrices), betas is not None
        kernel = load(PRODUCT, _index(xs[0]), defines(is_packed, is_transposed, is_gated))
        height = WIDE // len(matrices) if is_gated else WIDE  # rows of a matrix that a block takes
        factor_box = (DEPTH, WIDE // DEPTH) if is_transposed else (height, 1)
        stored = [_stored(w) for w in matrices]
        scales = [w.scale if isinstance(w, PackedMatrices) else None for w in matrices]
        maps = [
            *_two(stored, (height, 1) if is_packed else factor_box),
            *_two(xs, (MAX_ROWS // 2, 1)),
            *_two(xs if low_rank is None else low_rank.factors, factor_box),
            *_two(xs if low_rank is None else low_rank.z, (MAX_ROWS // 2, 1)),
        ]
        sizes = (self.tiles.shape[0], outer, inner, len(matrices), rank)
        arguments = [*maps, scales[0], scales[-1], self.tiles, *results, *sizes, *(betas or (1.0, 1.0))]
        kernel(_multiprocessors(xs[0]) // 2 * 2, arguments)


def in_training(pairs: Pairs) -> grouped.Products:
    """For `train`: these products in place of the grouped ones."""
    ours = Products.of(pairs)
    return grouped.Products(
        gated=lambda x, w1, w3, _, betas, keeps: ours.gated(x, w1, w3, betas, keeps),
        down=lambda x, w, _: ours.product(x, w),
        hidden=lambda y, w, _: ours.inputs_gradient([y], [w]),
        inputs=lambda y1, w1, y3, w3, _: ours.inputs_gradient([y1, y3], [w1, w3]),
        weights=lambda y, x, _: ours.weights_gradient(y, x),
    )


def defines(is_packed: bool, is_transposed: bool, is_gated: bool) -> tuple[tuple[str, int], ...]:
    flags = {"IS_PACKED": is_packed, "TRANSPOSED": is_transposed, "GATED": is_gated, "MAX_ROWS": MAX_ROWS}
    return tuple((name, int(flag)) for name, flag in flags.items())


def _stored(w: Matrices) -> Tensor:
    x = w.packed if isinstance(w, PackedMatrices) else w
    assert isinstance(x, Tensor)
    return x


def _two(tensors: Sequence[Tensor], box: tuple[int, int]) -> list[TensorMap]:
    """The maps of one or two; of one twice."""
    assert all(x.is_contiguous() for x in tensors)
    return [tensor_map(x, *box) for x in (tensors[0], tensors[-1])]


def _index(x: Tensor) -> int:
    assert x.device.index is not None
    return x.device.index


def _multiprocessors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count
