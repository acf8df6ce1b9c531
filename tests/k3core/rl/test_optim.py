from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from k3core.checkpoint.tensors import from_safetensors, from_torch, to_safetensors, to_torch
from k3core.rl.optim import NamedAdamW, OptimConfig

START = {"first": torch.tensor([1.0, -2.0, 3.0]), "second": torch.full((2, 2), 0.5)}
GOOD = {"first": torch.tensor([0.1, 0.2, -0.3]), "second": torch.full((2, 2), -0.1)}


def make(cfg: OptimConfig | None = None) -> NamedAdamW:
    parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in START.items()}
    return NamedAdamW(parameters, cfg or OptimConfig(learning_rate=0.1))


def give(optimizer: NamedAdamW, gradients: Mapping[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        optimizer.parameters[name].grad = gradient.clone()


def everything(optimizer: NamedAdamW) -> dict[str, Tensor]:
    weights = {name: parameter.detach().clone() for name, parameter in optimizer.parameters.items()}
    return weights | optimizer.state()


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_step_is_adamw_as_published() -> None:
    cfg = OptimConfig(learning_rate=9.0, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1, grad_clip=100.0)
    optimizer = make(cfg)
    w, m, v = START["first"].double(), torch.zeros(3).double(), torch.zeros(3).double()
    for t, scale in enumerate((1.0, -0.5, 2.0), start=1):
        give(optimizer, {name: g * scale for name, g in GOOD.items()})
        assert optimizer.step(learning_rate=0.1).applied  # the argument, not the config's
        g = GOOD["first"].double() * scale
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        w = w - 0.1 * 0.1 * w - 0.1 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-3)
    assert torch.allclose(optimizer.parameters["first"].double(), w, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_step_with_one_gradient_not_finite_changes_no_bit_and_names_it(bad: float) -> None:
    optimizer, control = make(), make()
    for each in (optimizer, control):
        give(each, GOOD)
        each.step(0.1)
    before = everything(optimizer)
    poisoned = {**GOOD, "second": torch.tensor([[0.0, bad], [0.0, 0.0]])}
    give(optimizer, poisoned)
    result = optimizer.step(0.1)
    assert (result.applied, result.reason) == (False, "the gradient of second is not finite")
    assert math.isnan(result.grad_norm)
    assert same_bits(everything(optimizer), before)
    assert all(parameter.grad is None for parameter in optimizer.parameters.values())

    for each in (optimizer, control):
        give(each, GOOD)
        assert each.step(0.1).applied
    assert same_bits(everything(optimizer), everything(control))


def test_a_norm_that_overflows_is_refused_and_not_clipped_to_zero() -> None:
    optimizer = make()
    give(optimizer, {name: torch.full_like(g, 1e30) for name, g in GOOD.items()})
    result = optimizer.step(0.1)
    assert (result.applied, result.grad_norm) == (False, math.inf)
    assert same_bits(everything(optimizer), START)


def test_without_any_gradient_there_is_no_step() -> None:
    optimizer = make()
    result = optimizer.step(0.1)
    assert (result.applied, result.reason) == (False, "no parameter has a gradient")
    assert same_bits(everything(optimizer), START)


def test_clipping_scales_all_gradients_to_the_global_norm_that_it_reports() -> None:
    gradients = {"first": torch.tensor([30.0, 0.0, 0.0]), "second": torch.tensor([[40.0, 0.0], [0.0, 0.0]])}
    optimizer = make(OptimConfig(beta1=0.0, grad_clip=2.0))
    give(optimizer, gradients)
    assert optimizer.step(0.1).grad_norm == pytest.approx(50.0)
    state = optimizer.state()  # with beta1 0 the first moment is the gradient that was used
    assert state["exp_avg.first"].tolist() == pytest.approx([1.2, 0, 0])
    assert state["exp_avg.second"].flatten().tolist() == pytest.approx([1.6, 0, 0, 0])

    optimizer = make(OptimConfig(beta1=0.0, grad_clip=51.0))
    give(optimizer, gradients)
    optimizer.step(0.1)
    assert torch.equal(optimizer.state()["exp_avg.first"], gradients["first"])


def test_gradients_are_dropped_by_a_step() -> None:
    optimizer = make()
    give(optimizer, GOOD)
    optimizer.step(0.1)
    assert all(parameter.grad is None for parameter in optimizer.parameters.values())


def test_a_state_that_went_through_a_file_continues_bit_for_bit() -> None:
    straight, first = make(), make()
    for each in (straight, first):
        give(each, GOOD)
        each.step(0.1)
    saved = to_torch(from_safetensors(to_safetensors(from_torch(first.state())), "optimizer"))
    assert {name.split(".")[0] for name in saved} == {"step", "exp_avg", "exp_avg_sq"}
    second = make()
    with torch.no_grad():
        for name, parameter in second.parameters.items():
            parameter.copy_(first.parameters[name])
    second.load_state(saved)
    for each in (straight, second):
        give(each, {name: -2 * g for name, g in GOOD.items()})
        each.step(0.1)
    assert same_bits(everything(second), everything(straight))


def test_a_saved_state_is_a_copy() -> None:
    optimizer = make()
    give(optimizer, GOOD)
    optimizer.step(0.1)
    saved = optimizer.state()
    kept = {name: tensor.clone() for name, tensor in saved.items()}
    for _ in range(2):  # it is neither the tensors that step, nor do they become it
        give(optimizer, GOOD)
        optimizer.step(0.1)
        assert same_bits(saved, kept)
        optimizer.load_state(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exp_avg.third": torch.zeros(3)}, r"exp_avg\.third \(3,\) fits no trained parameter"),
        ({"exp_avg.first": torch.zeros(4)}, r"exp_avg\.first \(4,\) fits no trained parameter"),
        ({"step.first": torch.zeros(3)}, r"step\.first \(3,\) fits no trained parameter"),
        ({"momentum.first": torch.zeros(3)}, r"momentum\.first \(3,\) fits no trained parameter"),
        ({"first": torch.zeros(3)}, r"first \(3,\) fits no trained parameter"),
        ({"exp_avg_sq.second": None}, r"exp_avg_sq\.second is missing"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name_and_nothing_is_loaded(
    change: dict[str, Tensor | None], message: str
) -> None:
    optimizer = make()
    give(optimizer, GOOD)
    optimizer.step(0.1)
    before = everything(optimizer)
    wrong = {name: tensor for name, tensor in (optimizer.state() | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=f"optimizer state: {message}"):
        optimizer.load_state(wrong)
    assert same_bits(everything(optimizer), before)


def test_an_empty_state_is_a_fresh_optimizer() -> None:
    optimizer = make()
    give(optimizer, GOOD)
    optimizer.step(0.1)
    optimizer.load_state({})
    assert optimizer.state() == {}
