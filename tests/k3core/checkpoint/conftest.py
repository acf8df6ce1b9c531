"""Checkpoints of small models in both forms, and with packed experts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from k3core.checkpoint.names import expected_shapes, hf_name, is_packed, written_dtype, written_shape
from k3core.model.config import MXFP4, K3Config
from k3core.model.hf_config import to_hf

RandomTensors = Callable[..., dict[str, Tensor]]


@pytest.fixture
def k3_packed(k3: K3Config) -> K3Config:
    return replace(k3, routed_expert_hidden_size=64, moe_intermediate_size=32, expert_quantization=MXFP4)


@pytest.fixture(params=["k3", "kimi_linear", "k3_packed"])
def form(request: pytest.FixtureRequest) -> K3Config:
    """Each form of a checkpoint in turn."""
    cfg: K3Config = request.getfixturevalue(request.param)
    return cfg


@pytest.fixture
def random_tensors() -> RandomTensors:
    """Every tensor of a model by internal name, in the types in which a bf16 checkpoint stores them."""

    def make(cfg: K3Config, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in expected_shapes(cfg).items():
            if is_packed(name):
                low, high = (100, 130) if name.endswith("scale") else (0, 256)
                tensors[name] = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
                if high == 256:
                    tensors[name][0] &= 0x99  # a row of 0, -0, 0.5 and -0.5, which packing afresh gives other bytes
            else:
                tensors[name] = torch.randn(shape, generator=generator).to(written_dtype(name, dtype))
        return tensors

    return make


ReleasedFolder = Callable[..., Path]


@pytest.fixture
def released_folder(tmp_path: Path, random_tensors: RandomTensors) -> ReleasedFolder:
    """A folder as someone else writes it: the format's own library, an order by name, vision tensors, own choices of
    types and of A_log's shape, metadata, an index and documents in another style, and files of a tokenizer."""

    def make(
        cfg: K3Config,
        name: str = "released",
        seed: int = 0,
        a_log: str = "written",
        conv: torch.dtype = torch.bfloat16,
        is_single: bool = False,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        layout = cfg.family
        stored = {}
        for internal, tensor in random_tensors(cfg, seed).items():
            if internal.endswith(("conv1d.weight", "o_norm.weight")):
                tensor = tensor.to(conv)
            if internal.endswith("A_log") and a_log == "written":
                shape = written_shape(internal, tuple(tensor.shape), layout)
                heads, tensor = tensor, tensor.new_zeros(shape)
                tensor.view(-1)[: len(heads)] = heads
            elif internal.endswith("A_log") and a_log == "4-D":
                tensor = tensor.view(1, 1, -1, 1)
            stored[hf_name(internal, layout)] = tensor
        if cfg.family == "kimi_k3":
            stored["vision_tower.encoder.blocks.0.mlp.weight"] = torch.randn(8, 4).bfloat16()
            stored["mm_projector.proj.bias"] = torch.tensor([0.5, math.nan])
        names = sorted(stored)
        halves = [names] if is_single else [names[: len(names) // 3], names[len(names) // 3 :]]
        weight_map = {}
        for i, half in enumerate(halves, 1):
            file = "model.safetensors" if is_single else f"model-{i:05d}-of-00002.safetensors"
            save_file({n: stored[n] for n in half}, folder / file, metadata={"format": "pt", "made_by": "someone"})
            weight_map |= dict.fromkeys(half, file)
        if not is_single:
            index = {"weight_map": weight_map, "metadata": {"total_parameters": 3, "total_size": 1}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))
        (folder / "config.json").write_text(json.dumps(to_hf(cfg) | {"transformers_version": "4.57.1"}, indent=8))
        (folder / "generation_config.json").write_text('{"eos_token_id":  7}')
        (folder / "tiktoken.model").write_bytes(b"IQ== 0\n")
        (folder / "figures").mkdir()
        (folder / "figures" / "logo.svg").write_bytes(b"<svg/>")
        return folder

    return make


@pytest.fixture
def folder_bytes() -> Callable[[Path], dict[str, bytes]]:
    """Every file of a folder by its path."""
    return lambda folder: {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
