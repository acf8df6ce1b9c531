"""bf16 and fp16 inputs: what runs equals the definition, and gradients are those of exact arithmetic, rounded once."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from k3kernels.attn_res.eager import attn_res_mix
from k3kernels.attn_res.reference import attn_res_mix as attn_res_mix_ref
from k3kernels.kda import kda_chunked, kda_gate, kda_recurrent, l2_norm
from k3kernels.mla import absorb_queries, attend_latent, mla_attention_from_start, unabsorb
from k3kernels.mla import eager as mla_eager
from k3kernels.mla.reference import mla_attention
from k3kernels.rms_norm import eager as norm_eager
from k3kernels.rms_norm import reference as norm_ref
from k3kernels.short_conv.eager import short_conv
from k3kernels.short_conv.reference import short_conv as short_conv_ref
from k3kernels.situ.eager import situ
from k3kernels.situ.reference import situ as situ_ref

NARROW = (torch.bfloat16, torch.float16)
T, D = 257, 96

Op = Callable[..., Tensor]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ulps(a: Tensor, b: Tensor) -> int:
    """The largest distance in units in the last place: the codes of a narrow float, in order of its value."""
    codes = [x.view(torch.int16).int() for x in (a, b)]
    ordered = [torch.where(code < 0, -(code & 0x7FFF), code) for code in codes]
    return int((ordered[0] - ordered[1]).abs().max())


def mix(function: Op) -> Op:
    return lambda norm, proj, *rows: function(rows, norm, proj, 1e-5)


# op, definition, inputs, indices of the inputs that stay fp32, ulps between the two
CASES: dict[str, tuple[Op, Op, Sequence[Tensor], tuple[int, ...], int]] = {
    "rms_norm": (
        lambda x, w: norm_eager.rms_norm(x, w, 1e-5),
        lambda x, w: norm_ref.rms_norm(x, w, 1e-5),
        (3 * randn(T, D), randn(D)),
        (),
        0,
    ),
    "rms_norm with an fp32 weight": (
        lambda x, w: norm_eager.rms_norm(x, w, 1e-5),
        lambda x, w: norm_ref.rms_norm(x, w, 1e-5),
        (3 * randn(T, D), randn(D)),
        (1,),
        0,
    ),
    "gated_rms_norm": (
        lambda o, g, w: norm_eager.gated_rms_norm(o, g, w, 1e-5),
        lambda o, g, w: norm_ref.gated_rms_norm(o, g, w, 1e-5),
        (randn(T, 4, 24), randn(T, 4, 24, seed=1), randn(24)),
        (2,),
        0,
    ),
    "short_conv": (short_conv, short_conv_ref, (randn(3, T + 3, 30), randn(30, 4)), (1,), 1),
    "situ": (
        lambda g, u: situ(g, u, 4.0, 25.0),
        lambda g, u: situ_ref(g, u, 4.0, 25.0),
        (3 * randn(T, D), 20 * randn(T, D, seed=1)),
        (),
        1,
    ),
    "situ without a linear beta": (
        lambda g, u: situ(g, u, 4.0, None),
        lambda g, u: situ_ref(g, u, 4.0, None),
        (3 * randn(T, D), 20 * randn(T, D, seed=1)),
        (),
        1,
    ),
    "attn_res_mix": (
        mix(attn_res_mix),
        mix(attn_res_mix_ref),
        (randn(D), randn(D, seed=1), *(randn(T, D, seed=r) for r in range(2, 7))),
        (),
        1,
    ),
}


def inputs_of(case: str, dtype: torch.dtype) -> list[Tensor]:
    _, _, inputs, kept, _ = CASES[case]
    return [x if i in kept else x.to(dtype) for i, x in enumerate(inputs)]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("case", CASES)
def test_an_op_rounds_where_its_definition_does(case: str, dtype: torch.dtype) -> None:
    op, definition, *_, max_ulps = CASES[case]
    inputs = inputs_of(case, dtype)
    got, want = op(*inputs), definition(*inputs)
    assert got.dtype == want.dtype == dtype
    assert ulps(got, want) <= max_ulps
    assert (got != want).float().mean() < 1e-3


@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("rms_norm")])
def test_a_definition_rounds_once(case: str) -> None:
    """Equal to exact arithmetic on the same inputs, rounded. (The norm before the weight rounds twice, by definition.)"""
    inputs = inputs_of(case, torch.bfloat16)
    exact = CASES[case][1](*(x.double() for x in inputs))
    assert (CASES[case][1](*inputs) != exact.bfloat16()).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_exact_arithmetic_rounded_once(case: str, dtype: torch.dtype) -> None:
    """A gradient arrives in its input's type. What is left to fp32 sums is 1e-5 of the largest element."""
    op, definition, *_ = CASES[case]
    inputs = [x.requires_grad_() for x in inputs_of(case, dtype)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, out_exact = op(*inputs), definition(*exact)
    upstream = randn(*out.shape, seed=5).to(dtype)
    gradients = torch.autograd.grad(out, inputs, upstream)
    wants = torch.autograd.grad(out_exact, exact, upstream.double())
    for i, (x, got, want) in enumerate(zip(inputs, gradients, wants, strict=True)):
        assert got.dtype == x.dtype, i
        rounding = torch.finfo(x.dtype).eps / 2 if x.dtype == dtype else 0.0
        smallest = torch.finfo(dtype).tiny if x.dtype == dtype else 0.0
        allowed = 1.01 * rounding * want.abs() + 1e-5 * want.abs().max() + smallest
        assert ((got.double() - want).abs() <= allowed).all(), i


def test_the_norm_rounds_before_its_weight() -> None:
    """The Hugging Face order; one rounding after the weight gives other bits for many elements."""
    x_TD, weight_D = inputs_of("rms_norm", torch.bfloat16)
    unit_TD = x_TD.double() * torch.rsqrt(x_TD.double().square().mean(-1, keepdim=True) + 1e-5)
    got_TD = norm_eager.rms_norm(x_TD, weight_D, 1e-5)
    two_TD = (unit_TD.bfloat16().double() * weight_D.double()).bfloat16()
    once_TD = (unit_TD * weight_D.double()).bfloat16()
    assert (got_TD != two_TD).float().mean() < 1e-3
    assert (got_TD != once_TD).float().mean() > 0.1


def test_residual_scores_are_not_rounded() -> None:
    """Two rows that the product norm * proj tells apart by less than bf16 resolves keep their exact shares."""
    norm_D, proj_D = (1 + 0.1 * randn(D)).bfloat16(), (0.3 * randn(D, seed=1)).bfloat16()
    rows = [randn(T, D, seed=r).bfloat16() for r in (2, 3)]
    exact = attn_res_mix_ref([row.double() for row in rows], norm_D.double(), proj_D.double(), 1e-5)
    rounded_product = attn_res_mix_ref([r.double() for r in rows], (norm_D * proj_D).double(), torch.ones(D), 1e-5)
    unit = [norm_ref.rms_norm(row, norm_D, 1e-5) for row in rows]
    scores_RT = torch.stack([(row @ proj_D).double() for row in unit])  # a bf16 norm followed by a bf16 product
    rounded_scores = sum(p.unsqueeze(-1) * row.double() for p, row in zip(scores_RT.softmax(0), rows, strict=True))
    got = attn_res_mix(rows, norm_D, proj_D, 1e-5)
    assert (got != exact.bfloat16()).float().mean() < 1e-3
    assert (got != rounded_product.bfloat16()).float().mean() > 0.05
    assert (got != rounded_scores.bfloat16()).float().mean() > 0.05


def kda_inputs(N: int, L: int, H: int = 2, K: int = 24, lower_bound: float | None = -5.0) -> list[Tensor]:
    q, k, v = (randn(N, L, H, K, seed=s).bfloat16() for s in (1, 2, 3))
    g = kda_gate(randn(N, L, H, K, seed=4).bfloat16(), torch.zeros(H), torch.full((H, K), -2.0), lower_bound)
    return [l2_norm(q), l2_norm(k), v, g, torch.sigmoid(randn(N, L, H)), randn(N, H, K, K, seed=5)]


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_the_chunked_recurrence_of_bf16_inputs_is_that_of_exact_arithmetic_rounded_once(
    lower_bound: float | None,
) -> None:
    inputs = kda_inputs(2, 80, lower_bound=lower_bound)
    o, last = kda_chunked(*inputs, 16, lower_bound, 24**-0.5)
    exact_o, exact_last = kda_recurrent(*(x.double() for x in inputs), 24**-0.5)
    assert (o.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert ((o - exact_o).abs() <= 2.0**-8 * exact_o.abs() + 1e-6).all()
    assert (o != exact_o.bfloat16()).float().mean() < 1e-3
    assert (last - exact_last).abs().max() < 1e-5


def test_the_chunked_recurrence_has_gradients_of_exact_arithmetic_rounded_once() -> None:
    inputs = [x.requires_grad_() for x in kda_inputs(1, 48)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    o, last = kda_chunked(*inputs, 16, -5.0, 24**-0.5)
    exact_o, exact_last = kda_recurrent(*exact, 24**-0.5)
    upstream, upstream_last = randn(*o.shape).bfloat16(), randn(*last.shape)
    gradients = torch.autograd.grad((o, last), inputs, (upstream, upstream_last))
    wants = torch.autograd.grad((exact_o, exact_last), exact, (upstream.double(), upstream_last.double()))
    for x, got, want in zip(inputs, gradients, wants, strict=True):
        assert got.dtype == x.dtype
        rounding = 2.0**-8 if x.dtype == torch.bfloat16 else 0.0
        assert ((got - want).abs() <= rounding * want.abs() + 1e-5 * want.abs().max()).all()


def test_decay_and_norm_keep_fp32_parameters_fp32() -> None:
    """exp(A_log) of a slow head differs by half a percent when A_log is rounded to bf16."""
    f, A_log = randn(T, 2, 24).bfloat16(), torch.tensor([0.30078125 + 2**-9, -1.1], dtype=torch.float32)
    g = kda_gate(f, A_log, torch.zeros(2, 24), None)
    exact = kda_gate(f.double(), A_log.double(), torch.zeros(2, 24).double(), None)
    rounded = kda_gate(f.double(), A_log.bfloat16().double(), torch.zeros(2, 24).double(), None)
    assert g.dtype == torch.float32
    torch.testing.assert_close(g.double(), exact, rtol=1e-6, atol=0)
    assert ((rounded - exact) / exact).abs().max() > 1e-3


def test_l2_norm_rounds_once() -> None:
    x = randn(T, 3, 128).bfloat16()
    exact = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert (l2_norm(x) != exact.bfloat16()).float().mean() < 1e-3


def attention_inputs(N: int, H: int, S: int, X: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    return randn(N, H, S, X, seed=1).bfloat16(), randn(N, H, S, X, seed=2).bfloat16(), randn(N, H, S, V).bfloat16()


def test_attention_rounds_probabilities_and_result_and_nothing_else() -> None:
    q, k, v = attention_inputs(2, 3, 70, 24, 16)
    pos = torch.arange(70).expand(2, 70)
    exact = mla_attention(q.double(), k.double(), v.double(), pos, 0.5)
    defined, fused = mla_attention(q, k, v, pos, 0.5), mla_attention_from_start(q, k, v, 0.5)
    assert defined.dtype == fused.dtype == torch.bfloat16
    # A sum of probabilities p_s (1 + e_s) times v_s, |e_s| <= 2^-8, then one rounding of the result.
    size = mla_attention(q.double(), k.double(), v.double().abs(), pos, 0.5)
    for got in (defined, fused):
        assert ((got.double() - exact).abs() <= 2.0**-8 * (size + exact.abs()) + 1e-6).all()
    scores = torch.softmax(((q @ k.mT) * 0.5).float().masked_fill(torch.ones(70, 70).triu(1).bool(), -torch.inf), -1)
    rounded = scores.bfloat16() @ v
    assert (defined.double() - exact).square().mean() < 0.5 * (rounded.double() - exact).square().mean()


def test_padding_behind_a_row_is_not_seen_by_its_queries() -> None:
    q, k, v = attention_inputs(2, 3, 40, 24, 16)
    alone = mla_attention_from_start(q[:1, :, :13], k[:1, :, :13], v[:1, :, :13], 0.5)
    padded = []
    for behind in (0.0, 1e4):
        for x in (q, k, v):
            x[0, :, 13:] = behind
        padded.append(mla_attention_from_start(q, k, v, 0.5)[:1, :, :13])
    assert torch.equal(*padded)
    assert (padded[0] - alone).abs().max() < 2.0**-7 * alone.abs().max()


def test_absorbed_attention_sums_its_blocks_in_fp32() -> None:
    N, H, S, X, P, R, V = 2, 2, 608, 6, 4, 10, 5
    q, cache = randn(N, H, X + P).bfloat16(), randn(N, S, R + P).bfloat16()
    kv_b, pos = randn(H, X + V, R).bfloat16(), torch.tensor([[S - 1], [300]])

    def attend(q: Tensor, cache: Tensor, kv_b: Tensor) -> Tensor:
        read = attend_latent(absorb_queries(q, kv_b[:, :X], X).unsqueeze(1), cache, pos, R, 0.3)
        return unabsorb(read.squeeze(1), kv_b[:, X:], q.dtype)

    got = attend(q, cache, kv_b)
    exact = attend(q.double(), cache.double(), kv_b.double())
    assert got.dtype == torch.bfloat16
    # Probabilities are rounded, independently; their sum over 600 keys and the result's own rounding.
    assert (got - exact).abs().max() < 2.0**-8 * exact.abs().max()


def test_torchs_deterministic_mode_keeps_attention_away_from_cudnn(monkeypatch) -> None:
    """Whose backward pass adds in no fixed order."""
    monkeypatch.setattr(mla_eager, "uses_kernel", lambda _: True)
    q, _, v = attention_inputs(1, 1, 2, 192, 128)
    assert mla_eager._takes_cudnn(q, v)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not mla_eager._takes_cudnn(q, v)
