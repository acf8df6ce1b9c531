"""The same experts from torch's own parts: `torch._grouped_mm` between compiled gathers, activation and weighting.

gate and up are one product of a stacked matrix [E, 2F, R]. Backward of the gather is a gather and a sum over slots, not an
addition by index, except in the form that leaves all to autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from moe_inputs import BETAS
from torch import Tensor

Work = Callable[..., Tensor]  # x, experts, weights, w13, w2


def sort_routes(experts_Tk: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """order, inverse and the ends of the experts' rows."""
    in_order, order = torch.sort(experts_Tk.flatten().to(torch.int16), stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    ends = torch.arange(num_experts, device=order.device, dtype=torch.int16)
    return order, inverse, torch.searchsorted(in_order, ends, right=True, out_int32=True)


def activate_wide(gate_up: Tensor) -> Tensor:
    beta, linear_beta = BETAS
    gate, up = gate_up.float().chunk(2, -1)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


def activate(gate_up: Tensor) -> Tensor:
    return activate_wide(gate_up).to(gate_up.dtype)


def weigh(ys: Tensor, weights_Tk: Tensor, inverse: Tensor) -> Tensor:
    T, k = weights_Tk.shape
    return (ys[inverse].view(T, k, -1).float() * weights_Tk[:, :, None]).sum(1).to(ys.dtype)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, inverse, k):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (inverse,) = ctx.saved_tensors
        total = grad[inverse].view(-1, ctx.k, grad.shape[1]).float().sum(1)
        return total.to(grad.dtype), None, None, None


class Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ys, weights, order, inverse):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(ys, weights, order, inverse)
        return weigh(ys, weights, inverse)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ys, weights, order, inverse = ctx.saved_tensors
        T, k = weights.shape
        grad_ys = (grad[order // k].float() * weights.flatten()[order][:, None]).to(grad.dtype)
        grad_weights = (ys[inverse].view(T, k, -1).float() * grad[:, None].float()).sum(-1)
        return grad_ys, grad_weights, None, None


def gathered(x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
    out: Tensor = Gather.apply(x, order, inverse, k)
    return out


def weighed(ys: Tensor, weights_Tk: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    out: Tensor = Weigh.apply(ys, weights_Tk, order, inverse)
    return out


@dataclass(frozen=True, slots=True)
class Glue:
    sort: Callable[..., tuple[Tensor, Tensor, Tensor]] = sort_routes
    gather: Callable[..., Tensor] = gathered
    activate: Callable[..., Tensor] = activate
    weigh: Callable[..., Tensor] = weighed

    def run(self, x: Tensor, experts: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        order, inverse, ends = self.sort(experts, w13.shape[0])
        xs = self.gather(x, order, inverse, experts.shape[1])
        h = self.activate(torch._grouped_mm(xs, w13.mT, offs=ends))
        return self.weigh(torch._grouped_mm(h, w2.mT, offs=ends), weights, order, inverse)


def compiled(call: Callable, **options: bool) -> Callable:  # type: ignore[type-arg]
    if not torch.cuda.is_available():
        return call
    return torch.compile(call, dynamic=False, options=options or {"coordinate_descent_tuning": True})


def load_parts() -> Work:
    """The parts between the products compiled one by one."""
    return Glue(compiled(sort_routes), compiled(gathered), compiled(activate), compiled(weighed)).run


def load_whole() -> Work:
    """All of it compiled at once."""
    whole: Work = compiled(Glue().run)
    return whole


def load_autograd() -> Work:
    """All of it compiled at once, with autograd's own backward of indexing."""
    glue = Glue(
        gather=lambda x, order, _, k: x[order // k],
        weigh=lambda ys, weights, _, inverse: weigh(ys, weights, inverse),
    )
    whole: Work = compiled(glue.run)
    return whole


def load_tuned() -> Work:
    """All of it compiled at once, with every choice tried out, of the products too: minutes."""
    whole: Work = compiled(Glue().run, max_autotune=True, coordinate_descent_tuning=True)
    return whole


DEFAULT_VARIANTS = ("parts", "whole", "autograd")
VARIANTS: dict[str, Callable[[], Work]] = {
    "parts": load_parts,
    "whole": load_whole,
    "autograd": load_autograd,
    "tuned": load_tuned,
}
