"""LoRA branches: nothing at first, the merged weights later, in prefill, decode and training alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from k3core.model.config import K3Config
from k3core.model.layers import Linear
from k3core.model.lora import LoraConfig, attach_lora
from k3core.model.model import K3Model
from k3core.model.moe import Experts
from k3core.model.state import SlotState
from k3core.model.weights import is_adapter_tensor, load_tensors, named_tensors
from k3kernels.packing import Packing

RandomModel = Callable[[K3Config], K3Model]

ATTENTION = ("q_proj", "k_proj", "v_proj", "f_b_proj", "b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
LORA = LoraConfig(rank=3, alpha=6.0, targets=(*ATTENTION, "down_proj", "lm_head", "w1", "w2", "w3"))
TOKENS = torch.arange(40)


def with_lora(model: K3Model, cfg: LoraConfig = LORA) -> K3Model:
    attach_lora(model, cfg, torch.Generator().manual_seed(0))
    return model


def logits(model: K3Model) -> torch.Tensor:
    return model.logits(model(TOKENS, Packing((40,))).hidden_TD)


@torch.no_grad()
def trained(model: K3Model) -> K3Model:
    """As if training had moved every B."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in named_tensors(model).items():
        if name.endswith("lora_B"):
            tensor.normal_(0, 0.2, generator=generator)
    return model


def test_a_fresh_adapter_changes_nothing(cfg: K3Config, random_model: RandomModel) -> None:
    assert torch.equal(logits(with_lora(random_model(cfg))), logits(random_model(cfg)))


def test_only_the_adapter_is_trained_and_all_of_it(cfg: K3Config, random_model: RandomModel) -> None:
    model = trained(with_lora(random_model(cfg)))
    logits(model).square().sum().backward()
    for name, p in model.named_parameters():
        is_adapter = name.endswith(("lora_A", "lora_B"))
        assert p.requires_grad == is_adapter, name
        assert (p.grad is not None and bool(p.grad.abs().max() > 0)) == is_adapter, name


def test_an_adapter_equals_its_merged_weights(cfg: K3Config, random_model: RandomModel) -> None:
    model = trained(with_lora(random_model(cfg).double()))
    merged = random_model(cfg).double()
    own = dict(merged.named_modules())
    with torch.no_grad():
        for path, module in model.named_modules():
            target = own.get(path)
            if isinstance(module, Linear) and isinstance(target, Linear) and module.lora_A is not None:
                assert module.lora_B is not None
                target.weight.add_(2.0 * (module.lora_B @ module.lora_A))
            if isinstance(module, Experts) and isinstance(target, Experts):
                for name in ("w1", "w2", "w3"):
                    A_ERI, B_EOR = getattr(module, f"{name}_lora_A"), getattr(module, f"{name}_lora_B")
                    getattr(target, name).add_(2.0 * torch.einsum("eor,eri->eoi", B_EOR, A_ERI))
    torch.testing.assert_close(logits(model), logits(merged), rtol=0, atol=1e-10)
    assert (logits(model) - logits(random_model(cfg).double())).abs().max() > 0.1


def test_decode_sees_the_adapter_as_the_full_forward_pass_does(cfg: K3Config, random_model: RandomModel) -> None:
    model = trained(with_lora(random_model(cfg).double()))
    state = SlotState(cfg, 1, 40, torch.float64)
    with torch.no_grad():
        pieces = [model(TOKENS[:33], Packing((33,)), None, state, torch.tensor([0])).hidden_TD]
        pieces += [model.decode(token.expand(1), state, torch.tensor([True])).hidden_TD for token in TOKENS[33:]]
        torch.testing.assert_close(model.logits(torch.cat(pieces)), logits(model), rtol=0, atol=1e-10)


def test_adapter_tensors_carry_an_adapter_to_another_model(cfg: K3Config, random_model: RandomModel) -> None:
    source, target = trained(with_lora(random_model(cfg))), with_lora(random_model(cfg))
    adapter = {name: tensor for name, tensor in named_tensors(source).items() if is_adapter_tensor(name)}
    assert "layers.1.block_sparse_moe.experts.5.w3.lora_B" in adapter
    load_tensors(target, {**named_tensors(target), **adapter})
    assert torch.equal(logits(source), logits(target))


def test_a_target_that_names_no_matrix_is_refused_with_those_that_do(k3: K3Config, random_model: RandomModel) -> None:
    with pytest.raises(ValueError, match=r"train\.lora_targets: \['qproj'\] name no matrix.*'kv_b_proj'.*'w1'"):
        with_lora(random_model(k3), LoraConfig(2, 4.0, ("o_proj", "qproj")))
