"""What tensors are called, inside and in files."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3core.checkpoint.names import (
    collapse,
    expected_shapes,
    hf_name,
    internal_name,
    is_foreign,
    readable_shapes,
    written_dtype,
    written_shape,
)
from k3core.model.config import K3Config
from k3core.model.model import build_model
from k3core.model.presets import PRESETS
from k3core.model.weights import named_tensors

LAYOUTS = ("kimi_k3", "kimi_k3_text", "kimi_linear")


def test_expected_tensors_are_those_of_the_model(form: K3Config) -> None:
    own = named_tensors(build_model(form, device="meta"))
    assert {name: tuple(tensor.shape) for name, tensor in own.items()} == expected_shapes(form)


def test_k3_has_as_many_tensors_and_parameters_as_the_release() -> None:
    shapes = expected_shapes(PRESETS["kimi-k3"])
    assert len(shapes) + 168 == 497_220  # the vision parts have 168
    packed = [name for name in shapes if name.endswith("weight_packed")]
    assert len(packed) == 247_296
    numbers = sum(
        torch.Size(shape).numel() * (2 if name.endswith("weight_packed") else 1)
        for name, shape in shapes.items()
        if not name.endswith("weight_scale")
    )
    assert round(numbers / 1e9) == 2779
    size_bytes = sum(
        torch.Size(shape).numel() * written_dtype(name, torch.bfloat16).itemsize for name, shape in shapes.items()
    )
    assert round(size_bytes / 1e10) == 156  # 1.56 TB


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embed_tokens.weight", (163840, 7168)),
        ("output_attn_res_proj.weight", (1, 7168)),
        ("layers.0.mlp.gate_proj.weight", (33792, 7168)),
        ("layers.0.self_attn.g_proj.weight", (12288, 7168)),
        ("layers.0.self_attn.A_log", (96,)),
        ("layers.0.self_attn.q_conv1d.weight", (12288, 1, 4)),
        ("layers.0.self_attn.f_a_proj.weight", (128, 7168)),
        ("layers.0.self_attn.b_proj.weight", (96, 7168)),
        ("layers.3.self_attn.q_b_proj.weight", (18432, 1536)),
        ("layers.3.self_attn.kv_a_proj_with_mqa.weight", (576, 7168)),
        ("layers.3.self_attn.kv_b_proj.weight", (24576, 512)),
        ("layers.92.self_attn.g_proj.weight", (12288, 7168)),
        ("layers.1.block_sparse_moe.gate.weight", (896, 7168)),
        ("layers.1.block_sparse_moe.routed_expert_up_proj.weight", (7168, 3584)),
        ("layers.1.block_sparse_moe.shared_experts.down_proj.weight", (7168, 6144)),
        ("layers.92.block_sparse_moe.experts.895.w1.weight_packed", (3072, 1792)),
        ("layers.92.block_sparse_moe.experts.895.w1.weight_scale", (3072, 112)),
        ("layers.92.block_sparse_moe.experts.895.w2.weight_packed", (3584, 1536)),
        ("layers.92.block_sparse_moe.experts.895.w2.weight_scale", (3584, 96)),
    ],
)
def test_k3_has_the_released_shapes(name: str, shape: tuple[int, ...]) -> None:
    assert expected_shapes(PRESETS["kimi-k3"])[name] == shape


def test_layers_are_counted_from_0_in_names_and_their_kind_from_1_in_the_config() -> None:
    shapes = expected_shapes(PRESETS["kimi-linear-48b-a3b"])
    assert shapes["layers.3.self_attn.q_proj.weight"] == (6144, 2304)
    assert "layers.3.self_attn.A_log" not in shapes
    assert shapes["layers.4.self_attn.g_b_proj.weight"] == (4096, 128)


def test_each_layout_spells_its_own_way() -> None:
    expert, dense, head = (
        "layers.1.block_sparse_moe.experts.2.w3.weight",
        "layers.0.mlp.up_proj.weight",
        "lm_head.weight",
    )
    spelled = {layout: [hf_name(name, layout) for name in (expert, dense, head)] for layout in LAYOUTS}
    assert spelled == {
        "kimi_k3": [
            "language_model.model.layers.1.block_sparse_moe.experts.2.w3.weight",
            "language_model.model.layers.0.mlp.up_proj.weight",
            "language_model.lm_head.weight",
        ],
        "kimi_k3_text": [
            "model.layers.1.mlp.experts.2.w3.weight",
            "model.layers.0.mlp.up_proj.weight",
            "lm_head.weight",
        ],
        "kimi_linear": [
            "model.layers.1.block_sparse_moe.experts.2.w3.weight",
            "model.layers.0.mlp.up_proj.weight",
            "lm_head.weight",
        ],
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_name_returns_from_every_layout(form: K3Config, layout: str) -> None:
    assert [internal_name(hf_name(name, layout), form) for name in expected_shapes(form)] == list(expected_shapes(form))


def test_a_dense_layer_may_be_spelled_as_transformers_does(kimi_linear: K3Config) -> None:
    dense = "model.layers.0.block_sparse_moe.down_proj.weight"
    assert internal_name(dense, kimi_linear) == "layers.0.mlp.down_proj.weight"
    sparse = "model.layers.1.mlp.shared_experts.down_proj.weight"
    assert internal_name(sparse, kimi_linear) == "layers.1.block_sparse_moe.shared_experts.down_proj.weight"


def test_vision_tensors_keep_their_own_name(k3: K3Config) -> None:
    for name in ("vision_tower.encoder.blocks.0.norm0.weight", "mm_projector.proj.0.weight"):
        assert is_foreign(name)
        assert internal_name(name, k3) == name
    assert not is_foreign("language_model.model.norm.weight")


@pytest.mark.parametrize(
    "stranger",
    [
        "layers.0.self_attn.A_log",  # no prefix
        "norm.weight",
        "model.lm_head.weight",
        "language_model.norm.weight",
        "model.layers.00.self_attn.A_log",
        "model.layers.99999999999.mlp.up_proj.weight",
        "transformer.h.0.attn.weight",
        "",
    ],
)
def test_other_names_stay_foreign_to_the_model(k3: K3Config, stranger: str) -> None:
    assert internal_name(stranger, k3) not in expected_shapes(k3)


def test_A_log_is_padded_for_k3_and_four_dimensional_for_kimi_linear() -> None:
    name = "layers.0.self_attn.A_log"
    assert written_shape(name, (96,), "kimi_k3") == (128,)
    assert written_shape(name, (128,), "kimi_k3_text") == (128,)
    assert written_shape(name, (129,), "kimi_k3") == (256,)
    assert written_shape(name, (32,), "kimi_linear") == (1, 1, 32, 1)
    assert readable_shapes(name, (96,)) == ((96,), (1, 1, 96, 1), (128,))
    assert readable_shapes("norm.weight", (96,)) == ((96,),)


@pytest.mark.parametrize(
    "kept", ["A_log", "dt_bias", "q_conv1d.weight", "gate.e_score_correction_bias", "o_norm.weight"]
)
def test_gates_taps_and_selection_biases_are_stored_in_fp32(kept: str) -> None:
    assert written_dtype(f"layers.1.x.{kept}", torch.bfloat16) == torch.float32
    assert written_dtype("layers.1.block_sparse_moe.gate.weight", torch.bfloat16) == torch.bfloat16
    assert written_dtype("x.experts.0.w1.weight_scale", torch.float32) == torch.uint8


def test_a_width_that_cannot_be_packed_is_named(k3: K3Config) -> None:
    with pytest.raises(ValueError, match="w1 of the experts has 12 inputs: mxfp4 packs multiples of 32"):
        expected_shapes(replace(k3, expert_quantization="mxfp4"))


def expand(line: str) -> list[str]:
    match = re.search(r"\{([^}]*)\}", line)
    if match is None:
        return [line]
    bounds = [part.split("-") for part in match[1].split(",")]
    numbers = [n for part in bounds for n in range(int(part[0]), int(part[-1]) + 1)]
    return [name for n in numbers for name in expand(line[: match.start()] + str(n) + line[match.end() :])]


NAMES = st.builds(
    "{}layers.{}.{}.experts.{}.w{}.weight".format,
    st.sampled_from(["", "model."]),
    st.sampled_from(["0", "1", "2", "7", "10", "007"]),
    st.sampled_from(["mlp", "block_sparse_moe"]),
    st.integers(0, 12),
    st.integers(1, 2),
)


@given(st.lists(NAMES | st.sampled_from(["norm.weight", "lm_head.weight", "layers.3.norm"])))
def test_collapsed_names_are_the_same_names(names: list[str]) -> None:
    expanded = [name for line in collapse(names) for name in expand(line)]
    assert sorted(expanded) == sorted(set(names))


def test_all_experts_of_k3_are_one_line_a_matrix() -> None:
    names = [name for name in expected_shapes(PRESETS["kimi-k3"]) if "weight_scale" in name]
    assert collapse(names) == [
        f"layers.{{1-92}}.block_sparse_moe.experts.{{0-895}}.{matrix}.weight_scale" for matrix in ("w1", "w3", "w2")
    ]
