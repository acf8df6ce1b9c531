"""Activation checkpointing: the same gradients from layers that are computed twice, and what is kept in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig, attach_lora
from k3core.model.model import ROWS, K3Model
from k3core.model.moe import Router
from k3core.model.state import SlotState
from k3kernels.kda import eager as kda_eager
from k3kernels.packing import Packing

RandomModel = Callable[[K3Config], K3Model]

PACKING = Packing((9, 1, 30))


def made_tokens(cfg: K3Config) -> Tensor:
    return torch.randint(cfg.vocab_size, (PACKING.num_tokens,), generator=torch.Generator().manual_seed(1))


def gradients(model: K3Model, *, recompute: bool, replay_TLk: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """(gradients by name, the experts that were used)."""
    model.zero_grad()
    forward = model(made_tokens(model.cfg), PACKING, replay_TLk, activation_checkpointing=recompute)
    weights_TD = torch.linspace(-1, 1, forward.hidden_TD.numel()).view_as(forward.hidden_TD)
    (forward.hidden_TD * weights_TD).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, forward.routed_experts_TLk


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


class Passes:
    """Counts the passes through one layer's router."""

    def __init__(self, router: Router) -> None:
        self.count = 0
        router.register_forward_pre_hook(self._pass)

    def _pass(self, _router: Any, _inputs: Any) -> None:
        self.count += 1


class NoisyRouter(Passes):
    """The selection bias is drawn anew in every pass: what a tie or another order of a sum does, and far more often.

    The bias weighs nothing, so with the same experts the function is the same.
    """

    def _pass(self, router: Any, _inputs: Any) -> None:
        super()._pass(router, _inputs)
        router.e_score_correction_bias.normal_(0, 10, generator=torch.Generator().manual_seed(self.count))


def routers(model: K3Model) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


@pytest.mark.parametrize("kind", ["free", "replayed", "partly replayed"])
def test_recomputed_layers_give_the_same_gradients_bit_for_bit(
    cfg: K3Config, random_model: RandomModel, kind: str
) -> None:
    model = random_model(cfg)
    replay_TLk = None
    if kind != "free":
        replay_TLk = (gradients(model, recompute=False)[1] + 1) % cfg.num_experts
    if kind == "partly replayed":
        assert replay_TLk is not None
        replay_TLk[5:9] = -1
    kept, used_TLk = gradients(model, recompute=False, replay_TLk=replay_TLk)
    recomputed, used_again_TLk = gradients(model, recompute=True, replay_TLk=replay_TLk)
    assert torch.equal(used_TLk, used_again_TLk)
    assert_same_bits(recomputed, kept)


def test_the_experts_of_the_forward_pass_are_imposed_on_a_router_that_would_now_choose_others(
    cfg: K3Config, random_model: RandomModel
) -> None:
    model = random_model(cfg)
    noisy = [NoisyRouter(router) for router in routers(model)]
    kept, used_TLk = gradients(model, recompute=False)
    for router in noisy:
        router.count = 0
    recomputed, used_again_TLk = gradients(model, recompute=True)
    assert {router.count for router in noisy} == {2}
    assert torch.equal(used_TLk, used_again_TLk)
    assert_same_bits(recomputed, kept)

    # What it would have been without: the second pass's own choice.
    with torch.no_grad():
        own_TLk = model(made_tokens(cfg), PACKING).routed_experts_TLk
    assert (own_TLk != used_TLk).any(0).any(-1).all()


def test_each_layer_is_computed_once_more_and_without_gradients_only_once(
    cfg: K3Config, random_model: RandomModel
) -> None:
    model = random_model(cfg)
    passes = [Passes(router) for router in routers(model)]
    gradients(model, recompute=True)
    assert {p.count for p in passes} == {2}
    with torch.no_grad():
        model(made_tokens(cfg), PACKING, activation_checkpointing=True)
    assert {p.count for p in passes} == {3}


def test_an_adapter_gets_the_same_gradients_over_a_frozen_model(cfg: K3Config, random_model: RandomModel) -> None:
    """The first layer's input requires no gradient then."""
    model = random_model(cfg)
    attach_lora(model, LoraConfig(2, 4.0, ("o_proj", "kv_b_proj")), torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    kept, _ = gradients(model, recompute=False)
    recomputed, _ = gradients(model, recompute=True)
    assert all(name.endswith(("lora_A", "lora_B")) for name in kept)
    assert_same_bits(recomputed, kept)


def test_what_is_kept_of_a_layer_is_its_input_and_its_experts(
    cfg: K3Config, random_model: RandomModel, allocations: Any
) -> None:
    """Over the whole model: L inputs [T, D] (bank rows are among them), the experts as int64 twice (each layer's, and
    the model's result), and of the last mix and norm a few [T, D] and [rows, T]."""
    model, T = random_model(cfg), -(-PACKING.num_tokens // ROWS) * ROWS
    tokens_T = made_tokens(cfg)

    def kept_bytes(recompute: bool) -> int:
        tracked = type(allocations)()
        with tracked:
            forward = model(tokens_T, PACKING, activation_checkpointing=recompute)
            kept: int = tracked.live_bytes
            forward.hidden_TD.sum().backward()
        return kept

    residual_bytes = T * cfg.hidden_size * 4
    routes_bytes = T * len(cfg.moe_layers) * cfg.num_experts_per_token * 8
    rows = 0 if cfg.attn_res_block_size is None else -(-cfg.num_hidden_layers // cfg.attn_res_block_size) + 1
    end_bytes = 4 * residual_bytes + 4 * rows * T * 4 + 4 * T
    bound = cfg.num_hidden_layers * residual_bytes + 2 * routes_bytes + end_bytes
    assert kept_bytes(recompute=True) <= bound
    assert kept_bytes(recompute=False) > 5 * bound


def test_a_prefill_cannot_be_checkpointed(k3: K3Config, random_model: RandomModel) -> None:
    model = random_model(k3)
    state = SlotState(k3, num_slots=3, max_length=40)
    with pytest.raises(AssertionError, match="move the slots again"):
        model(made_tokens(k3), PACKING, None, state, torch.arange(3), activation_checkpointing=True)


def test_a_recurrence_cut_into_segments_is_computed_again_too(
    k3: K3Config, random_model: RandomModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backward runs inside the recomputation, which hands out what was saved once."""
    model = random_model(k3)
    monkeypatch.setattr(kda_eager, "LARGEST_BYTES", 1 << 12)
    (kept, _), (again, _) = (gradients(model, recompute=recompute) for recompute in (False, True))
    assert_same_bits(kept, again)
