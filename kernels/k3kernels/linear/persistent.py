"""The batch-invariant GEMM for many rows on Hopper: a program a multiprocessor, tiles moved by TMA.

An element's sum is that of `linear.triton`: one fp32 accumulator, K from 0 up, 16 products an instruction, zeros behind K's
end. So this may be picked by the number of rows. The loop over tiles and the one over K are flattened: the next tile's
loads start while this one is stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from k3kernels.linear.triton import INTERPRETED, Tile, _add_products, _round_to

LARGE = Tile(block_m=128, slice=256, parts=2, block_k=64, num_warps=8, num_stages=4)
"""`slice` columns in one accumulator, stored in `parts` parts."""
MIN_ROWS = 1024
ALIGNMENT_BYTES = 16  # of a row, and of the first one


@triton.jit
def _place_of_tile(tile, num_m, num_n):  # type: ignore[no-untyped-def]
    """(row block, column block): tiles that follow each other share ROW_BLOCKS blocks of x, and one of w."""
    ROW_BLOCKS: tl.constexpr = 8
    group = tile // (ROW_BLOCKS * num_n)
    in_group = min(num_m - group * ROW_BLOCKS, ROW_BLOCKS)
    inside = tile % (ROW_BLOCKS * num_n)
    return group * ROW_BLOCKS + inside % in_group, inside // in_group


@triton.jit(do_not_specialize=["M"])
def persistent_product_kernel(  # type: ignore[no-untyped-def]
    x_desc,
    w_desc,
    y_desc,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """x [M, K], w [N, K], y [M, N], in blocks of [BM, BK], [BN, BK] and [BM, BN / PARTS]."""
    num_m, num_n, num_k = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    # The place of the tile that is stored is counted apart, so that it does not hold back the loads of the next.
    stored = tl.program_id(0) - tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        block_m, block_n = _place_of_tile(tile, num_m, num_n)
        sums = tl.zeros([BM, BN], tl.float32)
        for k in range(num_k):
            x = x_desc.load([block_m * BM, k * BK])
            w = w_desc.load([block_n * BN, k * BK])
            sums = _add_products(x, tl.trans(w), sums, INTERPRETED)
        stored += tl.num_programs(0)
        block_m, block_n = _place_of_tile(stored, num_m, num_n)
        row, column = block_m * BM, block_n * BN
        if PARTS == 2:
            left, right = tl.split(tl.permute(tl.reshape(sums, [BM, 2, BN // 2]), [0, 2, 1]))
            y_desc.store([row, column], _round_to(left, y_desc.dtype, INTERPRETED))
            y_desc.store([row, column + BN // 2], _round_to(right, y_desc.dtype, INTERPRETED))
        else:
            y_desc.store([row, column], _round_to(sums, y_desc.dtype, INTERPRETED))


def is_for(x_MK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether there are tiles for every multiprocessor, and TMA can read and write the rows where they lie."""
    M, N = x_MK.shape[0], weight_NK.shape[0]
    if x_MK.dtype != torch.bfloat16 or out_dtype not in (torch.bfloat16, torch.float32) or M < MIN_ROWS:
        return False
    is_aligned = all(
        x.stride(1) == 1 and x.stride(0) * x.itemsize % ALIGNMENT_BYTES == 0 and x.data_ptr() % ALIGNMENT_BYTES == 0
        for x in (x_MK, weight_NK)
    )
    num_tiles = -(-M // LARGE.block_m) * -(-N // LARGE.slice)
    is_hopper = INTERPRETED or torch.cuda.get_device_capability(x_MK.device)[0] == 9
    return is_aligned and N * out_dtype.itemsize % ALIGNMENT_BYTES == 0 and num_tiles >= _programs(x_MK) and is_hopper


def multiply(x_MK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    """x W^T [M, N], of what `is_for` says yes to."""
    tile = tile or LARGE
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    y_MN = torch.empty(M, N, dtype=out_dtype, device=x_MK.device)
    num_tiles = -(-M // tile.block_m) * -(-N // tile.slice)
    persistent_product_kernel[(min(num_tiles, _programs(x_MK)),)](
        TensorDescriptor.from_tensor(x_MK, [tile.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weight_NK, [tile.slice, tile.block_k]),
        TensorDescriptor.from_tensor(y_MN, [tile.block_m, tile.slice // tile.parts]),
        M,
        N,
        K,
        BM=tile.block_m,
        BN=tile.slice,
        BK=tile.block_k,
        PARTS=tile.parts,
        INTERPRETED=INTERPRETED,
        num_warps=tile.num_warps,
        num_stages=stages(tile, out_dtype.itemsize),
    )
    return y_MN


def stages(tile: Tile, itemsize: int) -> int:
    """itemsize: bytes of an element of the result, whose wider parts take a stage's shared memory."""
    return tile.num_stages - (itemsize == 4)


def _programs(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
