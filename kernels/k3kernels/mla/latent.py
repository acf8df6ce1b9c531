"""Absorbed attention over latent rows whose bits do not depend on who else is in the batch or how a history was cut.

kv_b is folded into query and result, so a query reads the cached rows themselves, in training, prefill and decoding alike.
Keys behind a query weigh 0 and are summed block by block, so their number changes no bit; rows of queries are rounded up
to TILE, because a BLAS multiplies one or two rows by other kernels than more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.dtypes import at_least_fp32

KEY_BLOCK = 128  # keys that one GEMM sums over; a BLAS splits longer sums by their length
KEYS = 32  # the number of keys is a multiple of this: a vectorised sum takes its remainder in another order
TILE = 4


def absorb_queries(q_THX: Tensor, kv_b_HXR: Tensor, nope: int) -> Tensor:
    """[T, H, R + rope] in at least fp32: q_nope W_uk beside the shared key's part; T as many rows as any other call's."""
    wide = at_least_fp32(q_THX.dtype)
    q_HTR = q_THX[..., :nope].transpose(0, 1).to(wide) @ kv_b_HXR.to(wide)
    return torch.cat([q_HTR.transpose(0, 1), q_THX[..., nope:].to(wide)], -1)


def unabsorb(latent_THR: Tensor, kv_b_HVR: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H, V]: the values of what was read, rounded once."""
    return (latent_THR.transpose(0, 1) @ kv_b_HVR.to(latent_THR.dtype).mT).transpose(0, 1).to(dtype)


def attend_latent(q_NQHC: Tensor, latent_NSC: Tensor, pos_NQ: Tensor, R: int, scale: float) -> Tensor:
    """softmax(q c^T scale) c for queries at positions pos over rows s <= pos: [N, Q, H, R] in q's type.

    S is a multiple of KEYS; rows behind a query must be finite. Probabilities are rounded to the rows' type.
    """
    N, Q, H, C = q_NQHC.shape
    S = latent_NSC.shape[1]
    assert S % KEYS == 0, S
    wide = q_NQHC.dtype
    rows_NMC = q_NQHC.reshape(N, Q * H, C)
    rows_NMC = F.pad(rows_NMC, (0, 0, 0, -(Q * H) % TILE))
    latent = latent_NSC.to(wide)
    scores_NMS = (rows_NMC @ latent.mT).mul_(scale)
    hidden_NQS = torch.arange(S, device=q_NQHC.device) > pos_NQ.unsqueeze(-1)
    scores_NQHS = scores_NMS[:, : Q * H].view(N, Q, H, S).masked_fill_(hidden_NQS.unsqueeze(2), float("-inf"))
    prob_NMS = scores_NMS  # in whose place they are written: the rows behind the queries are zeros already
    prob_NMS[:, : Q * H] = torch.softmax(scores_NQHS, -1).to(latent_NSC.dtype).view(N, Q * H, S)
    out_NMR = prob_NMS[..., :KEY_BLOCK] @ latent[:, :KEY_BLOCK, :R]
    for block in range(KEY_BLOCK, S, KEY_BLOCK):
        keys = slice(block, block + KEY_BLOCK)
        out_NMR = out_NMR + prob_NMS[..., keys] @ latent[:, keys, :R]
    return out_NMR[:, : Q * H].view(N, Q, H, R)
