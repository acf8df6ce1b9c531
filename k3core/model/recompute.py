"""Activation checkpointing of a decoder layer, with the experts of the forward pass imposed on the second one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.checkpoint import checkpoint

# (running sum [T, D], recorded experts [T, k] or None, rows of the bank) -> (running sum after it, experts or None)
Step = Callable[..., tuple[Tensor, Tensor | None]]
Run = Callable[[Step, Tensor, Tensor | None, Sequence[Tensor]], tuple[Tensor, Tensor | None]]


def run_once(
    step: Step, prefix_TD: Tensor, replay_Tk: Tensor | None, bank: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    return step(prefix_TD, replay_Tk, *bank)


def run_and_recompute(
    step: Step, prefix_TD: Tensor, replay_Tk: Tensor | None, bank: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Keeps the running sum, the bank's rows (the same tensors for every layer) and the experts; the rest is computed
    again in the backward pass.

    The second time the experts of the first are imposed: a router near a tie that chose otherwise would give the
    gradient of another function, and nothing would show it.
    """
    used: list[Tensor] = []

    def step_again(prefix_TD: Tensor, replay_Tk: Tensor | None, *bank: Tensor) -> tuple[Tensor, Tensor | None]:
        out_TD, experts_Tk = step(prefix_TD, used[0] if used else replay_Tk, *bank)
        if experts_Tk is not None and not used:
            used.append(experts_Tk)
        return out_TD, experts_Tk

    # Nothing in a layer is random, so no generator's state is kept.
    out: tuple[Tensor, Tensor | None] = checkpoint(
        step_again, prefix_TD, replay_Tk, *bank, use_reentrant=False, preserve_rng_state=False
    )
    return out
