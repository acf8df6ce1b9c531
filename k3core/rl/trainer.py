"""Trainer: forward_backward, optim_step, save, load. Full parameters or LoRA is which of them require a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor, nn

from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig, attach_lora
from k3core.model.model import ROWS, K3Model, build_model
from k3core.model.weights import is_adapter_tensor, load_tensors, named_tensors
from k3core.rl.optim import NamedAdamW, OptimConfig, StepResult
from k3core.rl.renormalise import head_supported_logprobs
from k3kernels.dispatch import is_batch_invariant
from k3kernels.linear_logprob import MAX_LOGITS
from k3kernels.packing import Packing

Loss = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]
Supports = Sequence[np.ndarray | None]


class Trainer:
    """Owns one model and its optimizer. Not finite is refused: a bad loss or gradient vetoes the next optim_step."""

    def __init__(
        self,
        cfg: K3Config,
        optim: OptimConfig,
        lora: LoraConfig | None = None,
        seed: int = 0,
        *,
        model: K3Model | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        activation_checkpointing: bool = False,
    ) -> None:
        """Trains `model` where it lies; without one, random weights of type dtype on device.

        With lora the weights are frozen and have no gradient buffers: what AdamW holds is fp32 and the factors' size.
        Raises ValueError for a model of another architecture, and for full parameters that AdamW cannot train: it keeps
        no fp32 copy of 16-bit weights, and packed experts have no gradient.
        """
        generator = torch.Generator().manual_seed(seed)
        if model is None:
            model = build_model(cfg, dtype, device)
            is_on_cpu = torch.device(device).type == "cpu"
            model.init_weights(generator if is_on_cpu else torch.Generator(device).manual_seed(seed))
        elif model.cfg != cfg:
            raise ValueError(
                f"the model to train has another architecture than the config: {_differences(model.cfg, cfg)}"
            )
        if lora is not None:  # factors are drawn on the CPU, wherever the model lies
            attach_lora(model, lora, generator)
        self.model = model
        self.activation_checkpointing = activation_checkpointing
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        _require_trainable(model, trained)
        self.optimizer = NamedAdamW(trained, optim)
        self._veto: str | None = None

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def logprobs(
        self,
        tokens_T: Tensor,
        packing: Packing,
        target_M: Tensor,
        replay_TLk: Tensor | None,
        temperature: float,
        supports_M: Supports | None = None,
    ) -> Tensor:
        """log p(token | what came before) at the M target positions only, fp32 [M] on the model's device.

        supports_M: the ids that each token was drawn among, over which p is then renormalised (`k3core.rl.renormalise`);
        None for the whole vocabulary, of one token or of all.
        Arguments may lie elsewhere. Without a target the model is not run and the result is empty, without a gradient.
        Raises ValueError where the recorded experts are not those of this model's MoE layers.
        """
        return target_logprobs(
            *(self.model, tokens_T, packing, target_M, replay_TLk, temperature, supports_M),
            self.activation_checkpointing,
        )

    def forward_backward(
        self,
        tokens_T: Tensor,
        packing: Packing,
        target_M: Tensor,
        loss: Loss,
        replay_TLk: Tensor | None = None,
        temperature: float = 1.0,
        supports_M: Supports | None = None,
    ) -> dict[str, Tensor]:
        """Accumulate the gradients of loss(logprobs_M), M on the model's device.

        A loss that is not finite adds nothing and vetoes the step; without a target there is no gradient to add.
        """
        value, metrics = loss(self.logprobs(tokens_T, packing, target_M, replay_TLk, temperature, supports_M))
        if torch.isfinite(value):
            if target_M.numel():
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

    def save(self, *, adapter_only: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies in host memory of (weights by checkpoint name, optimizer state).

        adapter_only: of the weights, those of the adapter, which is all that LoRA changes.
        """
        weights = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in named_tensors(self.model).items()
            if not adapter_only or is_adapter_tensor(name)
        }
        return weights, self.optimizer.state()

    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        load_tensors(self.model, weights)
        self.optimizer.load_state(optimizer)
        self.optimizer.zero_grad()
        self._veto = None


def target_logprobs(
    model: K3Model,
    tokens_T: Tensor,
    packing: Packing,
    target_M: Tensor,
    replay_TLk: Tensor | None = None,
    temperature: float = 1.0,
    supports_M: Supports | None = None,
    activation_checkpointing: bool = False,
) -> Tensor:
    """`Trainer.logprobs` of any model."""
    assert bool((packing.pos_T[target_M] > 0).all()), "nothing comes before a sequence's first token"
    cfg = model.cfg
    routed = (len(cfg.moe_layers), cfg.num_experts_per_token)
    if replay_TLk is not None and replay_TLk.shape[1:] != routed:
        raise ValueError(f"recorded experts are {tuple(replay_TLk.shape[1:])} a token, the model's are {routed}")
    device = model.embed_tokens.weight.device
    tokens_T, target_M = tokens_T.to(device), target_M.to(device)
    if target_M.numel() == 0:
        return torch.zeros(0, device=device)
    if torch.device(packing.device) != device:
        packing = Packing(packing.lengths, device)
    replay_TLk = None if replay_TLk is None else replay_TLk.to(device)
    forward = model(tokens_T, packing, replay_TLk, activation_checkpointing=activation_checkpointing)
    M = len(target_M)
    num_missing = -M % ROWS if device.type == "cpu" else 0  # in whole multiples, as the engine's head computes them
    target_M = torch.cat([target_M, target_M[:1].expand(num_missing)])
    hidden_MD = forward.hidden_TD.index_select(0, target_M - 1)
    if supports_M is None and device.type != "cpu" and not is_batch_invariant():
        return model.logprobs(hidden_MD, tokens_T[target_M], temperature)[:M]
    supports_M = supports_M or [None] * M  # the engine's own rounding, with or without supports
    logprobs_M = head_supported_logprobs(
        hidden_MD,
        model.logits,
        [p for p in model.lm_head.parameters() if p.requires_grad],
        cfg.vocab_size,
        tokens_T[target_M],
        temperature,
        [*supports_M, *[supports_M[0]] * num_missing],
        block_rows=max(1, MAX_LOGITS // cfg.vocab_size // ROWS) * ROWS,
    )
    return logprobs_M[:M].float()


def _require_trainable(model: K3Model, trained: Mapping[str, nn.Parameter]) -> None:
    if not trained:
        raise ValueError("no parameter of the model requires a gradient: train a LoRA adapter, or unfreeze the model")
    narrow = [name for name, p in trained.items() if torch.finfo(p.dtype).bits < 32]
    if narrow:
        raise ValueError(
            f"full parameters in {trained[narrow[0]].dtype} cannot be trained ({len(narrow)} tensors, {narrow[0]} the "
            "first): AdamW's steps would be lost in rounding; load the model in torch.float32, or train a LoRA adapter"
        )
    is_full = all(p.requires_grad for p in model.parameters())
    packed = [name for name, _ in model.named_buffers() if name.endswith("_packed")]
    if is_full and packed:
        raise ValueError(
            f"full parameters of packed experts cannot be trained ({packed[0]} and {len(packed) - 1} more have no gradient):"
            " load the experts unpacked, or train a LoRA adapter"
        )


def _differences(a: K3Config, b: K3Config) -> str:
    return ", ".join(
        f"{setting.name} {getattr(a, setting.name)!r} in place of {getattr(b, setting.name)!r}"
        for setting in fields(K3Config)
        if getattr(a, setting.name) != getattr(b, setting.name)
    )
