"""KDA in chunks that lie at fixed positions of the sequence: one arithmetic for training, prefill and decoding.

Chunks of C tokens begin at positions 0, C, 2C, ... whoever computes them and however a history was cut into pieces. Row i
of a chunk is a function of the state at the chunk's start and of the rows up to i, in a fixed order, so a token gets the
same bits in a trainer's pass over whole sequences, in any piece of a prefill and in decoding. With G the inclusive sum of g
from the chunk's start:

    pairs_ij = sum_c k_ic e^(G_ic) k_jc e^(-G_jc),  M_ij = beta_i pairs_ij (j < i)
    u_i = beta_i (v_i - (k_i e^(G_i)) S) - sum_j M_ij u_j
    o_i = (scale q_i e^(G_i)) S + sum_(j <= i) (the pairs of scale q_i and k_j) u_j
    S  <- diag(e^(G_last)) S + (k e^(G_last - G))^T u        at a chunk's end only

Between chunk ends the state is read and not written; what has been seen of a chunk is its rows (k, G, u). A BLAS multiplies
one or two rows by other kernels than more, so a single row travels in a tile of TILE.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.kda.reference import is_split

CHUNK = 16
TILE = 4
VECTOR = 32  # numbers that a vector loop takes at once; what is left behind them, it may round in another way


@dataclass(frozen=True)
class ChunkRows:
    """Of N sequences, what they have seen of the chunk they stand in, in the state's type: k, G, u [N, H, C, K or V], and
    k e^(-G), which is read where the gate is bounded. Rows from the number of seen ones on are finite, and those of u zeros
    where any have been seen: a step reads all rows as they lie, and those weigh 0."""

    k_NHCK: Tensor
    G_NHCK: Tensor
    back_NHCK: Tensor
    u_NHCV: Tensor

    def of(self, which: Tensor | slice) -> ChunkRows:
        """Of some of the sequences: views where `which` is a slice."""
        return ChunkRows(*(x[which] for x in self.tensors()))

    def write(self, which: Tensor, rows: ChunkRows) -> None:
        for mine, theirs in zip(self.tensors(), rows.tensors(), strict=True):
            mine[which] = theirs

    def tensors(self) -> tuple[Tensor, ...]:
        return self.k_NHCK, self.G_NHCK, self.back_NHCK, self.u_NHCV


def kda_aligned(
    q_NLHK: Tensor,
    k_NLHK: Tensor,
    v_NLHV: Tensor,
    g_NLHK: Tensor,
    beta_NLH: Tensor,
    state_NHKV: Tensor,
    lower_bound: float | None,
    scale: float,
) -> Tensor:
    """o [N, L, H, V] of sequences that begin at a chunk's start; L is a multiple of C, padded with zeros behind the end."""
    none_N = torch.zeros(len(q_NLHK), dtype=torch.long, device=q_NLHK.device)
    inputs = (q_NLHK, k_NLHK, v_NLHV, g_NLHK, beta_NLH, state_NHKV)
    return kda_aligned_from(*inputs, None, none_N, none_N, lower_bound, scale)[0]


def kda_aligned_from(
    q_NLHK: Tensor,
    k_NLHK: Tensor,
    v_NLHV: Tensor,
    g_NLHK: Tensor,
    beta_NLH: Tensor,
    state_NHKV: Tensor,
    seen: ChunkRows | None,
    num_seen_N: Tensor,
    num_new_N: Tensor,
    lower_bound: float | None,
    scale: float,
    emit: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor, ChunkRows, list[Tensor]]:
    """Sequences that go on in mid-chunk: the first num_seen rows of L stand for `seen` and hold zeros.

    Returns o [N, L, H, V] (rows that were seen are undefined), the state at the start of the chunk in which each sequence
    ends, what it has seen of that one, and for each (sequence, number of chunks) of `emit` the state [H, K, V] after them.
    """
    N, L = q_NLHK.shape[:2]
    C, wide, device = CHUNK, state_NHKV.dtype, q_NLHK.device
    assert L % C == 0, L
    num_chunks = L // C

    def to_chunks(x: Tensor) -> Tensor:  # [N, L, H, X] -> [N, H, L/C, C, X]
        return x.to(wide).unflatten(1, (num_chunks, C)).permute(0, 3, 1, 2, 4).contiguous()

    q, k, v = to_chunks(q_NLHK) * scale, to_chunks(k_NLHK), to_chunks(v_NLHV)
    g, beta = to_chunks(g_NLHK), to_chunks(beta_NLH.unsqueeze(-1))
    is_seen = (torch.arange(C, device=device) < num_seen_N.unsqueeze(-1))[:, None, :, None]
    if seen is not None:
        k[:, :, 0] = torch.where(is_seen, seen.k_NHCK, k[:, :, 0])
        # The sum goes on from the last seen row, as if that row's g were the whole sum so far.
        is_last = (torch.arange(C, device=device) == num_seen_N.unsqueeze(-1) - 1)[:, None, :, None]
        g[:, :, 0] = torch.where(is_last, seen.G_NHCK, g[:, :, 0])
    G = g.clone()
    for i in range(1, C):  # one rounding a token, as in decoding: torch.cumsum has a wider accumulator
        G[..., i, :] += G[..., i - 1, :]
    if seen is not None:
        G[:, :, 0] = torch.where(is_seen, seen.G_NHCK, G[:, :, 0])
    back = k * (-G).exp() if is_bounded(lower_bound) else k
    expG = G.exp()
    both = torch.cat([k * expG, q * expG], -2)
    pairs = _pairs(torch.cat([k, q], -2), both, torch.cat([G, G], -2), k, G, back, lower_bound)
    M = F.pad((beta * pairs[..., :C, :]).tril(-1), (0, 0, 0, TILE - 1))
    P = pairs[..., C:, :].tril()
    to_end = (k * (G[..., -1:, :] - G).exp()).mT.contiguous()
    decay = expG[..., -1:, :].mT

    num_full_N = (num_seen_N + num_new_N) // C
    S = kept = state_NHKV
    outputs, us = [], []
    emitted: dict[tuple[int, int], Tensor] = {}
    for c in range(num_chunks):
        from_state = both[:, :, c] @ S
        b = beta[:, :, c] * (v[:, :, c] - from_state[..., :C, :])
        u_seen = torch.where(is_seen, seen.u_NHCV, 0.0) if seen is not None and c == 0 else None
        u = torch.zeros_like(b) if u_seen is None else u_seen.clone()
        for i in range(C):
            u_i = b[..., i, :] - (M[:, :, c, i : i + TILE] @ u)[..., 0, :]
            u[..., i, :] = u_i if u_seen is None else torch.where(is_seen[..., i, :], u_seen[..., i, :], u_i)
        outputs.append(from_state[..., C:, :] + P[:, :, c] @ u)
        us.append(u)
        S = decay[:, :, c] * S + to_end[:, :, c] @ u
        kept = torch.where((num_full_N == c + 1)[:, None, None, None], S, kept)
        emitted |= {(n, chunks): S[n] for n, chunks in emit if chunks == c + 1}
    o = torch.cat(outputs, 2).transpose(1, 2).to(v_NLHV.dtype)
    # A sequence that ends with a chunk has seen nothing of the next one: any rows will do.
    last_N = num_full_N.clamp(max=num_chunks - 1)
    numbers_N = torch.arange(N, device=device)
    rows = ChunkRows(*(x[numbers_N, :, last_N] for x in (k, G, back, torch.stack(us, 2))))
    return o, kept, rows, [emitted[each] for each in emit]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the first `num` sequences stand in their chunks before a token: the same in every layer, so found once a step.

    None behind them takes part. rows_M: for each sequence and head the number of the token's row among all [N H C]; before_M that of the row before
    it. active, starts and ends: the numbers of the sequences that take part, of all that stand at a chunk's start, and
    of those that take part and complete a chunk.
    """

    num: int
    rows_M: Tensor
    before_M: Tensor
    is_first_N11: Tensor
    is_passive_N11: Tensor
    active: Tensor
    starts: Tensor
    ends: Tensor

    @staticmethod
    def of(position_N: Tensor, is_active_N: Tensor, num_heads: int, head_dim: int) -> Places:
        active = is_active_N.nonzero().squeeze(-1)
        multiple = VECTOR // math.gcd(VECTOR, num_heads * head_dim)
        num = min(-(-(int(active[-1]) + 1) // multiple) * multiple, len(position_N)) if len(active) else len(position_N)
        place_N, is_active_N = position_N[:num] % CHUNK, is_active_N[:num]
        is_first_N = place_N == 0
        first_rows = torch.arange(0, num * num_heads * CHUNK, CHUNK, device=place_N.device).view(-1, num_heads)
        rows_M = (first_rows + place_N.unsqueeze(-1)).flatten()
        return Places(
            num,
            rows_M,
            (rows_M - 1).clamp_(min=0),
            is_first_N[:, None, None],
            ~is_active_N[:, None, None],
            active,
            is_first_N.nonzero().squeeze(-1),
            (is_active_N & (place_N == CHUNK - 1)).nonzero().squeeze(-1),
        )


def kda_aligned_step(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    g_NHK: Tensor,
    beta_NH: Tensor,
    state_NHKV: Tensor,
    rows: ChunkRows,
    places: Places,
    lower_bound: float | None,
    scale: float,
) -> Tensor:
    """One token of N sequences, each at its own row of its chunk: o [N, H, V].

    Writes the row into `rows`, whose tensors are contiguous, and at a chunk's end the state, both in place. What it writes
    for a sequence that is not active is the row after those that it has seen, which weighs 0; its o means nothing.
    """
    wide = state_NHKV.dtype
    k, v, g, beta = (x.to(wide) for x in (k_NHK, v_NHV, g_NHK, beta_NH.unsqueeze(-1)))
    at, (N, H, K) = places.rows_M, k.shape
    all_k, all_G, all_back, all_u = (x.view(-1, x.shape[-1]) for x in rows.tensors())
    # Behind a chunk's start 0 is added, which changes no bit.
    G = all_G.index_select(0, places.before_M).view(N, H, K).masked_fill_(places.is_first_N11, 0.0).add_(g)
    all_k.index_copy_(0, at, k.reshape(-1, K))
    all_G.index_copy_(0, at, G.view(-1, K))
    all_back.index_copy_(0, at, (k * (-G).exp_() if is_bounded(lower_bound) else k).reshape(-1, K))
    if len(places.starts):
        rows.u_NHCV.index_fill_(0, places.starts, 0.0)
    two = torch.stack([k, q_NHK.to(wide) * scale], -2)
    tile = F.pad(two * G.exp().unsqueeze(-2), (0, 0, 0, TILE - 2))
    if is_bounded(lower_bound):
        pairs = tile @ rows.back_NHCK.mT
    else:
        pairs = _pairs(two, tile, G.unsqueeze(-2), rows.k_NHCK, rows.G_NHCK, rows.back_NHCK, lower_bound)
        pairs = F.pad(pairs, (0, 0, 0, TILE - 2))
    # Row 0 reads what is before the token, row 1 the token too: all behind that is finite, and u is 0 there.
    pairs[:, :, 0] *= beta
    from_state = tile @ state_NHKV
    u = (
        (v - from_state[:, :, 0])
        .mul_(beta)
        .sub_((pairs @ rows.u_NHCV)[:, :, 0])
        .masked_fill_(places.is_passive_N11, 0.0)
    )
    all_u.index_copy_(0, at, u.view(N * H, -1))
    o = from_state[:, :, 1] + (pairs @ rows.u_NHCV)[:, :, 1]
    if len(ends := places.ends):
        at_end = _at_end(state_NHKV[ends], *(x[ends] for x in (rows.k_NHCK, rows.G_NHCK, rows.u_NHCV)))
        state_NHKV.index_copy_(0, ends, at_end)
    return o.to(v_NHV.dtype)


def _at_end(state: Tensor, k: Tensor, G: Tensor, u: Tensor) -> Tensor:
    """The state after a whole chunk."""
    to_end = (k * (G[..., -1:, :] - G).exp()).mT.contiguous()
    return G.exp()[..., -1:, :].mT * state + to_end @ u


def is_bounded(lower_bound: float | None) -> bool:
    """Whether e^(-G) of a whole chunk is finite in fp32, so that exponents can be split at the chunk's start."""
    return is_split(lower_bound, 2 * CHUNK)


def _pairs(
    rows: Tensor, decayed: Tensor, G_rows: Tensor, k: Tensor, G: Tensor, back: Tensor, lower_bound: float | None
) -> Tensor:
    """sum_c x_ic k_jc e^(G_ic - G_jc) for rows x [..., rows, K], whose sums are G_rows and whose x e^G are `decayed`;
    [..., rows, C].

    One product where the gate is bounded; else the exponents are formed as differences, at C times the memory.
    """
    if is_bounded(lower_bound):
        return decayed @ back.mT
    decay = (G_rows.unsqueeze(-2) - G.unsqueeze(-3)).clamp(max=0.0).exp()
    return (rows.unsqueeze(-2) * (k.unsqueeze(-3) * decay)).sum(-1)
