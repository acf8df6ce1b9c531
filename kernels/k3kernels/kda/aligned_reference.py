"""KDA in chunks at fixed positions, one chunk of one sequence at a time, as it is written down.

Chunks of 16 tokens begin at positions 0, 16, 32, ... With S the state [K, V] at a chunk's start and G the inclusive sum
of g from there, row i is a function of S and of the rows up to i, in a fixed order:

    u_i = beta_i (v_i - (k_i e^(G_i)) S) - sum_(j < i) beta_i <k_i e^(G_i), k_j e^(-G_j)> u_j
    o_i = (q_i e^(G_i)) S + sum_(j <= i) <q_i e^(G_i), k_j e^(-G_j)> u_j
    S  <- diag(e^(G_15)) S + sum_j (k_j e^(G_15 - G_j)) u_j^T       at the chunk's end
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 16


def chunk_tile(
    q_CHK: Tensor, k_CHK: Tensor, v_CHV: Tensor, g_CHK: Tensor, beta_CH: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """o [C, H, V] and the state behind the rows; all of the state's type, q scaled. Exponents are differences, <= 0."""
    G = g_CHK.cumsum(0)
    outputs: list[Tensor] = []
    us: list[Tensor] = []
    for i in range(len(k_CHK)):
        from_k, from_q = (torch.einsum("hk,hkv->hv", x[i] * G[i].exp(), state_HKV) for x in (k_CHK, q_CHK))
        u = beta_CH[i].unsqueeze(-1) * (v_CHV[i] - from_k)
        for j in range(i):
            pair_H = (k_CHK[i] * k_CHK[j] * (G[i] - G[j]).exp()).sum(-1)
            u = u - (beta_CH[i] * pair_H).unsqueeze(-1) * us[j]
        us.append(u)
        o = from_q
        for j in range(i + 1):
            o = o + (q_CHK[i] * k_CHK[j] * (G[i] - G[j]).exp()).sum(-1, keepdim=True) * us[j]
        outputs.append(o)
    to_end = k_CHK * (G[-1] - G).exp()
    state_end = G[-1].exp().unsqueeze(-1) * state_HKV + torch.einsum("chk,chv->hkv", to_end, torch.stack(us))
    return torch.stack(outputs), state_end


def kda_aligned(
    q_LHK: Tensor,
    k_LHK: Tensor,
    v_LHV: Tensor,
    g_LHK: Tensor,
    beta_LH: Tensor,
    state_HKV: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """One sequence from a chunk's start on: o [L, H, V] in v's type, and the states [chunks + 1, H, K, V] at chunk starts.

    The last state stands at the start of the chunk in which the sequence ends.
    """
    S = state_HKV
    inputs = [x.to(S.dtype) for x in (q_LHK, k_LHK, v_LHV, g_LHK, beta_LH)]
    inputs[0] = inputs[0] * scale
    outputs, states = [], [S]
    for start in range(0, len(q_LHK), CHUNK):
        q, k, v, g, beta = (x[start : start + CHUNK] for x in inputs)
        o, S = chunk_tile(q, k, v, g, beta, S)
        outputs.append(o)
        if start + CHUNK <= len(q_LHK):
            states.append(S)
    return torch.cat(outputs).to(v_LHV.dtype), torch.stack(states)
