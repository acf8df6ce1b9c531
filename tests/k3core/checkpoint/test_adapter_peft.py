"""peft and transformers as the judges: adapters cross in both directions and give the same logits."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k3core.checkpoint.adapter import Adapter, adapter_of, attach_adapter, load_adapter, save_adapter
from k3core.checkpoint.hf import load_model
from k3core.checkpoint.merge import merge_adapter
from k3core.checkpoint.peft_targets import uncrossed_experts
from k3core.model.lora import LoraConfig, LoraOverride, attach_lora, detach_lora, lora_matrices
from k3core.model.model import K3Model
from k3core.model.weights import named_tensors
from k3kernels.packing import Packing

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

# peft speaks of patterns that match parameters as if they matched nothing, and torch of what peft calls.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning", "ignore::UserWarning")

LINEARS = (
    *("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj"),
    *("kv_a_proj_with_mqa", "kv_b_proj", "gate_proj", "up_proj", "down_proj"),
)
EXPERTS = ("w1", "w2", "w3")
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TOKENS = torch.arange(5, 45)

Judge = Any
"""A transformers model, with or without peft around it."""


@pytest.fixture(scope="module")
def judge() -> Judge:
    """A tiny Kimi-Linear of random weights; no two widths agree."""
    config = transformers.KimiLinearConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=20,
        linear_attn_config={
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "num_heads": 3,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
        },
        first_k_dense_replace=1,
        moe_layer_freq=1,
        mla_use_nope=True,
        moe_router_activation_func="sigmoid",
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    torch.manual_seed(0)
    model = transformers.KimiLinearForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                p.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def base_folder(judge: Judge, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("base")
    judge.save_pretrained(folder)
    return folder


@pytest.fixture
def ours(base_folder: Path) -> K3Model:
    return load_model(base_folder, torch.float32)


def judged(model: Judge) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(TOKENS[None]).logits[0]
    return logits


def logits(model: K3Model) -> Tensor:
    with torch.no_grad():
        return model.logits(model(TOKENS, Packing((len(TOKENS),))).hidden_TD).float()


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-5)


def our_adapter(model: K3Model, targets: Sequence[str], *overrides: LoraOverride) -> Adapter:
    lora, generator = LoraConfig(3, 6.0, tuple(targets), overrides), torch.Generator().manual_seed(0)
    attach_lora(model, lora, generator)
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            if name.endswith("lora_B"):
                tensor.normal_(0, 0.05, generator=generator)
    return adapter_of(model, lora, "tiny")


def their_adapter(judge: Judge, folder: Path, **fields: object) -> Judge:
    """peft's own, random, saved by peft."""
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=True, **fields)
    model = peft.get_peft_model(copy.deepcopy(judge), config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.05)
    model.save_pretrained(folder)
    return model


def test_the_bases_agree(judge: Judge, ours: K3Model) -> None:
    assert close(logits(ours), judged(judge))
    assert judged(judge).std() > 0.1


@pytest.mark.parametrize(
    ("targets", "overrides"),
    [
        (LINEARS, ()),
        (("lm_head",), ()),
        (EXPERTS, ()),
        ((*LINEARS, *EXPERTS, "lm_head"), ()),
        (("w2", "down_proj"), ()),
        (
            (*LINEARS, *EXPERTS),
            (
                LoraOverride("layers.0.self_attn.f_a_proj", 5, 1.0),
                LoraOverride("layers.2.block_sparse_moe.shared_experts.up_proj", 2, 3.0),
                LoraOverride("down_proj", 4, 9.0),
                LoraOverride("layers.1.block_sparse_moe.experts.w3", 2, 4.0),
            ),
        ),
        (
            (
                "layers.2.self_attn.f_b_proj",
                "layers.1.block_sparse_moe.shared_experts.gate_proj",
                "layers.0.mlp.up_proj",
            ),
            (),
        ),
        (tuple(f"layers.2.block_sparse_moe.experts.{matrix}" for matrix in EXPERTS), ()),
    ],
    ids=["linears", "head", "experts", "everything", "down", "mixed", "single modules", "experts of one layer"],
)
def test_peft_loads_our_folder_and_gives_our_logits(
    judge: Judge, ours: K3Model, tmp_path: Path, targets: tuple[str, ...], overrides: tuple[LoraOverride, ...]
) -> None:
    adapter = our_adapter(ours, targets, *overrides)
    save_adapter(tmp_path / "a", ours.cfg, adapter)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(judge), tmp_path / "a").eval()
    assert close(judged(theirs), logits(ours))
    assert not torch.allclose(judged(theirs), judged(judge), rtol=0, atol=1e-3)
    num_lora = sum(p.numel() for name, p in theirs.named_parameters() if "lora_" in name)
    assert num_lora > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 4, "lora_alpha": 8, "target_modules": list(LINEARS)},
        {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        {"r": 4, "lora_alpha": 8, "target_modules": r".*(self_attn|shared_experts)\..*_proj"},
        {"r": 4, "lora_alpha": 8, "target_modules": r"model\.layers\.\d\.self_attn\.forget_gate\.f_a_proj"},
        {"r": 4, "lora_alpha": 8, "target_modules": ["lm_head", "q_proj"], "use_rslora": True},
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1, 2]},
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "exclude_modules": ["layers.1.self_attn.o_proj"]},
        {
            "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "mlp.gate_proj", "shared_experts.up_proj"],
            "rank_pattern": {"gate_proj": 6, r"layers\.2\..*q_proj": 2}, "alpha_pattern": {"up_proj": 3},
        },
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "target_parameters": FUSED},
        {"r": 4, "lora_alpha": 8, "target_modules": [], "target_parameters": FUSED[:1]},
        {"r": 4, "lora_alpha": 8, "target_modules": [], "target_parameters": FUSED[1:]},
        {
            "r": 4, "lora_alpha": 8, "target_modules": ["down_proj"], "target_parameters": FUSED, "use_rslora": True,
            "rank_pattern": {r".*\.experts\.gate_up_proj": 3}, "alpha_pattern": {r"experts\.down_proj": 5},
        },
        {"r": 4, "lora_alpha": 8, "target_modules": [], "target_parameters": ["layers.2.mlp.experts.down_proj"]},
    ],
    ids=lambda fields: "-".join(fields),
)  # fmt: skip
def test_an_adapter_that_peft_saved_gives_pefts_logits_in_ours(
    judge: Judge, ours: K3Model, tmp_path: Path, fields: dict[str, object]
) -> None:
    theirs = their_adapter(judge, tmp_path / "theirs", **fields)
    adapter = load_adapter(tmp_path / "theirs", ours.cfg)
    attach_adapter(ours, adapter)
    assert close(logits(ours), judged(theirs))
    assert not torch.allclose(judged(theirs), judged(judge), rtol=0, atol=1e-3)
    save_adapter(tmp_path / "ours", ours.cfg, adapter)
    if uncrossed_experts(ours.cfg, adapter.lora, lora_matrices(ours)):
        assert fields["target_parameters"] == FUSED[:1]
        return
    again = peft.PeftModel.from_pretrained(copy.deepcopy(judge), tmp_path / "ours").eval()
    assert close(judged(again), judged(theirs))


def test_experts_that_peft_cannot_take_are_left_out_by_it_without_a_word(
    judge: Judge, ours: K3Model, tmp_path: Path
) -> None:
    """What docs/adapters.md warns of; when this fails, peft has learnt it."""
    save_adapter(tmp_path / "a", ours.cfg, our_adapter(ours, ("q_proj", "w1", "w3")))
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(judge), tmp_path / "a").eval()
    assert not torch.allclose(judged(theirs), logits(ours), rtol=0, atol=1e-3)


def test_target_parameters_are_what_carries_the_experts_into_peft(judge: Judge, ours: K3Model, tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", ours.cfg, our_adapter(ours, ("q_proj", *EXPERTS)))
    config = tmp_path / "a" / "adapter_config.json"
    document = json.loads(config.read_text())
    assert document.pop("target_parameters") == FUSED
    config.write_text(json.dumps(document))
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(judge), tmp_path / "a").eval()
    assert not torch.allclose(judged(theirs), logits(ours), rtol=0, atol=1e-3)


def test_every_field_is_one_of_pefts_config(ours: K3Model, tmp_path: Path) -> None:
    overrides = (LoraOverride("w2", 2, 4.0), LoraOverride("layers.1.self_attn.q_proj", 3, 1.0))
    save_adapter(tmp_path / "a", ours.cfg, our_adapter(ours, (*LINEARS, *EXPERTS), *overrides))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of fields that it does not know, and leaves out
        config = peft.PeftConfig.from_pretrained(tmp_path / "a")
    assert isinstance(config, peft.LoraConfig)
    assert (config.r, config.lora_alpha, config.base_model_name_or_path) == (3, 6, "tiny")


def test_the_merged_model_is_the_model_that_peft_merges(judge: Judge, ours: K3Model, tmp_path: Path) -> None:
    theirs = their_adapter(
        judge, tmp_path / "a", r=4, lora_alpha=8, target_modules=[*LINEARS, "lm_head"], target_parameters=FUSED
    )
    report = merge_adapter(ours, load_adapter(tmp_path / "a", ours.cfg))
    theirs = theirs.merge_and_unload()
    assert close(logits(ours), judged(theirs))
    assert len(report.merged) == sum(shape[0] if len(shape) == 3 else 1 for shape in lora_matrices(ours).values())


def test_a_head_that_peft_repeats_must_be_the_models_own(judge: Judge, ours: K3Model, tmp_path: Path) -> None:
    their_adapter(judge, tmp_path / "a", r=4, target_modules=["q_proj", "lm_head"])
    assert "base_model.model.lm_head.base_layer.weight" in load_file(tmp_path / "a" / "adapter_model.safetensors")
    adapter = load_adapter(tmp_path / "a", ours.cfg)
    with torch.no_grad():
        ours.lm_head.weight[3, 4] += 0.01
    before = {name: tensor.clone() for name, tensor in named_tensors(ours).items()}
    for use in (attach_adapter, merge_adapter):
        with pytest.raises(ValueError, match=r"lm_head\.weight: the adapter's file repeats another base's"):
            use(ours, adapter)
    after = named_tensors(ours)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_detached_model_has_the_bases_logits_again(judge: Judge, ours: K3Model) -> None:
    our_adapter(ours, (*LINEARS, *EXPERTS))
    detach_lora(ours)
    assert close(logits(ours), judged(judge))


def test_peft_keeps_the_names_of_a_trained_file(judge: Judge, tmp_path: Path) -> None:
    """What is read above is what peft writes: fused experts, forget_gate, mlp."""
    their_adapter(judge, tmp_path / "a", r=4, target_modules=["f_a_proj"], target_parameters=FUSED)
    keys = load_file(tmp_path / "a" / "adapter_model.safetensors").keys()
    assert "base_model.model.model.layers.0.self_attn.forget_gate.f_a_proj.lora_A.weight" in keys
    assert "base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight" in keys
    assert "base_model.model.model.layers.1.mlp.experts.lora_A.weight" in keys
