"""Trainer: forward_backward, optim_step, save, load. Full parameters or LoRA is which of them require a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig, attach_lora
from k3core.model.model import K3Model
from k3core.model.weights import load_tensors, named_tensors
from k3core.rl.optim import NamedAdamW, OptimConfig, StepResult
from k3kernels.packing import Packing

Loss = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]

MAX_LOGITS = 1 << 24  # 128 MiB of fp64: long episodes over a large vocabulary would fill the memory with logits


class Trainer:
    """Owns one model and its optimizer. Not finite is refused: a bad loss or gradient vetoes the next optim_step."""

    def __init__(self, cfg: K3Config, optim: OptimConfig, lora: LoraConfig | None = None, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = K3Model(cfg)
        self.model.init_weights(generator)
        if lora is not None:
            attach_lora(self.model, lora, generator)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = NamedAdamW(trained, optim)
        self._veto: str | None = None

    def logprobs(
        self, tokens_T: Tensor, packing: Packing, target_M: Tensor, replay_TLk: Tensor | None, temperature: float
    ) -> Tensor:
        """log p(token | what came before) at the M target positions only, at most MAX_LOGITS logits at a time.

        Raises ValueError where the recorded experts are not those of this model's MoE layers.
        """
        assert bool((packing.pos_T[target_M] > 0).all()), "nothing comes before a sequence's first token"
        cfg = self.model.cfg
        routed = (len(cfg.moe_layers), cfg.num_experts_per_token)
        if replay_TLk is not None and replay_TLk.shape[1:] != routed:
            raise ValueError(f"recorded experts are {tuple(replay_TLk.shape[1:])} a token, the model's are {routed}")
        hidden_MD = self.model(tokens_T, packing, replay_TLk).hidden_TD.index_select(0, target_M - 1)
        rows = max(1, MAX_LOGITS // cfg.vocab_size)
        if len(hidden_MD) <= rows:
            return self._head(hidden_MD, tokens_T[target_M], temperature)
        pieces = zip(hidden_MD.split(rows), tokens_T[target_M].split(rows), strict=True)
        # Recomputed in the backward pass: kept for it, the pieces would be the whole again.
        return torch.cat([checkpoint(self._head, *piece, temperature, use_reentrant=False) for piece in pieces])

    def _head(self, hidden_MD: Tensor, tokens_M: Tensor, temperature: float) -> Tensor:
        logits_MV = self.model.logits(hidden_MD)
        if temperature != 1.0:
            logits_MV = logits_MV / temperature
        return -F.cross_entropy(logits_MV, tokens_M, reduction="none").float()

    def forward_backward(
        self,
        tokens_T: Tensor,
        packing: Packing,
        target_M: Tensor,
        loss: Loss,
        replay_TLk: Tensor | None = None,
        temperature: float = 1.0,
    ) -> dict[str, Tensor]:
        """Accumulate the gradients of loss(logprobs_M). A loss that is not finite adds nothing and vetoes the step."""
        value, metrics = loss(self.logprobs(tokens_T, packing, target_M, replay_TLk, temperature))
        if torch.isfinite(value):
            value.backward()
        else:
            self._veto = f"the loss is {value.item()}"
        return metrics

    def optim_step(self, learning_rate: float | None = None) -> StepResult:
        if self._veto is not None:
            result = StepResult(False, float("nan"), self._veto)
            self._veto = None
            self.optimizer.zero_grad()
            return result
        return self.optimizer.step(self.optimizer.cfg.learning_rate if learning_rate is None else learning_rate)

    def save(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of (weights by checkpoint name, optimizer state)."""
        weights = {name: tensor.detach().clone() for name, tensor in named_tensors(self.model).items()}
        return weights, self.optimizer.state()

    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        load_tensors(self.model, dict(weights))
        self.optimizer.load_state(optimizer)
        self.optimizer.zero_grad()
        self._veto = None
