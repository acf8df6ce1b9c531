from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import KimiLinearConfig

from k3core.model.config import K3Config
from k3core.model.hf_config import from_hf, layout_of, to_hf, unread_keys
from k3core.model.hf_keys import KEYS, MISSING, find, put
from k3core.model.hf_quantization import mxfp4_block
from k3core.model.hf_released import kimi_k3, kimi_linear

Document = dict[str, Any]

K3, LINEAR = from_hf(kimi_k3()), from_hf(kimi_linear())
TEXT = "text_config."


def k3_text() -> Document:
    """K3's text model without the wrapper."""
    return {**kimi_k3()["text_config"], "architectures": ["KimiK3LinearForCausalLM"]}


def problems(document: Any) -> list[str]:
    with pytest.raises(ValueError) as caught:
        from_hf(document)
    return str(caught.value).splitlines()


def changed(document: Document, path: str, value: object) -> Document:
    out = copy.deepcopy(document)
    if value is MISSING:
        *parents, last = path.split(".")
        parent = find(out, ".".join(parents)) if parents else out
        del parent[last]
    else:
        put(out, path, value)
    return out


def same(a: Document, b: Document) -> bool:
    """Equal in values, their JSON types, and the order of keys."""
    return json.dumps(a) == json.dumps(b)


@pytest.mark.parametrize("make", [kimi_k3, k3_text, kimi_linear])
def test_a_document_comes_back_as_it_was(make: Callable[[], Document]) -> None:
    document = make()
    assert same(to_hf(from_hf(document), like=document), document)


def test_the_three_layouts_are_told_apart_and_hold_one_architecture() -> None:
    assert [layout_of(make()) for make in (kimi_k3, k3_text, kimi_linear)] == ["kimi_k3", "kimi_k3_text", "kimi_linear"]
    assert from_hf(k3_text()) == K3
    assert (K3.family, LINEAR.family) == ("kimi_k3", "kimi_linear")


def test_what_the_architecture_does_not_read_is_carried_along() -> None:
    document = {**kimi_k3(), "vision_config": {"patch_size": 14}, "auto_map": {"AutoConfig": "x.Y"}, "something": [1]}
    back = to_hf(replace(K3, routed_scaling_factor=2.0), like=document)
    assert back["vision_config"] == {"patch_size": 14}
    assert back["something"] == [1]
    assert back["text_config"].pop("routed_scaling_factor") == 2.0
    document["text_config"].pop("routed_scaling_factor")
    assert same(back, document)
    assert unread_keys(document) == ("something",)


def test_a_document_is_not_changed_in_its_place() -> None:
    document = kimi_k3()
    to_hf(replace(K3, expert_quantization=None, num_experts=4, num_experts_per_token=2), like=document)
    assert same(document, kimi_k3())


def test_experts_that_are_not_packed_leave_no_quantization_block() -> None:
    plain = replace(K3, expert_quantization=None)
    document = to_hf(plain, like=kimi_k3())
    assert "quantization" not in json.dumps(document)
    assert from_hf(document) == plain
    at_the_top = {
        **changed(kimi_k3(), "text_config.quantization_config", MISSING),
        "quantization_config": mxfp4_block(),
    }
    assert from_hf(at_the_top) == K3
    assert "quantization" not in json.dumps(to_hf(plain, like=at_the_top))
    assert to_hf(K3, like=document)["text_config"]["quantization_config"] == mxfp4_block()


def test_a_model_of_fewer_layers_changes_both_lists_and_what_repeats_them() -> None:
    document = {**kimi_linear(), "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    four = replace(LINEAR, num_hidden_layers=4, full_attn_layers=(4,))
    document["layer_types"] = [
        "full_attention" if i + 1 in LINEAR.full_attn_layers else "linear_attention" for i in range(27)
    ]
    written = to_hf(four, like=document)
    assert written["linear_attn_config"]["full_attn_layers"] == [4]
    assert written["linear_attn_config"]["kda_layers"] == [1, 2, 3]
    assert written["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert from_hf(written) == four


@pytest.mark.parametrize("cfg", [K3Config(), K3, LINEAR, K3Config(vocab_size=100, latent_norm_eps=1e-5)])
def test_a_document_of_ones_own_is_whole(cfg: K3Config) -> None:
    document = to_hf(cfg)
    assert from_hf(document) == cfg
    assert unread_keys(document) == ()
    assert json.loads(json.dumps(document)) == document
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert 0 <= document[key] < cfg.vocab_size


def test_the_released_documents_are_what_is_written_for_their_models() -> None:
    assert same(to_hf(K3), kimi_k3())
    assert same(to_hf(LINEAR), kimi_linear())
    assert kimi_k3()["media_placeholder_token_id"] == 163605
    assert [kimi_linear()[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [163584, 163586, 163839]


def test_parts_of_k3_are_not_written_into_a_kimi_linear_document() -> None:
    with pytest.raises(ValueError, match="parts that only K3's can describe"):
        to_hf(replace(LINEAR, attn_res_block_size=3), like=kimi_linear())


@pytest.mark.parametrize("cfg", [LINEAR, replace(LINEAR, num_hidden_layers=5, full_attn_layers=(2, 5), num_experts=16)])
def test_transformers_reads_the_same_numbers(cfg: K3Config) -> None:
    theirs = KimiLinearConfig(**to_hf(cfg))
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "intermediate_size",
        "num_experts",
        "num_experts_per_token",
        "num_shared_experts",
        "moe_intermediate_size",
        "moe_renormalize",
        "routed_scaling_factor",
        "hidden_act",
        "rms_norm_eps",
    ):
        assert getattr(theirs, name) == getattr(cfg, name), name
    assert (theirs.linear_num_heads, theirs.linear_head_dim) == (cfg.kda_num_heads, cfg.kda_head_dim)
    assert theirs.linear_conv_kernel_dim == cfg.short_conv_kernel_size
    assert [kind == "linear_attention" for kind in theirs.layer_types] == [
        cfg.is_kda(i) for i in range(cfg.num_hidden_layers)
    ]
    assert [kind == "sparse" for kind in theirs.mlp_layer_types] == [
        cfg.is_moe(i) for i in range(cfg.num_hidden_layers)
    ]


def test_what_transformers_writes_is_read_as_the_same_model() -> None:
    theirs = json.loads(KimiLinearConfig(**kimi_linear()).to_json_string())
    assert "layer_types" in theirs
    assert from_hf(theirs) == LINEAR


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("hidden_size", MISSING, "hidden_size: missing"),
        ("hidden_size", "7168", 'hidden_size: expected a whole number, got "7168"'),
        ("hidden_size", True, "hidden_size: expected a whole number, got true"),
        ("hidden_size", None, "hidden_size: must not be null"),
        ("hidden_size", 0, "hidden_size: must be >= 1, got 0"),
        ("num_hidden_layers", 0, "num_hidden_layers: must be >= 1, got 0"),
        ("q_lora_rank", MISSING, "q_lora_rank: missing"),
        ("rms_norm_eps", 0, "rms_norm_eps: must be > 0, got 0"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps: expected a number, got NaN"),
        ("moe_renormalize", 1, "moe_renormalize: expected true or false, got 1"),
        ("hidden_act", "gelu", "hidden_act: must be 'situ' or 'silu', got \"gelu\""),
        ("activation_situ_beta", MISSING, "activation_situ_beta: missing"),
        ("activation_situ_linear_beta", MISSING, "activation_situ_linear_beta: missing"),
        ("latent_moe_use_norm", MISSING, "latent_moe_use_norm: missing"),
        ("attn_res_block_size", MISSING, "attn_res_block_size: missing"),
        ("routed_expert_hidden_size", MISSING, "routed_expert_hidden_size: missing"),
        ("mla_use_output_gate", MISSING, "mla_use_output_gate: missing"),
        ("linear_attn_config", MISSING, "linear_attn_config: missing"),
        ("linear_attn_config", 5, "linear_attn_config: must be an object"),
        ("linear_attn_config.num_heads", MISSING, "linear_attn_config.num_heads: missing"),
        ("linear_attn_config.gate_lower_bound", MISSING, "linear_attn_config.gate_lower_bound: missing"),
        ("linear_attn_config.gate_lower_bound", -7, "linear_attn_config.gate_lower_bound: must be in [-5, 0) or none"),
        ("linear_attn_config.use_full_rank_gate", MISSING, "linear_attn_config.use_full_rank_gate: missing"),
        ("num_experts_per_token", 897, "num_experts_per_token 897 and text_config.num_experts 896: "),
        ("num_expert_group", 8, "num_expert_group: got 8: experts are not chosen by group"),
        ("topk_group", 4, "topk_group: got 4: experts are not chosen by group"),
        ("topk_method", "greedy", 'topk_method: got "greedy": the router has no other choice'),
        ("moe_router_activation_func", "softmax", 'moe_router_activation_func: got "softmax": the router has no other'),
        ("moe_router_activation_func", MISSING, "moe_router_activation_func: missing"),
        ("tie_word_embeddings", True, "tie_word_embeddings: got true: the head has a matrix of its own"),
        ("num_nextn_predict_layers", 1, "num_nextn_predict_layers: got 1: layers that predict further tokens"),
        ("mla_use_nope", False, "mla_use_nope: got false: rotary positions are not implemented"),
        ("mla_use_nope", MISSING, "mla_use_nope: missing"),
        ("rope_scaling", {"type": "yarn"}, "rope_scaling: got an object: there are no rotary positions"),
        ("rope_parameters", {"rope_type": "yarn"}, 'rope_parameters: got "yarn": there are no rotary positions'),
        ("attention_bias", True, "attention_bias: got true: no projection has a bias"),
        ("num_key_value_heads", 8, "num_key_value_heads: found 8, the other keys say 96"),
        ("num_experts_per_tok", 8, "num_experts_per_tok: found 8, the other keys say 16"),
        ("quantization_config.quant_method", "fp8", 'quantization_config: found quant_method "fp8": only compressed-t'),
        (
            "quantization_config.config_groups.group_0.format",
            "nvfp4-pack-quantized",
            'quantization_config: found group_0 of format "nvfp4-pack-quantized": only compressed-tensors mxfp4-pack',
        ),
        (
            "quantization_config.config_groups.group_0.weights.group_size",
            16,
            "quantization_config: found group_0.weights.group_size 16: only ",
        ),
        (
            "quantization_config.config_groups.group_0.weights.scale_dtype",
            "torch.float32",
            'quantization_config: found group_0.weights.scale_dtype "torch.float32": only ',
        ),
        ("quantization_config.config_groups", [], "quantization_config: found config_groups []: only "),
        ("quantization_config", "mxfp4", 'quantization_config: found "mxfp4": only '),
        ("model_type", "qwen3", 'model_type: must be "kimi_linear", got "qwen3"'),
        (
            "moe_intermediate_size",
            3000,
            "moe_intermediate_size 3000 and text_config.quantization_config mxfp4: packed experts come in groups of 32",
        ),
    ],
)
def test_a_fault_is_one_line_that_names_the_key(path: str, value: object, line: str) -> None:
    (problem,) = problems(changed(kimi_k3(), TEXT + path, value))
    assert problem.startswith(TEXT + line)


@pytest.mark.parametrize(
    ("full", "kda", "said"),
    [
        ([0, 3], [1, 2, 4], "no layers [0]"),  # counted from 0, by hand
        ([3], [0, 1, 2], "in neither [4], no layers [0]"),  # both from 0
        ([4], [1, 2, 3, 4], "twice [4]"),
        ([4], [1, 2], "in neither [3]"),
        ([4], [1, 2, 2, 3], "twice [2]"),
        ([4, 5], [1, 2, 3], "no layers [5]"),
        ([4], [], "in neither [1, 2, 3]"),
    ],
)
def test_the_two_lists_must_split_the_layers_between_them(full: list[int], kda: list[int], said: str) -> None:
    document = changed(kimi_linear(), "num_hidden_layers", 4)
    document["linear_attn_config"] |= {"full_attn_layers": full, "kda_layers": kda}
    (problem,) = problems(document)
    assert problem == (
        "linear_attn_config.full_attn_layers and kda_layers must split the layers 1..4 between them "
        f"(counted from 1): {said}"
    )


def test_a_list_that_is_missing_or_no_list_is_named() -> None:
    for name in ("full_attn_layers", "kda_layers"):
        path = f"linear_attn_config.{name}"
        assert problems(changed(kimi_linear(), path, MISSING)) == [f"{path}: missing"]
        assert problems(changed(kimi_linear(), path, "all")) == [f'{path}: expected a list of layer numbers, got "all"']
        (problem,) = problems(changed(kimi_linear(), path, [1.0]))
        assert problem.startswith(f"{path}: expected a list of layer numbers")


def test_the_order_of_the_lists_does_not_matter() -> None:
    document = kimi_linear()
    document["linear_attn_config"]["full_attn_layers"].reverse()
    assert from_hf(document) == LINEAR
    assert same(to_hf(LINEAR, like=document), document)


def test_the_wrapper_may_not_tie_the_embeddings_either() -> None:
    (problem,) = problems({**kimi_k3(), "tie_word_embeddings": True})
    assert problem.startswith("tie_word_embeddings: got true")


def test_all_problems_are_reported_at_once() -> None:
    document = kimi_linear()
    del document["hidden_size"], document["linear_attn_config"]["head_dim"]
    document |= {"hidden_act": "gelu", "num_expert_group": 8, "tie_word_embeddings": True, "num_experts_per_token": 300}
    assert len(problems(document)) == 6


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ([], "expected an object, got []"),
        ({}, 'model_type: missing: must be "kimi_k3" or "kimi_linear"'),
        ({"model_type": "deepseek_v3"}, 'model_type: got "deepseek_v3": must be "kimi_k3" or "kimi_linear"'),
        ({"model_type": "kimi_k3"}, "text_config: missing"),
        ({"model_type": "kimi_k3", "text_config": 3}, "text_config: expected an object, got 3"),
    ],
)
def test_a_document_of_another_model_is_refused(document: Any, line: str) -> None:
    assert problems(document) == [line]


def test_kimi_linear_means_without_by_leaving_out() -> None:
    assert (LINEAR.attn_res_block_size, LINEAR.routed_expert_hidden_size, LINEAR.gate_lower_bound) == (None,) * 3
    assert (LINEAR.mla_use_output_gate, LINEAR.use_full_rank_gate) == (False, False)


def test_a_flat_document_with_a_part_of_k3_must_say_all_of_them() -> None:
    lines = problems({**kimi_linear(), "attn_res_block_size": 6})
    assert "mla_use_output_gate: missing" in lines
    assert "linear_attn_config.gate_lower_bound: missing" in lines


def paths(document: Document, prefix: str = "") -> Iterator[str]:
    for name, value in document.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from paths(value, f"{prefix}{name}.")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
MAKERS = st.sampled_from([kimi_k3, k3_text, kimi_linear])


@given(make=MAKERS, data=st.data())
def test_any_mangled_document_is_read_or_refused_line_by_line(
    make: Callable[[], Document], data: st.DataObject
) -> None:
    document = make()
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(sorted(paths(document))))
        document = changed(document, path, data.draw(st.just(MISSING) | JSON))
        if not document:
            break
    try:
        cfg = from_hf(document)
    except ValueError as error:
        lines = str(error).splitlines()
        assert lines
        assert len(set(lines)) == len(lines)
        assert all(line.strip() and len(line) < 400 for line in lines)
    else:
        assert json.dumps(to_hf(cfg, like=document)) == json.dumps(document)


@given(make=MAKERS, data=st.data())
def test_each_required_key_that_is_missing_has_its_line(make: Callable[[], Document], data: st.DataObject) -> None:
    document = make()
    prefix = TEXT if make is kimi_k3 else ""
    text = document["text_config"] if prefix else document
    there = [key.place for key in KEYS if find(text, key.place) is not MISSING]
    there += ["linear_attn_config.full_attn_layers", "linear_attn_config.kda_layers"]
    gone = data.draw(st.sets(st.sampled_from(there), min_size=1, max_size=6))
    for path in gone:
        document = changed(document, prefix + path, MISSING)
    lines = problems(document)
    # Without an activation, or without the layers' number, nobody can ask for what goes with them.
    depending = {"activation_situ_beta", "activation_situ_linear_beta", "latent_moe_use_norm"}
    if {"hidden_act", "routed_expert_hidden_size"} & gone:
        gone -= depending
    if "num_hidden_layers" in gone:
        gone -= {"linear_attn_config.full_attn_layers", "linear_attn_config.kda_layers"}
    if "linear_attn_config.full_attn_layers" in gone:  # of two missing lists the first is named
        gone -= {"linear_attn_config.kda_layers"}
    assert {f"{prefix}{path}: missing" for path in gone} <= set(lines)
    assert all(line.endswith(": missing") for line in lines)
