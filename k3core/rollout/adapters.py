"""Adapters that an engine serves beside its policy: whose branches the model computes with, one adapter at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from k3core.model.lora import Branches, LoraConfig, branches_of, detach_lora, set_branches
from k3core.model.model import K3Model
from k3core.rollout.protocol import UnknownAdapter


@dataclass(frozen=True, slots=True)
class Loaded:
    """sha256 of its factors and scales: a name says nothing about what it stands for."""

    sha256: str
    branches: Branches


class AdapterSet:
    """None is the policy as it was loaded, with the branches of its own that it may have."""

    def __init__(self, model: K3Model) -> None:
        self.model = model
        self._own = branches_of(model)
        self._loaded: dict[str, Loaded] = {}
        self._active: Branches = self._own

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def sha256(self, name: str | None) -> str | None:
        """Raises UnknownAdapter."""
        return None if name is None else self._get(name).sha256

    def load(self, name: str, tensors: Mapping[str, Tensor], config: LoraConfig) -> None:
        """Raises ValueError for what does not fit the model; nothing changes then."""
        from k3core.checkpoint.adapter import Adapter, attach_adapter  # reads files with what a GPU job may lack

        if not name:
            raise ValueError("an adapter needs a name")
        detach_lora(self.model)
        try:
            attach_adapter(self.model, Adapter(config, tensors))
            branches = branches_of(self.model)
            self.model.requires_grad_(False)
        finally:
            set_branches(self.model, self._active)
        self._loaded[name] = Loaded(_sha256(tensors, branches), branches)

    def unload(self, name: str) -> None:
        self._get(name)
        del self._loaded[name]

    def activate(self, name: str | None) -> None:
        branches = self._own if name is None else self._get(name).branches
        if branches is not self._active:
            set_branches(self.model, branches)
            self._active = branches

    def _get(self, name: str) -> Loaded:
        if name not in self._loaded:
            known = ", ".join(self._loaded) or "none"
            raise UnknownAdapter(f"adapter {name!r} is not loaded; loaded: {known}")
        return self._loaded[name]


def _sha256(tensors: Mapping[str, Tensor], branches: Branches) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    digest.update(repr([(path, scale) for path, (_, _, scale) in branches.items()]).encode())
    return digest.hexdigest()
