"""KDA backward in chunks of 64 tokens: the parts and states of the forward pass are computed again, not kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

from k3kernels.kda.chunk.forward import (
    INTER_SHARED_BYTES,
    INTER_SOURCE,
    SETTINGS,
    Gate,
    Intra,
    KdaInputs,
    cuda_defines,
    dot_type,
    has_cuda_form,
    has_inter_cuda_form,
    inter,
    inter_defines,
    intra,
    is_bounded,
)
from k3kernels.kda.chunk.gradient import kda_gradient_kernel
from k3kernels.kda.chunk.inter import kda_inter_backward_kernel
from k3kernels.kda.chunk.segments import Segment, rows_of
from k3kernels.kda.chunk.table import ROWS, ChunkTable
from k3kernels.nvrtc import CudaSource, load

CUDA = CudaSource(Path(__file__).with_name("gradient.cu"), "kda_gradient", threads=256, shared_bytes=111_392)
CUDA_BLOCK_K = 64
INTER_CUDA = CudaSource(INTER_SOURCE, "kda_inter_backward", threads=256, shared_bytes=INTER_SHARED_BYTES)


def inter_backward(
    parts: Intra,
    table: ChunkTable,
    do_THV: Tensor,
    d_final: Tensor | None,
    dv_THV: Tensor | None = None,
    d_initial: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of v [T, H, V], of the state at each chunk's end [chunks, H, K, V], and of the initial states: the
    first and last in dv and d_initial, where they are given."""
    H, K, V = parts.k_decayed.shape[1], parts.k_decayed.shape[-1], do_THV.shape[-1]
    block_v = min(V, SETTINGS.inter_block_v)
    dv_THV = torch.empty_like(do_THV) if dv_THV is None else dv_THV
    d_states = torch.empty(table.num_chunks, H, K, V, dtype=do_THV.dtype, device=do_THV.device)
    if d_initial is None:
        d_initial = torch.empty(table.num_sequences, H, K, V, dtype=torch.float32, device=do_THV.device)
    if has_inter_cuda_form(parts.k_decayed, do_THV):
        where = (d_final, table.edges_N, table.tokens_N)
        kernel = load(INTER_CUDA, do_THV.device.index, inter_defines(True))
        kernel(table.num_sequences * H, (do_THV, *parts.tensors(), *where, dv_THV, d_states, d_initial, H))
        return dv_THV, d_states, d_initial
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


@dataclass(frozen=True, slots=True)
class Passed:
    """What the passes over chunks leave for the gradients inside them: u and dv [T, H, V], the state at each chunk's start
    and its gradient at the end [chunks, H, K, V], `Intra.norms`; and the gradients of the initial states."""

    u_THV: Tensor
    dv_THV: Tensor
    states: Tensor
    d_states: Tensor
    norms: Tensor
    d_initial: Tensor


def pass_over_chunks(
    inputs: KdaInputs,
    gate: Gate,
    table: ChunkTable,
    do_THV: Tensor,
    d_final: Tensor | None,
    initial_NHKV: Tensor | None,
    dv_THV: Tensor,
    d_initial: Tensor | None,
) -> Passed:
    H, K, V = *inputs.k_THK.shape[1:], inputs.v_THV.shape[-1]
    states, u_THV = do_THV.new_empty(table.num_chunks, H, K, V), torch.empty_like(do_THV)
    parts = intra(inputs, gate, table)
    inter(inputs, parts, table, initial_NHKV, kept=(states, u_THV))
    _, d_states, d_initial = inter_backward(parts, table, do_THV, d_final, dv_THV, d_initial)
    return Passed(u_THV, dv_THV, states, d_states, parts.norms, d_initial)


def gradient_block(channels: int) -> int:
    return min(channels, SETTINGS.gradient_block_k)


def inside_chunks(
    inputs: KdaInputs,
    gate: Gate,
    table: ChunkTable,
    o_THV: Tensor,
    do_THV: Tensor,
    passed: Passed,
    found: Sequence[Tensor],
) -> None:
    """found: gradients of q, k, f [T, H, K] and b [T, H]; what each chunk adds to those of dt_bias [chunks, H, K] and of
    A_log [chunks, H, blocks of K], fp32. All are written."""
    H, K, V = *inputs.k_THK.shape[1:], inputs.v_THV.shape[-1]
    block_k = gradient_block(K)
    num_programs = table.num_chunks * H * (K // block_k)
    raw = (*inputs.tensors(), table.starts_C, table.lengths_C)
    read = (o_THV, do_THV, passed.u_THV, passed.dv_THV, passed.states, passed.d_states)
    if has_cuda_form(inputs, gate) and V == 128 and block_k == CUDA_BLOCK_K:
        kernel = load(CUDA, do_THV.device.index, cuda_defines(inputs))
        kernel(num_programs, (*raw, *read, passed.norms, *found, gate.scale, gate.lower_bound or 0.0, H))
        return
    dot, precision = dot_type()
    kda_gradient_kernel[(num_programs,)](
        *raw,
        *read,
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


def gradients(
    inputs: KdaInputs,
    gate: Gate,
    segments: tuple[Segment, ...],
    o_THV: Tensor,
    do_THV: Tensor,
    d_final_NHKV: Tensor | None,
    initial_NHKV: Tensor | None,
    between: Sequence[Tensor],
) -> tuple[KdaInputs, Tensor | None]:
    """Of the raw inputs, and of the initial states where there are any. between: see `outputs`."""
    H, K = inputs.k_THK.shape[1:]
    between = list(between)
    dv_THV, of_tokens, of_chunks = torch.empty_like(do_THV), list[Tensor](), list[Tensor]()
    d_initial_NHKV = None if initial_NHKV is None else torch.empty_like(initial_NHKV)
    d_carried: Tensor | None = None
    for segment in reversed(segments):
        own, do = inputs.at(segment), rows_of(do_THV, segment.tokens)
        passed = pass_over_chunks(
            own,
            gate,
            segment.table,
            do,
            segment.states(d_final_NHKV, d_carried, -1),
            segment.states(initial_NHKV, between.pop() if segment.continues else None, 0),
            rows_of(dv_THV, segment.tokens),
            None if d_initial_NHKV is None else rows_of(d_initial_NHKV, segment.sequences),
        )
        if not of_tokens:  # not before: where there is one segment, its parts are gone now
            of_tokens = [torch.empty_like(x) for x in (inputs.q_THK, inputs.k_THK, inputs.f_THK, inputs.b_TH)]
            of_chunks = [
                torch.empty(segments[-1].chunks.stop, H, n, dtype=torch.float32, device=do.device)
                for n in (K, K // gradient_block(K))
            ]
        found = [rows_of(x, segment.tokens) for x in of_tokens] + [rows_of(x, segment.chunks) for x in of_chunks]
        inside_chunks(own, gate, segment.table, rows_of(o_THV, segment.tokens), do, passed, found)
        d_carried = passed.d_initial[0].clone() if segment.continues else None
        del passed  # before the next segment's
    dq, dk, df, db = of_tokens
    dt_bias_parts, a_log_parts = of_chunks
    return KdaInputs(dq, dk, dv_THV, df, db, a_log_parts.sum((0, 2)), dt_bias_parts.sum(0)), d_initial_NHKV
