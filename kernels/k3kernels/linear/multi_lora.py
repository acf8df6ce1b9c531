"""x W^T + scale_a (x A_a^T) B_a^T, each row with its own adapter a: forward and backward.

On a GPU the product with W is the library's and kernels of ours do the rest (`multi_lora_launch.py`); elsewhere this is the
reference. A pair of an adapter and an expert is an adapter too, whose term goes onto the experts' product: any number of
them may have few rows or none.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from k3kernels.dispatch import uses_invariant_product
from k3kernels.linear.reference import AdapterRows, multi_lora_onto_reference, multi_lora_reference

MAX_RANK = 256


def adapter_rows(adapter_T: Tensor, num_adapters: int) -> AdapterRows:
    """What `multi_lora` needs of a batch, for all its layers; on a GPU sorted there, without waiting for it.

    adapter_T: each row's adapter, integers; any that is not in 0..num_adapters-1 is none. Raises ValueError for others.
    """
    if adapter_T.dim() != 1 or adapter_T.dtype.is_floating_point or num_adapters < 1:
        raise ValueError(
            f"adapter_rows takes a vector of integers and at least one adapter, got {adapter_T.dtype} "
            f"{tuple(adapter_T.shape)} and {num_adapters}"
        )
    if not adapter_T.is_cuda:
        return AdapterRows(adapter_T, num_adapters)
    from k3kernels.linear.multi_lora_launch import sorted_rows  # where there is no GPU, Triton need not be installed

    with torch.cuda.device(adapter_T.device):
        return sorted_rows(adapter_T, num_adapters)


def multi_lora(
    x_TI: Tensor,
    W_OI: Tensor,
    A_nrI: Tensor,
    B_nOr: Tensor,
    scale_n: Tensor,
    rows: AdapterRows,
    ranks_n: Tensor | None = None,
) -> Tensor:
    """y [T, O] in x's type; see the reference for where it rounds.

    x and W bf16 or fp32, the same; A and B fp32 or bf16, rounded to x's type; scale fp32, without a gradient. ranks int32:
    adapters may have fewer than r ranks, and what A and B hold above them is neither read into y nor given a gradient but
    0. Gradients of A and B are sums in fp32 over an adapter's own rows, in order, rounded to the parameter's type: their
    bits, and those of LoRA's term in y, are the same beside any other adapters. Raises ValueError for what does not fit.
    """
    _check(x_TI, W_OI.shape[0], A_nrI, B_nOr, scale_n, rows, ranks_n)
    if W_OI.dtype != x_TI.dtype or W_OI.shape[1:] != x_TI.shape[1:]:
        raise ValueError(f"multi_lora takes W [O, I] in x's type, got {tuple(W_OI.shape)} in {W_OI.dtype}: convert it")
    if type(rows) is AdapterRows:
        return multi_lora_reference(x_TI, W_OI, A_nrI, B_nOr, scale_n, rows, ranks_n)
    return _on_device(x_TI, W_OI, None, A_nrI, B_nOr, scale_n, rows, ranks_n)


def multi_lora_onto(
    onto_TO: Tensor,
    x_TI: Tensor,
    A_nrI: Tensor,
    B_nOr: Tensor,
    scale_n: Tensor,
    rows: AdapterRows,
    ranks_n: Tensor | None = None,
) -> Tensor:
    """As `multi_lora`, onto a product that is already there, in x's type; of experts', say. onto has a gradient too."""
    _check(x_TI, onto_TO.shape[1], A_nrI, B_nOr, scale_n, rows, ranks_n)
    if onto_TO.dtype != x_TI.dtype or len(onto_TO) != len(x_TI):
        raise ValueError(
            f"multi_lora_onto takes onto [T, O] in x's type, got {tuple(onto_TO.shape)} in {onto_TO.dtype}: convert it"
        )
    if type(rows) is AdapterRows:
        return multi_lora_onto_reference(onto_TO, x_TI, A_nrI, B_nOr, scale_n, rows, ranks_n)
    return _on_device(x_TI, None, onto_TO, A_nrI, B_nOr, scale_n, rows, ranks_n)


def _check(
    x_TI: Tensor,
    num_out: int,
    A_nrI: Tensor,
    B_nOr: Tensor,
    scale_n: Tensor,
    rows: AdapterRows,
    ranks_n: Tensor | None,
) -> None:
    (T, num_in), (n, r) = x_TI.shape, A_nrI.shape[:2]
    want = (len(rows.adapter_T), (rows.num_adapters, r, num_in), (n, num_out, r), (n,))
    got = (T, tuple(A_nrI.shape), tuple(B_nOr.shape), tuple(scale_n.shape))
    if got != want or (ranks_n is not None and ranks_n.shape != (n,)):
        raise ValueError(f"multi_lora's rows, A, B and scale fit {want}, got {got}; ranks are as many as scales")
    if not 1 <= r <= MAX_RANK:
        raise ValueError(f"multi_lora takes ranks to {MAX_RANK}, got {r}: split the adapter in two")
    if x_TI.dtype not in (torch.bfloat16, torch.float32) and type(rows) is not AdapterRows:
        raise ValueError(f"multi_lora takes bf16 or fp32 on a GPU, got {x_TI.dtype}: convert x and W")
    if scale_n.dtype != torch.float32:
        raise ValueError(f"multi_lora takes scale in fp32, got {scale_n.dtype}: convert it")


def _on_device(x_TI: Tensor, *others: Any) -> Tensor:
    with torch.cuda.device(x_TI.device) if x_TI.is_cuda else nullcontext():
        y_TO: Tensor = _MultiLora.apply(x_TI, *others)
    return y_TO


class _MultiLora(torch.autograd.Function):
    """Of W and onto one is none."""

    @staticmethod
    def forward(ctx: Any, x_TI, W_OI, onto_TO, A_nrI, B_nOr, scale_n, rows, ranks_n):  # type: ignore[no-untyped-def]
        from k3kernels.linear import multi_lora_launch as launch
        from k3kernels.linear.triton import rows_of

        x_TI, scale_n = rows_of(x_TI), scale_n.contiguous()
        a_nrI, b_nOr = A_nrI.to(x_TI.dtype).contiguous(), B_nOr.to(x_TI.dtype).contiguous()
        ranks_n = None if ranks_n is None else ranks_n.int().contiguous()
        z_TR = launch.shrink(x_TI, a_nrI, scale_n, rows, ranks_n, is_nrK=True)
        y_TO = _onto(x_TI, W_OI, onto_TO, z_TR, b_nOr, rows, ranks_n)
        ctx.save_for_backward(x_TI, W_OI, a_nrI, b_nOr, scale_n, z_TR, ranks_n)
        ctx.rows, ctx.dtypes = rows, (A_nrI.dtype, B_nOr.dtype)
        return y_TO

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor):  # type: ignore[no-untyped-def]
        from k3kernels.linear import multi_lora_launch as launch

        x_TI, W_OI, a_nrI, b_nOr, scale_n, z_TR, ranks_n = ctx.saved_tensors
        needs_x, needs_W, needs_onto, needs_A, needs_B = ctx.needs_input_grad[:5]
        rows, (A_dtype, B_dtype), grad_TO = ctx.rows, ctx.dtypes, grad_TO.contiguous()
        grad_x = grad_W = product = None
        grad_A = torch.empty_like(a_nrI, dtype=A_dtype) if needs_A else None
        grad_B = torch.empty_like(b_nOr, dtype=B_dtype) if needs_B else None
        fuses_B = needs_B and (needs_x or needs_A) and launch.fuses_gradient(z_TR, rows)
        if needs_x or needs_A:
            taken = (z_TR, grad_B) if fuses_B else (None, None)
            grad_z_TR = launch.shrink(grad_TO, b_nOr, scale_n, rows, ranks_n, False, *taken)
        if needs_x:
            grad_x = x_TI.new_empty(x_TI.shape)
            launch.expand(grad_z_TR, a_nrI, None, grad_x, rows, ranks_n, is_nNr=False)
            product = None if W_OI is None else partial(grad_x.addmm_, grad_TO, W_OI)
        with launch.beside(product):
            if grad_B is not None and not fuses_B:
                launch.accumulate(grad_TO, z_TR, grad_B, rows, is_nrC=False)
            if grad_A is not None:
                launch.accumulate(x_TI, grad_z_TR, grad_A, rows, is_nrC=True)
        if needs_W:
            grad_W = torch.mm(grad_TO.T, x_TI)
        return grad_x, grad_W, grad_TO if needs_onto else None, grad_A, grad_B, None, None, None


def _onto(x_TI, W_OI, onto_TO, z_TR, b_nOr, rows, ranks_n):  # type: ignore[no-untyped-def]
    """x W^T, or onto where W is none; and onto it z B_a^T of each row's adapter."""
    from k3kernels.linear.multi_lora_launch import expand
    from k3kernels.linear.triton import multiply

    def added(onto_TO: Tensor | None, y_TO: Tensor) -> Tensor:
        expand(z_TR, b_nOr, onto_TO, y_TO, rows, ranks_n, is_nNr=True)
        return y_TO

    new = partial(x_TI.new_empty, x_TI.shape[0], b_nOr.shape[1])
    if W_OI is None:
        return added(onto_TO.contiguous(), new())
    if uses_invariant_product(x_TI):
        y_TO = multiply(x_TI, W_OI)
        return added(y_TO, y_TO)
    return added(None, new()).addmm_(x_TI, W_OI.T)
