"""LoRA (arXiv 2106.09685): which matrices of a model get a trainable low-rank branch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from k3core.model.layers import Linear
from k3core.model.model import K3Model
from k3core.model.moe import Experts

EXPERT_MATRICES = ("w1", "w2", "w3")


@dataclass(frozen=True, slots=True)
class LoraOverride:
    """A rank and alpha of their own for the matrices that `target` names."""

    target: str
    rank: int
    alpha: float


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """targets are module names (q_proj, o_proj, ...) and w1, w2, w3 for the experts' matrices; with more of the path
    in front (shared_experts.down_proj, layers.3.self_attn.q_proj) they name fewer.

    The branch of a matrix is scaled by alpha / rank; the first override that names it replaces both.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    overrides: tuple[LoraOverride, ...] = ()

    def is_target(self, path: str) -> bool:
        return any(names_path(target, path) for target in self.targets)

    def rank_alpha(self, path: str) -> tuple[int, float]:
        """Of the matrix at `path`, which is a module's path or `layers.1.block_sparse_moe.experts.w1`."""
        for override in self.overrides:
            if names_path(override.target, path):
                return override.rank, override.alpha
        return self.rank, self.alpha

    def scale(self, path: str) -> float:
        rank, alpha = self.rank_alpha(path)
        return alpha / rank


def names_path(target: str, path: str) -> bool:
    """`target` is the path or its last components."""
    return path == target or path.endswith(f".{target}")


def lora_matrices(model: K3Model) -> dict[str, tuple[int, ...]]:
    """Shape of every matrix that can be a target, by path: (out, in), or (E, out, in) for `...experts.w1`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            shapes[path] = tuple(module.weight.shape)
        if isinstance(module, Experts):
            shapes |= {f"{path}.{name}": module.shape(name) for name in EXPERT_MATRICES}
    return shapes


def require_matrices(cfg: LoraConfig, paths: Iterable[str], setting: str) -> None:
    """Raises ValueError, which begins with the name of the setting, for targets and overrides that name no matrix and
    for ranks below 1."""
    known = list(paths)
    names = [*cfg.targets, *(override.target for override in cfg.overrides)]
    if any(name.rsplit(".", 1)[-1] == "embed_tokens" for name in names):
        raise ValueError(
            f"{setting}: embed_tokens cannot be a target: LoRA adapts products, the embedding is a look-up"
        )
    unused = sorted({name for name in names if not any(names_path(name, path) for path in known)})
    if unused:
        leaves = sorted({path.rsplit(".", 1)[-1] for path in known})
        raise ValueError(f"{setting}: {unused} name no matrix of this model; known: {leaves}")
    low = [
        f"{name} has rank {rank}"
        for name, rank in [("it", cfg.rank), *((o.target, o.rank) for o in cfg.overrides)]
        if rank < 1
    ]
    if low:
        raise ValueError(f"{setting}: a rank is at least 1; {', '.join(low)}")


def attach_lora(model: K3Model, cfg: LoraConfig, generator: torch.Generator) -> None:
    """Freeze the model and give every targeted matrix its pair. Raises ValueError for a target that names nothing."""
    require_matrices(cfg, lora_matrices(model), "train.lora_targets")
    model.requires_grad_(False)
    for path, module in model.named_modules():
        if isinstance(module, Linear) and cfg.is_target(path):
            module.attach_lora(*cfg.rank_alpha(path), generator)
        if isinstance(module, Experts):
            for name in EXPERT_MATRICES:
                if cfg.is_target(f"{path}.{name}"):
                    module.attach_lora(name, *cfg.rank_alpha(f"{path}.{name}"), generator)


Branches = dict[tuple[str, str], tuple[Tensor | None, Tensor | None, float]]
"""(module's path, matrix of Experts or "") -> A, B and scale of every matrix that can have a branch."""


def branches_of(model: K3Model) -> Branches:
    """What is attached, not copied."""
    found: Branches = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            found[path, ""] = (module.lora_A, module.lora_B, module.lora_scale)
        if isinstance(module, Experts):
            for name in EXPERT_MATRICES:
                found[path, name] = module.branch(name)
    return found


def set_branches(model: K3Model, branches: Branches) -> None:
    """Compute with these branches, which `branches_of` gave, from now on."""
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            module.set_branch(*branches[path, ""])
        if isinstance(module, Experts):
            for name in EXPERT_MATRICES:
                module.set_branch(name, *branches[path, name])


def detach_lora(model: K3Model) -> None:
    """Take every branch away; the base's weights are as they were before one was attached."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.lora_A = module.lora_B = None
        if isinstance(module, Experts):
            for name in EXPERT_MATRICES:
                setattr(module, f"{name}_lora_A", None)
                setattr(module, f"{name}_lora_B", None)
