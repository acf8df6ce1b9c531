"""PEFT folders in and out: the same bytes again, every layout that others write, and one line for whatever is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3core.checkpoint.adapter import (
    Adapter,
    adapter_of,
    attach_adapter,
    load_adapter,
    model_matrices,
    save_adapter,
)
from k3core.checkpoint.adapter_keys import expert_path
from k3core.checkpoint.peft_targets import shortest_ends, uncrossed_experts
from k3core.errors import IntegrityError
from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig, LoraOverride, attach_lora, lora_matrices
from k3core.model.model import K3Model
from k3core.model.weights import is_adapter_tensor, named_tensors
from k3kernels.packing import Packing

RandomModel = Callable[[K3Config], K3Model]

FILES = ("adapter_config.json", "adapter_model.safetensors")
LORA = LoraConfig(3, 6.0, ("q_proj", "kv_b_proj", "down_proj", "w1", "w2", "w3", "lm_head"))
ATTENTION = LoraConfig(2, 4.0, ("q_proj", "o_proj"))
MIXED = LoraConfig(
    4,
    8.0,
    ("o_proj", "layers.1.self_attn.f_a_proj", "shared_experts.gate_proj", "down_proj", "w1", "w2", "w3"),
    (
        LoraOverride("layers.2.self_attn.o_proj", 6, 3.0),
        LoraOverride("down_proj", 5, 8.0),
        LoraOverride("w2", 2, 0.3),
        LoraOverride("layers.3.block_sparse_moe.experts.w1", 4, 10.5),
    ),
)


def random_adapter(cfg: K3Config, lora: LoraConfig, dtype: torch.dtype = torch.float32) -> Adapter:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for path, (*experts, out_features, in_features) in model_matrices(cfg).items():
        if not lora.is_target(path):
            continue
        rank, _ = lora.rank_alpha(path)
        for module in [expert_path(path, e) for e in range(experts[0])] if experts else [path]:
            tensors[f"{module}.lora_A"] = torch.randn(rank, in_features, generator=generator).to(dtype)
            tensors[f"{module}.lora_B"] = torch.randn(out_features, rank, generator=generator).to(dtype)
    return Adapter(lora, tensors, "moonshotai/some-base")


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def config_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / FILES[0]).read_text())
    return document


def rewrite(folder: Path, tensors: dict[str, Tensor] | None = None, **fields: object) -> Path:
    """The folder with other tensors, or fields of its config changed; ... takes a field away."""
    document = {**config_of(folder), **fields}
    (folder / FILES[0]).write_text(json.dumps({k: v for k, v in document.items() if v is not ...}))
    if tensors is not None:
        (folder / FILES[1]).unlink()
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / FILES[1])
    return folder


def meaning(adapter: Adapter, cfg: K3Config) -> dict[str, tuple[int, float]]:
    """Rank and scale of every target."""
    lora = adapter.lora
    return {p: (lora.rank_alpha(p)[0], lora.scale(p)) for p in model_matrices(cfg) if lora.is_target(p)}


def same(a: Adapter, b: Adapter) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(torch.equal(a.tensors[k], b.tensors[k]) for k in a.tensors)


@pytest.fixture
def saved(tmp_path: Path, kimi_linear: K3Config) -> Path:
    save_adapter(tmp_path / "adapter", kimi_linear, random_adapter(kimi_linear, LORA))
    return tmp_path / "adapter"


@pytest.fixture
def attention(tmp_path: Path, k3: K3Config) -> Path:
    """Of K3, without experts."""
    save_adapter(tmp_path / "attention", k3, random_adapter(k3, ATTENTION))
    return tmp_path / "attention"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("lora", [LORA, MIXED], ids=["one rank", "mixed"])
def test_saved_loaded_and_saved_again_it_is_the_same_bytes(
    tmp_path: Path, cfg: K3Config, lora: LoraConfig, dtype: torch.dtype
) -> None:
    adapter = random_adapter(cfg, lora, dtype)
    save_adapter(tmp_path / "a", cfg, adapter)
    loaded = load_adapter(tmp_path / "a", cfg)
    assert same(loaded, adapter)
    assert meaning(loaded, cfg) == meaning(adapter, cfg)
    assert loaded.base_model == "moonshotai/some-base"
    save_adapter(tmp_path / "b", cfg, loaded)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
    assert set(bytes_of(tmp_path / "a")) == set(FILES)


def test_the_order_of_tensors_and_of_targets_does_not_change_the_bytes(tmp_path: Path, cfg: K3Config) -> None:
    adapter = random_adapter(cfg, LORA)
    turned = Adapter(
        replace(LORA, targets=LORA.targets[::-1]), dict(reversed(adapter.tensors.items())), adapter.base_model
    )
    save_adapter(tmp_path / "a", cfg, adapter)
    save_adapter(tmp_path / "b", cfg, turned)
    assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")


def test_keys_are_the_families_module_paths(tmp_path: Path, cfg: K3Config) -> None:
    save_adapter(tmp_path / "a", cfg, random_adapter(cfg, LORA))
    keys = load_file(tmp_path / "a" / FILES[1]).keys()
    prefix = "language_model." if cfg.family == "kimi_k3" else ""
    assert f"base_model.model.{prefix}model.layers.1.block_sparse_moe.experts.5.w3.lora_A.weight" in keys
    assert f"base_model.model.{prefix}model.layers.0.mlp.down_proj.lora_B.weight" in keys
    assert f"base_model.model.{prefix}lm_head.lora_B.weight" in keys
    assert len(keys) == len(random_adapter(cfg, LORA).tensors)


def test_the_text_layout_of_k3_is_written_and_read(tmp_path: Path, k3: K3Config) -> None:
    adapter = random_adapter(k3, LORA)
    save_adapter(tmp_path / "a", k3, adapter, layout="kimi_k3_text")
    assert "base_model.model.model.layers.1.mlp.experts.5.w3.lora_A.weight" in load_file(tmp_path / "a" / FILES[1])
    assert same(load_adapter(tmp_path / "a", k3), adapter)


def test_the_config_has_the_fields_that_peft_and_engines_read(attention: Path) -> None:
    assert config_of(attention) == {
        "base_model_name_or_path": "moonshotai/some-base",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": 4,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": 2,
        "target_modules": ["o_proj", "q_proj"],
        "task_type": "CAUSAL_LM",
    }


def test_factors_are_saved_in_another_type_on_request(tmp_path: Path, k3: K3Config) -> None:
    adapter = random_adapter(k3, ATTENTION)
    save_adapter(tmp_path / "a", k3, adapter, dtype=torch.bfloat16)
    loaded = load_adapter(tmp_path / "a", k3)
    assert all(torch.equal(loaded.tensors[name], t.to(torch.bfloat16)) for name, t in adapter.tensors.items())


def test_a_models_adapter_goes_through_a_folder_into_another_model(
    tmp_path: Path, cfg: K3Config, random_model: RandomModel
) -> None:
    model, other = random_model(cfg), random_model(cfg)
    generator = torch.Generator().manual_seed(0)
    attach_lora(model, LORA, generator)
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            if name.endswith("lora_B"):
                tensor.normal_(0, 0.2, generator=generator)
    save_adapter(tmp_path / "a", cfg, adapter_of(model, LORA, "base"))
    attach_adapter(other, load_adapter(tmp_path / "a", cfg))
    tokens, packing = torch.arange(30), Packing((30,))
    with torch.no_grad():
        assert torch.equal(*(m.logits(m(tokens, packing).hidden_TD) for m in (model, other)))
    trained = {name for name, p in other.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in other.named_parameters() if "lora_" in name}


def test_attached_factors_are_held_in_fp32_whatever_the_file_holds(
    tmp_path: Path, k3: K3Config, random_model: RandomModel
) -> None:
    save_adapter(tmp_path / "a", k3, random_adapter(k3, LORA), dtype=torch.bfloat16)
    model = random_model(k3)
    attach_adapter(model, load_adapter(tmp_path / "a", k3))
    assert {t.dtype for name, t in named_tensors(model).items() if is_adapter_tensor(name)} == {torch.float32}


def test_an_adapter_that_does_not_fit_is_refused_with_every_name_and_nothing_is_attached(
    k3: K3Config, random_model: RandomModel
) -> None:
    adapter = random_adapter(k3, ATTENTION)
    tensors = dict(adapter.tensors)
    q, o = "layers.0.self_attn.q_proj", "layers.1.self_attn.o_proj"
    tensors["layers.9.self_attn.q_proj.lora_A"] = tensors.pop(f"{q}.lora_A")
    tensors[f"{o}.lora_B"] = tensors[f"{o}.lora_B"].T
    model = random_model(k3)
    before = set(named_tensors(model))
    with pytest.raises(ValueError) as refusal:
        attach_adapter(model, replace(adapter, tensors=tensors))
    for part in (
        f"missing: {q}.lora_A",
        "unexpected: layers.9.self_attn.q_proj.lora_A",
        f"{o}.lora_B: torch.float32 [2, 20]",
    ):
        assert part in str(refusal.value)
    assert set(named_tensors(model)) == before
    assert all(p.requires_grad for p in model.parameters())


def test_a_second_adapter_is_refused(k3: K3Config, random_model: RandomModel) -> None:
    model, adapter = random_model(k3), random_adapter(k3, ATTENTION)
    attach_adapter(model, adapter)
    with pytest.raises(ValueError, match="has an adapter already: merge it or detach_lora first"):
        attach_adapter(model, adapter)


def test_another_config_than_the_attached_one_is_refused(k3: K3Config, random_model: RandomModel) -> None:
    model = random_model(k3)
    attach_lora(model, ATTENTION, torch.Generator())
    with pytest.raises(ValueError, match=r"unexpected: layers\.\{0-4\}\.self_attn\.o_proj\.lora_A"):
        adapter_of(model, replace(ATTENTION, targets=("q_proj",)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_neither_written_nor_read(
    tmp_path: Path, k3: K3Config, attention: Path, bad: float
) -> None:
    adapter = random_adapter(k3, ATTENTION)
    adapter.tensors["layers.2.self_attn.o_proj.lora_B"][3, 1] = bad
    with pytest.raises(ValueError, match=rf"^layers\.2\.self_attn\.o_proj\.lora_B holds {bad}: not written$"):
        save_adapter(tmp_path / "new", k3, adapter)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attention"]
    tensors = load_file(attention / FILES[1])
    key = "base_model.model.language_model.model.layers.2.self_attn.o_proj.lora_B.weight"
    rewrite(attention, tensors | {key: torch.full_like(tensors[key], bad)})
    with pytest.raises(ValueError, match=rf"{key} holds {bad}"):
        load_adapter(attention, k3)


def test_a_number_too_large_for_the_chosen_type_is_not_written(tmp_path: Path, k3: K3Config) -> None:
    adapter = random_adapter(k3, ATTENTION)
    adapter.tensors["layers.2.self_attn.o_proj.lora_B"][3, 1] = 1e6
    with pytest.raises(ValueError, match="holds inf: not written"):
        save_adapter(tmp_path / "new", k3, adapter, dtype=torch.float16)


def test_a_folder_that_is_not_empty_is_not_written_into(attention: Path, k3: K3Config) -> None:
    before = bytes_of(attention)
    with pytest.raises(ValueError, match="is not empty"):
        save_adapter(attention, k3, random_adapter(k3, LORA))
    assert bytes_of(attention) == before


def test_keys_that_are_missing_unexpected_or_misshapen_are_listed_together(attention: Path, k3: K3Config) -> None:
    tensors = load_file(attention / FILES[1])
    prefix = "base_model.model.language_model.model"
    del tensors[f"{prefix}.layers.0.self_attn.q_proj.lora_B.weight"]
    tensors[f"{prefix}.layers.1.self_attn.k_proj.lora_A.weight"] = torch.zeros(2, 20)
    tensors[f"{prefix}.layers.77.self_attn.q_proj.lora_A.weight"] = torch.zeros(2, 20)
    tensors[f"{prefix}.norm.weight"] = torch.zeros(20)
    tensors[f"{prefix}.embed_tokens.lora_embedding_A"] = torch.zeros(2, 61)
    tensors[f"{prefix}.layers.1.self_attn.q_proj.lora_magnitude_vector"] = torch.zeros(24)
    tensors[f"{prefix}.layers.2.self_attn.o_proj.lora_A.weight"] = torch.zeros(7, 10)
    tensors[f"{prefix}.layers.4.self_attn.o_proj.lora_A.weight"] = torch.zeros(2, 10, dtype=torch.int32)
    rewrite(attention, tensors)
    with pytest.raises(ValueError) as refusal:
        load_adapter(attention, k3)
    lines = {line.strip() for line in str(refusal.value).splitlines()[1:]}
    assert lines == {
        f"missing: {prefix}.layers.0.self_attn.q_proj.lora_B.weight",
        f"unexpected: {prefix}.layers.1.self_attn.k_proj.lora_A.weight",
        f"unexpected: {prefix}.layers.77.self_attn.q_proj.lora_A.weight",
        f"unexpected: {prefix}.norm.weight",
        f"unexpected: {prefix}.embed_tokens.lora_embedding_A "
        "(embed_tokens cannot be a target: LoRA adapts products, the embedding is a look-up)",
        f"unexpected: {prefix}.layers.1.self_attn.q_proj.lora_magnitude_vector (DoRA)",
        f"{prefix}.layers.2.self_attn.o_proj.lora_A.weight: torch.float32 [7, 10] in place of floating point [2, 10]",
        f"{prefix}.layers.4.self_attn.o_proj.lora_A.weight: torch.int32 [2, 10] in place of floating point [2, 10]",
    }


def test_many_missing_keys_are_one_line(saved: Path, kimi_linear: K3Config) -> None:
    tensors = {key: t for key, t in load_file(saved / FILES[1]).items() if ".w2." not in key or "lora_B" not in key}
    with pytest.raises(ValueError) as refusal:
        load_adapter(rewrite(saved, tensors), kimi_linear)
    assert str(refusal.value).splitlines()[1:] == [
        "  missing: base_model.model.model.layers.{1-4}.block_sparse_moe.experts.{0-5}.w2.lora_B.weight"
    ]


def test_an_adapter_of_another_architecture_is_refused(attention: Path, k3: K3Config) -> None:
    key = "base_model.model.transformer.h.{}.attn.c_attn.lora_{}.weight"
    tensors = {key.format(layer, factor): torch.ones(2, 2) for layer in range(3) for factor in "AB"}
    with pytest.raises(ValueError, match="names no matrix of this model") as refusal:
        load_adapter(rewrite(attention, tensors, target_modules=["c_attn"]), k3)
    assert "unexpected: base_model.model.transformer.h.0.attn.c_attn.lora_A.weight" in str(refusal.value)


def test_an_adapter_without_targets_is_refused(k3: K3Config, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not fit the model: it has no targets"):
        save_adapter(tmp_path / "a", k3, Adapter(LoraConfig(2, 4.0, ()), {}))


def test_an_adapter_for_another_family_is_refused(attention: Path, kimi_linear: K3Config) -> None:
    with pytest.raises(ValueError, match=r"in place of|missing|unexpected"):
        load_adapter(attention, replace(kimi_linear, hidden_size=24))


REFUSALS: list[tuple[dict[str, object], str]] = [
    ({"use_dora": True}, r"use_dora True: DoRA normalises the merged weight"),
    ({"bias": "lora_only"}, r"bias 'lora_only': no linear of this model has a bias"),
    ({"lora_bias": True}, r"lora_bias True: no linear"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\]: whole modules"),
    ({"trainable_token_indices": [1]}, r"trainable_token_indices \[1\]: embeddings"),
    ({"layer_replication": [[0, 2], [1, 3]]}, r"layer_replication .* repeats layers"),
    ({"fan_in_fan_out": True}, r"fan_in_fan_out True"),
    ({"peft_type": "IA3"}, r"peft_type 'IA3': only LORA adapters are read"),
    ({"peft_type": ...}, r"peft_type None: only LORA adapters are read"),
    ({"init_lora_weights": "pissa_niter_4"}, r"init_lora_weights 'pissa_niter_4': the factors stand on changed base"),
    ({"use_qalora": True}, r"use_qalora True: QALoRA pools"),
    ({"quantum_config": {"bits": 1}}, r"quantum_config \{'bits': 1\} is not known; remove it if"),
    ({"r": 0}, r"r: expected a rank of at least 1, found 0"),
    ({"r": ...}, r"r: expected a rank of at least 1, found None"),
    ({"base_model_name_or_path": ["x"]}, r"base_model_name_or_path: expected a name, found \['x'\]"),
    ({"lora_alpha": "8"}, r"lora_alpha: expected a number, found '8'"),
    ({"target_modules": None}, r"target_modules: names no module, and there are no target_parameters"),
    ({"target_modules": [3]}, r"target_modules: expected a list of names"),
    ({"target_modules": "("}, r"target_modules: expected a list of names, a regular expression"),
    ({"target_parameters": "w1"}, r"target_parameters: expected a list of names"),
    ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern: expected an object of expressions for module paths and ranks"),
    ({"alpha_pattern": {"(": 1}}, r"alpha_pattern: expected an object of expressions for module paths and numbers"),
    ({"layers_to_transform": "1"}, r"layers_to_transform: expected a layer number or a list of them"),
    ({"target_modules": ".*q_proj", "layers_to_transform": [1]}, r"layers_to_transform: only for a list"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"), REFUSALS, ids=[next(iter(fields)) + f" {i}" for i, (fields, _) in enumerate(REFUSALS)]
)
def test_a_field_that_cannot_be_honoured_is_refused_by_its_name(
    attention: Path, k3: K3Config, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        load_adapter(rewrite(attention, **fields), k3)
    assert len(str(refusal.value).splitlines()) == 1


def test_all_refused_fields_are_listed_at_once(attention: Path, k3: K3Config) -> None:
    with pytest.raises(ValueError) as refusal:
        load_adapter(rewrite(attention, use_dora=True, bias="all", r=-1), k3)
    lines = str(refusal.value).splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"{attention / FILES[0]}: ") for line in lines)


def test_what_does_not_change_the_result_is_ignored(attention: Path, k3: K3Config) -> None:
    ignored = {"lora_dropout": 0.1, "peft_version": "0.30", "init_lora_weights": "eva", "eva_config": {"rho": 2.0}}
    assert same(load_adapter(rewrite(attention, **ignored), k3), random_adapter(k3, ATTENTION))


def test_no_file_no_folder_and_no_json_are_refused_with_the_path(attention: Path, k3: K3Config, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: expected a folder with adapter_config\.json"):
        load_adapter(tmp_path / "nowhere", k3)
    (attention / FILES[0]).write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json: expected a JSON object"):
        load_adapter(attention, k3)
    (attention / FILES[0]).unlink()
    with pytest.raises(ValueError, match=r"adapter_config\.json: cannot be read: No such file"):
        load_adapter(attention, k3)


def test_a_pickle_is_refused_with_the_remedy(attention: Path, k3: K3Config) -> None:
    (attention / FILES[1]).rename(attention / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model\.bin: is a pickle.*safe_serialization=True"):
        load_adapter(attention, k3)
    (attention / "adapter_model.bin").unlink()
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: cannot be read"):
        load_adapter(attention, k3)


def test_a_file_cut_short_is_refused_at_every_length(attention: Path, k3: K3Config) -> None:
    whole = (attention / FILES[1]).read_bytes()
    for length in [0, 7, 8, 100, len(whole) // 2, len(whole) - 1]:
        (attention / FILES[1]).write_bytes(whole[:length])
        with pytest.raises(IntegrityError, match=r"adapter_model\.safetensors"):
            load_adapter(attention, k3)


def test_rslora_is_scaled_by_the_root_of_the_rank(attention: Path, k3: K3Config) -> None:
    loaded = load_adapter(rewrite(attention, use_rslora=True, alpha_pattern={"q_proj": 9.0}), k3)
    assert loaded.lora.scale("layers.0.self_attn.q_proj") == pytest.approx(9.0 / 2**0.5, rel=1e-15)
    assert loaded.lora.scale("layers.0.self_attn.o_proj") == pytest.approx(4.0 / 2**0.5, rel=1e-15)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r".*self_attn\.(q_proj|o_proj)"},
        {"target_modules": r"language_model\.model\.layers\.\d+\.self_attn\.(q|o)_proj"},
        {"target_modules": r"model\.layers\.\d+\.self_attn\.(q|o)_proj"},
        {"target_modules": ["self_attn.q_proj", "o_proj", "k_proj"], "exclude_modules": ["k_proj"]},
        {"target_modules": ["q_proj", "o_proj", "k_proj"], "exclude_modules": r".*\.k_proj"},
        {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [0, 1, 2, 3, 4]},
        {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": []},
    ],
    ids=str,
)
def test_targets_are_understood_as_peft_understands_them(
    attention: Path, k3: K3Config, fields: dict[str, object]
) -> None:
    adapter = random_adapter(k3, ATTENTION)
    loaded = load_adapter(rewrite(attention, **fields), k3)
    assert same(loaded, adapter)
    assert meaning(loaded, k3) == meaning(adapter, k3)


@pytest.mark.parametrize("layers", [1, [1]])
@pytest.mark.parametrize("pattern", [None, "layers", ["blocks", "layers"]])
def test_an_adapter_on_one_layer_alone_is_understood(
    tmp_path: Path, k3: K3Config, layers: object, pattern: object
) -> None:
    one = replace(ATTENTION, targets=("layers.1.self_attn.q_proj", "layers.1.self_attn.o_proj"))
    adapter = random_adapter(k3, one)
    save_adapter(tmp_path / "a", k3, adapter)
    rewrite(tmp_path / "a", target_modules=["q_proj", "o_proj"], layers_to_transform=layers, layers_pattern=pattern)
    assert meaning(load_adapter(tmp_path / "a", k3), k3) == meaning(adapter, k3)
    with pytest.raises(ValueError, match="missing: "):
        load_adapter(rewrite(tmp_path / "a", layers_to_transform=[1, 2]), k3)


def test_all_linear_is_every_linear_but_the_head_and_experts_where_they_are(tmp_path: Path, k3: K3Config) -> None:
    leaves = {path.rsplit(".", 1)[-1] for path in model_matrices(k3)}
    linear = random_adapter(k3, LoraConfig(2, 4.0, tuple(leaves - {"lm_head", "w1", "w2", "w3"})))
    every = random_adapter(k3, LoraConfig(2, 4.0, tuple(leaves - {"lm_head"})))
    some = random_adapter(k3, ATTENTION)
    for name, adapter in (("linear", linear), ("every", every), ("some", some)):
        save_adapter(tmp_path / name, k3, adapter)
        rewrite(tmp_path / name, target_modules="all-linear")
    assert meaning(load_adapter(tmp_path / "linear", k3), k3) == meaning(linear, k3)
    assert meaning(load_adapter(tmp_path / "every", k3), k3) == meaning(every, k3)
    with pytest.raises(ValueError, match=r"missing: .*k_proj"):
        load_adapter(tmp_path / "some", k3)


def test_other_prefixes_and_spellings_of_keys_are_read(saved: Path, kimi_linear: K3Config) -> None:
    tensors = {
        key.removeprefix("base_model.model.")
        .replace("block_sparse_moe", "mlp")
        .replace("lora_A.weight", "lora_A.default.weight"): tensor
        for key, tensor in load_file(saved / FILES[1]).items()
    }
    assert same(load_adapter(rewrite(saved, tensors), kimi_linear), random_adapter(kimi_linear, LORA))


def test_a_key_given_under_two_spellings_is_refused(saved: Path, kimi_linear: K3Config) -> None:
    tensors = load_file(saved / FILES[1])
    key = "base_model.model.model.layers.1.block_sparse_moe.experts.0.w1.lora_A.weight"
    tensors[key.replace("block_sparse_moe", "mlp")] = tensors[key]
    with pytest.raises(ValueError, match=rf"there twice: {key} and "):
        load_adapter(rewrite(saved, tensors), kimi_linear)


def stacked(folder: Path, cfg: K3Config, is_shared: bool) -> tuple[Path, dict[str, Tensor]]:
    """The experts' factors as [E, ...], and the tensors that these mean; shared: w1 and w3 have one A, w2 one B."""
    tensors, expected = load_file(folder / FILES[1]), {}
    prefix = "base_model.model.model"
    for layer in cfg.moe_layers:
        for matrix in ("w1", "w2", "w3"):
            for factor in ("lora_A", "lora_B"):
                experts = f"layers.{layer}.block_sparse_moe.experts"
                keys = [f"{prefix}.{experts}.{e}.{matrix}.{factor}.weight" for e in range(cfg.num_experts)]
                stack = torch.stack([tensors.pop(key) for key in keys])
                if is_shared and (factor == "lora_A") == (matrix != "w2"):
                    stack = stack[:1]
                tensors[f"{prefix}.{experts}.{matrix}.{factor}.weight"] = stack
                for e in range(cfg.num_experts):
                    expected[f"{experts}.{e}.{matrix}.{factor}"] = stack[e if len(stack) > 1 else 0]
    return rewrite(folder, tensors), expected


@pytest.mark.parametrize("is_shared", [False, True])
def test_stacked_experts_are_read_and_a_factor_that_they_share(
    saved: Path, kimi_linear: K3Config, tmp_path: Path, is_shared: bool
) -> None:
    folder, expected = stacked(saved, kimi_linear, is_shared)
    loaded = load_adapter(folder, kimi_linear)
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in expected.items())
    save_adapter(tmp_path / "again", kimi_linear, loaded)
    assert same(load_adapter(tmp_path / "again", kimi_linear), loaded)


def test_fused_experts_of_another_shape_or_without_their_pair_are_refused(
    tmp_path: Path, kimi_linear: K3Config
) -> None:
    save_adapter(tmp_path / "a", kimi_linear, random_adapter(kimi_linear, ATTENTION))
    tensors = load_file(tmp_path / "a" / FILES[1])
    fused = "base_model.model.model.layers.{}.mlp.experts.{}"
    tensors[fused.format(1, "base_layer.lora_A.weight")] = torch.zeros(12, 20)
    tensors[fused.format(2, "lora_A.weight")] = torch.zeros(12, 21)
    tensors[fused.format(2, "lora_B.weight")] = torch.zeros(18, 12)
    tensors[fused.format(0, "lora_A.weight")] = torch.zeros(12, 20)
    for spelling in ("mlp", "block_sparse_moe"):
        for factor, shape in (("lora_A", (12, 9)), ("lora_B", (20, 12))):
            tensors[f"base_model.model.model.layers.3.{spelling}.experts.{factor}.weight"] = torch.zeros(shape)
    rewrite(tmp_path / "a", tensors, target_parameters=["mlp.experts.gate_up_proj"])
    with pytest.raises(ValueError) as refusal:
        load_adapter(tmp_path / "a", kimi_linear)
    lines = [line.strip() for line in str(refusal.value).splitlines()]
    assert f"missing: {fused.format(1, 'base_layer.lora_B.weight')}" in lines
    assert f"unexpected: {fused.format(0, 'lora_A.weight')}" in lines
    assert sum(line.startswith("there twice: ") and ".layers.3." in line for line in lines) == 2
    assert any(
        line.startswith(fused.format(2, "lora_A.weight")) and "fit neither gate_up_proj" in line for line in lines
    )


def test_matrices_that_peft_would_leave_out_are_named(kimi_linear: K3Config, k3: K3Config) -> None:
    matrices = model_matrices(kimi_linear)

    def left_out(*targets: str, overrides: tuple[LoraOverride, ...] = ()) -> list[str]:
        return uncrossed_experts(kimi_linear, LoraConfig(4, 8.0, targets, overrides), matrices)

    assert left_out("q_proj", "w1", "w2", "w3") == []
    assert left_out("w2") == []
    assert left_out("w1", "w2", "w3", overrides=(LoraOverride("w3", 2, 4.0),)) == []
    one = "layers.1.block_sparse_moe.experts"
    assert left_out(f"{one}.w1", f"{one}.w3", "layers.2.block_sparse_moe.experts.w2") == [f"{one}.w1", f"{one}.w3"]
    assert len(left_out("w1", "w2")) == 8
    assert len(left_out("w1", "w2", "w3", overrides=(LoraOverride("w3", 4, 4.0),))) == 12
    assert uncrossed_experts(k3, LoraConfig(4, 8.0, ("w1",)), model_matrices(k3)) == []


def test_ends_of_paths_are_the_shortest_that_name_the_selected_ones() -> None:
    paths = ["layers.0.a.q", "layers.1.a.q", "layers.11.a.q", "layers.0.b.q", "layers.0.b.k", "head"]
    assert shortest_ends(paths, paths) == ("head", "k", "q")
    assert shortest_ends(["layers.0.b.q", "head"], paths) == ("b.q", "head")
    assert shortest_ends(["layers.1.a.q"], paths) == ("layers.1.a.q",)
    assert shortest_ends([], paths) == ()


def test_a_configs_matrices_are_those_of_its_model(cfg: K3Config) -> None:
    assert model_matrices(cfg) == lora_matrices(K3Model(cfg))
