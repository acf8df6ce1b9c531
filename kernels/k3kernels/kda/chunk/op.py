"""`kda_chunk`: the chunked kernels as one differentiable operation."""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.kda.chunk.backward import gradients
from k3kernels.kda.chunk.forward import Gate, KdaInputs, outputs
from k3kernels.kda.chunk.segments import SEGMENT_TOKENS, cut
from k3kernels.kda.chunk.table import ChunkTable
from k3kernels.linear.triton import INTERPRETED


def kda_chunk(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    f_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    table: ChunkTable,
    lower_bound: float | None,
    scale: float,
    initial_NHKV: Tensor | None = None,
    emitted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention (arXiv 2510.26692) of packed sequences, from raw inputs: o [T, H, V] and final states
    [N, H, K, V] fp32, with gradients of all inputs.

    q, k [T, H, K] are normalised, f [T, H, K] goes through `kda_gate`, b [T, H] through a sigmoid, inside. q, k, v and f
    are bf16 (in the interpreter fp32), A_log, dt_bias and states fp32. K and V are powers of two from 16 on. What lies between
    the passes over memory is rounded to the inputs' type; sums and states are fp32. Equal calls give equal bits, a
    sequence's do not depend on the others, and a chunk's not on how many follow. A batch of more than SEGMENT_TOKENS is
    computed segment after segment, forward and back, to the same bits.

    table: see `chunk_table`; where it names emits, those states are written to emitted [slots, H, K, V] fp32.
    Raises ValueError for other types, and for emits without emitted or the other way round.
    """
    tensors = (q_THK, k_THK, v_THV, f_THK, b_TH, A_log_H.float(), dt_bias_HK.float())
    wanted = torch.float32 if INTERPRETED else torch.bfloat16
    if any(x.dtype != wanted for x in tensors[:4]):
        found = ", ".join(str(x.dtype) for x in tensors[:4])
        raise ValueError(f"kda_chunk: q, k, v and f must be {wanted}, got {found}: convert them, or take kda_chunked")
    if b_TH.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"kda_chunk: b must be bf16 or fp32, got {b_TH.dtype}: convert it")
    if (table.emits_C is None) != (emitted is None):
        raise ValueError("kda_chunk: emitted must be given exactly where the table names emits")
    o_THV: Tensor
    final_NHKV: Tensor
    o_THV, final_NHKV = _KdaChunk.apply(
        *tensors, initial_NHKV, cut(table, SEGMENT_TOKENS), Gate(lower_bound, scale), emitted
    )
    return o_THV, final_NHKV


class _KdaChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, f, b, A_log, dt_bias, initial, segments, gate, emitted):  # type: ignore[no-untyped-def]
        inputs = KdaInputs(q, k, v, f, b, A_log, dt_bias).contiguous()
        initial = None if initial is None else initial.float().contiguous()
        o, final, between = outputs(inputs, gate, segments, initial, emitted)
        ctx.save_for_backward(*inputs.tensors(), o, initial, *between)
        ctx.segments, ctx.gate = segments, gate
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    def backward(ctx, do, d_final):  # type: ignore[no-untyped-def]
        *inputs, o, initial = (saved := ctx.saved_tensors)[:9]  # once: under checkpointing each access computes again
        do = torch.zeros_like(o) if do is None else do.contiguous()
        d_final = None if d_final is None else d_final.float().contiguous()
        found, d_initial = gradients(KdaInputs(*inputs), ctx.gate, ctx.segments, o, do, d_final, initial, saved[9:])
        return *found.tensors(), d_initial, None, None, None
