"""Which form computes a layer's experts in kernels' mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3kernels import dispatch, moe
from k3kernels.moe import NO_LORA, LoraPair, PackedMatrices, eager, frozen, train, triton

E, R, F = 4, 256, 512
LORA = (None, None, LoraPair(torch.zeros(E, 2, F), torch.zeros(E, R, 2), 1.0))


@pytest.fixture
def form(monkeypatch):
    """The name of the form that computes; on any device as on Hopper."""
    seen: list[str] = []

    def replace(module, name: str) -> None:
        def compute(x: Tensor, *_: object) -> Tensor:
            seen.append(module.__name__.rpartition(".")[2])
            return x * 1

        monkeypatch.setattr(module, name, compute)

    monkeypatch.setattr(dispatch, "_is_known", lambda _: True)
    monkeypatch.setattr("k3kernels.moe.hopper._is_on_hopper", lambda _: True)
    replace(eager, "moe_experts")
    replace(triton, "moe_experts")
    replace(train, "moe_experts_train")
    replace(frozen, "moe_experts_frozen")

    def run(dtype=torch.bfloat16, rows=2, lora=NO_LORA, packed=False, trains="x", invariant=False) -> str:
        seen.clear()
        shapes = ((E, F, R), (E, F, R), (E, R, F))
        if packed:
            codes = [torch.zeros(*s[:2], s[2] // 2, dtype=torch.uint8) for s in shapes]
            scales = [torch.zeros(*s[:2], s[2] // 32, dtype=torch.uint8) for s in shapes]
            matrices = [PackedMatrices(c, s, dtype) for c, s in zip(codes, scales, strict=True)]
        else:
            matrices = [torch.zeros(s, dtype=dtype, requires_grad=trains == "matrices") for s in shapes]
        x = torch.zeros(rows, R, dtype=dtype, requires_grad=trains == "x")
        experts = torch.zeros(rows, 2, dtype=torch.long)
        with dispatch.batch_invariant(invariant):
            moe.moe_experts(x, experts, torch.ones(rows, 2), *matrices, None, lora)
        return seen[0]

    return run


def test_training_and_many_rows_in_bf16_are_trains(form):
    assert form() == "train"
    assert form(trains="matrices") == "train"
    assert form(trains="", rows=33) == "train"


def test_few_rows_fp32_and_what_an_engine_repeats_are_tritons(form):
    assert form(trains="") == "triton"
    assert form(dtype=torch.float32) == "triton"
    assert form(invariant=True) == "triton"


def test_mxfp4_and_lora_are_frozens_where_bits_may_depend_on_the_batch(form):
    assert form(packed=True) == form(lora=LORA) == form(packed=True, lora=LORA, trains="") == "frozen"
    assert form(packed=True, invariant=True) == form(lora=LORA, invariant=True) == "eager"
    assert form(packed=True, dtype=torch.float32) == form(lora=LORA, trains="matrices") == "eager"
