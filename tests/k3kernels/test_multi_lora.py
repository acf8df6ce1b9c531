"""LoRA with an adapter a row against its definition, gradients included, and adapters alone against adapters in a batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels.linear import multi_lora_launch as launch
from k3kernels.linear.multi_lora import adapter_rows, multi_lora, multi_lora_onto
from k3kernels.linear.reference import AdapterRows, multi_lora_onto_reference, multi_lora_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on the CPU, Triton's interpreter
TYPES = [torch.float32, torch.bfloat16]
NAMES = ("x", "W", "A", "B")


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the small sums here, too."""
    monkeypatch.setattr(launch, "PIECE", 32)
    monkeypatch.setattr(launch, "SHRINK", launch.SHRINK | {"BK": 16})
    monkeypatch.setattr(launch, "EXPAND", launch.EXPAND | {"BN": 32, "COLUMNS": 32})
    monkeypatch.setattr(launch, "ACCUMULATE", launch.ACCUMULATE | {"BC": 32, "BK": 16})


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def draw(
    T: int, num_out: int, num_in: int, n: int, r: int, dtype: torch.dtype, lora_dtype: torch.dtype
) -> dict[str, Tensor]:
    x, W = randn(T, num_in, dtype=dtype), randn(num_out, num_in, dtype=dtype, seed=1) * num_in**-0.5
    A = randn(n, r, num_in, dtype=lora_dtype, seed=2) * num_in**-0.5
    B = randn(n, num_out, r, dtype=lora_dtype, seed=3) * r**-0.5
    return {name: tensor.detach() for name, tensor in zip(NAMES, (x, W, A, B), strict=True)}


def mixed(T: int, n: int, seed: int = 0) -> Tensor:
    return torch.randint(-1, n, (T,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def scales(n: int) -> Tensor:
    return torch.linspace(0.5, 2, n, device=DEVICE)


def run(
    inputs: dict[str, Tensor], adapter_T: Tensor, ranks_n: Tensor | None = None, call=multi_lora
) -> dict[str, Tensor]:
    """y and its gradients along inputs' dy."""
    n = len(inputs["A"])
    rows = AdapterRows(adapter_T, n) if call is multi_lora_reference else launch.sorted_rows(adapter_T, n)
    leaves = [inputs[name].clone().requires_grad_() for name in NAMES]
    y = call(*leaves, scales(n), rows, ranks_n)
    grads = torch.autograd.grad(y, leaves, inputs["dy"])
    return {"y": y.detach()} | dict(zip(NAMES, grads, strict=True))


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    bound = 1e-2 if dtype == torch.bfloat16 else 2e-6
    for name, tensor in want.items():
        error = (got[name].double() - tensor.double()).norm() / tensor.double().norm().clamp(min=1e-9)
        assert error < bound, (name, error)


def with_dy(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    x, W = inputs["x"], inputs["W"]
    return inputs | {"dy": randn(len(x), len(W), dtype=x.dtype, seed=4)}


@pytest.mark.parametrize(("dtype", "lora_dtype"), [(TYPES[0], TYPES[0]), (TYPES[1], TYPES[0])])
@pytest.mark.parametrize(
    ("T", "num_out", "num_in", "n", "r"), [(1, 1, 1, 1, 1), (70, 33, 75, 3, 5), (40, 64, 64, 2, 16)]
)
def test_values_and_gradients_equal_the_definition(dtype, lora_dtype, T, num_out, num_in, n, r):
    inputs, adapter_T = with_dy(draw(T, num_out, num_in, n, r, dtype, lora_dtype)), mixed(T, n)
    got = run(inputs, adapter_T)
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    want = run(wide, adapter_T, call=multi_lora_reference)
    assert {name: got[name].dtype for name in NAMES} == {name: inputs[name].dtype for name in NAMES}
    assert_near(got, want, dtype)
    same_type = run(inputs, adapter_T, call=multi_lora_reference)
    assert_near({"y": got["y"]}, {"y": same_type["y"]}, dtype)


def test_gradients_of_single_precision_adapters_are_not_rounded_to_their_inputs_type():
    inputs = with_dy(draw(20, 33, 40, 2, 5, torch.bfloat16, torch.float32))
    A = run(inputs, mixed(20, 2))["A"]
    assert not torch.equal(A, A.bfloat16().float())


@pytest.mark.parametrize("dtype", TYPES)
def test_what_lies_above_an_adapters_rank_is_ignored_and_gets_no_gradient(dtype):
    inputs, adapter_T = with_dy(draw(60, 40, 48, 3, 16, dtype, dtype)), mixed(60, 3)
    ranks_n = torch.tensor([16, 3, 0], dtype=torch.int32, device=DEVICE)
    above = torch.arange(16, device=DEVICE) >= ranks_n[:, None]
    dirty = inputs | {
        "A": torch.where(above[:, :, None], torch.nan, inputs["A"]),
        "B": torch.where(above[:, None, :], torch.nan, inputs["B"]),
    }
    got, want = run(dirty, adapter_T, ranks_n), run(inputs, adapter_T, ranks_n, multi_lora_reference)
    assert_near(got, want, dtype)
    assert above.any()
    assert not got["A"].transpose(1, 2)[above[:, None, :].expand(-1, 48, -1)].any()
    assert not got["B"][above[:, None, :].expand(-1, 40, -1)].any()
    of_rank_0 = adapter_T == 2
    product = (inputs["x"].double() @ inputs["W"].double().T)[of_rank_0]
    torch.testing.assert_close(got["y"][of_rank_0].double(), product, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", TYPES)
def test_an_adapters_gradients_have_the_same_bits_beside_any_others(dtype):
    a, n = 1, 3
    inputs, adapter_T = with_dy(draw(70, 30, 40, n, 8, dtype, dtype)), mixed(70, n)
    mine, is_a = adapter_T == a, (torch.arange(n, device=DEVICE) == a)[:, None, None]
    changed = {"x": torch.where(mine[:, None], inputs["x"], 7.0), "A": torch.where(is_a, inputs["A"], 3.0)}
    together = run(inputs, adapter_T)
    alone = run(inputs | {name: inputs[name][mine] for name in ("x", "dy")}, adapter_T[mine])
    others_changed = run(inputs | changed, torch.where(mine, adapter_T, 2))
    assert together["A"][a].any()
    for other in (alone, others_changed):
        for name in ("A", "B"):
            assert torch.equal(other[name][a], together[name][a])


def test_a_rows_low_rank_product_has_the_same_bits_in_every_batch_and_tile():
    inputs, adapter_T = draw(150, 1, 40, 3, 8, torch.bfloat16, torch.bfloat16), mixed(150, 3)
    x, A = inputs["x"], inputs["A"]

    def low_rank(rows_T: Tensor, block_m: int) -> Tensor:
        rows = launch.sorted_rows(adapter_T[rows_T], 3, block_m)
        z_TR = launch.shrink(x[rows_T], A, scales(3), rows, None, is_nrK=True)
        out = torch.zeros(len(rows_T), z_TR.shape[1], dtype=z_TR.dtype, device=DEVICE)
        placed = rows.order_T[: int(rows.edges[3])].long()
        out[placed] = z_TR[: len(placed)]
        return out

    every = torch.arange(150, device=DEVICE)
    together = low_rank(every, 64)
    for block_m in (128, 256):
        assert torch.equal(low_rank(every, block_m), together)
    for some in (every[:1], every[7:9], every[40:140]):
        assert torch.equal(low_rank(some, 64), together[some])


@pytest.mark.parametrize("arrival", ["012", "210", "102"])
def test_the_pieces_are_added_in_order_whoever_comes_last(monkeypatch, arrival):
    x = torch.zeros(20, 96, device=DEVICE)
    for piece, value in enumerate((1e8, 1.0, -1e8)):  # whose sum is 0 in this order, and 1 in others
        x[:, 32 * piece] = value
    A, rows = torch.ones(2, 8, 96, device=DEVICE), launch.sorted_rows(mixed(20, 2).abs(), 2)
    if DEVICE.type == "cpu":
        from triton.runtime.interpreter import interpreter_builder

        place = interpreter_builder.set_grid_idx
        shuffled = lambda x, y, z: place(x, int(arrival[y]), z)  # noqa: E731
        monkeypatch.setattr(interpreter_builder, "set_grid_idx", shuffled)
    for _ in range(2):
        z_TR = launch.shrink(x, A, torch.ones(2, device=DEVICE), rows, None, is_nrK=True)
        assert not z_TR.any()
        assert not rows.arrived_M.any()
    x[:, 32] = 64.0
    assert launch.shrink(x, A, torch.ones(2, device=DEVICE), rows, None, is_nrK=True)[:, :8].all()


@pytest.mark.parametrize(
    "change",
    [
        {"EXPAND": {"BM": 256, "BN": 16, "COLUMNS": 48, "num_stages": 1}},
        {"SHRINK": {"BM": 64, "BK": 32, "num_stages": 2}},
    ],
)
def test_how_it_is_launched_changes_no_bits(monkeypatch, change):
    inputs, adapter_T = with_dy(draw(100, 72, 40, 2, 8, torch.bfloat16, torch.float32)), mixed(100, 2)
    want = run(inputs, adapter_T)
    for name, value in change.items():
        monkeypatch.setattr(launch, name, value)
    got = run(inputs, adapter_T)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("r", [5, 16])
def test_a_gradient_in_another_kernels_pass_is_that_of_its_own(monkeypatch, r, block_m):
    inputs = with_dy(draw(180, 33, 40, 4, r, torch.bfloat16, torch.float32))
    adapter_T = torch.full((180,), 1, device=DEVICE)  # 140 rows, in several tiles
    adapter_T[::9], adapter_T[4::9] = 2, -1  # 20 rows, in one tile; adapters 0 and 3 have none
    sorted_rows = launch.sorted_rows
    monkeypatch.setattr(launch, "sorted_rows", lambda adapters, n: sorted_rows(adapters, n, block_m))
    accumulated, accumulate = [], launch.accumulate
    monkeypatch.setattr(launch, "accumulate", lambda *given, **how: accumulated.append(1) or accumulate(*given, **how))
    fused = run(inputs, adapter_T)
    assert len(accumulated) == 1, "A's gradient alone"
    monkeypatch.setattr(launch, "fuses_gradient", lambda *_: False)
    apart = run(inputs, adapter_T)
    assert len(accumulated) == 3
    for name, tensor in fused.items():
        error = (tensor.double() - apart[name].double()).norm() / apart[name].double().norm()
        # The interpreter adds other numbers of rows at a time.
        assert error < 1e-6 if DEVICE.type == "cpu" and name in "AB" else error == 0
    assert all(fused["A"][a].any() for a in (1, 2))
    for a in (0, 3):
        assert not fused["A"][a].any()
        assert not fused["B"][a].any()


def test_rows_of_no_adapter_are_the_product_alone():
    inputs = with_dy(draw(40, 33, 48, 2, 8, torch.float32, torch.float32))
    for none in (-1, 2, 77):
        got = run(inputs, torch.full((40,), none, device=DEVICE))
        assert torch.equal(got["y"], inputs["x"] @ inputs["W"].T)
        assert torch.equal(got["x"], inputs["dy"] @ inputs["W"])
        assert not got["A"].any()
        assert not got["B"].any()


@pytest.mark.parametrize("dtype", TYPES)
def test_onto_a_product_that_is_there_values_and_gradients_equal_the_definition(dtype):
    x, _, A, B = draw(70, 33, 75, 3, 5, dtype, torch.float32).values()
    onto, dy, adapter_T = randn(70, 33, dtype=dtype, seed=6), randn(70, 33, dtype=dtype, seed=7), mixed(70, 3)
    names, leaves = ("onto", "x", "A", "B"), [each.clone().requires_grad_() for each in (onto, x, A, B)]

    def values_and_gradients(call, rows, inputs) -> dict[str, Tensor]:
        y = call(*inputs, scales(3), rows)
        return {"y": y.detach()} | dict(zip(names, torch.autograd.grad(y, inputs, dy.to(y.dtype)), strict=True))

    got = values_and_gradients(multi_lora_onto, launch.sorted_rows(adapter_T, 3), leaves)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    assert_near(got, values_and_gradients(multi_lora_onto_reference, AdapterRows(adapter_T, 3), wide), dtype)
    assert torch.equal(got["y"][adapter_T < 0], onto[adapter_T < 0])
    assert torch.equal(leaves[0], onto)


def test_896_groups_of_an_adapter_and_an_expert_with_few_rows_each():
    n = 896
    x, W, A, B = draw(40, 24, 16, n, 4, torch.float32, torch.float32).values()
    group_T = torch.randint(0, n, (40,), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    group_T[:3] = n - 1
    got = multi_lora(x, W, A, B, scales(n), launch.sorted_rows(group_T, n))
    assert_near({"y": got}, {"y": multi_lora_reference(x, W, A, B, scales(n), AdapterRows(group_T, n))}, x.dtype)


def test_groups_without_rows_among_many_get_zero_gradients():
    inputs, group_T = with_dy(draw(20, 24, 16, 30, 4, torch.float32, torch.float32)), 3 * mixed(20, 9).abs()
    got = run(inputs, group_T)
    assert_near(got, run(inputs, group_T, call=multi_lora_reference), torch.float32)
    empty = ~torch.isin(torch.arange(30, device=DEVICE), group_T)
    assert empty.any()
    assert not got["A"][empty].any()
    assert not got["B"][empty].any()


@pytest.mark.parametrize(("T", "n", "block_m"), [(1, 1, 64), (200, 5, 64), (200, 5, 128), (300, 2, 256), (20, 896, 64)])
def test_tiles_hold_each_row_once_stably_and_none_of_two_adapters(T, n, block_m):
    adapter_T = mixed(T, n, seed=T)
    rows = launch.sorted_rows(adapter_T, n, block_m)
    seen = []
    for adapter, first, end in rows.tiles_N3.tolist():
        if adapter > n:
            continue
        tile = rows.order_T[first : min(end, first + block_m)].tolist()
        assert tile == sorted(tile)
        assert tile
        assert {max(-1, a) for a in adapter_T[tile].tolist()} == {adapter if adapter < n else -1}
        seen += tile
    assert sorted(seen) == list(range(T))


def test_no_rows_give_no_rows_and_zero_gradients():
    inputs = draw(0, 33, 48, 2, 8, torch.float32, torch.float32) | {"dy": randn(0, 33)}
    got = run(inputs, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert got["y"].shape == (0, 33)
    assert not got["A"].any()
    assert not got["B"].any()


def test_only_what_requires_a_gradient_gets_one():
    inputs, rows = draw(20, 24, 16, 2, 8, torch.float32, torch.float32), launch.sorted_rows(mixed(20, 2), 2)
    for needed in NAMES:
        leaves = {name: inputs[name].clone().requires_grad_(name == needed) for name in NAMES}
        multi_lora(*leaves.values(), scales(2), rows).sum().backward()
        assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [needed]


def test_rows_that_do_not_lie_next_to_each_other_are_taken_too():
    inputs, adapter_T = with_dy(draw(20, 33, 48, 2, 8, torch.float32, torch.float32)), mixed(20, 2)
    want = run(inputs, adapter_T)
    strided = inputs | {"x": inputs["x"].T.contiguous().T, "dy": inputs["dy"].T.contiguous().T}
    got = run(strided, adapter_T)
    assert all(torch.equal(got[name], want[name]) for name in ("A", "B"))


def test_what_does_not_fit_is_refused():
    inputs = draw(20, 33, 48, 2, 8, torch.float32, torch.float32)
    rows = adapter_rows(mixed(20, 2), 2)
    x, W, A, B = inputs.values()
    with pytest.raises(ValueError, match="vector of integers"):
        adapter_rows(torch.zeros(3), 2)
    with pytest.raises(ValueError, match="rows, A, B and scale fit"):
        multi_lora(x[:5], W, A, B, scales(2), rows)
    with pytest.raises(ValueError, match="rows, A, B and scale fit"):
        multi_lora(x, W, A, B[:, :, :3], scales(2), rows)
    with pytest.raises(ValueError, match=r"W \[O, I\] in x's type"):
        multi_lora(x, W.bfloat16(), A, B, scales(2), rows)
    with pytest.raises(ValueError, match=r"onto \[T, O\] in x's type"):
        multi_lora_onto(randn(19, 33), x, A, B, scales(2), rows)
    with pytest.raises(ValueError, match="split the adapter"):
        multi_lora(x, W, A.repeat(1, 64, 1), B.repeat(1, 1, 64), scales(2), rows)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU it is the kernels")
def test_on_a_cpu_the_op_is_its_definition():
    inputs, rows = draw(20, 33, 48, 2, 8, torch.float64, torch.float32), adapter_rows(mixed(20, 2), 2)
    want = multi_lora_reference(*inputs.values(), scales(2), rows)
    assert torch.equal(multi_lora(*inputs.values(), scales(2), rows), want)
