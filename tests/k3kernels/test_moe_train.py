"""Training's experts in kernels against their definition: the output, every gradient, and a token's bits in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels.moe import hopper, train
from k3kernels.moe.grouped import OURS, GroupedTile, Products, Tiles, activate
from k3kernels.moe.pairs import combine, sort_pairs, stage, unstage
from k3kernels.moe.reference import moe_experts as moe_experts_ref
from k3kernels.moe.train import moe_experts_train

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
K3 = (4.0, 25.0)  # SiTU's betas; None is SiLU
NAMES = ("x", "weights", "w1", "w3", "w2")
E, R, F, K = 3, 24, 40, 2


def small_tiles(columns: int = 64) -> Tiles:
    if DEVICE.type == "cuda":
        tile = GroupedTile(64, 64, 32, 4, 2)
        return Tiles(tile, tile, tile, tile, tile)
    tile = GroupedTile(16, columns, 16, 4, 2, band=2)
    return Tiles(tile, tile, tile, tile, GroupedTile(64, columns, 16, 4, 2))


def plain(product: str):
    """A grouped GEMM by a loop, for `Products`."""

    def run(a: Tensor, b: Tensor, pairs) -> Tensor:
        spans = list(zip(pairs.edges.tolist(), pairs.edges.tolist()[1:], strict=False))
        if product == "weights":
            return torch.stack([a[i:j].T @ b[i:j] for i, j in spans])
        out = a.new_full((a.shape[0], b.shape[1] if product == "forward" else b.shape[2]), float("nan"))
        for e, (i, j) in enumerate(spans):
            out[i:j] = a[i:j] @ (b[e].T if product == "forward" else b[e])
        return out

    return run


FORWARD, INPUTS = plain("forward"), plain("inputs")


def plain_gated(x, w1, w3, pairs, betas, keeps):
    gate, up = FORWARD(x, w1, pairs), FORWARD(x, w3, pairs)
    h = activate(gate, up, pairs, betas)
    return (gate, up, h) if keeps else (None, None, h)


OTHERS = Products(
    plain_gated,
    FORWARD,
    INPUTS,
    lambda y1, w1, y3, w3, pairs: INPUTS(y1, w1, pairs) + INPUTS(y3, w3, pairs),
    plain("weights"),
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def draw(T: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    tensors = (randn(T, R), randn(T, K).abs(), *(randn(*s, seed=i) / s[2] ** 0.5 for i, s in enumerate(SHAPES)))
    leaves = {name: x.to(DEVICE, dtype) for name, x in zip(NAMES, tensors, strict=True)}
    return leaves | {"weights": leaves["weights"].float()}


SHAPES = (E, F, R), (E, F, R), (E, R, F)


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


def with_gradients(run, inputs: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out = run(leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"out": out.detach()} | dict(zip(leaves, grads, strict=True))


def exact(inputs: dict[str, Tensor], experts: Tensor, betas, grad: Tensor) -> dict[str, Tensor]:
    wide = {name: x.double() for name, x in inputs.items()}

    def run(leaves: dict[str, Tensor]) -> Tensor:
        x, weights, *matrices = leaves.values()
        return moe_experts_ref(x, experts, weights, *matrices, betas)

    return with_gradients(run, wide, grad.double())


def ours(inputs: dict[str, Tensor], experts: Tensor, betas, grad: Tensor, **options) -> dict[str, Tensor]:
    def run(leaves: dict[str, Tensor]) -> Tensor:
        x, weights, *matrices = leaves.values()
        return moe_experts_train(x, experts, weights, *matrices, betas, **({"tiles": small_tiles()} | options))

    return with_gradients(run, inputs, grad)


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Relative; NaN where something was left unwritten."""
    return {name: float((got[name].double() - x).norm() / x.norm().clamp(min=1e-30)) for name, x in want.items()}


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Memory that is not written holds NaN."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def poisoned(*args, make=make, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        monkeypatch.setattr(torch, name, poisoned)


@pytest.mark.parametrize(
    ("T", "kind", "betas", "products"),
    [
        (1, "uniform", None, OURS),
        (18, "uniform", K3, OURS),
        (13, "one", (4.0, None), OURS),
        (11, "dropped", K3, OURS),
        (5, "uniform", None, OTHERS),
        (12, "dropped", K3, OTHERS),
    ],
)
def test_the_output_and_every_gradient_are_the_definitions(T, kind, betas, products):
    inputs, experts, grad = draw(T), routes(T, kind), randn(T, R, seed=5).to(DEVICE)
    got = ours(inputs, experts, betas, grad, products=products, tiles=small_tiles(16 if T == 11 else 64))
    want = exact(inputs, experts, betas, grad)
    assert {name: x.dtype for name, x in got.items()} == dict.fromkeys(got, torch.float32)
    assert max(errors(got, want).values()) < 2e-6, errors(got, want)


@pytest.mark.parametrize("betas", [None, K3])
def test_in_bf16_errors_are_those_of_its_roundings(betas):
    inputs, experts, grad = draw(9, torch.bfloat16), routes(9), randn(9, R, seed=5).to(DEVICE, torch.bfloat16)
    got, want = ours(inputs, experts, betas, grad), exact(inputs, experts, betas, grad)
    assert all(got[name].dtype == inputs[name].dtype for name in NAMES)
    # Each rounding is 1.7e-3 of a tensor's norm; gate, up, h, y and the result are rounded, and the inputs of a sum.
    assert max(errors(got, want).values()) < 6e-3, errors(got, want)


def test_an_expert_without_tokens_has_zero_gradients():
    inputs, experts, grad = draw(9), routes(9), randn(9, R).to(DEVICE)
    got = ours(inputs, experts, K3, grad)
    for name in ("w1", "w3", "w2"):
        assert not got[name][1].any()
        assert got[name][0].any()


def test_a_slot_without_an_expert_adds_nothing_and_its_weight_has_no_gradient():
    inputs, grad = draw(5), randn(5, R).to(DEVICE)
    experts = torch.full((5, K), -1, device=DEVICE)
    got = ours(inputs, experts, None, grad)
    assert not any(x.any() for x in got.values())


def test_a_token_with_an_expert_beyond_the_last_is_nan_and_no_other():
    inputs, experts = draw(6), routes(6)
    experts[2, 1] = E
    out = moe_experts_train(inputs["x"], experts, *list(inputs.values())[1:], None, tiles=small_tiles())
    assert out.isnan().all(1).tolist() == [t == 2 for t in range(6)]


def test_no_tokens_give_no_rows_and_zero_gradients():
    inputs, experts = draw(0), routes(0)
    got = ours(inputs, experts, K3, randn(0, R).to(DEVICE))
    assert got["out"].shape == (0, R)
    assert not any(got[name].any() for name in NAMES)


def test_a_gradient_is_the_same_whether_or_not_others_are_needed():
    inputs, experts, grad = draw(2), routes(2), randn(2, R).to(DEVICE)
    want = ours(inputs, experts, K3, grad)
    for needed in ("weights", "w3"):
        leaves = {name: x.detach().requires_grad_(name == needed) for name, x in inputs.items()}
        x, *others = leaves.values()
        out = moe_experts_train(x, experts, *others, K3, tiles=small_tiles())
        assert torch.equal(torch.autograd.grad(out, leaves[needed], grad)[0], want[needed])


def test_a_tokens_bits_do_not_depend_on_the_batch_nor_on_whether_gradients_are_needed():
    inputs, experts = draw(7, torch.bfloat16), routes(7)
    x, weights, *matrices = inputs.values()
    together = moe_experts_train(x, experts, weights, *matrices, K3, tiles=small_tiles())
    trained = ours(inputs, experts, K3, torch.ones_like(x))["out"]
    assert torch.equal(together, trained)
    for part in (slice(0, 1), slice(2, 7)):
        alone = moe_experts_train(
            x[part].contiguous(), experts[part], weights[part], *matrices, K3, tiles=small_tiles(16)
        )
        assert torch.equal(alone, together[part])


@pytest.mark.parametrize("max_counted", [0, 1 << 17])
@pytest.mark.parametrize(("T", "num_experts"), [(17, E), (40, 1000)])
def test_pairs_lie_by_expert_and_in_the_tokens_order(T, num_experts, max_counted, monkeypatch):
    monkeypatch.setattr("k3kernels.moe.pairs.MAX_COUNTED", max_counted)
    experts = routes(T, "dropped") * (num_experts // E)
    experts[3, 0] = num_experts
    pairs = sort_pairs(experts, num_experts)
    flat, edges, order = experts.flatten().cpu(), pairs.edges.tolist(), pairs.order_P.cpu()
    assert edges[0] == 0
    for e in range(num_experts):
        assert order[edges[e] : edges[e + 1]].tolist() == (flat == e).nonzero().flatten().tolist()
    known = ((flat >= 0) & (flat < num_experts)).nonzero().flatten()
    assert torch.equal(order[pairs.inverse_P.cpu()[known].long()].long(), known)
    assert (pairs.inverse_P.cpu()[flat < 0] == -1).all()
    assert pairs.inverse_P.tolist()[3 * K] == -2
    assert sorted(order.tolist()) == list(range(T * K))


def test_staging_and_combining_are_those_of_indexing():
    T = 12
    inputs, experts, ys = draw(T), routes(T, "dropped"), randn(T * K, R).to(DEVICE)
    pairs = sort_pairs(experts, E)
    places, count = pairs.inverse_P.long().view(T, K), int(pairs.edges[-1])
    has_place, weights = places >= 0, inputs["weights"]
    tokens = pairs.order_P[:count].long() // K
    assert torch.equal(stage(inputs["x"], pairs)[:count], inputs["x"][tokens])
    of_slots = torch.where(has_place[:, :, None], ys[places.clamp(min=0)], 0)
    torch.testing.assert_close(combine(ys, weights, pairs), (weights[:, :, None] * of_slots).sum(1))
    torch.testing.assert_close(unstage(ys, pairs), of_slots.sum(1))


def test_two_runs_give_the_same_bits():
    inputs, experts, grad = draw(2), routes(2), randn(2, R).to(DEVICE)
    first, second = (ours(inputs, experts, K3, grad) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"w1": x["w1"].mT.contiguous().mT}, "contiguous stacks"),
        (lambda x: {"w2": x["w2"].bfloat16()}, "takes bf16 or fp32 on both sides"),
        (lambda x: {name: x[name][..., :22].contiguous() for name in ("x", "w1", "w3")}, "multiples of 4"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_with_a_remedy(change, message):
    inputs = draw(3)
    x, weights, *matrices = (inputs | change(inputs)).values()
    with pytest.raises(ValueError, match=message):
        moe_experts_train(x, routes(3), weights, *matrices, None)


def test_few_rows_an_expert_are_multiplied_by_hoppers_products(monkeypatch):
    asked = []
    monkeypatch.setattr(hopper, "takes", lambda matrices: len(matrices) == 3)
    monkeypatch.setattr(hopper, "in_training", lambda pairs: asked.append(pairs) or OTHERS)
    inputs, experts = draw(5, torch.bfloat16), routes(5)
    few = moe_experts_train(inputs["x"], experts, *(inputs[name] for name in NAMES[1:]), K3)
    assert len(asked) == 1
    monkeypatch.setattr(train, "FEW_ROWS", 0)
    many = moe_experts_train(inputs["x"], experts, *(inputs[name] for name in NAMES[1:]), K3, tiles=small_tiles())
    assert len(asked) == 1
    torch.testing.assert_close(few, many, rtol=2e-2, atol=2e-2)
