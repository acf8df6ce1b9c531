"""A row's bits do not depend on what else is in the batch. In fp32 on one thread, as the engine runs."""

import pytest
import torch
from torch import Tensor

from k3kernels.attn_res import attn_res_mix
from k3kernels.kda import kda_chunked, kda_gate, l2_norm
from k3kernels.mla import attend_latent
from k3kernels.mla.latent import KEY_BLOCK
from k3kernels.moe import moe_experts, route
from k3kernels.rms_norm import gated_rms_norm, rms_norm
from k3kernels.situ import situ

ROWS = 32  # the engine's batches are whole multiples


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("T", [2 * ROWS, 5 * ROWS])
@pytest.mark.parametrize("width", [9, 20, 48])
def test_rows_round_alike_in_batches_of_any_size(T: int, width: int) -> None:
    x_TD, y_TD, w_D, W_EF = randn(T, width), randn(T, width), randn(width), randn(11, width)
    ops = (
        lambda x, _: rms_norm(x, w_D, 1e-5),
        lambda x, y: gated_rms_norm(x.unflatten(-1, (1, -1)), y.unflatten(-1, (1, -1)), w_D, 1e-5),
        lambda x, y: situ(x, y, 4.0, 25.0),
        lambda x, y: attn_res_mix([x, y, x + y], w_D, w_D, 1e-5),
        lambda x, _: torch.nn.functional.linear(x, W_EF),
        lambda x, _: torch.sigmoid(torch.nn.functional.linear(x, W_EF)),
    )
    for op in ops:
        together = op(x_TD, y_TD)
        for start in range(0, T, ROWS):
            alone = op(x_TD[start : start + ROWS].clone(), y_TD[start : start + ROWS].clone())
            assert torch.equal(together[start : start + ROWS], alone)


@pytest.mark.parametrize("T", [2 * ROWS, 4 * ROWS])
def test_a_token_gets_the_same_bits_from_its_experts_however_few_tokens_share_them(T: int) -> None:
    E, R, F = 24, 48, 40
    x_TR, weights = randn(T, R), (randn(E, F, R), randn(E, F, R), randn(E, R, F))
    experts_Tk, weights_Tk = route(randn(T, E), torch.zeros(E), 2, True, 1.0)
    assert torch.bincount(experts_Tk.flatten()).unique().numel() > 4
    together = moe_experts(x_TR, experts_Tk, weights_Tk, *weights, (4.0, 25.0))
    for rows in (slice(0, ROWS), slice(ROWS, 2 * ROWS)):
        alone = moe_experts(x_TR[rows], experts_Tk[rows], weights_Tk[rows], *weights, (4.0, 25.0))
        assert torch.equal(together[rows], alone)


@pytest.mark.parametrize("num_keys", [20, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 12, 200, 300])
def test_cache_rows_behind_a_query_change_no_bit_of_it(num_keys: int) -> None:
    N, H, P, R = ROWS, 4, 12, 48
    cache_NSC, q_NQHC, pos_NQ = randn(N, 640, R + P), randn(N, 1, H, R + P), torch.full((N, 1), num_keys - 1)

    def attend(num_rows: int) -> Tensor:
        return attend_latent(q_NQHC, cache_NSC[:, :num_rows], pos_NQ, R, (R + P) ** -0.5)

    want = attend(-(-num_keys // 32) * 32)
    for num_rows in range(-(-num_keys // 32) * 32, 641, 32):
        assert torch.equal(attend(num_rows), want), num_rows


def test_kda_sequences_keep_their_bits_beside_longer_ones_and_in_larger_batches() -> None:
    N, L, H, K, C = 6, 96, 3, 24, 32
    q, k, v = l2_norm(randn(N, L, H, K)), l2_norm(randn(N, L, H, K + 1)[..., :K]), randn(N, L, H, K)
    g = kda_gate(randn(N, L, H, K), torch.zeros(H), torch.zeros(H, K), -5.0)
    beta, state = torch.sigmoid(randn(N, L, H)), randn(N, H, K, K)
    behind = torch.arange(L) >= 20  # the first sequence ends here
    g[0, behind], beta[0, behind], v[0, behind] = 0, 0, 0
    o, last = kda_chunked(q, k, v, g, beta, state, C, -5.0)
    alone_o, alone_last = kda_chunked(*(x[:1, :C] for x in (q, k, v, g, beta)), state[:1], C, -5.0)
    assert torch.equal(o[:1, :C], alone_o)
    assert torch.equal(last[:1], alone_last)
