"""LoRA in bf16 and where a projection is not simply applied: gates, absorbed decode, the head, latent experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from k3core.model.config import K3Config
from k3core.model.layers import Linear
from k3core.model.lora import (
    LoraConfig,
    LoraOverride,
    attach_lora,
    detach_lora,
    lora_matrices,
)
from k3core.model.mla import MultiHeadLatentAttention
from k3core.model.model import K3Model
from k3core.model.moe import Experts, LatentMoE, situ_betas
from k3core.model.precision import cast_model
from k3core.model.state import SlotState
from k3core.model.weights import named_tensors
from k3kernels.moe.eager import moe_experts as eager_experts
from k3kernels.moe.reference import moe_experts, route
from k3kernels.packing import Packing

RandomModel = Callable[[K3Config], K3Model]

TOKENS = torch.arange(40)
PACKING = Packing((40,))


def attached(model: K3Model, *targets: str, scale: float = 0.2, overrides: tuple[LoraOverride, ...] = ()) -> K3Model:
    """With B as if training had moved it."""
    generator = torch.Generator().manual_seed(0)
    attach_lora(model, LoraConfig(3, 6.0, targets, overrides), generator)
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            if name.endswith("lora_B"):
                tensor.normal_(0, scale, generator=generator)
    return model


def bf16(model: K3Model) -> K3Model:
    cast_model(model, torch.bfloat16)
    return model


def logits(model: K3Model) -> Tensor:
    with torch.no_grad():
        return model.logits(model(TOKENS, PACKING).hidden_TD)


def factors(linear: Linear) -> tuple[Tensor, Tensor]:
    assert linear.lora_A is not None
    assert linear.lora_B is not None
    return linear.lora_A, linear.lora_B


def linear_with_lora(dtype: torch.dtype) -> Linear:
    linear, generator = Linear(24, 40), torch.Generator().manual_seed(0)
    torch.nn.init.normal_(linear.weight, std=0.2, generator=generator)
    linear = linear.to(dtype)
    linear.attach_lora(3, 6.0, generator)
    torch.nn.init.normal_(factors(linear)[1], std=0.2, generator=generator)
    return linear


@pytest.mark.parametrize(
    ("base", "held"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_factors_are_held_in_at_least_fp32_whatever_the_base_is(base: torch.dtype, held: torch.dtype) -> None:
    linear = linear_with_lora(base)
    assert {factor.dtype for factor in factors(linear)} == {held}
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1)).to(base)
    y = linear(x)
    assert y.dtype == base
    y.float().square().sum().backward()
    for factor in factors(linear):
        assert factor.grad is not None
        assert factor.grad.dtype == held
        assert factor.grad.abs().max() > 0


def test_in_bf16_the_branch_is_multiplied_and_added_in_bf16() -> None:
    linear = linear_with_lora(torch.bfloat16)
    A, B = (factor.to(torch.bfloat16) for factor in factors(linear))
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert torch.equal(linear(x), F.linear(x, linear.weight) + 2.0 * F.linear(F.linear(x, A), B))


def test_the_fp32_branch_is_the_same_sequence_of_operations_as_ever() -> None:
    linear = linear_with_lora(torch.float32)
    A, B = factors(linear)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    assert torch.equal(linear(x), F.linear(x, linear.weight) + 2.0 * F.linear(F.linear(x, A), B))
    assert torch.equal(linear.effective_weight(), linear.weight + 2.0 * (B @ A))


def test_an_effective_weight_keeps_an_update_that_bf16_would_lose() -> None:
    linear = linear_with_lora(torch.bfloat16)
    with torch.no_grad():
        factors(linear)[1].mul_(1e-5)
    assert linear.effective_weight().dtype == torch.float32
    A, B = factors(linear)
    torch.testing.assert_close(linear.effective_weight() - linear.weight.float(), 2.0 * B @ A, rtol=0.01, atol=3e-8)
    assert torch.equal(linear.effective_weight().to(torch.bfloat16), linear.weight)


def test_the_output_gate_is_applied_with_lora_on_o_proj_and_g_proj(k3: K3Config, random_model: RandomModel) -> None:
    """An engine that applied its gate by patching o_proj.forward lost it under LoRA."""
    model = random_model(k3).double()
    attention = model.layers[2].self_attn
    assert isinstance(attention, MultiHeadLatentAttention)
    seen: list[Tensor] = []
    attention.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    attention.g_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits(model)
    x, ungated = seen[0], seen[1] / torch.sigmoid(F.linear(seen[0], attention.g_proj.weight))
    seen.clear()
    attached(model, "layers.2.self_attn.o_proj", "layers.2.self_attn.g_proj")
    before = logits(model)
    A, B = factors(attention.g_proj)
    gate = torch.sigmoid(F.linear(x, attention.g_proj.weight + 2.0 * B @ A))
    assert torch.equal(seen[0], x)
    torch.testing.assert_close(seen[1], ungated * gate, rtol=0, atol=1e-12)
    with torch.no_grad():
        factors(attention.o_proj)[1].zero_()
    assert (logits(model) - before).abs().max() > 1e-3


def test_decode_serves_an_update_of_kv_b_proj_that_a_bf16_weight_would_lose(k3: K3Config) -> None:
    """Decode folds kv_b_proj into queries and outputs. Rounded there, an adapter would be trained and not served."""
    cfg = replace(k3, num_hidden_layers=1, full_attn_layers=(1,), kv_lora_rank=256, v_head_dim=100)
    R, T = cfg.kv_lora_rank, 20
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(T + 1, cfg.hidden_size, generator=generator)

    def shift(dtype: torch.dtype, is_decode: bool) -> float:
        """Mean change of what goes into o_proj, with an update of one sign and just below what rounds away."""
        model = K3Model(cfg)
        model.init_weights(torch.Generator().manual_seed(1))
        cast_model(model, dtype)
        attention = model.layers[0].self_attn
        assert isinstance(attention, MultiHeadLatentAttention)
        weight = attention.kv_b_proj.weight
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)).sign() * 1.5 / 16)
        attended: list[Tensor] = []
        attention.o_proj.register_forward_pre_hook(lambda _, inputs: attended.append(inputs[0][-1]))

        def run() -> Tensor:
            state, x = SlotState(cfg, 1, 32, dtype), x_TD.to(dtype)
            with torch.no_grad():
                if is_decode:
                    attention(x[:T], Packing((T,)), state, torch.tensor([0]))
                    state.length_N += T
                    attention.decode(x[T:], state, state.places(torch.tensor([True])))
                else:
                    attention(x, Packing((T + 1,)), state, torch.tensor([0]))
            return state.latent_rows(0, 0, T + 1)[: T + 1, :R].double().mean(0)

        mean_latent_R = run()
        attention.kv_b_proj.attach_lora(1, 1.0, generator)
        A, B = factors(attention.kv_b_proj)
        with torch.no_grad():
            A.copy_(mean_latent_R.sign()[None])
            B.fill_(2**-12.2)
            if dtype == torch.bfloat16:
                assert torch.equal(attention.kv_b_proj.effective_weight().to(dtype), weight)
        attended.clear()
        run()
        detach_lora(model)
        with_lora = attended[-1]
        run()
        return float((with_lora.double() - attended[-1].double()).mean())

    exact = shift(torch.float64, True)
    assert exact > 1e-3
    assert shift(torch.bfloat16, False) == pytest.approx(exact, rel=0.1)
    assert shift(torch.bfloat16, True) == pytest.approx(exact, rel=0.1)


def test_an_adapter_on_the_head_moves_logits_and_is_not_rounded_to_bf16(
    cfg: K3Config, random_model: RandomModel
) -> None:
    model = bf16(random_model(cfg))
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.sign() * 1.5 / 16)
    before = logits(model)
    attached(model, "lm_head", scale=1e-5)
    with torch.no_grad():
        hidden = model(TOKENS, PACKING).hidden_TD
    A, B = factors(model.lm_head)
    assert torch.equal(model.lm_head.effective_weight().to(torch.bfloat16), model.lm_head.weight)
    expected = before + F.linear(hidden.float(), 2.0 * B @ A)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=2e-6)
    assert (logits(model) - before).abs().max() > 1e-5


def test_an_experts_branch_is_w_plus_scale_b_a(cfg: K3Config, random_model: RandomModel) -> None:
    moe, x_TD, chosen_Tk, weights_Tk = moe_with_lora(random_model(cfg))
    z_TR = moe.routed_expert_down_proj(x_TD) if moe.is_latent else x_TD
    w1, w3, w2 = (experts_matrix(moe.experts, name, 2.0) for name in ("w1", "w3", "w2"))
    expected = moe_experts(z_TR.double(), chosen_Tk, weights_Tk.double(), w1, w3, w2, situ_betas(cfg))
    torch.testing.assert_close(combined(moe, x_TD).double(), expected, rtol=0, atol=1e-5)


def test_results_of_experts_with_lora_are_weighted_and_summed_in_fp32(cfg: K3Config, random_model: RandomModel) -> None:
    """To the bit, in bf16: weighted before the down projection or summed in bf16, they round otherwise."""
    moe, x_TD, chosen_Tk, weights_Tk = moe_with_lora(bf16(random_model(cfg)))
    each = []  # results of the first and of the second expert of each token, with weight 1
    for slot in range(2):
        w1, w3, w2 = (moe.experts.matrices(name, x_TD.dtype) for name in ("w1", "w3", "w2"))
        lora = (moe.experts.lora("w1"), moe.experts.lora("w3"), moe.experts.lora("w2"))
        z_TR = moe.routed_expert_down_proj(x_TD) if moe.is_latent else x_TD
        one = torch.ones(len(x_TD), 1)
        each.append(eager_experts(z_TR, chosen_Tk[:, slot, None], one, w1, w3, w2, situ_betas(cfg), lora).float())
    assert weights_Tk.dtype == torch.float32
    expected = (each[0] * weights_Tk[:, :1]).addcmul(each[1], weights_Tk[:, 1:]).to(torch.bfloat16)
    assert torch.equal(combined(moe, x_TD), expected)


def moe_with_lora(model: K3Model) -> tuple[LatentMoE, Tensor, Tensor, Tensor]:
    """A MoE layer whose experts have adapters, inputs, and the experts and weights that its router gives them."""
    cfg = attached(model, "w1", "w2", "w3").cfg
    moe = model.layers[1].block_sparse_moe.requires_grad_(False)
    assert isinstance(moe, LatentMoE)
    torch.nn.init.zeros_(moe.shared_experts.down_proj.weight)
    x_TD = torch.randn(30, cfg.hidden_size, generator=torch.Generator().manual_seed(3)).to(moe.gate.weight.dtype)
    bias, factor = moe.gate.e_score_correction_bias, cfg.routed_scaling_factor
    return moe, x_TD, *route(moe.gate(x_TD), bias, 2, cfg.moe_renormalize, factor)


def combined(moe: LatentMoE, x_TD: Tensor) -> Tensor:
    """What the experts' sum is, before K3's norm and projection to full width."""
    seen: list[Tensor] = []
    if moe.is_latent:
        moe.routed_expert_norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    whole = moe(x_TD, None)[0]
    return seen[0] if moe.is_latent else whole


def experts_matrix(experts: Experts, name: str, scale: float) -> Tensor:
    weight, A, B = (getattr(experts, key).double() for key in (name, f"{name}_lora_A", f"{name}_lora_B"))
    return weight + scale * torch.einsum("eor,eri->eoi", B, A)


def test_k3_experts_get_factors_of_the_latent_width(k3: K3Config, random_model: RandomModel) -> None:
    """Of 3584, not 7168: an engine sized them by hidden_size."""
    assert k3.routed_expert_hidden_size is not None
    assert k3.routed_expert_hidden_size != k3.hidden_size
    tensors = named_tensors(attached(random_model(k3), "w1", "w2", "w3"))
    R, F_ = k3.routed_expert_hidden_size, k3.moe_intermediate_size
    expert = "layers.1.block_sparse_moe.experts.5"
    shapes = {
        name: (tensors[f"{expert}.{name}.lora_A"].shape, tensors[f"{expert}.{name}.lora_B"].shape)
        for name in ("w1", "w2", "w3")
    }
    assert shapes == {"w1": ((3, R), (F_, 3)), "w2": ((3, F_), (R, 3)), "w3": ((3, R), (F_, 3))}


@pytest.mark.parametrize("target", ["embed_tokens", "model.embed_tokens"])
def test_the_embedding_cannot_be_a_target(k3: K3Config, random_model: RandomModel, target: str) -> None:
    with pytest.raises(ValueError, match=r"^train\.lora_targets: embed_tokens cannot be a target: .* look-up$"):
        attach_lora(random_model(k3), LoraConfig(2, 4.0, ("q_proj", target)), torch.Generator())


def test_a_router_or_a_norm_cannot_be_a_target(k3: K3Config, random_model: RandomModel) -> None:
    with pytest.raises(ValueError, match=r"\['gate', 'norm'\] name no matrix"):
        attach_lora(random_model(k3), LoraConfig(2, 4.0, ("q_proj", "gate", "norm")), torch.Generator())


@pytest.mark.parametrize(("rank", "override"), [(0, 1), (-1, 1), (2, 0)])
def test_a_rank_below_one_is_refused(k3: K3Config, random_model: RandomModel, rank: int, override: int) -> None:
    lora = LoraConfig(rank, 4.0, ("q_proj", "w1"), (LoraOverride("w1", override, 1.0),))
    model = random_model(k3)
    with pytest.raises(ValueError, match="a rank is at least 1"):
        attach_lora(model, lora, torch.Generator())
    assert all(p.requires_grad for p in model.parameters())


def test_a_path_names_one_matrix_and_an_override_gives_it_its_own_rank_and_alpha(
    k3: K3Config, random_model: RandomModel
) -> None:
    model = random_model(k3)
    overrides = (LoraOverride("layers.1.self_attn.q_proj", 5, 2.0), LoraOverride("w2", 1, 7.0))
    attached(model, "q_proj", "layers.0.self_attn.k_proj", "shared_experts.down_proj", "w1", "w2", overrides=overrides)
    lora = {name: tuple(p.shape) for name, p in model.named_parameters() if "lora_A" in name}
    assert {name for name in lora if "k_proj" in name} == {"layers.0.self_attn.k_proj.lora_A"}
    assert all("shared_experts" in name for name in lora if "down_proj" in name)
    assert lora["layers.0.self_attn.q_proj.lora_A"][0] == 3
    assert lora["layers.1.self_attn.q_proj.lora_A"][0] == 5
    assert model.get_submodule("layers.1.self_attn.q_proj").lora_scale == 2.0 / 5
    assert model.get_submodule("layers.0.self_attn.q_proj").lora_scale == 2.0
    assert lora["layers.1.block_sparse_moe.experts.w2_lora_A"][1] == 1


def test_the_experts_matrices_are_scaled_each_by_its_own_alpha_and_rank(
    k3: K3Config, random_model: RandomModel
) -> None:
    overrides = (LoraOverride("w2", 1, 7.0), LoraOverride("w3", 2, 1.0))
    model = attached(random_model(k3).double(), "w1", "w2", "w3", overrides=overrides)
    experts = model.layers[1].block_sparse_moe.experts
    for name, scale in {"w1": 2.0, "w2": 7.0, "w3": 0.5}.items():
        assert experts.lora(name).scale == scale


def test_detached_the_model_is_the_base_again(cfg: K3Config, random_model: RandomModel) -> None:
    model = random_model(cfg)
    before, names = logits(model), set(named_tensors(model))
    attached(model, "q_proj", "kv_b_proj", "lm_head", "w1", "w2", "w3")
    assert not torch.equal(logits(model), before)
    detach_lora(model)
    assert torch.equal(logits(model), before)
    assert set(named_tensors(model)) == names


def test_every_matrix_is_found_packed_or_not(k3: K3Config) -> None:
    wide = replace(k3, moe_intermediate_size=32, routed_expert_hidden_size=64)
    with torch.device("meta"):
        plain = lora_matrices(K3Model(wide))
        packed = lora_matrices(K3Model(replace(wide, expert_quantization="mxfp4")))
    assert plain == packed
    assert plain["layers.1.block_sparse_moe.experts.w2"] == (6, 64, 32)
