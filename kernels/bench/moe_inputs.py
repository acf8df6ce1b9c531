"""What the bench of the experts multiplies, which routes it takes, and the exact values at a few tokens and experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from harness import device
from torch import Tensor

from k3kernels.situ.reference import situ

UNIFORM, ZIPF = "uniform", "zipf"
BETAS = (4.0, 25.0)
NAMES = ("x", "weights", "w1", "w3", "w2")
EXACT_ROWS = 4096  # of an expert in fp64 at a time


@dataclass(frozen=True, slots=True)
class Sizes:
    experts: int
    slots: int
    latent: int  # R
    width: int  # F
    checked_tokens: int
    lengths: tuple[int, ...]


K3 = Sizes(112, 16, 3584, 3072, 64, (1024, 4096, 16384, 65536))  # the experts of one of 8 ranks
TOY = Sizes(5, 3, 32, 48, 8, (9, 40))


@dataclass(frozen=True, slots=True)
class Inputs:
    """x [T, R] and the result's gradient, bf16; experts [T, k] int64, their weights fp32; w1, w3 [E, F, R], w2 [E, R, F]."""

    x: Tensor
    grad: Tensor
    experts: Tensor
    weights: Tensor
    w1: Tensor
    w3: Tensor
    w2: Tensor

    @property
    def all(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in NAMES}

    def as_leaves(self) -> Inputs:
        return replace(self, **{name: x.detach().requires_grad_() for name, x in self.all.items()})


def draw_matrices(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator(device()).manual_seed(0)
    E, R, width = sizes.experts, sizes.latent, sizes.width
    w1, w3, w2 = (_normal(s, gen) for s in ((E, width, R), (E, width, R), (E, R, width)))
    for w in (w1, w3, w2):
        w.mul_(w.shape[2] ** -0.5)
    return w1, w3, w2


def draw(num_tokens: int, layout: str, sizes: Sizes, matrices: tuple[Tensor, Tensor, Tensor]) -> Inputs:
    gen = torch.Generator(device()).manual_seed(num_tokens)
    x, grad = (_normal((num_tokens, sizes.latent), gen) for _ in range(2))
    experts, weights = draw_routes(num_tokens, layout, sizes, gen)
    return Inputs(x, grad, experts, weights, *matrices)


def draw_routes(num_tokens: int, layout: str, sizes: Sizes, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Different experts of a token, drawn with equal chances, or with those of 1 / rank, ranks being shuffled."""
    E = sizes.experts
    chances = torch.rand(num_tokens, E, generator=gen, device=device()).clamp_(min=1e-9).log_().neg_().log_().neg_()
    if layout == ZIPF:
        ranks = torch.randperm(E, generator=gen, device=device()) + 1
        chances -= ranks.log()
    experts_Tk = chances.topk(sizes.slots).indices
    weights_Tk = torch.rand(num_tokens, sizes.slots, generator=gen, device=device()) + 0.1
    return experts_Tk, weights_Tk / weights_Tk.sum(1, keepdim=True)


def _normal(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=gen, device=device(), dtype=torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Exact:
    """In fp64, on the CPU: rows of out, x's and the weights' gradients at some tokens, and matrices' at some experts."""

    tokens: Tensor
    experts: tuple[int, ...]
    values: dict[str, Tensor]

    def errors(self, got: dict[str, Tensor]) -> dict[str, float]:
        """Relative; got holds out, and gradients by their input's name."""
        errors = {}
        for name, value in got.items():
            rows = self.tokens if name in ("out", "x", "weights") else torch.tensor(self.experts)
            mine, want = value[rows.to(value.device)].double().cpu(), self.values[name]
            errors["out" if name == "out" else f"d{name}"] = float((mine - want).norm() / want.norm())
        return errors


def exact(inputs: Inputs, sizes: Sizes, with_gradients: bool) -> Exact:
    T, E = len(inputs.x), sizes.experts
    count = min(T, sizes.checked_tokens)
    tokens = torch.arange(count, device=device()) * (T // count)
    out = torch.zeros(count, sizes.latent, dtype=torch.float64, device=device())
    grad_x, grad_weights = torch.zeros_like(out), torch.zeros(count, sizes.slots, dtype=torch.float64, device=device())
    experts_of_matrices = (0, E // 2)
    matrices: dict[str, list[Tensor]] = {"w1": [], "w3": [], "w2": []}
    for e in range(E):
        w1, w3, w2 = (w[e].double() for w in (inputs.w1, inputs.w3, inputs.w2))
        place, slot = (inputs.experts[tokens] == e).nonzero(as_tuple=True)
        x = inputs.x[tokens[place]].double().requires_grad_(with_gradients)
        weight = inputs.weights[tokens[place], slot].double().requires_grad_(with_gradients)
        y = weight[:, None] * _expert(x, w1, w3, w2)
        out.index_add_(0, place, y.detach())
        if with_gradients:
            grads = torch.autograd.grad(y, (x, weight), inputs.grad[tokens[place]].double())
            grad_x.index_add_(0, place, grads[0])
            grad_weights[place, slot] = grads[1]
        if with_gradients and e in experts_of_matrices:
            leaves = [w.requires_grad_() for w in (w1, w3, w2)]
            totals = [torch.zeros_like(w) for w in leaves]
            for token, slot in _chunks(inputs.experts, e):
                y = inputs.weights[token, slot, None].double() * _expert(inputs.x[token].double(), *leaves)
                for total, grad in zip(
                    totals, torch.autograd.grad(y, leaves, inputs.grad[token].double()), strict=True
                ):
                    total += grad
            for name, total in zip(matrices, totals, strict=True):
                matrices[name].append(total.cpu())
    values = {"out": out.cpu()}
    if with_gradients:
        values |= {"x": grad_x.cpu(), "weights": grad_weights.cpu()}
        values |= {name: torch.stack(totals) for name, totals in matrices.items()}
    return Exact(tokens.cpu(), experts_of_matrices, values)


def _expert(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    return F.linear(situ(F.linear(x, w1), F.linear(x, w3), *BETAS), w2)


def _chunks(experts_Tk: Tensor, e: int) -> Iterator[tuple[Tensor, Tensor]]:
    token, slot = (experts_Tk == e).nonzero(as_tuple=True)
    yield from zip(token.split(EXACT_ROWS), slot.split(EXACT_ROWS), strict=True)
