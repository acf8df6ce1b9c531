"""x W^T in the next wider type than x's, without ever holding the whole of W in that type."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.dtypes import wider

# Elements of the head's weight that are converted at a time: 32 MiB in fp32, 64 MiB in fp64.
MAX_WEIGHT = 1 << 23


def has_wide_output(x: Tensor, weight: Tensor) -> bool:
    """Whether the device multiplies these matrices into an fp32 result by itself: bf16 on CUDA. (fp16 is converted:
    what the backward pass rounds to it would vanish below 6e-8.)"""
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16


def operand(x: Tensor, like: Tensor, wide: torch.dtype) -> Tensor:
    """x as `matmul` wants it: as it is where the device has a wide output for it and `like`, else converted."""
    return x if has_wide_output(x, like) else x.to(wide)


def matmul(a_MK: Tensor, b_KN: Tensor, wide: torch.dtype) -> Tensor:
    """a b in type `wide`, without autograd.

    Products of bf16 numbers are exact in fp32, so a GEMM that accumulates and returns fp32 (`torch.mm` with out_dtype,
    CUDA only) equals the one over converted operands up to the order of its sum, and runs on the tensor cores. Where
    there is none, the operands are already of type `wide`; PyTorch's default, no TF32, is relied on.
    """
    if a_MK.dtype == wide:
        return torch.mm(a_MK, b_KN)
    return torch.mm(a_MK, b_KN, out_dtype=wide)


def product_in_fp32(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a b of factors no wider than fp32, summed and returned in it."""
    fp32 = torch.float32
    return matmul(operand(a_MK, b_KN, fp32), operand(b_KN, a_MK, fp32), fp32)


def add_product_in_fp32(sums_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """sums += a b of factors no wider than fp32, in the product's own accumulators: sums is fp32, and no other is made."""
    fp32 = torch.float32
    a, b = operand(a_MK, b_KN, fp32), operand(b_KN, a_MK, fp32)
    if a.dtype == fp32:
        sums_MN.addmm_(a, b)
    else:
        torch.addmm(sums_MN, a, b, out_dtype=fp32, out=sums_MN)


def wide_linear(x_MD: Tensor, weight_ND: Tensor) -> Tensor:
    """x W^T in the next wider type (bf16 in fp32, fp32 in fp64), differentiable: converts, then multiplies.

    Without a gradient, bf16 CUDA operands are multiplied as they are, into fp32.
    """
    wide = wider(x_MD.dtype)
    needs_gradient = torch.is_grad_enabled() and (x_MD.requires_grad or weight_ND.requires_grad)
    if has_wide_output(x_MD, weight_ND) and not needs_gradient:
        return matmul(x_MD, weight_ND.T, wide)
    return F.linear(x_MD.to(wide), weight_ND.to(wide))


def wide_logits(hidden_MD: Tensor, weight_VD: Tensor, low_rank: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """hidden W^T [+ z B^T for low_rank (z_Mr, B_Vr)] in the next wider type, MAX_WEIGHT elements of W at a time."""
    rows = vocabulary_block(weight_VD)
    blocks = []
    for start in range(0, weight_VD.shape[0], rows):
        logits_MB = wide_linear(hidden_MD, weight_VD[start : start + rows])
        if low_rank is not None:
            z_Mr, B_Vr = low_rank
            logits_MB = logits_MB + F.linear(z_Mr, B_Vr[start : start + rows].to(z_Mr.dtype))
        blocks.append(logits_MB)
    return torch.cat(blocks, -1)


def vocabulary_block(weight_VD: Tensor) -> int:
    """Rows of W that are converted at a time: a multiple of 128 where that is more than none."""
    V, D = weight_VD.shape
    rows = MAX_WEIGHT // D
    return max(1, min(V, rows // 128 * 128 or rows))
