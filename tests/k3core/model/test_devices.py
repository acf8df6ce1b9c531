"""No tensor is made on the CPU because nothing said where: what a GPU would need, shown without one.

Inside `torch.device("meta")` whatever names no device lies there. An operation that mixes it with the model's tensors
fails, as it would with a GPU's, or leaves results that are not the model's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3core.model.model import DecoderLayer, K3Model, build_model
from k3core.model.state import SlotState
from k3kernels.packing import Packing

RandomModel = Callable[[K3Config], K3Model]

LENGTHS = (5, 1, 17)


@pytest.fixture
def model(cfg: K3Config, random_model: RandomModel) -> K3Model:
    return random_model(cfg)


@pytest.fixture
def tokens_T() -> Tensor:
    return torch.randint(61, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def test_training_names_its_devices(model: K3Model, tokens_T: Tensor) -> None:
    def run() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        forward = model(tokens_T, Packing(LENGTHS, "cpu"))
        model.logits(forward.hidden_TD).square().mean().backward()
        return [forward.hidden_TD, *(p.grad for p in model.parameters() if p.grad is not None)]

    want = run()
    with torch.device("meta"):
        got = run()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@torch.no_grad()
def test_prefill_and_decode_name_their_devices(model: K3Model, tokens_T: Tensor) -> None:
    slots_N, is_active_N = torch.tensor([2, 0, 1]), torch.tensor([True, False, True, False])

    def run() -> list[Tensor]:
        state = SlotState(model.cfg, 4, 32, device="cpu")
        state.reset(1)
        prefilled = model(tokens_T, Packing(LENGTHS, "cpu"), None, state, slots_N)
        return [prefilled.hidden_TD, model.decode(tokens_T[:4], state, is_active_N).hidden_TD, state.length_N]

    want = run()
    with torch.device("meta"):
        got = run()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_layers_run_where_their_tensors_lie(cfg: K3Config, dtype: torch.dtype) -> None:
    """Shapes alone, on the meta device: packed sequences."""
    packing = Packing(LENGTHS, "meta")
    x_TD = torch.empty(sum(LENGTHS), cfg.hidden_size, dtype=dtype, device="meta")
    for layer in build_model(cfg, dtype, "meta").layers:
        assert isinstance(layer, DecoderLayer)
        out_TD = layer.self_attn(x_TD, packing, None, None)
        assert (out_TD.device.type, out_TD.dtype, out_TD.shape) == ("meta", dtype, x_TD.shape)


def test_a_packings_tensors_lie_on_its_device() -> None:
    packing = Packing(LENGTHS, "meta")
    tensors = (packing.lengths_N, packing.starts_N, packing.seq_T, packing.pos_T, packing.last_N)
    assert {x.device.type for x in tensors} == {"meta"}
    assert packing.seq_T.shape == packing.pos_T.shape == (sum(LENGTHS),)
    here = Packing(LENGTHS)
    assert here.seq_T.tolist() == [0] * 5 + [1] + [2] * 17
    assert here.pos_T.tolist() == [*range(5), 0, *range(17)]
