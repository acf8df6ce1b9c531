"""What is broken is what is named: each place is disturbed in the engine alone, and found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import k3core.model.kda
from k3core.first_difference import first_difference
from k3core.model.lora import LoraConfig, attach_lora
from k3core.model.model import K3Model
from k3core.model.presets import PRESETS
from k3core.model.state import SlotState
from k3core.parity import awake_model
from k3kernels.kda import kda_aligned_step

PROMPTS = (1, 17, 40)


def models(dtype: torch.dtype = torch.float32) -> tuple[K3Model, K3Model]:
    cfg = PRESETS["tiny"]
    return awake_model(cfg, dtype), awake_model(cfg, dtype)


def histories() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 512, length + 20).tolist() for length in PROMPTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_weights_differ_nowhere(dtype: torch.dtype) -> None:
    assert first_difference(*models(dtype), histories(), PROMPTS) is None


@pytest.mark.parametrize(
    ("tensor", "place"),
    [
        ("embed_tokens.weight", "embed_tokens (output)"),
        ("layers.1.self_attn.q_proj.weight", "layers.1.self_attn.q_proj (output)"),
        ("layers.1.self_attn.A_log", "layers.1.self_attn (attention core before o_proj)"),
        ("layers.1.self_attn.k_conv1d.weight", "layers.1.self_attn (attention core before o_proj)"),
        ("layers.3.self_attn.kv_b_proj.weight", "layers.3.self_attn (attention core before o_proj)"),
        ("layers.2.mlp_res_norm.weight", "layers.2 (residuals before post_attention_layernorm)"),
        ("layers.2.block_sparse_moe.gate.weight", "layers.2.block_sparse_moe.gate (output)"),
        ("layers.2.block_sparse_moe.experts.w2", "layers.2.block_sparse_moe (experts before routed_expert_norm)"),
        ("layers.0.mlp.down_proj.weight", "layers.0.mlp.down_proj (output)"),
        ("output_attn_res_proj.weight", "the model (residuals before norm)"),
        ("norm.weight", "norm (output)"),
        ("lm_head.weight", "lm_head (logits)"),
    ],
)
def test_a_tensor_that_the_engine_holds_otherwise_is_named_with_its_place(tensor: str, place: str) -> None:
    trainer, engine = models()
    engine.get_parameter(tensor).mul_(1 + 2**-10)
    found = first_difference(trainer, engine, histories(), PROMPTS)
    assert found is not None
    assert (found.place, found.weights) == (place, (tensor,))
    assert str(found) == f"{place}, of other weights ({tensor})"


def test_a_correction_bias_that_changes_a_choice_is_named_though_every_score_is_equal() -> None:
    trainer, engine = models()
    name = "layers.1.block_sparse_moe.gate.e_score_correction_bias"
    engine.get_buffer(name)[0] = 1.0
    found = first_difference(trainer, engine, histories(), PROMPTS)
    assert found is not None
    assert (found.place, found.weights) == ("layers.1.block_sparse_moe (experts before routed_expert_norm)", (name,))


def test_an_adapter_that_only_the_trainer_has_is_named() -> None:
    trainer, engine = models()
    for model, scale in ((trainer, 0.1), (engine, 0.0)):
        attach_lora(model, LoraConfig(4, 8.0, ("o_proj",)), torch.Generator().manual_seed(1))
        model.requires_grad_(False)
        for path, p in model.named_parameters():
            if path == "layers.2.self_attn.o_proj.lora_B":
                p.fill_(scale)
    found = first_difference(trainer, engine, histories(), PROMPTS)
    assert found is not None
    assert str(found) == "layers.2.self_attn.o_proj (output), of other weights (layers.2.self_attn.o_proj.lora_B)"


Form = Callable[..., Any]


def disturbed(form: Form) -> Form:
    def slightly(*args: Any, **settings: Any) -> Any:
        return form(*args, **settings) * (1 + 2**-20)

    return slightly


def test_an_operation_that_decodes_otherwise_is_named_with_the_first_token_that_it_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights are equal and prefills are too."""
    monkeypatch.setattr(k3core.model.kda, "kda_aligned_step", disturbed(kda_aligned_step))
    found = first_difference(*models(), histories(), PROMPTS)
    assert found is not None
    assert (found.place, found.weights) == ("layers.0.self_attn (attention core before o_proj)", ())
    assert (found.sequence, found.position, found.is_prefill) == (0, PROMPTS[0], False)
    assert 0 < found.max_abs < 1e-4


def test_latent_rows_that_are_written_otherwise_are_named_at_the_layer_that_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = SlotState.write_latent

    def write_rounded(state: SlotState, layer: int, slots: Any, positions: Any, rows_TC: torch.Tensor) -> None:
        write(state, layer, slots, positions, rows_TC.bfloat16().float())

    monkeypatch.setattr(SlotState, "write_latent", write_rounded)
    found = first_difference(*models(), histories(), PROMPTS)
    assert found is not None
    assert found.place == "layers.3.self_attn (attention core before o_proj)"
    assert found.is_prefill
