"""Kimi Delta Attention (arXiv 2510.26692): the gate, the token recurrence that defines it, and the chunked form.

State S [K, V] per head. With decay exp(g_t) per key channel, unit key k_t and write strength beta_t:
    S <- diag(exp g_t) S;   u_t = beta_t (v_t - S^T k_t);   S <- S + k_t u_t^T;   o_t = S^T (scale q_t)
The state's type is that of the whole recurrence: inputs are widened to it, and o is rounded once, to v's type.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.dtypes import at_least_fp32

MAX_EXPONENT = 80.0  # exp() of it is finite in fp32, and so is the product with a unit-norm key


def kda_gate(f_THK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay g <= 0 from the raw gate, at least fp32.

    lower_bound None (Kimi-Linear): g = -exp(A_log) softplus(f + dt_bias).
    lower_bound L < 0 (K3): g = L sigmoid(exp(A_log) (f + dt_bias)), which replaces the softplus form and lies in (L, 0).
    """
    wide = at_least_fp32(f_THK.dtype)
    z_THK = f_THK.to(wide) + dt_bias_HK.to(wide)
    a_H1 = A_log_H.to(wide).exp().unsqueeze(-1)
    if lower_bound is None:
        return -a_H1 * F.softplus(z_THK)
    return lower_bound * torch.sigmoid(a_H1 * z_THK)


def l2_norm(x_THK: Tensor, eps: float = 1e-6) -> Tensor:
    """round(x / sqrt(sum x^2 + eps)), in at least fp32: eps is added to the sum, not to the mean."""
    x_wide_THK = x_THK.to(at_least_fp32(x_THK.dtype))
    return (x_wide_THK * torch.rsqrt(x_wide_THK.square().sum(-1, keepdim=True) + eps)).to(x_THK.dtype)


def kda_recurrent(
    q_NLHK: Tensor,
    k_NLHK: Tensor,
    v_NLHV: Tensor,
    g_NLHK: Tensor,
    beta_NLH: Tensor,
    state_NHKV: Tensor,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The definition: one token after the other; q and k are normalised. Returns o [N, L, H, V] and S.

    A position with k = 0, g = 0 and beta = 0 leaves the state as it is: that is how rows are padded.
    """
    S_NHKV = state_NHKV
    outputs = []
    for t in range(q_NLHK.shape[1]):
        row = (q_NLHK[:, t], k_NLHK[:, t], v_NLHV[:, t], g_NLHK[:, t], beta_NLH[:, t])
        o_NHV, S_NHKV = kda_step(*row, S_NHKV, scale)
        outputs.append(o_NHV)
    return torch.stack(outputs, 1), S_NHKV


def kda_step(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    g_NHK: Tensor,
    beta_NH: Tensor,
    state_NHKV: Tensor,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """One token of the recurrence for N sequences: decay, read with k, write, read with q."""
    q, k, v, g, beta = (x.to(state_NHKV.dtype) for x in (q_NHK, k_NHK, v_NHV, g_NHK, beta_NH))
    S_NHKV = g.exp().unsqueeze(-1) * state_NHKV
    u_NHV = beta.unsqueeze(-1) * (v - (k.unsqueeze(-2) @ S_NHKV).squeeze(-2))
    S_NHKV = S_NHKV + k.unsqueeze(-1) * u_NHV.unsqueeze(-2)
    return ((q * scale).unsqueeze(-2) @ S_NHKV).squeeze(-2).to(v_NHV.dtype), S_NHKV


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
    """The same in chunks of C tokens; L must be a multiple of C (pad with zeros).

    Inside a chunk, with G the inclusive cumulative sum of g:
        (I + tril(M, -1)) [W U] = diag(beta) [k exp(G), v],   M_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)
        Ut = U - W S;   o = (q exp G) S + tril(sum_c q_ic k_jc exp(G_ic - G_jc)) Ut
        S <- diag(exp G_last) S + (k exp(G_last - G))^T Ut
    The pairwise exponents are split around the middle of the chunk when the gate's bound keeps both halves
    below MAX_EXPONENT, else formed as differences, which never overflow and cost C times the memory.
    """
    L, K, C = q_NLHK.shape[1], q_NLHK.shape[3], chunk
    assert L % C == 0, (L, C)
    wide = state_NHKV.dtype

    def to_chunks(x: Tensor) -> Tensor:  # [N, L, H, X] -> [N, H, L/C, C, X]
        return x.unflatten(1, (L // C, C)).permute(0, 3, 1, 2, 4)

    q = to_chunks(q_NLHK.to(wide) * scale)
    k, v, g, beta = (to_chunks(x.to(wide)) for x in (k_NLHK, v_NLHV, g_NLHK, beta_NLH.unsqueeze(-1)))
    G = g.cumsum(-2)
    G_last = G[..., -1:, :]
    expG = G.exp()
    if is_split(lower_bound, C):
        middle = G[..., C // 2 : C // 2 + 1, :]
        k_right = k * (middle - G).exp()
        from_middle = (G - middle).exp()
        kk = (k * from_middle) @ k_right.mT
        qk = (q * from_middle) @ k_right.mT
    else:
        lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril().unsqueeze(-1)
        decay = (G.unsqueeze(-2) - G.unsqueeze(-3)).masked_fill(~lower, float("-inf")).exp()
        kk = torch.einsum("...ic,...jc,...ijc->...ij", k, k, decay)
        qk = torch.einsum("...ic,...jc,...ijc->...ij", q, k, decay)
    qk = qk.tril()
    M = beta * kk.tril(-1)  # masked first: above the diagonal the split form may overflow, and beta's gradient sees kk
    right = beta * torch.cat([k * expG, v], -1)
    solved = torch.linalg.solve_triangular(M, right, upper=False, unitriangular=True)
    W, U = solved[..., :K], solved[..., K:]
    q_decayed = q * expG
    k_to_end = (k * (G_last - G).exp()).mT
    decay_chunk = G_last.exp().mT

    S = state_NHKV
    outputs = []
    # Unbound once: taken one by one, each chunk's backward would fill a whole tensor with zeros around it.
    chunks = zip(*(x.unbind(2) for x in (W, U, q_decayed, qk, k_to_end, decay_chunk)), strict=True)
    for W_c, U_c, q_c, qk_c, k_c, decay_c in chunks:
        Ut = U_c - W_c @ S
        outputs.append(q_c @ S + qk_c @ Ut)
        S = decay_c * S + k_c @ Ut
    o_NHLV = torch.cat(outputs, 2)
    return o_NHLV.transpose(1, 2).to(v_NLHV.dtype), S


def is_split(lower_bound: float | None, chunk: int) -> bool:
    """Whether the gate's bound lets a chunk's pairwise exponents be split around its middle."""
    return lower_bound is not None and -lower_bound * ((chunk + 1) // 2) <= MAX_EXPONENT
