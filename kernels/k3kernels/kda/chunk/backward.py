"""KDA backward in chunks of 64 tokens: the parts and states of the forward pass are computed again, not kept."""

from __future__ import annotations

from pathlib import Path

import torch
import triton
from torch import Tensor

from k3kernels.kda.chunk.forward import (
    SETTINGS,
    Gate,
    Intra,
    KdaInputs,
    cuda_defines,
    dot_type,
    has_cuda_form,
    inter,
    intra,
    is_bounded,
)
from k3kernels.kda.chunk.gradient import kda_gradient_kernel
from k3kernels.kda.chunk.inter import kda_inter_backward_kernel
from k3kernels.kda.chunk.table import ROWS, ChunkTable
from k3kernels.nvrtc import CudaSource, load

CUDA = CudaSource(Path(__file__).with_name("gradient.cu"), "kda_gradient", threads=256, shared_bytes=110_880)
CUDA_BLOCK_K = 64


def inter_backward(
    parts: Intra, table: ChunkTable, do_THV: Tensor, d_final: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of v [T, H, V], of the state at each chunk's end [chunks, H, K, V], and of the initial states."""
    H, K, V = parts.k_decayed.shape[1], parts.k_decayed.shape[-1], do_THV.shape[-1]
    block_v = min(V, SETTINGS.inter_block_v)
    dv_THV = torch.empty_like(do_THV)
    d_states = torch.empty(table.num_chunks, H, K, V, dtype=do_THV.dtype, device=do_THV.device)
    d_initial = torch.empty(table.num_sequences, H, K, V, dtype=torch.float32, device=do_THV.device)
    dot, precision = dot_type()
    kda_inter_backward_kernel[(table.num_sequences * H * triton.cdiv(V, block_v),)](
        do_THV,
        *parts.tensors(),
        d_initial if d_final is None else d_final,
        *(table.edges_N, table.tokens_N),
        *(dv_THV, d_states, d_initial),
        H=H,
        K=K,
        V=V,
        BV=block_v,
        C=ROWS,
        DOT=dot,
        PRECISION=precision,
        HAS_FINAL=d_final is not None,
        STAGES=SETTINGS.inter_stages,
        num_warps=SETTINGS.inter_warps,
    )
    return dv_THV, d_states, d_initial


def gradients(
    inputs: KdaInputs,
    gate: Gate,
    table: ChunkTable,
    o_THV: Tensor,
    do_THV: Tensor,
    d_final: Tensor | None,
    initial_NHKV: Tensor | None,
) -> tuple[KdaInputs, Tensor]:
    """Of the raw inputs, and of the initial states."""
    H, K, V = *inputs.k_THK.shape[1:], inputs.v_THV.shape[-1]
    n, device, dtype = table.num_chunks, do_THV.device, do_THV.dtype
    states, u_THV = torch.empty(n, H, K, V, dtype=dtype, device=device), torch.empty_like(do_THV)
    parts = intra(inputs, gate, table)
    inter(inputs, parts, table, initial_NHKV, kept=(states, u_THV))
    dv_THV, d_states, d_initial = inter_backward(parts, table, do_THV, d_final)
    norms = parts.norms
    del parts

    block_k = min(K, SETTINGS.gradient_block_k)
    dq, dk, df, db = (torch.empty_like(x) for x in (inputs.q_THK, inputs.k_THK, inputs.f_THK, inputs.b_TH))
    dt_bias_parts = torch.empty(n, H, K, dtype=torch.float32, device=device)
    a_log_parts = torch.empty(n, H, K // block_k, dtype=torch.float32, device=device)
    raw = (*inputs.tensors(), table.starts_C, table.lengths_C)
    found = (dq, dk, df, db, dt_bias_parts, a_log_parts)
    if has_cuda_form(inputs, gate) and V == 128 and block_k == CUDA_BLOCK_K:
        passed = (o_THV, do_THV, u_THV, dv_THV, states, d_states, norms)
        kernel = load(CUDA, device.index, cuda_defines(inputs))
        kernel(n * H * (K // block_k), (*raw, *passed, *found, gate.scale, gate.lower_bound or 0.0, H))
        return KdaInputs(dq, dk, dv_THV, df, db, a_log_parts.sum((0, 2)), dt_bias_parts.sum(0)), d_initial
    dot, precision = dot_type()
    kda_gradient_kernel[(n * H * (K // block_k),)](
        *raw,
        *(o_THV, do_THV, u_THV, dv_THV, states, d_states),
        *found,
        gate.scale,
        gate.lower_bound or 0.0,
        H=H,
        K=K,
        V=V,
        BK=block_k,
        R=ROWS // 2,
        DOT=dot,
        PRECISION=precision,
        IS_BOUNDED=is_bounded(gate),
        num_warps=SETTINGS.gradient_warps,
    )
    return KdaInputs(dq, dk, dv_THV, df, db, a_log_parts.sum((0, 2)), dt_bias_parts.sum(0)), d_initial
