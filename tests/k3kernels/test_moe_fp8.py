"""Experts in fp8 against their definition over the same quantised values: output, gradients, scales, and rows' bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from k3kernels.moe import fp8, reference
from k3kernels.moe.fp8_train import Fp8Matrices, moe_experts_fp8_train
from k3kernels.moe.grouped import GroupedTile, Scaled, Schedule, Tiles
from k3kernels.moe.pairs import sort_pairs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
K3 = (4.0, 25.0)  # SiTU's betas; None is SiLU
NAMES = ("x", "weights", "w1", "w3", "w2")
E, R, F, K = 3, 32, 48, 2
_TILE = GroupedTile(16, 64, 32, 4, 2, band=2) if DEVICE.type == "cpu" else GroupedTile(64, 64, 64, 4, 2)
TILES = Tiles(_TILE, _TILE, _TILE, _TILE, GroupedTile(64, 64, 16, 4, 2))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def draw(T: int) -> dict[str, Tensor]:
    """Weights are powers of two, which no rounding tells apart from being applied later."""
    shapes = (E, F, R), (E, F, R), (E, R, F)
    tensors = randn(T, R), *(2 * randn(*s, seed=i) / s[2] ** 0.5 for i, s in enumerate(shapes))
    x, *matrices = (t.to(DEVICE, torch.bfloat16) for t in tensors)
    weights = torch.exp2(torch.randint(-3, 1, (T, K), generator=torch.Generator().manual_seed(T)).float()).to(DEVICE)
    return dict(zip(NAMES, (x, weights, *matrices), strict=True))


def routes(T: int, kind: str = "uniform") -> Tensor:
    """uniform: expert 1 is chosen by nobody. one: all choose expert 2. dropped: a third has no expert."""
    gen = torch.Generator().manual_seed(T)
    scores = torch.rand(T, E, generator=gen)
    scores[:, 1] = -1
    experts_Tk = scores.topk(K).indices
    if kind == "one":
        experts_Tk = torch.full_like(experts_Tk, 2)
    if kind == "dropped":
        experts_Tk = torch.where(torch.rand(T, K, generator=gen) < 0.34, -1, experts_Tk)
    return experts_Tk.to(DEVICE)


def ours(inputs: dict[str, Tensor], experts: Tensor, betas=K3, grad: Tensor | None = None, hidden=None, needed=NAMES):
    leaves = {name: x.detach().requires_grad_(name in needed) for name, x in inputs.items()}
    x, weights, *matrices = leaves.values()
    out = moe_experts_fp8_train(x, experts, weights, Fp8Matrices.of(*matrices), betas, TILES, hidden)
    return gradients_of(out, {name: leaves[name] for name in needed}, grad)


def defined(inputs: dict[str, Tensor], experts: Tensor, betas, grad: Tensor, scale: float | None) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    x, weights, *matrices = leaves.values()
    return gradients_of(reference.moe_experts_fp8(x, experts, weights, *matrices, betas, scale), leaves, grad)


def gradients_of(out: Tensor, leaves: dict[str, Tensor], grad: Tensor | None) -> dict[str, Tensor]:
    grad = torch.ones_like(out) if grad is None else grad
    return {"out": out.detach()} | dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad), strict=True))


def relative(got: Tensor, want: Tensor) -> float:
    """NaN where something was left unwritten."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def wide(x: Scaled) -> Tensor:
    assert isinstance(x.scale, Tensor)
    return x.values.double() * x.scale.double()[..., None]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Memory that is not written holds NaN."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def poisoned(*args, make=make, **kwargs):
            x = make(*args, **kwargs)
            if x.itemsize == 1 and x.is_floating_point():
                x.view(torch.uint8).fill_(0x7F)
            elif x.is_floating_point():
                x.fill_(float("nan"))
            return x

        monkeypatch.setattr(torch, name, poisoned)


@pytest.mark.parametrize(
    ("T", "kind", "betas", "hidden"),
    [
        (1, "uniform", K3, None),
        (12, "dropped", K3, None),
        (9, "one", K3, "rows"),
        (4, "uniform", (4.0, None), None),
        (5, "dropped", None, "rows"),
        (3, "uniform", None, 0.02),
    ],
)
def test_the_output_and_every_gradient_are_the_definitions(T, kind, betas, hidden):
    inputs, experts, grad = draw(T), routes(T, kind), randn(T, R, seed=5).to(DEVICE, torch.bfloat16)
    scale = fp8.resolved(hidden, betas)
    assert (scale is None) == (hidden == "rows" or (hidden is None and betas != K3))
    got = ours(inputs, experts, betas, grad, hidden)
    want = defined(inputs, experts, betas, grad, scale)
    assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in want.items()}
    errors = {name: relative(got[name], x) for name, x in want.items()}
    # A SiLU's gradient sees it rounded in the definition, and before that in the kernel. A GPU's tanh moves some h by a place.
    limit = 2e-2 if DEVICE.type == "cuda" else 1e-3 if betas else 6e-3
    assert max(errors.values()) < limit, errors


def test_a_rows_output_does_not_depend_on_the_batch_nor_on_gradients():
    inputs, experts = draw(5), routes(5)
    x, weights, *matrices = inputs.values()
    trained = ours(inputs, experts)["out"]
    w13, w2 = fp8.quantise_gated(*matrices[:2]), fp8.quantise_matrices(matrices[2])
    assert torch.equal(moe_experts_fp8_train(x, experts, weights, Fp8Matrices.of(*matrices), K3, TILES), trained)
    for part in (slice(0, 5), slice(0, 1), slice(2, 5)):
        alone = fp8.moe_experts_fp8(x[part], experts[part], weights[part], w13, w2, K3, TILES)
        assert torch.equal(alone, trained[part])


def test_a_tokens_gradient_does_not_depend_on_the_batch_and_two_runs_give_the_same_bits():
    inputs, experts, grad = draw(4), routes(4, "dropped"), randn(4, R).to(DEVICE, torch.bfloat16)
    first, second = (ours(inputs, experts, K3, grad) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    part = {name: x[1:3] if name in ("x", "weights") else x for name, x in inputs.items()}
    alone = ours(part, experts[1:3], K3, grad[1:3])
    assert all(torch.equal(alone[name], first[name][1:3]) for name in ("x", "weights"))


@pytest.mark.parametrize("needed", [("x",), ("weights", "w3"), ("w2",)])
def test_a_gradient_is_the_same_whether_or_not_others_are_needed(needed):
    inputs, experts, grad = draw(2), routes(2), randn(2, R).to(DEVICE, torch.bfloat16)
    want = ours(inputs, experts, K3, grad)
    got = ours(inputs, experts, K3, grad, needed=needed)
    assert all(torch.equal(got[name], want[name]) for name in needed)


def test_an_expert_without_tokens_has_zero_gradients_and_a_slot_without_an_expert_none():
    inputs, experts = draw(5), routes(5)
    got = ours(inputs, experts)
    assert not any(got[name][1].any() for name in ("w1", "w3", "w2"))
    assert all(got[name][0].any() for name in ("w1", "w3", "w2"))
    nobody = ours(inputs, torch.full_like(experts, -1))
    assert not any(x.any() for x in nobody.values())


def test_another_product_gives_the_matrices_gradients_where_it_is_asked_for():
    inputs, experts = draw(3), routes(3)
    x, weights, *matrices = (value.requires_grad_() for value in inputs.values())

    def by_loop(y: Tensor, x: Tensor, pairs) -> Tensor:
        spans = zip(pairs.edges.tolist(), pairs.edges.tolist()[1:], strict=False)
        return 2 * torch.stack([(y[i:j].float().T @ x[i:j].float()).bfloat16() for i, j in spans])

    out = moe_experts_fp8_train(x, experts, weights, Fp8Matrices.of(*matrices), K3, TILES, weights_product=by_loop)
    out.sum().backward()
    want = ours(inputs, experts)
    for name, w in zip(NAMES[2:], matrices, strict=True):
        assert relative(w.grad, 2 * want[name]) < 3e-3


def test_nothing_waits_for_the_device(monkeypatch):
    inputs, experts = draw(1), routes(1)
    x, weights, *matrices = (value.requires_grad_() for value in inputs.values())
    quantised = Fp8Matrices.of(*matrices)

    def waits(*_):
        raise AssertionError("a value was asked for on the host")

    for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__index__", "__float__"):
        monkeypatch.setattr(Tensor, name, waits)
    moe_experts_fp8_train(x, experts, weights, quantised, K3, TILES).sum().backward()
    assert all(leaf.grad is not None for leaf in (x, weights, *matrices))


@pytest.mark.parametrize("columns", [64, 128])
def test_gate_and_up_find_their_rows_of_the_common_matrix_at_either_width(columns):
    wide_F, T = 144, 3
    x, w1, w3 = (t.to(DEVICE, torch.bfloat16) for t in (randn(T, R), randn(2, wide_F, R), randn(2, wide_F, R, seed=1)))
    pairs = sort_pairs(torch.tensor([[0], [1], [0]], device=DEVICE), 2)
    tile = replace(_TILE, columns=columns)
    xs, w13 = fp8.stage_fp8(x, pairs), fp8.quantise_gated(w1, w3)
    gate, up, h = fp8.gate_up(xs, w13, wide_F, Schedule(pairs), K3, 0.1, tile, keeps=True)
    order, expert = pairs.order_P.long(), torch.tensor([0, 0, 1], device=DEVICE)
    want = [torch.einsum("pr,pfr->pf", reference.quantised(x)[order], reference.quantised(w)[expert]) for w in (w1, w3)]
    assert max(relative(got, wanted) for got, wanted in zip((gate, up), want, strict=True)) < 3e-3
    assert relative(h.values.float() * 0.1, 100 * (gate / 4).tanh() * gate.sigmoid() * (up / 25).tanh()) < 4e-2


def test_no_tokens_give_no_rows_and_zero_gradients():
    got = ours(draw(0), routes(0))
    assert got["out"].shape == (0, R)
    assert not any(got[name].any() for name in NAMES)


def test_a_token_with_an_expert_beyond_the_last_is_nan_and_no_other():
    inputs, experts = draw(4), routes(4)
    experts[2, 1] = E
    assert ours(inputs, experts)["out"].isnan().all(1).tolist() == [t == 2 for t in range(4)]


def hidden_values(gate: list[float], up: list[float], scale: float, betas) -> Tensor:
    """h [P] in e4m3 before its scale, of these values of gate and up, which w1 and w3 copy out of x; NaN by x's scale."""
    x_PR, w_EFR = torch.zeros(len(gate), 16), torch.zeros(2, 1, 16, 16)
    x_PR[:, 0], x_PR[:, 1] = torch.tensor(gate), torch.tensor(up)
    w_EFR[0, 0, 0, 0] = w_EFR[1, 0, 0, 1] = 1
    pairs = sort_pairs(torch.zeros(len(gate), 1, dtype=torch.int64, device=DEVICE), 1)
    x = Scaled(x_PR.nan_to_num(1).to(DEVICE).to(torch.float8_e4m3fn), (0 * x_PR.sum(-1) + 1).to(DEVICE))
    w13 = fp8.quantise_gated(*w_EFR.to(DEVICE))
    h = fp8.gate_up(x, w13, 16, Schedule(pairs), betas, scale, TILES.gated, keeps=False)[2]
    return h.values[:, 0].float().cpu()


def test_beyond_its_scale_h_is_the_largest_value_and_nan_stays_nan():
    got = hidden_values([8.0, 8.0, 8.0, float("nan"), 8.0], [8.0, -8.0, 1.0, 1.0, 2.0**-9], 0.1, None)
    silu = 8 * torch.tensor(8.0).sigmoid().bfloat16()
    assert got[:3].tolist() == [448, -448, float((silu.float() / 0.1).to(torch.float8_e4m3fn))]
    assert got.isnan().tolist() == [False, False, False, True, False]
    assert got[4] == 80 * 2.0**-9


def test_at_the_activations_bound_h_is_the_largest_value_and_below_a_1024th_of_the_scale_it_is_0():
    scale = fp8.hidden_scale(K3)
    assert scale == 100 / 448
    assert fp8.hidden_scale(None) is None
    assert fp8.hidden_scale((4.0, None)) is None
    tiny = 2.0**-9  # where h is half of gate times up
    gate, up = [64.0, -64.0, 64.0, 64.0, tiny, tiny], [448.0, 448.0, -448.0, 2.0**-8, 2.0**-2, 2.0**-3]
    got = hidden_values(gate, up, scale, K3)
    assert got.tolist() == [448, 0, -448, round(4 * 2.0**-8 / scale * 128) / 128, 2.0**-9, 0]


def test_h_with_one_scale_is_as_exact_as_with_one_a_row():
    """At K3's bound, of rows whose root mean squares are 0.1 to 10."""
    h_PF = randn(40, 512) * torch.logspace(-1, 1, 40)[:, None]
    one, rows = (reference.quantised(h_PF, scale) for scale in (fp8.hidden_scale(K3), None))
    assert relative(one, h_PF) < 1.1 * relative(rows, h_PF)
    assert max(relative(got, want) for got, want in zip(one, h_PF, strict=True)) < 3e-2


@pytest.mark.parametrize(
    ("change", "hidden", "message"),
    [
        ({"x": torch.zeros(2, R)}, None, "bf16 rows"),
        ({"w1": torch.zeros(E, F, R)}, None, "trained as bf16"),
        ({}, 0.0, "give one above 0"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_with_a_remedy(change, hidden, message):
    x, weights, *matrices = (draw(2) | {name: value.to(DEVICE) for name, value in change.items()}).values()
    with pytest.raises(ValueError, match=message):
        moe_experts_fp8_train(x, routes(2), weights, Fp8Matrices.of(*matrices), K3, TILES, hidden)


def test_matrices_beside_each_other_have_one_scale_a_row_and_a_row_of_zeros_stays_zeros():
    a, b = randn(E, 4, 8).to(DEVICE), 100 * randn(E, 4, 16).to(DEVICE)
    a[1, 2], b[1, 2] = 0, 0
    got = fp8.quantise_matrices(a, b)
    both = torch.cat((a, b), 2)
    assert got.values.is_contiguous()
    torch.testing.assert_close(got.scale, both.abs().amax(-1) / fp8.FP8_MAX)
    assert not wide(got)[1, 2].any()
    assert relative(wide(got), both) < 4e-2


def test_rows_are_quantised_to_the_nearest_and_a_row_of_zeros_to_zeros():
    x = torch.cat((randn(5, 64), randn(1, 64) * 1e-3 * torch.eye(64)[0].add(1e-4), torch.zeros(1, 64))).bfloat16()
    pairs = sort_pairs(torch.zeros(7, 1, dtype=torch.int64, device=DEVICE), 1)
    got = fp8.quantise_rows(x.to(DEVICE), pairs)
    scale = x.float().abs().amax(-1) / fp8.FP8_MAX
    want = (x.float() / scale.clamp(min=1e-30)[:, None]).to(torch.float8_e4m3fn)
    assert torch.equal(got.values.float().cpu(), want.float())
    assert torch.equal(got.scale.cpu(), scale)
    assert torch.equal(wide(got).float().cpu()[:6], reference.quantised(x.float())[:6])
