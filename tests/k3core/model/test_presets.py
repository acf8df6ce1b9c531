from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import pytest

from infra.config import SHIPPED
from k3core.model.config import K3Config
from k3core.model.presets import PRESETS


def model_of(name: str) -> K3Config:
    """[model] of a shipped config, as it is written."""
    section: dict[str, Any] = tomllib.loads((SHIPPED / f"{name}.toml").read_text("utf-8"))["model"]
    plain = {key: None if value == "none" else value for key, value in section.items()}
    return K3Config(**{key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()})


@pytest.mark.parametrize(
    ("name", "cfg"),
    [
        ("tiny", PRESETS["tiny"]),
        ("linear48b_lora", PRESETS["kimi-linear-48b-a3b"]),
        ("k3_lora", PRESETS["kimi-k3"]),
        ("k3_full", replace(PRESETS["kimi-k3"], expert_quantization=None)),  # packed experts are not trained
    ],
)
def test_the_shipped_configs_and_the_released_documents_agree(name: str, cfg: K3Config) -> None:
    assert model_of(name) == cfg


def test_a_layer_is_moe_after_the_dense_ones_at_every_so_many_th() -> None:
    assert K3Config(num_hidden_layers=7, first_k_dense_replace=1, moe_layer_freq=2).moe_layers == (2, 4, 6)
    assert K3Config(num_hidden_layers=7, first_k_dense_replace=3, moe_layer_freq=3).moe_layers == (3, 6)
    assert K3Config(num_hidden_layers=3, first_k_dense_replace=0).moe_layers == (0, 1, 2)


def test_each_layer_is_either_kda_or_mla() -> None:
    k3 = PRESETS["kimi-k3"]
    assert (len(k3.kda_layers), len(k3.mla_layers)) == (69, 24)
    assert k3.mla_layers[-2:] == (91, 92)
    assert sorted(k3.kda_layers + k3.mla_layers) == list(range(93))
