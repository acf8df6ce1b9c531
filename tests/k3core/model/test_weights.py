"""Names and copying of a model's tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from k3core.model.config import K3Config
from k3core.model.model import K3Model
from k3core.model.weights import is_adapter_tensor, load_tensors, named_tensors
from k3kernels.packing import Packing

RandomModel = Callable[[K3Config], K3Model]
Shapes = dict[str, tuple[int, ...]]


def mlp_shapes(prefix: str, hidden: int, width: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def moe_shapes(layer: str, experts_hidden: int, shared_width: int) -> Shapes:
    moe = f"{layer}.block_sparse_moe"
    shapes: Shapes = {f"{moe}.gate.weight": (6, 20), f"{moe}.gate.e_score_correction_bias": (6,)}
    for e in range(6):
        shapes[f"{moe}.experts.{e}.w1.weight"] = (9, experts_hidden)
        shapes[f"{moe}.experts.{e}.w3.weight"] = (9, experts_hidden)
        shapes[f"{moe}.experts.{e}.w2.weight"] = (experts_hidden, 9)
    return shapes | mlp_shapes(f"{moe}.shared_experts", 20, shared_width)


def kda_shapes(layer: str) -> Shapes:
    attn = f"{layer}.self_attn"
    shapes: Shapes = {f"{attn}.{x}_proj.weight": (24, 20) for x in "qkv"}
    shapes |= {f"{attn}.{x}_conv1d.weight": (24, 1, 4) for x in "qkv"}
    return shapes | {
        f"{attn}.f_a_proj.weight": (8, 20),
        f"{attn}.f_b_proj.weight": (24, 8),
        f"{attn}.b_proj.weight": (3, 20),
        f"{attn}.A_log": (3,),
        f"{attn}.dt_bias": (24,),
        f"{attn}.o_norm.weight": (8,),
        f"{attn}.o_proj.weight": (20, 24),
    }


def mla_shapes(layer: str) -> Shapes:
    attn = f"{layer}.self_attn"
    return {
        f"{attn}.kv_a_proj_with_mqa.weight": (14, 20),
        f"{attn}.kv_a_layernorm.weight": (10,),
        f"{attn}.kv_b_proj.weight": (22, 10),
        f"{attn}.o_proj.weight": (20, 10),
    }


def common_shapes() -> Shapes:
    shapes: Shapes = {"embed_tokens.weight": (61, 20), "norm.weight": (20,), "lm_head.weight": (61, 20)}
    shapes |= mlp_shapes("layers.0.mlp", 20, 28)
    for layer in range(5):
        name = f"layers.{layer}"
        shapes |= mla_shapes(name) if layer in (2, 4) else kda_shapes(name)
        shapes |= {f"{name}.input_layernorm.weight": (20,), f"{name}.post_attention_layernorm.weight": (20,)}
    return shapes


def test_k3_tensors_have_the_checkpoints_names_and_shapes(k3: K3Config, random_model: RandomModel) -> None:
    want = common_shapes() | {"output_attn_res_norm.weight": (20,), "output_attn_res_proj.weight": (1, 20)}
    for layer in range(5):
        name = f"layers.{layer}"
        for read in ("self_attention", "mlp"):
            want |= {f"{name}.{read}_res_norm.weight": (20,), f"{name}.{read}_res_proj.weight": (1, 20)}
        if layer in (2, 4):
            want |= {
                f"{name}.self_attn.q_a_proj.weight": (14, 20),
                f"{name}.self_attn.q_a_layernorm.weight": (14,),
                f"{name}.self_attn.q_b_proj.weight": (20, 14),
                f"{name}.self_attn.g_proj.weight": (10, 20),
            }
        else:
            want[f"{name}.self_attn.g_proj.weight"] = (24, 20)
        if layer > 0:
            want |= moe_shapes(name, experts_hidden=12, shared_width=18) | {
                f"{name}.block_sparse_moe.routed_expert_down_proj.weight": (12, 20),
                f"{name}.block_sparse_moe.routed_expert_norm.weight": (12,),
                f"{name}.block_sparse_moe.routed_expert_up_proj.weight": (20, 12),
            }
    assert {name: tuple(t.shape) for name, t in named_tensors(random_model(k3)).items()} == want


def test_kimi_linear_tensors_have_the_checkpoints_names_and_shapes(
    kimi_linear: K3Config, random_model: RandomModel
) -> None:
    want = common_shapes()
    for layer in range(5):
        name = f"layers.{layer}"
        if layer in (2, 4):
            want[f"{name}.self_attn.q_proj.weight"] = (20, 20)
        else:
            want |= {f"{name}.self_attn.g_a_proj.weight": (8, 20), f"{name}.self_attn.g_b_proj.weight": (24, 8)}
        if layer > 0:
            want |= moe_shapes(name, experts_hidden=20, shared_width=9)
    assert {name: tuple(t.shape) for name, t in named_tensors(random_model(kimi_linear)).items()} == want


def test_named_tensors_are_the_models_own_storage(k3: K3Config, random_model: RandomModel) -> None:
    model = random_model(k3)
    named_tensors(model)["layers.1.block_sparse_moe.experts.4.w2.weight"].fill_(7.0)
    w2_ERF = model.get_parameter("layers.1.block_sparse_moe.experts.w2")
    assert w2_ERF[4].eq(7).all()
    assert not w2_ERF[3].eq(7).any()


def test_loaded_tensors_make_the_same_model(cfg: K3Config, random_model: RandomModel) -> None:
    source, target = random_model(cfg), K3Model(cfg)
    load_tensors(target, {name: tensor.clone() for name, tensor in named_tensors(source).items()})
    tokens_T, packing = torch.arange(9), Packing((9,))
    assert torch.equal(source(tokens_T, packing).hidden_TD, target(tokens_T, packing).hidden_TD)


def test_every_tensor_that_does_not_fit_is_named_and_nothing_is_written(
    k3: K3Config, random_model: RandomModel
) -> None:
    model = random_model(k3)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in named_tensors(model).items()}
    del tensors["layers.1.block_sparse_moe.routed_expert_norm.weight"]
    tensors["layers.1.block_sparse_moe.experts.6.w1.weight"] = torch.zeros(9, 12)
    tensors["norm.weight"] = torch.zeros(21)
    tensors["layers.0.self_attn.A_log"] = torch.zeros(3, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    with pytest.raises(ValueError, match="weights do not fit the model") as refusal:
        load_tensors(model, tensors)
    for problem in (
        "missing layers.1.block_sparse_moe.routed_expert_norm.weight",
        "unexpected layers.1.block_sparse_moe.experts.6.w1.weight",
        "norm.weight: torch.float32 (21,) in place of torch.float32 (20,)",
        "layers.0.self_attn.A_log: torch.bfloat16 (3,) in place of torch.float32 (3,)",
    ):
        assert problem in str(refusal.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in named_tensors(model).items())


def packed_config(k3: K3Config) -> K3Config:
    return replace(k3, routed_expert_hidden_size=32, moe_intermediate_size=64, expert_quantization="mxfp4")


def test_packed_experts_have_the_checkpoints_names_shapes_and_bytes(k3: K3Config) -> None:
    own = named_tensors(K3Model(packed_config(k3)))
    experts = {name: t for name, t in own.items() if name.startswith("layers.1.") and ".experts." in name}
    assert len(experts) == 6 * 3 * 2
    assert {t.dtype for t in experts.values()} == {torch.uint8}
    for e in range(6):
        shapes = {
            name.removeprefix(f"layers.1.block_sparse_moe.experts.{e}."): tuple(t.shape)
            for name, t in experts.items()
            if f".experts.{e}." in name
        }
        assert shapes == {
            "w1.weight_packed": (64, 16),
            "w1.weight_scale": (64, 1),
            "w2.weight_packed": (32, 32),
            "w2.weight_scale": (32, 2),
            "w3.weight_packed": (64, 16),
            "w3.weight_scale": (64, 1),
        }


def test_packed_tensors_are_the_models_own_storage_and_carry_it_to_another(k3: K3Config) -> None:
    source, target = K3Model(packed_config(k3)), K3Model(packed_config(k3))
    source.init_weights(torch.Generator().manual_seed(0))
    target.init_weights(torch.Generator().manual_seed(1))
    named_tensors(source)["layers.1.block_sparse_moe.experts.4.w2.weight_scale"].fill_(121)
    assert source.get_buffer("layers.1.block_sparse_moe.experts.w2_scale")[4].eq(121).all()
    assert not source.get_buffer("layers.1.block_sparse_moe.experts.w2_scale")[3].eq(121).any()
    load_tensors(target, {name: tensor.clone() for name, tensor in named_tensors(source).items()})
    tokens_T, packing = torch.arange(9), Packing((9,))
    assert torch.equal(source(tokens_T, packing).hidden_TD, target(tokens_T, packing).hidden_TD)


def test_packed_and_unpacked_experts_do_not_load_into_each_other_and_one_line_says_what_to_set(k3: K3Config) -> None:
    cfg = packed_config(k3)
    packed, plain = K3Model(cfg), K3Model(replace(cfg, expert_quantization=None))
    with pytest.raises(ValueError, match=r"^weights .* are not: set model\.expert_quantization to none$"):
        load_tensors(packed, named_tensors(plain))
    with pytest.raises(ValueError, match=r"^weights .* are not: set model\.expert_quantization to \"mxfp4\", or"):
        load_tensors(plain, named_tensors(packed))


def test_weights_of_another_model_are_refused_in_a_line_of_bounded_length(
    k3: K3Config, random_model: RandomModel
) -> None:
    model = random_model(k3)
    with pytest.raises(ValueError, match=r"weights do not fit the model: missing .* and 181 more$") as refusal:
        load_tensors(model, {"of.another": torch.zeros(1)})
    assert str(refusal.value).count(";") == 20


def test_only_lora_pairs_are_adapter_tensors(k3: K3Config, random_model: RandomModel) -> None:
    assert not any(is_adapter_tensor(name) for name in named_tensors(random_model(k3)))
    assert is_adapter_tensor("layers.0.self_attn.q_proj.lora_A")
    assert is_adapter_tensor("layers.1.block_sparse_moe.experts.3.w1.lora_B")
