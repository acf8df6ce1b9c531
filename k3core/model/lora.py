"""LoRA (arXiv 2106.09685): which matrices of a model get a trainable low-rank branch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3core.model.layers import Linear
from k3core.model.model import K3Model
from k3core.model.moe import Experts


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """targets are module names (q_proj, o_proj, ...) and w1, w2, w3 for the experts' matrices."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


def attach_lora(model: K3Model, cfg: LoraConfig, generator: torch.Generator) -> None:
    """Freeze the model and give every targeted matrix its pair. Raises ValueError for a target that names nothing."""
    model.requires_grad_(False)
    unused: set[str] = set(cfg.targets)
    for path, module in model.named_modules():
        leaf = path.rsplit(".", 1)[-1]
        if isinstance(module, Linear) and leaf in cfg.targets:
            module.attach_lora(cfg.rank, cfg.alpha, generator)
            unused.discard(leaf)
        if isinstance(module, Experts):
            for name in ("w1", "w2", "w3"):
                if name in cfg.targets:
                    module.attach_lora(name, cfg.rank, cfg.alpha, generator)
                    unused.discard(name)
    if unused:
        known = sorted(
            {path.rsplit(".", 1)[-1] for path, m in model.named_modules() if isinstance(m, Linear)} | {"w1", "w2", "w3"}
        )
        raise ValueError(f"train.lora_targets: {sorted(unused)} name no matrix of this model; known: {known}")
