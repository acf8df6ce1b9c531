"""AdamW over named parameters, with a state that can be saved and restored bit by bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_KINDS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter that has moved


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """AdamW (arXiv 1711.05101). grad_clip bounds the global gradient norm."""

    learning_rate: float = 5e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """applied False: the loss or a gradient was not finite, nothing was changed; reason says which."""

    applied: bool
    grad_norm: float
    reason: str | None = None


class NamedAdamW:
    def __init__(self, parameters: Mapping[str, nn.Parameter], cfg: OptimConfig) -> None:
        self.parameters = dict(parameters)
        self.cfg = cfg
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=cfg.learning_rate,
            betas=(cfg.beta1, cfg.beta2),
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            foreach=True,
        )

    def step(self, learning_rate: float) -> StepResult:
        """One step from the accumulated gradients, which are then dropped. Refused, bit-unchanged, when one is not finite."""
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if not gradients:
            return StepResult(False, float("nan"), "no parameter has a gradient")
        # The one number that a GPU is waited for: it is finite only if every number of every gradient is.
        norm = float(torch.nn.utils.get_total_norm(list(gradients.values())))
        if not math.isfinite(norm):
            self.zero_grad()
            for name, gradient in gradients.items():
                if not torch.isfinite(gradient).all():
                    return StepResult(False, float("nan"), f"the gradient of {name} is not finite")
            # Each number is finite, the sum of squares is not: clipping would make zeros of it.
            return StepResult(False, norm, "the norm of the gradient overflows")
        if norm > self.cfg.grad_clip:
            torch._foreach_mul_(list(gradients.values()), self.cfg.grad_clip / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.zero_grad()
        return StepResult(True, norm)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """`exp_avg.NAME`, `exp_avg_sq.NAME` and `step.NAME` of every parameter that has moved, copied to host memory."""
        out = {}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                out[f"{key}.{name}"] = value.detach().to("cpu", copy=True)
        return out

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave. Parameters that it lacks start anew.

        Raises ValueError naming a tensor that belongs to no parameter, has another shape or is missing; the state is
        then what it was.
        """
        state: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition(".")
            parameter = self.parameters.get(name)
            if parameter is None or kind not in _KINDS or value.shape != (parameter.shape if kind != "step" else ()):
                raise ValueError(f"optimizer state: {key} {tuple(value.shape)} fits no trained parameter")
            device = "cpu" if kind == "step" else parameter.device  # where AdamW itself keeps them
            state.setdefault(name, {})[kind] = value.to(device, copy=True)
        for name, kinds in state.items():
            if missing := [kind for kind in _KINDS if kind not in kinds]:
                raise ValueError(f"optimizer state: {missing[0]}.{name} is missing")
        self.optimizer.state.clear()
        self.optimizer.state.update({self.parameters[name]: kinds for name, kinds in state.items()})
