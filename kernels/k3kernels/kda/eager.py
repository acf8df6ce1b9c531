"""The chunked form with bounded memory: where the whole would be large, segment after segment, computed twice.

Of a segment nothing is kept but its inputs, which exist anyway, and the state it starts from. The backward pass runs
each segment again and takes its gradients before the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from k3kernels.kda import reference

LARGEST_BYTES = 256 * 2**20  # of the largest tensor made at once; a segment's backward holds up to seven of that size


def kda_chunked(
    q_NLHK: Tensor,
    k_NLHK: Tensor,
    v_NLHV: Tensor,
    g_NLHK: Tensor,
    beta_NLH: Tensor,
    state_NHKV: Tensor,
    chunk: int,
    lower_bound: float | None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    (N, L, _, K), V = q_NLHK.shape, v_NLHV.shape[-1]
    per_token = _largest_per_token(K, V, chunk, reference.is_split(lower_bound, chunk)) * state_NHKV.element_size()
    num_sequences, num_tokens = segment_shape(N, L, chunk, per_token * q_NLHK.shape[2])
    inputs = (q_NLHK, k_NLHK, v_NLHV, g_NLHK, beta_NLH, state_NHKV)
    if (num_sequences, num_tokens) == (N, L):
        return reference.kda_chunked(*inputs, chunk, lower_bound, scale)
    o_NLHV, last_NHKV = _Segments.apply(*inputs, (chunk, lower_bound, scale), (num_sequences, num_tokens))
    return o_NLHV, last_NHKV


def _largest_per_token(K: int, V: int, chunk: int, is_split: bool) -> int:
    """Elements a token and head: the pairwise [C, K] decays, else the states [K, V] kept at each chunk's start."""
    return max(K + V, K * V // chunk, 0 if is_split else chunk * K)


def segment_shape(N: int, L: int, chunk: int, token_bytes: int) -> tuple[int, int]:
    """Sequences and tokens of a segment whose largest tensor stays below LARGEST_BYTES; at least one chunk of one.

    Whole sequences where one fits, since each further segment of a sequence keeps a state.
    """
    num_sequences = min(N, LARGEST_BYTES // (L * token_bytes))
    if num_sequences > 0:
        return num_sequences, L
    return 1, max(1, LARGEST_BYTES // (chunk * token_bytes)) * chunk


class _Segments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, state, options, shape):  # type: ignore[no-untyped-def]
        N, L = q.shape[:2]
        o, last, starts = torch.empty_like(v), torch.empty_like(state), []
        for sequences in _slices(N, shape[0]):
            S = state[sequences]
            for tokens in _slices(L, shape[1]):
                if any(ctx.needs_input_grad):
                    starts.append(S)
                segment = [*(x[sequences, tokens] for x in (q, k, v, g, beta)), S]
                o[sequences, tokens], S = reference.kda_chunked(*segment, *options)
            last[sequences] = S
        ctx.save_for_backward(q, k, v, g, beta, *starts)
        ctx.options, ctx.shape = options, shape
        return o, last

    @staticmethod
    def backward(ctx, grad_o, grad_last):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # once: under activation checkpointing each access computes the layer again
        inputs, starts = saved[:5], list(saved[5:])
        N, L = inputs[0].shape[:2]
        grads, grad_state = [torch.empty_like(x) for x in inputs], torch.empty_like(grad_last)
        for sequences in reversed(_slices(N, ctx.shape[0])):
            grad_S = grad_last[sequences]
            for tokens in reversed(_slices(L, ctx.shape[1])):
                segment = [*(x[sequences, tokens] for x in inputs), starts.pop()]
                segment = [x.detach().requires_grad_() for x in segment]
                with torch.enable_grad():
                    outputs = reference.kda_chunked(*segment, *ctx.options)
                *of_inputs, grad_S = torch.autograd.grad(outputs, segment, (grad_o[sequences, tokens], grad_S))
                for grad, of_input in zip(grads, of_inputs, strict=True):
                    grad[sequences, tokens] = of_input
            grad_state[sequences] = grad_S
        return *grads, grad_state, None, None


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
