"""One value, two arithmetics: a forward pass whose rounding is a contract, and another form for its gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Form = Callable[..., Tensor]


def forward_and_gradient(forward: Form, gradient: Form, *inputs: Tensor) -> Tensor:
    """forward(*inputs), differentiated through gradient(*inputs), which is equal to it up to rounding.

    An engine can repeat the forward form token by token; the gradient's form is whatever is fast. It runs again in the
    backward pass, so nothing but the inputs is kept.
    """
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        with torch.no_grad():
            return forward(*inputs)
    out: Tensor = _TwoForms.apply(forward, gradient, *inputs)
    return out


class _TwoForms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, gradient, *inputs):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs)
        ctx.gradient = gradient
        return forward(*inputs)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # once: under activation checkpointing each access computes the layer again
        needed = ctx.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_(n) for x, n in zip(saved, needed, strict=True)]
        with torch.enable_grad():
            out = ctx.gradient(*inputs)
        wanted = [x for x, n in zip(inputs, needed, strict=True) if n]
        grads = iter(torch.autograd.grad(out, wanted, grad))
        return None, None, *(next(grads) if n else None for n in needed)
