"""The model in bf16: layers round at the points of docs/numerics.md, the formulas of the papers written out with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from k3core.model.config import K3Config
from k3core.model.kda import CHUNK, KimiDeltaAttention
from k3core.model.mla import MultiHeadLatentAttention
from k3core.model.model import DecoderLayer, K3Model
from k3core.model.precision import cast_model, is_fp32_kept
from k3core.model.state import SlotState
from k3kernels.packing import Packing

RandomModel = Callable[[K3Config], K3Model]
Round = Callable[[Tensor], Tensor]

T = CHUNK + 9
# docs/numerics.md, "What bf16 does to logits"
RMS_PER_LAYER = {"kimi_linear": 3 * 2**-9, "kimi_k3": 8 * 2**-9}
MAX_PER_RMS = {"kimi_linear": 10, "kimi_k3": 16}


def to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def exactly(x: Tensor) -> Tensor:
    return x


@pytest.fixture
def bf16_model(random_model: RandomModel) -> RandomModel:
    def make(cfg: K3Config) -> K3Model:
        model = random_model(cfg)
        cast_model(model, torch.bfloat16)
        return model

    return make


def layer_of(model: K3Model, index: int) -> KimiDeltaAttention | MultiHeadLatentAttention:
    layer = model.layers[index]
    assert isinstance(layer, DecoderLayer)
    return layer.self_attn


def inputs(cfg: K3Config, length: int = T) -> Tensor:
    return torch.randn(length, cfg.hidden_size, generator=torch.Generator().manual_seed(2)).bfloat16()


def linear(x: Tensor, module: nn.Module, r: Round) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return r(x @ weight.double().T)


def normed(x: Tensor, weight: Tensor, eps: float, r: Round) -> Tensor:
    return r(r(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)) * weight.double())


def assert_rounding_explains(got: Tensor, formula: Callable[[Round], Tensor]) -> None:
    """Of the distance to exact arithmetic, rounding at the formula's points leaves less than a quarter unexplained.

    What is left: sums in another order tip a rounding now and then.
    """
    assert got.dtype == torch.bfloat16
    exact, rounded = formula(exactly), formula(to_bf16)
    unexplained = (got.double() - rounded).square().mean().sqrt()
    assert unexplained < 0.25 * (rounded - exact).square().mean().sqrt()


def kda_formula(kda: KimiDeltaAttention, x_TD: Tensor, r: Round) -> Tensor:
    cfg = kda.cfg
    H, K = cfg.kda_num_heads, cfg.kda_head_dim
    num_tokens = len(x_TD)

    def projected(proj: nn.Module, conv: nn.Module) -> Tensor:
        y_TP, taps_PJ = linear(x_TD, proj, r), conv.weight.double()[:, 0]  # type: ignore[operator, index]
        padded = torch.cat([y_TP.new_zeros(3, y_TP.shape[1]), y_TP])
        y_TP = torch.stack([(padded[t : t + 4] * taps_PJ.T).sum(0) for t in range(num_tokens)])
        return r(y_TP * torch.sigmoid(y_TP)).view(num_tokens, H, K)

    def unit(x_THK: Tensor) -> Tensor:
        return r(x_THK / (x_THK.square().sum(-1, keepdim=True) + 1e-6).sqrt())

    q_THK = unit(projected(kda.q_proj, kda.q_conv1d))
    k_THK = unit(projected(kda.k_proj, kda.k_conv1d))
    v_THK = projected(kda.v_proj, kda.v_conv1d)
    z_THK = (linear(linear(x_TD, kda.f_a_proj, r), kda.f_b_proj, r) + kda.dt_bias.double()).view(num_tokens, H, K)
    a_H1 = kda.A_log.double().exp().unsqueeze(-1)
    bound = cfg.gate_lower_bound
    g_THK = -a_H1 * torch.log1p(z_THK.exp()) if bound is None else bound * torch.sigmoid(a_H1 * z_THK)
    beta_TH = torch.sigmoid(linear(x_TD, kda.b_proj, r))
    if cfg.use_full_rank_gate:
        gate_TP = linear(x_TD, kda.g_proj, r)
    else:
        gate_TP = linear(linear(x_TD, kda.g_a_proj, r), kda.g_b_proj, r)
    S_HKV, outputs = torch.zeros(H, K, K, dtype=torch.float64), []
    for t in range(num_tokens):
        S_HKV = g_THK[t].exp().unsqueeze(-1) * S_HKV
        u_HV = beta_TH[t].unsqueeze(-1) * (v_THK[t] - torch.einsum("hk,hkv->hv", k_THK[t], S_HKV))
        S_HKV = S_HKV + torch.einsum("hk,hv->hkv", k_THK[t], u_HV)
        outputs.append(torch.einsum("hk,hkv->hv", q_THK[t] * K**-0.5, S_HKV))
    o_THV = r(torch.stack(outputs))
    o_THV = o_THV * torch.rsqrt(o_THV.square().mean(-1, keepdim=True) + cfg.rms_norm_eps)
    y_THV = r(o_THV * kda.o_norm.weight.double() * torch.sigmoid(gate_TP.view(num_tokens, H, K)))
    return linear(y_THV.flatten(1), kda.o_proj, r)


def mla_formula(mla: MultiHeadLatentAttention, x_TD: Tensor, is_absorbed: bool, r: Round) -> Tensor:
    cfg = mla.cfg
    H, R, X = cfg.num_attention_heads, cfg.kv_lora_rank, cfg.qk_nope_head_dim
    num_tokens = len(x_TD)
    if cfg.q_lora_rank is None:
        q_TC = linear(x_TD, mla.q_proj, r)
    else:
        q_TC = linear(x_TD, mla.q_a_proj, r)
        q_TC = linear(normed(q_TC, mla.q_a_layernorm.weight, cfg.latent_norm_eps, r), mla.q_b_proj, r)
    q_THX = q_TC.view(num_tokens, H, -1)
    ckv_TC = linear(x_TD, mla.kv_a_proj_with_mqa, r)
    c_TR = normed(ckv_TC[:, :R], mla.kv_a_layernorm.weight, cfg.latent_norm_eps, r)
    kv_THX = linear(c_TR, mla.kv_b_proj, exactly if is_absorbed else r).view(num_tokens, H, -1)
    k_THX = torch.cat([kv_THX[..., :X], ckv_TC[:, None, R:].expand(-1, H, -1)], -1)
    scores_HTS = torch.einsum("thx,shx->hts", q_THX, k_THX) * mla.qk_head_dim**-0.5
    scores_HTS = scores_HTS.masked_fill(torch.ones(num_tokens, num_tokens).triu(1).bool(), float("-inf"))
    o_TP = r(torch.einsum("hts,shv->thv", r(torch.softmax(scores_HTS, -1)), kv_THX[..., X:])).flatten(1)
    if cfg.mla_use_output_gate:
        o_TP = r(o_TP * r(torch.sigmoid(linear(x_TD, mla.g_proj, r))))
    return linear(o_TP, mla.o_proj, r)


@torch.no_grad()
def test_a_kda_layer_rounds_where_the_rounding_model_says(cfg: K3Config, bf16_model: RandomModel) -> None:
    kda = layer_of(bf16_model(cfg), 0)
    assert isinstance(kda, KimiDeltaAttention)
    x_TD = inputs(cfg)
    assert_rounding_explains(kda(x_TD, Packing((T,)), None, None), lambda r: kda_formula(kda, x_TD.double(), r))


@torch.no_grad()
def test_a_kda_layer_rounds_alike_in_prefill_and_decode(cfg: K3Config, bf16_model: RandomModel) -> None:
    kda = layer_of(bf16_model(cfg), 0)
    x_TD, state = inputs(cfg), SlotState(cfg, 1, T, torch.bfloat16)
    cut, is_active_N = T // 2, torch.tensor([True])
    pieces = [kda(x_TD[:cut], Packing((cut,)), state, torch.tensor([0]))]
    for t in range(cut, T):  # the model moves the length, once for all layers
        state.length_N[0] = t
        pieces.append(kda.decode(x_TD[t : t + 1], state, state.places(is_active_N)))
    assert_rounding_explains(torch.cat(pieces), lambda r: kda_formula(kda, x_TD.double(), r))


@torch.no_grad()
def test_an_mla_layer_rounds_where_the_rounding_model_says(cfg: K3Config, bf16_model: RandomModel) -> None:
    mla = layer_of(bf16_model(cfg), 2)
    assert isinstance(mla, MultiHeadLatentAttention)
    x_TD, state = inputs(cfg), SlotState(cfg, 1, T, torch.bfloat16)
    over_history = mla(x_TD, Packing((T,)), state, torch.tensor([0]))
    assert_rounding_explains(over_history, lambda r: mla_formula(mla, x_TD.double(), True, r))
    assert torch.equal(mla(x_TD, Packing((T,)), None, None), over_history)


@torch.no_grad()
def test_an_mla_layer_decodes_without_rounding_each_heads_keys_and_values(
    cfg: K3Config, bf16_model: RandomModel
) -> None:
    mla = layer_of(bf16_model(cfg), 2)
    assert isinstance(mla, MultiHeadLatentAttention)
    x_TD, state = inputs(cfg), SlotState(cfg, 1, T, torch.bfloat16)
    rows = []
    for t in range(T):
        rows.append(mla.decode(x_TD[t : t + 1], state, state.places(torch.tensor([True]))))
        state.length_N += 1
    assert_rounding_explains(torch.cat(rows), lambda r: mla_formula(mla, x_TD.double(), True, r))


@torch.no_grad()
@pytest.mark.parametrize("num_layers", [4, 16])
def test_logits_in_bf16_stay_within_the_bound_of_fp32(
    cfg: K3Config, num_layers: int, random_model: RandomModel
) -> None:
    """At equal routes and equal weights. A quarter of the bound is exceeded: it is rounding that is measured."""
    full = tuple(range(4, num_layers + 1, 4))
    cfg = replace(cfg, num_hidden_layers=num_layers, full_attn_layers=full, hidden_size=64, kda_head_dim=16)
    if cfg.attn_res_block_size is not None:
        cfg = replace(cfg, attn_res_block_size=num_layers // 4)
    lengths = (40, 1, 25, 30)
    tokens_T = torch.randint(cfg.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    model = random_model(cfg)
    for name, p in model.named_parameters():
        p.data = p if is_fp32_kept(name) else p.bfloat16().float()
    exact = model(tokens_T, Packing(lengths))
    want_TV = model.logits(exact.hidden_TD)
    cast_model(model, torch.bfloat16)
    got_TV = model.logits(model(tokens_T, Packing(lengths), exact.routed_experts_TLk).hidden_TD)
    assert got_TV.dtype == torch.float32
    delta_TV = (got_TV - want_TV) / want_TV.std()
    rms, bound = delta_TV.square().mean().sqrt(), RMS_PER_LAYER[cfg.family] * num_layers**0.5
    assert 0.25 * bound < rms < bound
    assert delta_TV.abs().max() < MAX_PER_RMS[cfg.family] * bound


def test_gradients_in_bf16_follow_those_of_fp32_and_fp32_parameters_get_fp32_ones(
    cfg: K3Config, random_model: RandomModel
) -> None:
    lengths = (40, 1, 25, 30)
    tokens_T = torch.randint(cfg.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    model, replay_TLk = random_model(cfg), None
    for name, p in model.named_parameters():
        p.data = p.data if is_fp32_kept(name) else p.data.bfloat16().float()
    gradients: list[dict[str, Tensor]] = []
    for dtype in (torch.float32, torch.bfloat16):
        cast_model(model, dtype)
        model.zero_grad(set_to_none=True)
        forward = model(tokens_T, Packing(lengths), replay_TLk)
        replay_TLk = forward.routed_experts_TLk
        logprobs_TV = torch.log_softmax(model.logits(forward.hidden_TD), -1)
        logprobs_TV[:-1].gather(1, tokens_T[1:, None]).mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    exact, got = gradients
    assert got.keys() == exact.keys()
    for name, gradient in got.items():
        assert gradient.dtype == (torch.float32 if is_fp32_kept(name) else torch.bfloat16), name
        distance = (gradient.float() - exact[name].float()).norm() / exact[name].norm()
        assert distance < 0.15, name
    assert {"A_log", "dt_bias"} <= {name.rsplit(".")[-1] for name in got}
