"""Hand-written backwards against autograd through the definition, in fp64."""

import pytest
import torch

from k3kernels.attn_res.eager import attn_res_mix
from k3kernels.attn_res.reference import attn_res_mix as attn_res_mix_ref
from k3kernels.mla import absorb_queries, attend_latent, mla_attention_from_start, unabsorb
from k3kernels.mla.reference import mla_attention
from k3kernels.moe.eager import moe_experts
from k3kernels.moe.reference import moe_experts as moe_experts_ref
from k3kernels.moe.reference import route
from k3kernels.rms_norm import eager as norm_eager
from k3kernels.rms_norm import reference as norm_ref
from k3kernels.short_conv.eager import short_conv
from k3kernels.short_conv.reference import short_conv as short_conv_ref
from k3kernels.situ.eager import situ
from k3kernels.situ.reference import situ as situ_ref


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=gen).requires_grad_()


def assert_same(fast, slow, args: list[torch.Tensor]) -> None:
    a, b = fast(*args), slow(*args)
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    weight = torch.randn(a.shape, dtype=a.dtype, generator=torch.Generator().manual_seed(1))
    for got, want in zip(
        torch.autograd.grad((a * weight).sum(), args), torch.autograd.grad((b * weight).sum(), args), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("T", [1, 7, 65])
def test_rms_norm_equals_its_definition(T):
    args = [randn(T, 24), randn(24)]
    assert_same(lambda x, w: norm_eager.rms_norm(x, w, 1e-5), lambda x, w: norm_ref.rms_norm(x, w, 1e-5), args)


@pytest.mark.parametrize("T", [1, 7, 65])
def test_gated_rms_norm_equals_its_definition(T):
    args = [randn(T, 3, 8), randn(T, 3, 8, seed=1), randn(8)]
    assert_same(lambda *a: norm_eager.gated_rms_norm(*a, 1e-5), lambda *a: norm_ref.gated_rms_norm(*a, 1e-5), args)


@pytest.mark.parametrize("L", [1, 2, 63])
def test_short_conv_equals_its_definition(L):
    assert_same(short_conv, short_conv_ref, [randn(2, L + 3, 6), randn(6, 4)])


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ_equals_its_definition(linear_beta):
    args = [(3 * randn(7, 9)).detach().requires_grad_(), (20 * randn(7, 9, seed=1)).detach().requires_grad_()]
    assert_same(lambda g, u: situ(g, u, 4.0, linear_beta), lambda g, u: situ_ref(g, u, 4.0, linear_beta), args)


@pytest.mark.parametrize("R", [1, 2, 5])
def test_attn_res_mix_equals_its_definition(R):
    rows = [randn(11, 12, seed=r) for r in range(R)]
    args = [randn(12), randn(12, seed=3), *rows]
    assert_same(lambda n, p, *r: attn_res_mix(r, n, p, 1e-5), lambda n, p, *r: attn_res_mix_ref(r, n, p, 1e-5), args)


def test_attn_res_mix_uses_raw_rows_as_values():
    rows = [torch.full((1, 4), 8.0), torch.full((1, 4), 2.0)]
    mixed = attn_res_mix(rows, torch.ones(4), torch.zeros(4), 1e-5)
    torch.testing.assert_close(mixed, torch.full((1, 4), 5.0))


@pytest.mark.parametrize("betas", [(4.0, 25.0), (4.0, None), None])
@pytest.mark.parametrize("T", [1, 40])
def test_moe_experts_equal_their_definition_with_idle_experts(T, betas):
    E, R, F = 6, 8, 5
    experts, weights = route(randn(T, E).detach(), torch.tensor([0.0, 0, 0, 0, 0, -9.0]), 2, True, 1.0)
    assert 5 not in experts
    args = [randn(T, R), weights.detach().requires_grad_(), randn(E, F, R), randn(E, F, R, seed=2), randn(E, R, F)]
    assert_same(
        lambda x, w, a, b, c: moe_experts(x, experts, w, a, b, c, betas),
        lambda x, w, a, b, c: moe_experts_ref(x, experts, w, a, b, c, betas),
        args,
    )


def test_selection_bias_chooses_but_never_weighs():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    experts, weights = route(logits, torch.tensor([0.0, 0.0, 0.0, 10.0]), 2, False, 1.0)
    assert experts.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[-1.0, 2.0]])))


def test_replayed_experts_get_current_weights_and_gradients_and_a_missing_route_chooses_itself():
    logits = randn(2, 4)
    replay = torch.tensor([[3, 0], [-1, -1]])
    experts, weights = route(logits, torch.zeros(4), 2, True, 1.0, replay)
    own, _ = route(logits, torch.zeros(4), 2, True, 1.0)
    assert experts[0].tolist() == [3, 0]
    assert torch.equal(experts[1], own[1])
    (gradient,) = torch.autograd.grad(weights[0, 0], logits)
    assert gradient[0, 3] > 0
    assert gradient[0, 0] < 0
    assert gradient[0, 1:3].eq(0).all()


def test_attention_from_start_equals_the_definition():
    q, k, v = randn(2, 3, 9, 6), randn(2, 3, 9, 6, seed=1), randn(2, 3, 9, 4)
    pos = torch.arange(9).expand(2, 9)
    assert_same(lambda *a: mla_attention_from_start(*a, 0.4), lambda *a: mla_attention(*a, pos, 0.4), [q, k, v])


def test_attention_over_latent_rows_equals_attention_over_the_expansion():
    """Absorbed: for queries of two places, and latent rows rounded up with some that nobody sees."""
    N, H, S, X, P, R, V = 3, 2, 32, 4, 3, 5, 6
    cache, kv_b = randn(N, S, R + P).detach(), randn(H, X + V, R).detach()
    q = randn(N, H, 2, X + P).detach()
    pos = torch.tensor([[0, 1], [4, 9], [30, 31]])
    expanded = torch.einsum("nsr,hxr->nhsx", cache[..., :R], kv_b)
    k = torch.cat([expanded[..., :X], cache[:, None, :, R:].expand(-1, H, -1, -1)], -1)
    want = mla_attention(q, k, expanded[..., X:], pos, 0.3)
    absorbed_THC = absorb_queries(q.transpose(1, 2).flatten(0, 1), kv_b[:, :X], X)
    read = attend_latent(absorbed_THC.unflatten(0, (N, 2)), cache, pos, R, 0.3)
    got = unabsorb(read.flatten(0, 1), kv_b[:, X:], cache.dtype).unflatten(0, (N, 2)).transpose(1, 2)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
