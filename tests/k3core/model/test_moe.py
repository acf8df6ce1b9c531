"""Packed experts in a model: the same function as unpacked, frozen, and trainable through LoRA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig, attach_lora
from k3core.model.model import K3Model, build_model
from k3core.model.moe import Experts, situ_betas
from k3core.model.weights import load_tensors, named_tensors
from k3core.rl.optim import OptimConfig
from k3core.rl.trainer import Trainer
from k3kernels.mxfp4 import pack, unpack
from k3kernels.packing import Packing

RandomModel = Callable[[K3Config], K3Model]

TOKENS_T, PACKING = torch.arange(40), Packing((12, 28))
EXPERTS = LoraConfig(rank=3, alpha=6.0, targets=("w1", "w2", "w3", "o_proj"))


def with_groups(cfg: K3Config) -> K3Config:
    """Widths that divide into groups of 32, the two not alike."""
    latent = None if cfg.routed_expert_hidden_size is None else 32
    return replace(cfg, hidden_size=96, routed_expert_hidden_size=latent, moe_intermediate_size=64)


def pair_of_models(cfg: K3Config, random_model: RandomModel, dtype: torch.dtype) -> tuple[K3Model, K3Model]:
    """A model with packed experts, and the same with what they unpack to."""
    plain = random_model(with_groups(cfg))
    packed = build_model(replace(plain.cfg, expert_quantization="mxfp4"), dtype)
    tensors = {}
    for name, tensor in named_tensors(plain).items():
        if ".experts." in name:
            tensors[f"{name}_packed"], tensors[f"{name}_scale"] = pack(tensor)
            tensor.copy_(unpack(tensors[f"{name}_packed"], tensors[f"{name}_scale"], tensor.dtype))
        else:
            tensors[name] = tensor
    own = named_tensors(packed)
    load_tensors(packed, {name: tensor.to(own[name].dtype) for name, tensor in tensors.items()})
    return packed, plain.to(dtype)


def logits(model: K3Model) -> torch.Tensor:
    return model.logits(model(TOKENS_T, PACKING).hidden_TD)


def test_a_model_with_packed_experts_is_the_unpacked_one_bit_for_bit(cfg: K3Config, random_model: RandomModel) -> None:
    packed, plain = pair_of_models(cfg, random_model, torch.float32)
    assert torch.equal(logits(packed), logits(plain))
    assert sum(p.numel() for p in packed.parameters()) < sum(p.numel() for p in plain.parameters())


def test_one_expert_is_unpacked_exactly_in_bf16_or_the_type_that_is_asked_for(
    k3: K3Config, random_model: RandomModel
) -> None:
    packed, plain = pair_of_models(k3, random_model, torch.float32)
    experts = [m for m in packed.modules() if isinstance(m, Experts)]
    dense = [m for m in plain.modules() if isinstance(m, Experts)]
    for name in ("w1", "w2", "w3"):
        assert experts[1].shape(name) == dense[1].shape(name) == tuple(dense[1].get_parameter(name).shape)
        want = dense[1].expert(name, 4)
        assert want.data_ptr() == dense[1].get_parameter(name)[4].data_ptr(), "a view"
        assert experts[1].expert(name, 4).dtype == torch.bfloat16
        assert torch.equal(experts[1].expert(name, 4).float(), want)
        assert torch.equal(experts[1].expert(name, 4, torch.float32), want)


def test_lora_above_packed_experts_learns_what_it_learns_above_unpacked_ones(
    cfg: K3Config, random_model: RandomModel
) -> None:
    gradients = []
    for model in pair_of_models(cfg, random_model, torch.float32):
        attach_lora(model, EXPERTS, torch.Generator().manual_seed(0))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("lora_B"):
                    p.normal_(0, 0.2, generator=torch.Generator().manual_seed(len(name)))
        logits(model).logsumexp(-1).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    above_packed, above_plain = gradients
    assert above_packed.keys() == above_plain.keys()
    assert "layers.1.block_sparse_moe.experts.w2_lora_A" in above_packed
    for name, gradient in above_packed.items():
        assert torch.equal(gradient, above_plain[name]), name


def test_factors_above_packed_and_bf16_experts_are_fp32(k3: K3Config, random_model: RandomModel) -> None:
    for model in pair_of_models(k3, random_model, torch.bfloat16):
        attach_lora(model, EXPERTS, torch.Generator().manual_seed(0))
        factors = {name: p for name, p in model.named_parameters() if "experts" in name and "lora" in name}
        assert factors
        assert {p.dtype for p in factors.values()} == {torch.float32}
        out = logits(model)
        out.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in factors.values())


def test_each_matrix_has_the_scale_that_its_branch_was_attached_with() -> None:
    experts = Experts(2, 32, 64, "mxfp4")
    experts.attach_lora("w1", 2, 6.0, torch.Generator())
    experts.attach_lora("w3", 4, 6.0, torch.Generator())
    w1, w2, w3 = (experts.lora(name) for name in ("w1", "w2", "w3"))
    assert w1 is not None
    assert w2 is None
    assert w3 is not None
    assert (w1.scale, w3.scale) == (3.0, 1.5)
    assert (tuple(w1.A_ErI.shape), tuple(w3.B_EOr.shape)) == ((2, 2, 32), (2, 64, 4))


def test_all_parameters_of_a_model_with_packed_experts_cannot_be_trained_but_lora_above_them_can(
    k3: K3Config,
) -> None:
    cfg = replace(with_groups(k3), expert_quantization="mxfp4")
    with pytest.raises(ValueError, match=r"packed experts cannot be trained .*LoRA"):
        Trainer(cfg, OptimConfig())
    trainer = Trainer(cfg, OptimConfig(learning_rate=0.01), EXPERTS)
    before, _ = trainer.save()
    for _ in range(2):  # A's gradient is zero until B has moved
        trainer.forward_backward(TOKENS_T, PACKING, torch.arange(3, 12), lambda x: (-x.mean(), {}))
        assert trainer.optim_step().applied
    after, _ = trainer.save()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rsplit(".", 1)[-1] for name in moved} == {"lora_A", "lora_B"}
    assert any(".experts." in name for name in moved)


@pytest.mark.parametrize(
    ("hidden", "width", "quantization", "line"),
    [
        (48, 64, "mxfp4", "model.expert_quantization mxfp4: experts of 64 x 48 do not divide into groups of 32"),
        (64, 48, "mxfp4", "model.expert_quantization mxfp4: experts of 48 x 64 do not divide into groups of 32"),
        (64, 64, "fp8", "model.expert_quantization: must be 'mxfp4' or none, got 'fp8'"),
    ],
)
def test_experts_that_cannot_be_packed_are_refused(hidden: int, width: int, quantization: str, line: str) -> None:
    with pytest.raises(ValueError) as refusal:
        Experts(2, hidden, width, quantization)
    assert str(refusal.value).startswith(line)


def test_only_situ_and_silu_are_activations(k3: K3Config) -> None:
    assert situ_betas(k3) == (4.0, 25.0)
    assert situ_betas(replace(k3, hidden_act="silu")) is None
    for other in ("gelu", "relu", "SiLU", ""):
        with pytest.raises(ValueError, match=r"model\.hidden_act: .* is not known; use situ or silu"):
            situ_betas(replace(k3, hidden_act=other))
