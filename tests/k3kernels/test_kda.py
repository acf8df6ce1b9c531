"""Kimi Delta Attention: the chunked form is the recurrence."""

import pytest
import torch

from k3kernels.kda import eager, kda_chunked, kda_gate, kda_recurrent, l2_norm
from k3kernels.kda.reference import kda_chunked as kda_chunked_whole
from k3kernels.kda.reference import kda_step
from k3kernels.packing import Packing

NAMES = ("q", "k", "v", "g", "beta", "state")


def inputs(N: int, L: int, H: int = 2, K: int = 5, lower_bound: float | None = -5.0) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(L)
    q, k, v, f = (torch.randn(N, L, H, K, dtype=torch.float64, generator=gen) for _ in range(4))
    g = kda_gate(3 * f, torch.zeros(H).double(), torch.zeros(H, K).double(), lower_bound)
    beta = torch.rand(N, L, H, dtype=torch.float64, generator=gen)
    state = torch.randn(N, H, K, K, dtype=torch.float64, generator=gen)
    return [
        x.requires_grad_() for x in (l2_norm(q).detach() * K**-0.5, l2_norm(k).detach(), v, g.detach(), beta, state)
    ]


def outputs_and_gradients(form, args: list[torch.Tensor]) -> list[torch.Tensor]:
    o, state = form(*args)
    gen = torch.Generator().manual_seed(1)
    weight_o = torch.randn(o.shape, dtype=o.dtype, generator=gen)
    weight_s = torch.randn(state.shape, dtype=o.dtype, generator=gen)
    return [o, state, *torch.autograd.grad((o * weight_o).sum() + (state * weight_s).sum(), args)]


def padded(form, packing: Packing, length: int):
    """The chunked form over rows padded to whole chunks, compared on the real tokens."""

    def run(q, k, v, g, beta, state):
        rows = [packing.pad(x, length) for x in (q, k, v, g, beta)]
        o, last = form(*rows, state)
        return packing.unpad(o), last

    return run


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("chunk", [4, 16, 32])
@pytest.mark.parametrize("length", [1, 7, 31, 32, 33, 63, 65])
def test_chunked_equals_the_recurrence_with_all_gradients(length, chunk, lower_bound):
    args = inputs(2, length, lower_bound=lower_bound)
    want = outputs_and_gradients(kda_recurrent, args)

    def chunked(*a):
        full = -(-length // chunk) * chunk
        rows = [torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, full - length)) for x in a[:5]]
        o, state = kda_chunked(*rows, a[5], chunk, lower_bound)
        return o[:, :length], state

    got = outputs_and_gradients(chunked, args)
    for name, a, b in zip(("o", "state out", *NAMES), got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_packed_sequences_equal_each_one_alone_with_all_gradients():
    packing = Packing((1, 40, 7, 33))
    q, k, v, g, beta, _ = inputs(1, packing.num_tokens)
    state = torch.randn(4, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(9)).requires_grad_()
    args = [x.detach()[0].requires_grad_() for x in (q, k, v, g, beta)] + [state]

    def alone(q, k, v, g, beta, state):
        outputs = []
        for n, (start, length) in enumerate(zip(packing.starts_N.tolist(), packing.lengths, strict=True)):
            rows = [x[None, start : start + length] for x in (q, k, v, g, beta)]
            outputs.append(kda_recurrent(*rows, state[n : n + 1]))
        return torch.cat([o[0] for o, _ in outputs]), torch.cat([s for _, s in outputs])

    together = padded(lambda *a: kda_chunked(*a, 16, -5.0), packing, 48)
    for name, a, b in zip(
        ("o", "state out", *NAMES),
        outputs_and_gradients(together, args),
        outputs_and_gradients(alone, args),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_strongest_decay_of_the_bounded_gate_stays_finite_in_fp32():
    q, k, v, g, beta, state = (x.detach().float() for x in inputs(1, 64, K=24))
    g = torch.full_like(g, -5.0)
    o, last = kda_chunked(q, k, v, g, beta, state, 32, -5.0)
    want_o, want_last = kda_recurrent(q, k, v, g, beta, state)
    torch.testing.assert_close(o, want_o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, want_last, rtol=1e-4, atol=1e-5)


def test_strongest_decay_of_the_bounded_gate_has_the_recurrences_gradients_in_fp32():
    q, k, v, g, beta, state = (x.detach().float() for x in inputs(1, 64, K=24))
    args = [x.requires_grad_() for x in (q, k, v, torch.full_like(g, -5.0), beta, state)]
    got = outputs_and_gradients(lambda *a: kda_chunked(*a, 32, -5.0), args)
    for a, b in zip(got, outputs_and_gradients(kda_recurrent, args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_softplus_gate_far_below_the_bound_stays_finite():
    q, k, v, g, beta, state = (x.detach().float() for x in inputs(1, 64))
    o, last = kda_chunked(q, k, v, torch.full_like(g, -60.0), beta, state, 32, None)
    assert torch.isfinite(o).all()
    assert torch.isfinite(last).all()


def test_bounded_gate_replaces_the_softplus_form_and_is_no_clamp_of_it():
    f = torch.linspace(-20, 20, 41, dtype=torch.float64).view(41, 1, 1)
    A_log, dt_bias = torch.tensor([0.3], dtype=torch.float64), torch.tensor([[0.1]], dtype=torch.float64)
    bounded = kda_gate(f, A_log, dt_bias, -5.0)
    z = (f + 0.1) * torch.tensor(0.3, dtype=torch.float64).exp()
    torch.testing.assert_close(bounded, -5.0 / (1 + (-z).exp()), rtol=1e-12, atol=1e-14)
    softplus = kda_gate(f, A_log, dt_bias, None)
    torch.testing.assert_close(softplus, -torch.tensor(0.3).double().exp() * torch.log1p((f + 0.1).exp()))
    assert (bounded - softplus.clamp(min=-5.0)).abs().max() > 0.1


def test_l2_norm_adds_eps_to_the_sum_and_not_to_the_mean():
    x = torch.full((1, 1, 128), 1e-4, dtype=torch.float64)
    want = 1e-4 / (128 * 1e-8 + 1e-6) ** 0.5
    torch.testing.assert_close(l2_norm(x), torch.full_like(x, want))


def test_padding_with_zeros_leaves_the_state_as_it_is():
    args = [x.detach() for x in inputs(1, 5)]
    _, want = kda_recurrent(*args)
    longer = [torch.cat([x, torch.zeros_like(x[:, :3])], 1) for x in args[:5]]
    _, got = kda_recurrent(*longer, args[5])
    assert torch.equal(got, want)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize(("fitting", "shape"), [(1, (1, 16)), (50, (1, 48)), (112, (1, 112)), (229, (2, 112))])
def test_segments_equal_the_whole_with_all_gradients(fitting, shape, lower_bound, monkeypatch):
    """Of 5 sequences of 112 tokens: one chunk at a time, 48 tokens (the last piece is short), one sequence, two."""
    args = inputs(5, 112, lower_bound=lower_bound)
    token_bytes = 2 * 8 * (10 if lower_bound else 16 * 5)  # heads, fp64, and W and U of a token or its pairwise decays
    monkeypatch.setattr(eager, "LARGEST_BYTES", fitting * token_bytes)
    whole, seen = kda_chunked_whole, []

    def seeing(q, *rest):
        seen.append(q.shape[:2])
        return whole(q, *rest)

    monkeypatch.setattr(eager.reference, "kda_chunked", seeing)
    got = outputs_and_gradients(lambda *a: kda_chunked(*a, 16, lower_bound, 0.5), args)
    assert max(seen) == shape
    want = outputs_and_gradients(lambda *a: whole(*a, 16, lower_bound, 0.5), args)
    for name, a, b in zip(("o", "state out", *NAMES), got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}")


def test_what_fits_is_computed_whole():
    """No bit of a small model may depend on how a large one is cut."""
    assert eager.segment_shape(64, 320, 16, 4 * 48 * 8) == (64, 320)


def test_the_state_is_key_by_value():
    """Writing value e_2 under key e_0 at full strength sets S[0, 2], which a query e_0 reads back."""
    unit = torch.eye(4, dtype=torch.float64).view(4, 1, 1, 4)  # N, H
    zeros = torch.zeros(1, 1, 4, dtype=torch.float64)
    state = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    o, state = kda_step(unit[0], unit[0], unit[2], zeros, torch.ones(1, 1).double(), state)
    assert state[0, 0].nonzero().tolist() == [[0, 2]]
    assert torch.equal(o, unit[2])
    decay = torch.tensor([[[-1.0, 0, 0, 0]]], dtype=torch.float64)  # of key channel 0: its row shrinks
    _, state = kda_step(unit[3], unit[1], unit[2], decay, torch.ones(1, 1).double(), state)
    torch.testing.assert_close(state[0, 0, :2, 2], torch.tensor([-1.0, 0.0]).double().exp())


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_a_sequence_of_one_token_goes_through_the_chunked_form(lower_bound):
    q, k, v, g, beta, state = (x.detach().float() for x in inputs(3, 1, lower_bound=lower_bound))
    rows = [torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, 15)) for x in (q, k, v, g, beta)]
    o, last = kda_chunked(*rows, state, 16, lower_bound)
    want_o, want_last = kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
    torch.testing.assert_close(o[:, 0], want_o)
    torch.testing.assert_close(last, want_last)
