"""Products of rows sorted by expert with each expert's matrix: tiles, launches, and torch's grouped GEMM in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from k3kernels.linear.triton import INTERPRETED, max_tiles
from k3kernels.moe.grouped_kernels import (
    FIELDS,
    gated_gradient_kernel,
    gated_kernel,
    gated_rows_kernel,
    rows_product_kernel,
    tiles_kernel,
    weights_gradient_kernel,
)
from k3kernels.moe.pairs import Pairs
from k3kernels.situ.triton import kind_of

Betas = tuple[float, float | None] | None
COLUMNS = 1024  # of one program of the activation alone


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """What a program computes: rows x columns of the result, depth products at a time. None changes bits but depth.

    Of the gated product, columns are gate's and as many of up's. band: tiles of rows that read the same columns of a
    matrix one after the other. is_persistent: as many programs as run at once, each taking tiles in turn; is_flat: they
    load a tile's first operands while they still finish the one before.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    band: int = 8
    is_persistent: bool = True
    is_flat: bool = False


@dataclass(frozen=True, slots=True)
class Tiles:
    """By product: gate and up, down, the hidden rows' gradient, the inputs', the weights'."""

    gated: GroupedTile
    down: GroupedTile
    hidden: GroupedTile
    inputs: GroupedTile
    weights: GroupedTile


FEW_ROWS = 512  # of an expert on average, up to which a weight's gradient is more bytes than products


def pick_tiles(rows_per_expert: int, dtype: torch.dtype) -> Tiles:
    """For an average number of rows of an expert; both the sums' order and so the bits are the same for each."""
    if dtype == torch.float32:
        small = GroupedTile(64, 64, 16, 4, 2)
        return Tiles(small, small, small, small, small)
    gated = GroupedTile(128, 128, 64, 8, 4)
    rows = GroupedTile(128, 256, 64, 8, 3)
    weights = GroupedTile(128, 128, 32, 4, 4) if rows_per_expert <= FEW_ROWS else GroupedTile(128, 256, 32, 8, 4)
    return Tiles(gated, rows, rows, rows, weights)


@dataclass(slots=True)
class Schedule:
    """The tiles of one division of the pairs into experts, made once for each height of tile."""

    pairs: Pairs
    tables: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def table(self, tile: GroupedTile) -> Tensor:
        """`tiles_kernel`'s records [1 + tiles, FIELDS]."""
        key = tile.rows, tile.band
        if key not in self.tables:
            E, count = self.pairs.num_experts, self.max_tiles(tile)
            table = torch.empty(count + 1, FIELDS, dtype=torch.int32, device=self.pairs.edges.device)
            tiles_kernel[(triton.cdiv(count, 32),)](
                self.pairs.edges, table, count, E=E, BE=triton.next_power_of_2(E), BM=tile.rows, BAND=tile.band, BT=32
            )
            self.tables[key] = table
        return self.tables[key]

    def max_tiles(self, tile: GroupedTile) -> int:
        return max_tiles(self.pairs.order_P.numel(), self.pairs.num_experts, tile.rows)

    def grid(self, tile: GroupedTile, columns: int) -> tuple[int]:
        return (_programs(tile, self.max_tiles(tile) * triton.cdiv(columns, tile.columns), self.pairs.edges),)


@dataclass(frozen=True, slots=True)
class Scaled:
    """fp8 values [..., K] times an fp32 scale of each row [...]: rows of activations, or of each expert's matrix. A number is
    the scale of all rows."""

    values: Tensor
    scale: Tensor | float


def gate_up(
    xs_PR: Tensor,
    w1_EFR: Tensor,
    w3_EFR: Tensor,
    schedule: Schedule,
    betas: Betas,
    tile: GroupedTile,
    keeps: bool,
) -> Gated:
    """gate, up (None where not kept) and h, all [P, F], of sorted rows."""
    P, (_, F, R) = xs_PR.shape[0], w1_EFR.shape
    h_PF = torch.empty(P, F, dtype=xs_PR.dtype, device=xs_PR.device)
    gate_PF, up_PF = (torch.empty_like(h_PF), torch.empty_like(h_PF)) if keeps else (None, None)
    gated_rows_kernel[schedule.grid(tile, F)](
        *_descriptors(tile.depth, (xs_PR, tile.rows), (w1_EFR, tile.columns), (w3_EFR, tile.columns)),
        h_PF if gate_PF is None else gate_PF,
        h_PF if up_PF is None else up_PF,
        h_PF,
        schedule.table(tile),
        schedule.pairs.edges,
        F,
        R,
        *_numbers(betas),
        KIND=kind_of(betas),
        KEEPS=keeps,
        **_options(tile),
    )
    return gate_PF, up_PF, h_PF


def rows_product(x_PK: Tensor | Scaled, w_ENK: Tensor | Scaled, schedule: Schedule, tile: GroupedTile) -> Tensor:
    """x w_e^T [P, N] of sorted rows; bf16 where these are fp8."""
    (x_PK, x_scale), (w_ENK, w_scale) = _parts(x_PK), _parts(w_ENK)
    if isinstance(x_scale, float):
        x_scale, w_scale = None, w_scale * x_scale
    (P, K), N = x_PK.shape, w_ENK.shape[1]
    y_PN = torch.empty(P, N, dtype=_result_type(x_PK), device=x_PK.device)
    x_desc, w_desc = _descriptors(tile.depth, (x_PK, tile.rows), (w_ENK, tile.columns))
    rows_product_kernel[schedule.grid(tile, N)](
        *(x_desc, w_desc, x_desc, w_desc, x_scale, w_scale),
        *(y_PN, schedule.table(tile), schedule.pairs.edges, N, K),
        TWO=False,
        OUTER=False,
        **_options(tile),
    )
    return y_PN


def inputs_gradient(
    y_PK: Tensor, w_EKN: Tensor, schedule: Schedule, tile: GroupedTile, second: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """y w_e [P, N] of sorted rows; with `second`, another y and w, plus the same of them in one sum."""
    (P, K), N = y_PK.shape, w_EKN.shape[2]
    x_PN = torch.empty(P, N, dtype=y_PK.dtype, device=y_PK.device)
    descriptors = []
    for y, w in ((y_PK, w_EKN), second or (y_PK, w_EKN)):
        descriptors.append(_descriptor(y, tile.rows, tile.depth))
        descriptors.append(_descriptor(w, tile.depth, tile.columns))
    rows_product_kernel[schedule.grid(tile, N)](
        *(*descriptors, None, None),
        *(x_PN, schedule.table(tile), schedule.pairs.edges, N, K),
        TWO=second is not None,
        OUTER=True,
        **_options(tile),
    )
    return x_PN


@dataclass(frozen=True, slots=True)
class HiddenGradient:
    """Sorted rows [P, F]: the gradients of gate and up, and weight h; and by place the gradient of a pair's weight."""

    gate_PF: Tensor
    up_PF: Tensor
    weighted_h_PF: Tensor
    weights_P: Tensor


def weights_gradient(
    y_PN: Tensor, x_PK: Tensor, pairs: Pairs, tile: GroupedTile, dtype: torch.dtype | None = None
) -> Tensor:
    """[E, N, K] in dtype (none: y's): the sum of y^T x over each expert's rows, zeros where it has none."""
    (P, N), K, E = y_PN.shape, x_PK.shape[1], pairs.num_experts
    out_ENK = torch.empty(E, N, K, dtype=dtype or y_PN.dtype, device=y_PN.device)
    if P == 0:
        return out_ENK.zero_()
    num_tiles = E * triton.cdiv(N, tile.rows) * triton.cdiv(K, tile.columns)
    weights_gradient_kernel[(_programs(tile, num_tiles, y_PN),)](
        _descriptor(y_PN, tile.depth, tile.rows),
        _descriptor(x_PK, tile.depth, tile.columns),
        *(y_PN, x_PK, out_ENK, pairs.edges, N, K),
        E=E,
        BAND=tile.band,
        **_options(tile),
    )
    return out_ENK


Product = Callable[[Tensor, Tensor, Pairs], Tensor]
Gated = tuple[Tensor | None, Tensor | None, Tensor]


@dataclass(frozen=True, slots=True)
class Products:
    """Another grouped GEMM in place of ours, by product as in `Tiles`. None is ours.

    gated: (x [P, K], w1, w3 [E, N, K], pairs, betas, whether gate and up are kept) -> gate, up and h; down: (x, w)
    -> x w_e^T [P, N]; hidden: (y [P, K], w [E, K, N]) -> y w_e; inputs: (y1, w1, y3, w3) -> y1 w1_e + y3 w3_e; weights:
    (y [P, N], x [P, K]) -> y^T x [E, N, K]. The pairs come last. Rows without an expert may hold anything.
    """

    gated: Callable[[Tensor, Tensor, Tensor, Pairs, Betas, bool], Gated] | None = None
    down: Product | None = None
    hidden: Product | None = None
    inputs: Callable[[Tensor, Tensor, Tensor, Tensor, Pairs], Tensor] | None = None
    weights: Product | None = None


def torch_product(x_PK: Tensor, w_ENK: Tensor, pairs: Pairs) -> Tensor:
    y_PN: Tensor = torch._grouped_mm(x_PK, w_ENK.mT, offs=pairs.edges[1:])
    return y_PN


def torch_inputs_gradient(y_PK: Tensor, w_EKN: Tensor, pairs: Pairs) -> Tensor:
    x_PN: Tensor = torch._grouped_mm(y_PK, w_EKN, offs=pairs.edges[1:])
    return x_PN


def torch_weights_gradient(y_PN: Tensor, x_PK: Tensor, pairs: Pairs) -> Tensor:
    w_ENK: Tensor = torch._grouped_mm(y_PN.mT, x_PK, offs=pairs.edges[1:])
    return w_ENK


def torch_gated(x_PR: Tensor, w1_EFR: Tensor, w3_EFR: Tensor, pairs: Pairs, betas: Betas, _: bool) -> Gated:
    gate_PF, up_PF = (torch_product(x_PR, w, pairs) for w in (w1_EFR, w3_EFR))
    return gate_PF, up_PF, activate(gate_PF, up_PF, pairs, betas)


OURS = Products()
TORCH = Products(
    torch_gated,
    torch_product,
    torch_inputs_gradient,
    lambda y1, w1, y3, w3, pairs: torch_inputs_gradient(y1, w1, pairs).add_(torch_inputs_gradient(y3, w3, pairs)),
    torch_weights_gradient,
)


def activate(gate_PF: Tensor, up_PF: Tensor, pairs: Pairs, betas: Betas) -> Tensor:
    """h [P, F] of the rows that have an expert."""
    P, F = gate_PF.shape
    h_PF = torch.empty_like(gate_PF)
    gated_kernel[(P, triton.cdiv(F, COLUMNS))](
        *(gate_PF, up_PF, h_PF, pairs.edges, F, *_numbers(betas)),
        E=pairs.num_experts,
        KIND=kind_of(betas),
        BLOCK=COLUMNS,
        INTERPRETED=INTERPRETED,
    )
    return h_PF


def activate_backward(
    grad_PF: Tensor, weights_Tk: Tensor, gate_PF: Tensor, up_PF: Tensor, pairs: Pairs, betas: Betas
) -> HiddenGradient:
    """grad_PF: the gradient of h for a result that is not weighted."""
    P, F = gate_PF.shape
    grads = torch.empty_like(gate_PF), torch.empty_like(gate_PF), torch.empty_like(gate_PF)
    parts_P = torch.empty(P, dtype=torch.float32, device=grad_PF.device)
    gated_gradient_kernel[(P,)](
        *(grad_PF, weights_Tk.contiguous(), pairs.order_P, gate_PF, up_PF, *grads, parts_P, pairs.edges, F),
        *_numbers(betas),
        E=pairs.num_experts,
        KIND=kind_of(betas),
        BLOCK=COLUMNS,
        INTERPRETED=INTERPRETED,
    )
    return HiddenGradient(*grads, parts_P)


def _parts(x: Tensor | Scaled) -> tuple[Tensor, Any]:
    return (x, None) if isinstance(x, Tensor) else (x.values, x.scale)


def _result_type(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.itemsize == 1 else x.dtype


def _descriptors(depth: int, *tensors: tuple[Tensor, int]) -> list[TensorDescriptor]:
    return [_descriptor(x, rows, depth) for x, rows in tensors]


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles of a matrix, or of all experts' matrices below each other."""
    x = x.view(-1, x.shape[-1])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def _options(tile: GroupedTile) -> dict[str, int | bool]:
    return {
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": tile.depth,
        "FLATTEN": tile.is_flat,
        "INTERPRETED": INTERPRETED,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _numbers(betas: Betas) -> tuple[float, float]:
    beta, linear_beta = betas or (1.0, None)
    return float(beta), float(linear_beta or 1.0)


def _programs(tile: GroupedTile, num_tiles: int, x: Tensor) -> int:
    if not tile.is_persistent or not x.is_cuda:
        return num_tiles
    return min(num_tiles, _multiprocessors(x.get_device()) * (1 if tile.warps == 8 else 2))


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
