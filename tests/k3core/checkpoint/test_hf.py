"""Checkpoints of the released form, read into models and written from them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3core.checkpoint import hf_write
from k3core.checkpoint.hf import iter_tensors, load_model, open_checkpoint, read_tensor, save_checkpoint
from k3core.checkpoint.hf_plan import plan_new
from k3core.checkpoint.names import expected_shapes, hf_name
from k3core.errors import IntegrityError
from k3core.model.config import K3Config
from k3core.model.hf_config import from_hf
from k3core.model.presets import PRESETS
from k3core.model.weights import named_tensors
from k3kernels.mxfp4 import unpack
from k3kernels.packing import Packing

RandomTensors = Callable[..., dict[str, Tensor]]
ReleasedFolder = Callable[..., Path]
FolderBytes = Callable[[Path], dict[str, bytes]]

INDEX = "model.safetensors.index.json"
EXPERT = "layers.1.block_sparse_moe.experts.0.w1"


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].to(t.dtype), t) for name, t in b.items())


def plain(cfg: K3Config) -> K3Config:
    return replace(cfg, expert_quantization=None)


def unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            matrix = name.removesuffix("_packed")
            found[matrix] = unpack(tensor, tensors[f"{matrix}_scale"], torch.float32)
        elif not name.endswith(".weight_scale"):
            found[name] = tensor
    return found


def partial_folders(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if "partial" in path.name]


# Round trips


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_loaded_and_saved_again_is_the_same_bytes(
    tmp_path: Path, form: K3Config, random_tensors: RandomTensors, folder_bytes: FolderBytes, dtype: torch.dtype
) -> None:
    tensors = random_tensors(form, dtype=dtype)
    summary = save_checkpoint(tmp_path / "a", form, tensors, dtype=dtype, shard_bytes=20_000)
    model = load_model(tmp_path / "a", dtype)
    assert equal(named_tensors(model), tensors)
    backwards = reversed(named_tensors(model).items())
    save_checkpoint(tmp_path / "b", model.cfg, backwards, dtype=dtype, shard_bytes=20_000)
    assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")
    assert sorted(summary.files) == sorted(folder_bytes(tmp_path / "a"))
    assert summary.bytes == sum(map(len, folder_bytes(tmp_path / "a").values()))
    assert (summary.num_tensors, summary.num_rounded) == (len(tensors), 0)
    assert len([file for file in summary.files if file.endswith(".safetensors")]) > 2


@pytest.mark.parametrize("a_log", ["written", "1-D", "4-D"])
@pytest.mark.parametrize("conv", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_single", [False, True])
def test_a_released_folder_that_is_loaded_and_saved_comes_out_byte_for_byte(
    tmp_path: Path,
    form: K3Config,
    released_folder: ReleasedFolder,
    folder_bytes: FolderBytes,
    a_log: str,
    conv: torch.dtype,
    is_single: bool,
) -> None:
    released = released_folder(form, a_log=a_log, conv=conv, is_single=is_single)
    model = load_model(released, torch.bfloat16)
    summary = save_checkpoint(tmp_path / "again", model.cfg, named_tensors(model), like=released)
    assert folder_bytes(tmp_path / "again") == folder_bytes(released)
    assert summary.num_rounded == 0
    assert summary.copied == ("generation_config.json", "tiktoken.model", "figures/logo.svg")
    checkpoint = open_checkpoint(released)
    save_checkpoint(tmp_path / "streamed", checkpoint.cfg, iter_tensors(checkpoint), like=checkpoint)
    assert folder_bytes(tmp_path / "streamed") == folder_bytes(released)


def test_a_changed_tensor_changes_its_own_bytes_alone(
    tmp_path: Path, k3: K3Config, released_folder: ReleasedFolder, folder_bytes: FolderBytes
) -> None:
    released = released_folder(k3)
    model = load_model(released)
    named_tensors(model)["norm.weight"].mul_(3)
    save_checkpoint(tmp_path / "new", k3, named_tensors(model), like=released)
    old, new = folder_bytes(released), folder_bytes(tmp_path / "new")
    changed = {name for name in old if old[name] != new[name]}
    assert changed == {"model-00002-of-00002.safetensors"}
    (file,) = changed
    entry = open_checkpoint(released).tensors["norm.weight"].entry
    start, stop = entry.offset, entry.offset + entry.num_bytes
    assert (old[file][:start], old[file][stop:]) == (new[file][:start], new[file][stop:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_is_loaded_in_the_type_asked_for(
    tmp_path: Path, form: K3Config, random_tensors: RandomTensors, dtype: torch.dtype
) -> None:
    tensors = random_tensors(form)
    save_checkpoint(tmp_path / "a", form, tensors)
    own = named_tensors(load_model(tmp_path / "a", dtype))
    assert own["embed_tokens.weight"].dtype == dtype
    assert own["layers.0.self_attn.A_log"].dtype == torch.float32
    for name, tensor in own.items():
        assert torch.equal(tensor, tensors[name].to(tensor.dtype)), name


def test_tensors_come_one_by_one_in_the_order_of_the_files(released_folder: ReleasedFolder, k3: K3Config) -> None:
    checkpoint = open_checkpoint(released_folder(k3))
    given = dict(iter_tensors(checkpoint))
    places = [(checkpoint.tensors[name].file, checkpoint.tensors[name].entry.offset) for name in given]
    assert places == sorted(places)
    assert {name: tuple(t.shape) for name, t in given.items()} == expected_shapes(k3)
    assert all(torch.equal(read_tensor(checkpoint, name), tensor) for name, tensor in given.items())


def test_progress_ends_at_all_bytes_of_the_text_model(released_folder: ReleasedFolder, k3: K3Config) -> None:
    released = released_folder(k3)
    calls: list[tuple[int, int, str]] = []
    load_model(released, progress=lambda *call: calls.append(call))
    assert [done for done, _, _ in calls] == sorted({done for done, _, _ in calls})
    assert {total for _, total, _ in calls} == {calls[-1][0]}
    assert {name for _, _, name in calls} == set(expected_shapes(k3))


# What is written


def test_the_index_and_the_files_agree_and_no_file_is_larger_than_asked(
    tmp_path: Path, form: K3Config, random_tensors: RandomTensors
) -> None:
    tensors = random_tensors(form)
    save_checkpoint(tmp_path / "a", form, tensors, shard_bytes=30_000)
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    assert (tmp_path / "a" / INDEX).read_text() == json.dumps(index, indent=2) + "\n"
    files = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    loaded: dict[str, Tensor] = {}
    for file in files:
        part = load_file(tmp_path / "a" / file)
        with safe_open(tmp_path / "a" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        assert sum(t.nbytes for t in part.values()) <= 30_000 or len(part) == 1
        assert {index["weight_map"][name] for name in part} == {file}
        loaded |= part
    assert loaded.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in loaded.values())
    for name, tensor in tensors.items():
        stored = loaded[hf_name(name, form.family)]
        assert torch.equal(stored.reshape(-1)[: tensor.numel()], tensor.reshape(-1))
        assert not stored.reshape(-1)[tensor.numel() :].any()


def test_config_json_says_what_was_saved(tmp_path: Path, form: K3Config, random_tensors: RandomTensors) -> None:
    save_checkpoint(tmp_path / "a", form, random_tensors(form), dtype=torch.float32)
    document = json.loads((tmp_path / "a" / "config.json").read_text())
    assert from_hf(document) == form
    assert document["dtype"] == document.get("text_config", document)["dtype"] == "float32"
    generation = json.loads((tmp_path / "a" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == document["eos_token_id"]


def test_every_tensor_lies_on_a_multiple_of_its_elements_size(
    tmp_path: Path, k3_packed: K3Config, random_tensors: RandomTensors
) -> None:
    odd = replace(k3_packed, vocab_size=7, hidden_size=3)
    save_checkpoint(tmp_path / "a", odd, random_tensors(odd))
    sizes = {"F32": 4, "BF16": 2, "U8": 1}
    entries = [stored.entry for stored in open_checkpoint(tmp_path / "a").tensors.values()]
    assert {entry.dtype for entry in entries} == set(sizes)
    assert all(entry.offset % sizes[entry.dtype] == 0 for entry in entries)


def test_tensors_that_lose_bits_are_counted(tmp_path: Path, k3: K3Config, random_tensors: RandomTensors) -> None:
    tensors = random_tensors(k3, dtype=torch.float32)
    tensors["norm.weight"] = torch.ones(20)
    summary = save_checkpoint(tmp_path / "a", k3, tensors)
    saved = named_tensors(load_model(tmp_path / "a", torch.float32))
    changed = [name for name, tensor in tensors.items() if not torch.equal(saved[name], tensor)]
    assert summary.num_rounded == len(changed)
    assert "norm.weight" not in changed
    assert "layers.0.self_attn.A_log" not in changed
    assert all(torch.equal(saved[name], tensors[name].bfloat16().float()) for name in changed)


def test_the_text_layout_is_the_flat_one_that_sglangs_text_class_reads(
    tmp_path: Path, k3: K3Config, random_tensors: RandomTensors
) -> None:
    tensors = random_tensors(k3)
    save_checkpoint(tmp_path / "a", k3, tensors, layout="kimi_k3_text")
    document = json.loads((tmp_path / "a" / "config.json").read_text())
    assert document["architectures"] == ["KimiK3LinearForCausalLM"]
    assert document["model_type"] == "kimi_linear"
    assert "text_config" not in document
    names = json.loads((tmp_path / "a" / INDEX).read_text())["weight_map"]
    assert not any("block_sparse_moe" in name or name.startswith("language_model.") for name in names)
    assert "model.layers.1.mlp.experts.0.w1.weight" in names
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names
    assert open_checkpoint(tmp_path / "a").layout == "kimi_k3_text"
    assert equal(named_tensors(load_model(tmp_path / "a")), tensors)


def test_k3_and_its_layout_belong_together(
    tmp_path: Path, k3: K3Config, kimi_linear: K3Config, random_tensors: RandomTensors, released_folder: ReleasedFolder
) -> None:
    with pytest.raises(ValueError, match="layout kimi_linear: this model's family is kimi_k3"):
        save_checkpoint(tmp_path / "a", k3, random_tensors(k3), layout="kimi_linear")
    with pytest.raises(ValueError, match="layout kimi_k3_text: this model's family is kimi_linear"):
        save_checkpoint(tmp_path / "a", kimi_linear, random_tensors(kimi_linear), layout="kimi_k3_text")
    with pytest.raises(ValueError, match=r"layout kimi_k3_text: like .* has layout kimi_k3"):
        save_checkpoint(tmp_path / "a", k3, random_tensors(k3), layout="kimi_k3_text", like=released_folder(k3))


def test_layers_of_full_width_are_planned_in_files_of_the_size_asked_for() -> None:
    cfg = replace(PRESETS["kimi-k3"], num_hidden_layers=9, full_attn_layers=(4, 8, 9))
    plan = plan_new(cfg, "kimi_k3", torch.bfloat16, torch.bfloat16, 17 * 10**9)
    total = sum(plan.sizes.values())
    assert len(plan.slots) == len(expected_shapes(cfg)) > 43_000
    assert len(plan.sizes) == math.ceil(total / 17e9)
    assert min(list(plan.sizes.values())[:-1]) > 15e9
    assert max(plan.sizes.values()) < 17.01e9
    assert max(map(len, plan.headers.values())) < 2_000_000


# Packed experts


def test_packed_experts_are_loaded_unpacked_on_demand(
    tmp_path: Path, k3_packed: K3Config, random_tensors: RandomTensors
) -> None:
    tensors = random_tensors(k3_packed)
    save_checkpoint(tmp_path / "a", k3_packed, tensors, shard_bytes=5_000)
    for dtype in (torch.bfloat16, torch.float32):
        model = load_model(tmp_path / "a", dtype, experts="unpacked")
        assert model.cfg == plain(k3_packed)
        assert equal(
            named_tensors(model),
            {n: t.to(dtype) for n, t in unpacked(tensors).items()}
            | {n: t for n, t in tensors.items() if t.dtype == torch.float32},
        )


def test_a_bf16_export_has_no_quantization_block(
    tmp_path: Path, k3_packed: K3Config, released_folder: ReleasedFolder, folder_bytes: FolderBytes
) -> None:
    released = released_folder(k3_packed)
    assert b"quantization_config" in (released / "config.json").read_bytes()
    checkpoint = open_checkpoint(released)
    summary = save_checkpoint(tmp_path / "a", k3_packed, iter_tensors(checkpoint), like=released, experts="bf16")
    assert summary.num_rounded == 0
    assert b"quantization" not in (tmp_path / "a" / "config.json").read_bytes()
    exported = open_checkpoint(tmp_path / "a")
    assert exported.cfg == plain(k3_packed)
    assert exported.document["transformers_version"] == "4.57.1"
    assert {exported.tensors[f"{EXPERT}.weight"].entry.dtype} == {"BF16"}
    assert equal(dict(iter_tensors(exported)), unpacked(dict(iter_tensors(checkpoint))))
    old, new = load_released_vision(released), load_released_vision(tmp_path / "a")
    assert old.keys() == new.keys()
    assert all(old[name].view(torch.uint8).equal(new[name].view(torch.uint8)) for name in old)
    assert (tmp_path / "a" / "tiktoken.model").read_bytes() == folder_bytes(released)["tiktoken.model"]


def load_released_vision(folder: Path) -> dict[str, Tensor]:
    files = folder.glob("*.safetensors")
    return {n: t for file in files for n, t in load_file(file).items() if n.startswith(("vision_tower", "mm_proj"))}


def test_an_unpacked_model_packed_like_its_origin_keeps_every_byte(
    tmp_path: Path, k3_packed: K3Config, released_folder: ReleasedFolder, folder_bytes: FolderBytes
) -> None:
    released = released_folder(k3_packed)
    model = load_model(released, experts="unpacked")
    summary = save_checkpoint(tmp_path / "a", model.cfg, named_tensors(model), like=released, experts="mxfp4")
    assert folder_bytes(tmp_path / "a") == folder_bytes(released)
    assert summary.num_rounded == 0
    named_tensors(model)[f"{EXPERT}.weight"][3, 40] += 1000
    summary = save_checkpoint(tmp_path / "b", model.cfg, named_tensors(model), like=released, experts="mxfp4")
    old, new = dict(iter_tensors(open_checkpoint(released))), dict(iter_tensors(open_checkpoint(tmp_path / "b")))
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {f"{EXPERT}.weight_packed", f"{EXPERT}.weight_scale"}
    packed = f"{EXPERT}.weight_packed"
    assert set((old[packed] != new[packed]).nonzero()[:, 0].tolist()) == {3}
    assert set((old[packed] != new[packed]).nonzero()[:, 1].tolist()) <= set(range(16, 32))  # its group of 32 values
    assert summary.num_rounded == 1


def test_plain_experts_are_packed_on_demand(tmp_path: Path, k3_packed: K3Config, random_tensors: RandomTensors) -> None:
    tensors = unpacked(random_tensors(k3_packed))
    summary = save_checkpoint(tmp_path / "a", plain(k3_packed), tensors, experts="mxfp4")
    assert summary.num_rounded == 0  # they come from the grid
    checkpoint = open_checkpoint(tmp_path / "a")
    assert checkpoint.cfg == k3_packed
    assert equal(unpacked(dict(iter_tensors(checkpoint))), tensors)
    tensors[f"{EXPERT}.weight"] = torch.randn(32, 64)
    assert save_checkpoint(tmp_path / "b", plain(k3_packed), tensors, experts="mxfp4").num_rounded == 1


def test_experts_in_another_form_than_the_config_says_are_refused(
    tmp_path: Path, k3_packed: K3Config, random_tensors: RandomTensors
) -> None:
    tensors = unpacked(random_tensors(k3_packed))
    with pytest.raises(ValueError, match=r"experts\.\{0-5\}\.w1\.weight: experts in another form .* choose experts="):
        save_checkpoint(tmp_path / "a", k3_packed, tensors)
    assert list(tmp_path.iterdir()) == []


def test_plain_kimi_linear_has_no_width_to_pack(
    tmp_path: Path, kimi_linear: K3Config, random_tensors: RandomTensors
) -> None:
    tensors = random_tensors(kimi_linear)
    save_checkpoint(tmp_path / "a", kimi_linear, tensors, experts="bf16")
    with pytest.raises(ValueError, match="w1 of the experts has 20 inputs: mxfp4 packs multiples of 32"):
        save_checkpoint(tmp_path / "b", kimi_linear, tensors, experts="mxfp4")


# Other programs


def test_what_transformers_saves_is_loaded_and_computes_the_same(transformers_model: Saved) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        theirs, folder = transformers_model(dtype)
        ours = load_model(folder, torch.float32)
        stored = load_file(folder / "model.safetensors")
        assert "model.layers.0.block_sparse_moe.gate_proj.weight" in stored  # the dense layer, as it spells it
        assert torch.equal(
            ours.layers[0].mlp.gate_proj.weight, stored["model.layers.0.block_sparse_moe.gate_proj.weight"].float()
        )
        assert torch.equal(ours.layers[0].self_attn.A_log, stored["model.layers.0.self_attn.A_log"].float().flatten())
        tokens_T = torch.arange(40) % 61
        with torch.no_grad():
            logits = ours.logits(ours(tokens_T, Packing((40,))).hidden_TD)
            want = theirs.float()(tokens_T[None]).logits[0]
        assert (logits - want).abs().max() < 1e-4 * want.abs().max(), dtype


def test_transformers_loads_what_is_saved_and_computes_the_same(
    tmp_path: Path, transformers_model: Saved, folder_bytes: FolderBytes
) -> None:
    from transformers import KimiLinearForCausalLM

    _, folder = transformers_model(torch.float32)
    model = load_model(folder, torch.float32)
    save_checkpoint(tmp_path / "a", model.cfg, named_tensors(model), dtype=torch.float32, shard_bytes=50_000)
    theirs, info = KimiLinearForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    tokens_T = torch.arange(40) % 61
    with torch.no_grad():
        logits = model.logits(model(tokens_T, Packing((40,))).hidden_TD)
        want = theirs(tokens_T[None]).logits[0]
    assert (logits - want).abs().max() < 1e-4 * want.abs().max()
    save_checkpoint(tmp_path / "b", model.cfg, named_tensors(model), like=folder)
    assert folder_bytes(tmp_path / "b") == folder_bytes(folder)


Saved = Callable[[torch.dtype], tuple[torch.nn.Module, Path]]


@pytest.fixture
def transformers_model(tmp_path: Path) -> Saved:
    """A tiny Kimi-Linear of transformers with random norms and router bias, and the folder that it saves."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    document = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": 61,
        "hidden_size": 32,
        "head_dim": 8,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "q_lora_rank": None,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "mla_use_nope": True,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 24,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
            "num_heads": 3,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    }

    def make(dtype: torch.dtype) -> tuple[torch.nn.Module, Path]:
        torch.manual_seed(0)
        model = KimiLinearForCausalLM(KimiLinearConfig(**document)).to(dtype)
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name.endswith("norm.weight"):
                    tensor.uniform_(0.5, 1.5)
                elif name.endswith("e_score_correction_bias"):
                    tensor.normal_(0, 0.1)
                elif tensor.ndim >= 2 and tensor.numel() > 8:
                    tensor.normal_(0, 0.2)
        folder = tmp_path / f"transformers-{dtype}"
        model.save_pretrained(folder)
        return model, folder

    return make


# Refusals: nothing loaded, nothing written


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused_on_both_ways(
    tmp_path: Path, k3: K3Config, random_tensors: RandomTensors, bad: float
) -> None:
    tensors = random_tensors(k3)
    tensors["layers.2.self_attn.o_proj.weight"][3, 7] = bad
    with pytest.raises(ValueError, match=rf"layers\.2\.self_attn\.o_proj\.weight holds {bad} at \[3, 7\]"):
        save_checkpoint(tmp_path / "a", k3, tensors)
    assert list(tmp_path.iterdir()) == []
    save_checkpoint(tmp_path / "a", k3, tensors, check_finite=False)
    place = r"model-00001-of-00001\.safetensors: language_model\.model\.layers\.2\.self_attn\.o_proj\.weight holds"
    with pytest.raises(IntegrityError, match=rf"{place} {bad} at \[3, 7\]"):
        load_model(tmp_path / "a")
    with pytest.raises(IntegrityError, match=place):
        list(iter_tensors(open_checkpoint(tmp_path / "a")))
    loaded = named_tensors(load_model(tmp_path / "a", check_finite=False))
    assert not loaded["layers.2.self_attn.o_proj.weight"][3, 7].isfinite()


def test_a_nan_scale_is_refused_whatever_is_checked(
    tmp_path: Path, k3_packed: K3Config, released_folder: ReleasedFolder, random_tensors: RandomTensors
) -> None:
    released = released_folder(k3_packed)
    stored = open_checkpoint(released).tensors[f"{EXPERT}.weight_scale"]
    with open(released / stored.file, "rb+") as file:
        file.seek(stored.entry.offset + 3)
        file.write(b"\xff")
    for experts in ("keep", "unpacked"):
        with pytest.raises(IntegrityError, match=r"experts\.0\.w1\.weight_scale holds NaN \(byte 255\) at \[1, 1\]"):
            load_model(released, experts=experts, check_finite=False)
    tensors = random_tensors(k3_packed)
    tensors[f"{EXPERT}.weight_scale"][1, 1] = 255
    with pytest.raises(ValueError, match=r"experts\.0\.w1\.weight_scale holds NaN \(byte 255\) at \[1, 1\]"):
        save_checkpoint(tmp_path / "a", k3_packed, tensors, check_finite=False)


def test_padding_that_is_not_zero_is_refused(k3: K3Config, released_folder: ReleasedFolder) -> None:
    released = released_folder(k3)
    stored = open_checkpoint(released).tensors["layers.0.self_attn.A_log"]
    assert stored.entry.shape == (128,)
    with open(released / stored.file, "rb+") as file:
        file.seek(stored.entry.offset + 4 * 5)
        file.write(b"\0\0\x80\x3f")
    with pytest.raises(IntegrityError, match=r"A_log holds 1\.0 at \[5\]: what follows the 3 heads must be zero"):
        load_model(released)


def test_a_taken_target_is_never_touched(tmp_path: Path, k3: K3Config, random_tensors: RandomTensors) -> None:
    taken, file, empty = tmp_path / "taken", tmp_path / "file", tmp_path / "empty"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    file.write_text("mine")
    empty.mkdir()
    tensors = random_tensors(k3)
    with pytest.raises(ValueError, match="taken: is not empty; name a new folder"):
        save_checkpoint(taken, k3, tensors)
    with pytest.raises(ValueError, match="file: is there and is no folder"):
        save_checkpoint(file, k3, tensors)
    assert [path.name for path in taken.iterdir()] == ["notes.txt"]
    save_checkpoint(empty, k3, tensors)
    save_checkpoint(tmp_path / "new" / "parents", k3, tensors)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    save_checkpoint(tmp_path / "link", k3, tensors)
    for folder in (empty, tmp_path / "new" / "parents", tmp_path / "elsewhere"):
        assert equal(named_tensors(load_model(folder)), tensors)
    assert partial_folders(tmp_path) == []


def test_every_tensor_that_does_not_fit_is_named_before_anything_is_written(
    tmp_path: Path, k3: K3Config, random_tensors: RandomTensors
) -> None:
    tensors = random_tensors(k3)
    del tensors["layers.1.block_sparse_moe.routed_expert_norm.weight"]
    tensors["layers.1.block_sparse_moe.experts.6.w1.weight"] = torch.zeros(9, 12)
    tensors["norm.weight"] = torch.zeros(21)
    tensors["lm_head.weight"] = torch.zeros(61, 20, dtype=torch.int64)
    tensors["layers.0.self_attn.q_proj.lora_A"] = torch.zeros(2, 20)
    with pytest.raises(ValueError, match="tensors do not fit the model") as refusal:
        save_checkpoint(tmp_path / "a", k3, tensors)
    for problem in (
        "missing layers.1.block_sparse_moe.routed_expert_norm.weight",
        "unexpected layers.1.block_sparse_moe.experts.6.w1.weight",
        "norm.weight: torch.float32 [21] in place of bfloat16, float16, float32 or float64 [20]",
        "lm_head.weight: torch.int64 [61, 20] in place of bfloat16, float16, float32 or float64 [61, 20]",
        "unexpected layers.0.self_attn.q_proj.lora_A: an adapter's; merge it into the weights first",
    ):
        assert problem in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", [0, 1, 20, -1])
def test_a_stream_that_fails_or_falls_short_leaves_nothing(
    tmp_path: Path, form: K3Config, random_tensors: RandomTensors, where: int
) -> None:
    items = list(random_tensors(form).items())

    def failing() -> Iterator[tuple[str, Tensor]]:
        for i, item in enumerate(items):
            if i == where % len(items):
                raise RuntimeError("the source went away")
            yield item

    with pytest.raises(RuntimeError, match="the source went away"):
        save_checkpoint(tmp_path / "a", form, failing())
    name = items[where][0]
    with pytest.raises(ValueError, match=f"missing {name}"):
        save_checkpoint(tmp_path / "a", form, (item for item in items if item[0] != name))
    with pytest.raises(ValueError, match=f"{name}: given twice"):
        save_checkpoint(tmp_path / "a", form, iter([*items, items[where]]))
    with pytest.raises(ValueError, match=r"unexpected layers\.9\.mlp\.x"):
        save_checkpoint(tmp_path / "a", form, iter([*items, ("layers.9.mlp.x", torch.zeros(1))]))
    assert list(tmp_path.iterdir()) == []


def test_half_of_a_packed_matrix_is_missed(tmp_path: Path, k3_packed: K3Config, random_tensors: RandomTensors) -> None:
    tensors = random_tensors(k3_packed)
    del tensors[f"{EXPERT}.weight_scale"]
    for given in (tensors, iter(tensors.items())):
        with pytest.raises(ValueError, match=rf"missing {EXPERT}\.weight"):
            save_checkpoint(tmp_path / "a", k3_packed, given, experts="bf16")
    assert list(tmp_path.iterdir()) == []


def test_half_of_a_packed_matrix_that_comes_twice_is_refused(
    tmp_path: Path, k3_packed: K3Config, random_tensors: RandomTensors
) -> None:
    tensors = random_tensors(k3_packed)
    for suffix in ("packed", "scale"):
        again = (f"{EXPERT}.weight_{suffix}", tensors[f"{EXPERT}.weight_{suffix}"])
        for items in ([*tensors.items(), again], [again, *tensors.items()]):
            with pytest.raises(ValueError, match=rf"{EXPERT}\.weight_{suffix}: given twice"):
                save_checkpoint(tmp_path / "a", k3_packed, iter(items), experts="bf16")


def test_vision_tensors_of_many_chunks_are_copied_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    k3: K3Config,
    released_folder: ReleasedFolder,
    folder_bytes: FolderBytes,
) -> None:
    released = released_folder(k3)
    monkeypatch.setattr(hf_write, "CHUNK_BYTES", 24)
    save_checkpoint(tmp_path / "a", k3, iter_tensors(open_checkpoint(released)), like=released)
    assert folder_bytes(tmp_path / "a") == folder_bytes(released)


def test_a_killed_save_leaves_no_folder_under_the_targets_name(tmp_path: Path) -> None:
    script = """
import os, sys, torch
from k3core.checkpoint.hf import save_checkpoint
from k3core.checkpoint.names import expected_shapes
from k3core.model.config import K3Config
def tensors():
    for i, (name, shape) in enumerate(expected_shapes(K3Config()).items()):
        if i == 100:
            os.kill(os.getpid(), 9)
        yield name, torch.zeros(shape)
save_checkpoint(sys.argv[1], K3Config(), tensors())
"""
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path / "a")], check=False)
    assert run.returncode == -9
    assert not (tmp_path / "a").exists()
    (left,) = partial_folders(tmp_path)
    assert not (tmp_path / left / INDEX).exists()


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, k3: K3Config, random_tensors: RandomTensors
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(hf_write.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(ValueError, match=r"a: needs \d+ bytes, .* has 1000 left"):
        save_checkpoint(tmp_path / "a", k3, random_tensors(k3))
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_another_shape_is_not_saved_like_a_folder(
    tmp_path: Path, k3: K3Config, kimi_linear: K3Config, released_folder: ReleasedFolder, random_tensors: RandomTensors
) -> None:
    released = released_folder(k3)
    wider = replace(k3, intermediate_size=30)
    with pytest.raises(ValueError, match=r"another architecture.*layers\.0\.mlp\.gate_proj\.weight"):
        save_checkpoint(tmp_path / "a", wider, random_tensors(wider), like=released)
    with pytest.raises(ValueError, match=r"another architecture.*layers\.\{0-4\}\.self_attention_res_norm\.weight"):
        save_checkpoint(tmp_path / "a", kimi_linear, random_tensors(kimi_linear), like=released)
    assert [path.name for path in tmp_path.iterdir()] == ["released"]


def test_a_changed_constant_changes_config_json_alone(
    tmp_path: Path, k3: K3Config, released_folder: ReleasedFolder, folder_bytes: FolderBytes
) -> None:
    released = released_folder(k3)
    cfg = replace(k3, routed_scaling_factor=1.5)
    save_checkpoint(tmp_path / "a", cfg, iter_tensors(open_checkpoint(released)), like=released)
    old, new = folder_bytes(released), folder_bytes(tmp_path / "a")
    assert {name for name in old if old[name] != new[name]} == {"config.json"}
    assert open_checkpoint(tmp_path / "a").cfg == cfg


def test_weights_that_the_index_does_not_name_and_hidden_folders_are_left_out(
    tmp_path: Path, k3: K3Config, released_folder: ReleasedFolder
) -> None:
    released = released_folder(k3)
    save_file({"x": torch.zeros(3)}, released / "consolidated.safetensors")
    (released / "pytorch_model.bin").write_bytes(b"pickle")
    (released / ".git").mkdir()
    (released / ".git" / "HEAD").write_text("x")
    (released / "link.txt").symlink_to(released / "tiktoken.model")
    (released / "dangling.txt").symlink_to(released / "absent")
    checkpoint = open_checkpoint(released)
    summary = save_checkpoint(tmp_path / "a", k3, iter_tensors(checkpoint), like=checkpoint)
    assert summary.left_out == ("consolidated.safetensors", "dangling.txt", "pytorch_model.bin")
    assert not (tmp_path / "a" / "link.txt").is_symlink()
    assert (tmp_path / "a" / "link.txt").read_bytes() == b"IQ== 0\n"
    assert not (tmp_path / "a" / ".git").exists()


def test_scales_beyond_the_types_range_are_refused_when_they_are_unpacked(
    tmp_path: Path, k3_packed: K3Config, random_tensors: RandomTensors
) -> None:
    tensors = random_tensors(k3_packed)
    tensors[f"{EXPERT}.weight_scale"][0, 0] = 254
    tensors[f"{EXPERT}.weight_packed"][0, 0] = 7
    save_checkpoint(tmp_path / "a", k3_packed, tensors)
    load_model(tmp_path / "a")
    with pytest.raises(IntegrityError, match=r"experts\.0\.w1\.weight_packed stands for numbers beyond 2\^128"):
        load_model(tmp_path / "a", experts="unpacked")
    with pytest.raises(ValueError, match=r"experts\.0\.w1\.weight holds inf at \[0, 0\]"):
        save_checkpoint(tmp_path / "b", k3_packed, tensors, experts="bf16")


def test_checkpoints_need_torch_and_numpy_alone() -> None:
    script = """
import sys
for name in ("blake3", "zstandard", "pydantic", "tokenizers", "tiktoken", "regex", "transformers", "fsspec", "prefect"):
    sys.modules[name] = None
import k3core.checkpoint.hf
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": "fp8"}, "experts 'fp8': expected keep, bf16 or mxfp4"),
        ({"dtype": torch.int8}, r"dtype torch\.int8: a checkpoint holds bfloat16, float16 or float32"),
        ({"dtype": torch.float64}, r"dtype torch\.float64: a checkpoint holds"),
        ({"shard_bytes": 0}, "shard_bytes 0: must be at least 1"),
    ],
)
def test_options_without_meaning_are_refused(
    tmp_path: Path, k3: K3Config, random_tensors: RandomTensors, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path / "a", k3, random_tensors(k3), **options)
    with pytest.raises(ValueError, match="experts 'bf16': expected keep or unpacked"):
        load_model(tmp_path, experts="bf16")
