"""Routed experts, stacked or packed, with and without LoRA, against autograd through the definition."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from k3kernels.moe import LoraPair, Matrices, PackedMatrices, eager, moe_experts, route
from k3kernels.moe.reference import moe_experts as moe_experts_ref
from k3kernels.mxfp4 import pack, unpack

ROWS = 32  # the engine's batches are whole multiples
SITU = (4.0, 25.0)
ALL, NONE = (True, True, True), (False, False, False)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + sum(shape)))


@dataclass(frozen=True)
class Layer:
    """Arguments of one call. lora is above w1, w3, w2; weights are leaves where they are not packed."""

    x: Tensor
    experts: Tensor
    weights: Tensor
    matrices: tuple[Matrices, Matrices, Matrices]
    lora: tuple[LoraPair | None, LoraPair | None, LoraPair | None]

    def leaves(self) -> list[Tensor]:
        factors = [t for pair in self.lora if pair is not None for t in (pair.A_ErI, pair.B_EOr)]
        return [self.x, self.weights, *(w for w in self.matrices if isinstance(w, Tensor)), *factors]


def layer(
    experts_Tk: Tensor,
    E: int,
    R: int = 32,
    F: int = 64,
    is_packed: bool = False,
    has_lora: tuple[bool, bool, bool] = NONE,
    dtype: torch.dtype = torch.float64,
    lora_dtype: torch.dtype | None = None,
) -> Layer:
    T, k = experts_Tk.shape
    wide = torch.promote_types(dtype, torch.float32)
    shapes = ((E, F, R), (E, F, R), (E, R, F))
    dense = [randn(*shape, seed=i, dtype=wide) * shape[-1] ** -0.5 for i, shape in enumerate(shapes)]
    matrices = [PackedMatrices(*pack(w), dtype) if is_packed else w.to(dtype).requires_grad_() for w in dense]
    pairs: list[LoraPair | None] = []
    for i, (shape, has) in enumerate(zip(shapes, has_lora, strict=True)):
        A, B = (
            randn(E, 3, shape[2], seed=10 + i, dtype=wide) * shape[2] ** -0.5,
            randn(E, shape[1], 3, seed=20 + i, dtype=wide),
        )
        pairs.append(LoraPair(*(t.to(lora_dtype or wide).requires_grad_() for t in (A, B)), 0.5 + i) if has else None)
    weights = torch.rand(T, k, generator=torch.Generator().manual_seed(3), dtype=wide)
    x = randn(T, R, seed=4, dtype=wide).to(dtype)
    return Layer(x.requires_grad_(), experts_Tk, weights.requires_grad_(), tuple(matrices), tuple(pairs))


def run(function, of: Layer, betas: tuple[float, float | None] | None = SITU) -> list[Tensor]:
    """The output, and the gradient of a weighted sum of it for every leaf."""
    out = function(of.x, of.experts, of.weights, *of.matrices, betas, of.lora)
    assert out.dtype == of.x.dtype
    along = randn(*out.shape, seed=7).bfloat16().to(out.dtype)  # the same in every type
    leaves = of.leaves()
    gradients = torch.autograd.grad((out * along).sum(), leaves)
    assert [g.dtype for g in gradients] == [leaf.dtype for leaf in leaves]
    return [out.detach(), *gradients]


def routed(T: int, E: int, k: int) -> Tensor:
    """With an expert that nobody chooses, where there are more than k."""
    bias = torch.zeros(E)
    if k < E:
        bias[E // 2] = -9.0
    experts, _ = route(randn(T, E, dtype=torch.float32), bias, k, True, 1.0)
    return experts


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("betas", [SITU, (4.0, None), None])
@pytest.mark.parametrize("has_lora", [NONE, ALL, (False, True, False), (False, False, True)])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("T", [1, 40])
def test_output_and_every_gradient_equal_those_of_the_definition(T, is_packed, has_lora, betas) -> None:
    of = layer(routed(T, 6, 2), 6, is_packed=is_packed, has_lora=has_lora)
    assert_same(run(moe_experts, of, betas), run(moe_experts_ref, of, betas))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    "experts",
    [
        pytest.param(torch.zeros(0, 2, dtype=torch.long), id="no tokens"),
        pytest.param(torch.full((20, 1), 3), id="all tokens on one expert"),
        pytest.param(torch.full((5, 2), 3), id="and in both slots"),
        pytest.param(torch.arange(4).expand(30, 4), id="k = E"),
        pytest.param(torch.tensor([[3, 0]]), id="one token"),
    ],
)
def test_lopsided_routes_are_computed_as_the_definition_says(experts: Tensor, is_packed: bool) -> None:
    of = layer(experts, 4, is_packed=is_packed, has_lora=ALL)
    got = run(moe_experts, of)
    assert_same(got, run(moe_experts_ref, of))
    idle = [e for e in range(4) if e not in experts]
    for gradient in got[3:]:
        assert gradient[idle].eq(0).all()


def test_packed_experts_are_the_unpacked_ones_bit_for_bit() -> None:
    of = layer(routed(50, 6, 2), 6, is_packed=True, has_lora=ALL, dtype=torch.float32)
    dense = replace(of, matrices=tuple(unpack(w.packed, w.scale, torch.float32) for w in of.matrices))
    got = run(moe_experts, of)
    want = run(moe_experts, replace(dense, matrices=tuple(w.requires_grad_() for w in dense.matrices)))
    for a, b in zip(got, [*want[:3], *want[6:]], strict=True):
        assert torch.equal(a, b)


def test_bf16_rounds_where_the_definition_does_bit_for_bit() -> None:
    """Every product and sum of a GEMM is exact here, so that only the points where the op itself rounds remain."""
    T, E, R, F, k = 64, 4, 32, 32, 4
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).bfloat16()

    def one_hot(*shape: int) -> Tensor:
        """Of each row one element is +-1."""
        chosen = torch.randint(0, shape[-1], shape[:-1], generator=generator)
        return torch.nn.functional.one_hot(chosen, shape[-1]).bfloat16() * (integers(*shape[:-1], 1) >= 0) * 1.0

    x, w1, w3, w2 = integers(T, R), integers(E, F, R) / 4, integers(E, F, R) / 4, one_hot(E, R, F).bfloat16()
    pair = LoraPair(integers(E, 2, R).float(), one_hot(E, F, 2).float(), 0.125)
    down = LoraPair(one_hot(E, 2, F).float(), one_hot(E, R, 2).float(), 0.5)
    experts = torch.stack([torch.randperm(E, generator=generator) for _ in range(T)])
    weights = torch.rand(T, k, generator=generator)
    for betas in (SITU, None):
        for lora in ((None, None, None), (pair, pair, None), (pair, pair, down)):
            got = moe_experts(x, experts, weights, w1, w3, w2, betas, lora)
            want = moe_experts_ref(x, experts, weights, w1, w3, w2, betas, lora)
            assert got.dtype == torch.bfloat16
            assert torch.equal(got, want)
    rounded_too_often = torch.zeros(T, R, dtype=torch.bfloat16)
    for slot in range(k):
        alone = moe_experts(x, experts[:, slot : slot + 1], torch.ones(T, 1), w1, w3, w2, None)
        rounded_too_often += (alone.float() * weights[:, slot : slot + 1]).bfloat16()
    assert not torch.equal(rounded_too_often, moe_experts(x, experts, weights, w1, w3, w2, None))


@pytest.mark.parametrize("betas", [SITU, None])
@pytest.mark.parametrize("is_packed", [False, True])
def test_bf16_gradients_are_as_near_to_the_exact_ones_as_those_of_the_definition(is_packed: bool, betas) -> None:
    of = layer(routed(96, 6, 2), 6, is_packed=is_packed, has_lora=ALL, dtype=torch.bfloat16)
    exact = Layer(
        of.x.detach().double().requires_grad_(),
        of.experts,
        of.weights.detach().double().requires_grad_(),
        tuple(
            replace(w, dtype=torch.float64) if isinstance(w, PackedMatrices) else w.detach().double().requires_grad_()
            for w in of.matrices
        ),
        tuple(
            LoraPair(*(t.detach().bfloat16().double().requires_grad_() for t in (p.A_ErI, p.B_EOr)), p.scale)
            for p in of.lora
        ),
    )
    got, defined, want = (
        run(moe_experts, of, betas),
        run(moe_experts_ref, of, betas),
        run(moe_experts_ref, exact, betas),
    )
    for a, b, c in zip(got, defined, want, strict=True):
        error, allowed = ((t.double() - c).norm() / c.norm() for t in (a, b))
        assert error < max(1.2 * allowed, torch.finfo(torch.bfloat16).eps / 2)
        assert error < 0.02


def test_large_batches_of_narrow_types_are_activated_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    of = layer(routed(96, 6, 2), 6, has_lora=ALL, dtype=torch.bfloat16)
    want = run(moe_experts, of)
    monkeypatch.setattr("k3kernels.moe.eager.MAX_WIDE", 64 * 64)  # 64 rows of the 192
    for a, b in zip(run(moe_experts, of), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("T", [2 * ROWS, 4 * ROWS])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_token_keeps_its_bits_under_lora_however_few_tokens_share_its_experts(T: int, is_packed: bool) -> None:
    E = 24
    of = layer(routed(T, E, 2), E, is_packed=is_packed, has_lora=ALL, dtype=torch.float32)
    assert torch.bincount(of.experts.flatten()).unique().numel() > 4
    together = moe_experts(of.x, of.experts, of.weights, *of.matrices, SITU, of.lora)
    for rows in (slice(0, ROWS), slice(ROWS, 2 * ROWS)):
        alone = moe_experts(of.x[rows], of.experts[rows], of.weights[rows], *of.matrices, SITU, of.lora)
        assert torch.equal(together[rows], alone)


def test_an_untrained_branch_changes_no_bit() -> None:
    of = layer(routed(50, 6, 2), 6, has_lora=ALL, dtype=torch.float32)
    with torch.no_grad():
        for pair in of.lora:
            assert pair is not None
            pair.B_EOr.zero_()
    plain = moe_experts(of.x, of.experts, of.weights, *of.matrices, SITU)
    assert torch.equal(moe_experts(of.x, of.experts, of.weights, *of.matrices, SITU, of.lora), plain)


class Multiplications(TorchDispatchMode):
    """Counts those of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert "bmm" not in name
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.count += a.shape[0] * a.shape[1] * b.shape[1]
        return function(*args, **(kwargs or {}))


def multiplications(of: Layer, leaves: list[Tensor]) -> int:
    """Of the backward pass that gives the leaves' gradients."""
    out = moe_experts(of.x, of.experts, of.weights, *of.matrices, SITU, of.lora)
    with Multiplications() as counter:
        torch.autograd.grad(out.sum(), leaves)
    return counter.count


def test_only_gradients_that_somebody_needs_are_computed() -> None:
    T, k, R, F, r = 40, 2, 32, 64, 3
    one = T * k * R * F  # a matrix times the rows of all experts
    trained = layer(routed(T, 6, k), 6, R, F)
    assert multiplications(trained, trained.leaves()) == 6 * one
    frozen = replace(trained, matrices=tuple(w.detach() for w in trained.matrices))
    assert multiplications(frozen, [frozen.x, frozen.weights]) == 3 * one
    first = replace(frozen, x=frozen.x.detach())
    assert multiplications(first, [first.weights]) == 0, "nothing before the experts is trained, and nothing in them"
    pair = LoraPair(randn(6, r, F).requires_grad_(), randn(6, R, r).requires_grad_(), 2.0)
    above_w2 = replace(first, lora=(None, None, pair))
    through_branch = T * k * r * (R + F)
    assert multiplications(above_w2, [pair.A_ErI, pair.B_EOr]) == 2 * through_branch
    below_w2 = replace(frozen, lora=(None, None, pair))
    assert (
        multiplications(below_w2, [below_w2.x, pair.A_ErI, pair.B_EOr]) == 3 * one + 2 * through_branch + T * k * r * F
    )


class WatchedMatrices:
    """Notes how many matrices are alive, of all that came from the same list, when one more is made."""

    def __init__(self, of: Tensor, alive: list[StorageWeakRef], most: list[int]) -> None:
        self.of, self.alive, self.most, self.asked = of, alive, most, list[int]()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.of.shape)

    def __getitem__(self, e: int, /) -> Tensor:
        matrix = self.of[e].clone()
        self.asked.append(e)
        self.alive.append(StorageWeakRef(matrix.untyped_storage()))
        self.most.append(sum(not ref.expired() for ref in self.alive))
        return matrix


def test_one_experts_matrix_is_held_at_a_time_and_made_again_in_the_backward_pass() -> None:
    of = layer(routed(40, 6, 2), 6, has_lora=ALL)
    alive, most = list[StorageWeakRef](), list[int]()
    watched = tuple(WatchedMatrices(w.detach(), alive, most) for w in of.matrices if isinstance(w, Tensor))
    run(moe_experts, replace(of, matrices=watched))
    used = sorted(of.experts.unique().tolist())
    assert [w.asked for w in watched] == [[*used, *used]] * 3
    assert max(most) == 1


def test_what_is_kept_for_the_backward_pass_is_in_the_activations_type_and_holds_no_unpacked_matrix() -> None:
    T, k, R, F, E = 200, 2, 32, 64, 16
    of = layer(routed(T, E, k), E, R, F, is_packed=True, has_lora=(False, False, True), dtype=torch.bfloat16)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        moe_experts(of.x, of.experts, of.weights, *of.matrices, SITU, of.lora)
    given = {tensor.data_ptr() for tensor in of.leaves()}
    made = [t for t in kept if t.is_floating_point() and t.data_ptr() not in given]
    assert {t.dtype for t in made} == {torch.bfloat16}
    assert sum(t.numel() for t in made) == T * k * (3 * F + R), "gate, up and their product; the experts' results"


def test_an_expert_that_the_layer_does_not_have_is_refused() -> None:
    for beyond in (-1, 4):
        of = layer(torch.tensor([[0, 1], [2, beyond]]), 4)
        with pytest.raises(ValueError, match="an expert that is not one of this layer's 4"):
            moe_experts(of.x, of.experts, of.weights, *of.matrices, SITU)


@pytest.mark.parametrize("betas", [(4.0, 25.0), None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("latent", "width"), [(48, 48), (12, 8), (96, 40), (128, 64)])
def test_a_few_rows_times_all_experts_have_the_bits_of_rows_sorted_by_expert(
    latent: int, width: int, dtype: torch.dtype, betas: tuple[float, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    w1, w3 = (torch.randn(8, width, latent, generator=generator).to(dtype) for _ in range(2))
    w2 = torch.randn(8, latent, width, generator=generator).to(dtype)
    for rows in (32, 64, 128):
        x = torch.randn(rows, latent, generator=generator).to(dtype)
        experts = torch.rand(rows, 8, generator=generator).topk(2).indices
        inputs = (x, experts, torch.rand(rows, 2, generator=generator), w1, w3, w2, betas)
        with torch.no_grad(), monkeypatch.context() as patched:
            few = eager.moe_experts(*inputs)
            patched.setattr(eager, "_by_all_experts", None)
            patched.setattr(eager, "MAX_DENSE_ROWS", 0)
            assert torch.equal(eager.moe_experts(*inputs), few)


@pytest.mark.parametrize("expert", [-1, 8])
def test_an_expert_that_a_layer_lacks_is_refused_in_a_few_rows_too(expert: int) -> None:
    w1, w2 = torch.ones(8, 4, 4), torch.ones(8, 4, 4)
    experts = torch.full((32, 2), expert)
    with torch.no_grad(), pytest.raises(ValueError, match="not one of this layer's 8"):
        moe_experts(torch.ones(32, 4), experts, torch.ones(32, 2), w1, w1, w2, SITU)
