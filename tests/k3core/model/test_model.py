"""The decoder against the formulas of its papers, written out here as plain loops in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from k3core.model import model as model_module
from k3core.model.config import K3Config
from k3core.model.kda import CHUNK, KimiDeltaAttention
from k3core.model.layers import MLP, RMSNorm
from k3core.model.lora import LoraConfig, attach_lora
from k3core.model.mla import MultiHeadLatentAttention
from k3core.model.model import ROWS, DecoderLayer, K3Model, ResidualProj, build_model
from k3core.model.moe import LatentMoE, Router
from k3core.model.presets import PRESETS
from k3kernels.linear_logprob import eager, wide
from k3kernels.mxfp4 import unpack
from k3kernels.packing import Packing

RandomModel = Callable[[K3Config], K3Model]


def tokens(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(61, (length,), generator=generator) for length in lengths]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def of(name: str) -> Callable[[str], str]:
    return lambda message: f"{name}: {message}"


def layers_of(model: K3Model) -> list[DecoderLayer]:
    return [layer for layer in model.layers if isinstance(layer, DecoderLayer)]


def mlp_of(layer: DecoderLayer, x_TD: Tensor) -> Tensor:
    if hasattr(layer, "mlp"):
        return layer.mlp(x_TD)
    return layer.block_sparse_moe(x_TD, None)[0]


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


# Sequences


def test_packed_sequences_equal_each_one_alone_in_logits_and_all_gradients(
    cfg: K3Config, random_model: RandomModel
) -> None:
    model = random_model(cfg).double()
    sequences = tokens(1, CHUNK + 1, 5, CHUNK)
    weight_TV = randn(sum(map(len, sequences)), cfg.vocab_size)

    def logits_and_gradients(groups: list[list[Tensor]]) -> tuple[Tensor, list[Tensor | None]]:
        model.zero_grad()
        pieces = []
        for group in groups:
            hidden_TD = model(torch.cat(group), Packing(tuple(map(len, group)))).hidden_TD
            pieces.append(model.logits(hidden_TD))
        logits_TV = torch.cat(pieces)
        (logits_TV * weight_TV).sum().backward()
        return logits_TV.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    together, together_grads = logits_and_gradients([sequences])
    alone, alone_grads = logits_and_gradients([[sequence] for sequence in sequences])
    assert_close(together, alone)
    for (name, _), got, want in zip(model.named_parameters(), together_grads, alone_grads, strict=True):
        assert (got is None) == (want is None), name
        if got is not None and want is not None:
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9, msg=of(name))


def test_a_token_changes_nothing_before_it(cfg: K3Config, random_model: RandomModel) -> None:
    model = random_model(cfg).double()
    (tokens_T,) = tokens(CHUNK + 9)
    other_T = tokens_T.clone()
    other_T[CHUNK + 2] = (other_T[CHUNK + 2] + 1) % cfg.vocab_size
    a_TD, b_TD = (model(t, Packing((len(t),))).hidden_TD for t in (tokens_T, other_T))
    assert_close(a_TD[: CHUNK + 2], b_TD[: CHUNK + 2])
    assert ((a_TD - b_TD).abs().amax(-1) > 1e-4)[CHUNK + 2 :].all()


def test_gradients_flow_to_every_parameter(cfg: K3Config, random_model: RandomModel) -> None:
    model = random_model(cfg)
    sequences = tokens(40, 40)
    model(torch.cat(sequences), Packing((40, 40))).hidden_TD.square().sum().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0}
    identity_read = {f"layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
    assert without - {"lm_head.weight"} == (identity_read if cfg.attn_res_block_size else set())


def test_an_unknown_activation_is_refused(k3: K3Config, random_model: RandomModel) -> None:
    model = random_model(replace(k3, hidden_act="gelu"))
    with pytest.raises(ValueError, match=r"model\.hidden_act: 'gelu'"):
        model(tokens(3)[0], Packing((3,)))


def test_logits_are_computed_in_the_next_wider_type(k3: K3Config, random_model: RandomModel) -> None:
    model = random_model(k3)
    hidden_TD = randn(2, k3.hidden_size)
    want_TV = hidden_TD.float().double() @ model.lm_head.weight.double().T
    assert_close(model.logits(hidden_TD.float()), want_TV)
    assert model.bfloat16().logits(hidden_TD.bfloat16()).dtype == torch.float32


# Residual stream


def mix(rows: list[Tensor], norm: RMSNorm, proj: ResidualProj, eps: float) -> Tensor:
    mixed = []
    for t in range(rows[0].shape[0]):
        row_RD = torch.stack([row[t] for row in rows])
        score_R = torch.stack(
            [(row / (row.square().mean() + eps).sqrt()) @ (norm.weight * proj.weight[0]) for row in row_RD]
        )
        mixed.append(torch.softmax(score_R, 0) @ row_RD)
    return torch.stack(mixed)


def test_attention_residuals_follow_the_order_of_the_papers_loop(k3: K3Config, random_model: RandomModel) -> None:
    model, eps = random_model(k3).double(), k3.rms_norm_eps
    (tokens_T,), packing = tokens(7), Packing((7,))
    prefix: Tensor | None = model.embed_tokens(tokens_T)
    bank: list[Tensor] = []
    for i, layer in enumerate(layers_of(model)):
        assert prefix is not None
        read = (layer.self_attention_res_norm, layer.self_attention_res_proj)
        a_in = mix([*bank, prefix], *read, eps) if bank else prefix
        if i % 2 == 0:
            bank.append(prefix)
            prefix = None
        a = layer.self_attn(layer.input_layernorm(a_in), packing, None, None)
        prefix = a if prefix is None else prefix + a
        m_in = mix([*bank, prefix], layer.mlp_res_norm, layer.mlp_res_proj, eps)
        prefix = prefix + mlp_of(layer, layer.post_attention_layernorm(m_in))
    assert prefix is not None
    final = mix([*bank, prefix], model.output_attn_res_norm, model.output_attn_res_proj, eps)
    assert_close(model(tokens_T, packing).hidden_TD, model.norm(final))


def test_bank_row_0_is_the_embedding_and_each_other_row_the_sum_of_a_blocks_sublayers(
    k3: K3Config, random_model: RandomModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(k3).double()
    reads: list[list[Tensor]] = []
    outputs: list[Tensor] = []

    def record_read(rows: list[Tensor], reader: tuple[RMSNorm, ResidualProj] | None, next_norm: RMSNorm) -> Tensor:
        if reader is not None:
            reads.append(rows)
        return K3Model._read(model, rows, reader, next_norm)

    def record_output(_module: object, _inputs: object, output: Tensor | tuple[Tensor, Tensor]) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    monkeypatch.setattr(model, "_read", record_read)
    for layer in layers_of(model):
        layer.self_attn.register_forward_hook(record_output)
        (layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp).register_forward_hook(
            record_output
        )
    (tokens_T,) = tokens(ROWS)
    model(tokens_T, Packing((ROWS,)))

    assert [len(rows) for rows in reads] == [2, 2, 2, 2, 3, 3, 3, 3, 4, 4]  # mlp 0, then attn and mlp 1..4, output
    rows = reads[-1]
    assert_close(rows[0], model.embed_tokens(tokens_T))
    for row, block in zip(rows[1:], (outputs[0:4], outputs[4:8], outputs[8:10]), strict=True):
        assert_close(row, torch.stack(block).sum(0))


def test_the_first_attention_read_is_the_identity_and_gets_no_gradient(k3: K3Config, random_model: RandomModel) -> None:
    model = random_model(k3)
    model(tokens(5)[0], Packing((5,))).hidden_TD.sum().backward()
    first, second, *_ = layers_of(model)
    assert first.self_attention_res_norm.weight.grad is None
    assert first.self_attention_res_proj.weight.grad is None
    assert second.self_attention_res_proj.weight.grad is not None


def test_without_a_block_size_residuals_are_ordinary(kimi_linear: K3Config, random_model: RandomModel) -> None:
    model = random_model(kimi_linear).double()
    (tokens_T,), packing = tokens(9), Packing((9,))
    x_TD = model.embed_tokens(tokens_T)
    for layer in layers_of(model):
        x_TD = x_TD + layer.self_attn(layer.input_layernorm(x_TD), packing, None, None)
        x_TD = x_TD + mlp_of(layer, layer.post_attention_layernorm(x_TD))
    assert_close(model(tokens_T, packing).hidden_TD, model.norm(x_TD))


# Sublayers


def activation(cfg: K3Config, gate: Tensor, up: Tensor) -> Tensor:
    if cfg.hidden_act == "silu":
        return gate * torch.sigmoid(gate) * up
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)


def mlp(cfg: K3Config, module: MLP, x: Tensor) -> Tensor:
    gate, up = module.gate_proj.weight @ x, module.up_proj.weight @ x
    return module.down_proj.weight @ activation(cfg, gate, up)


def expert(cfg: K3Config, moe: LatentMoE, e: int, z: Tensor) -> Tensor:
    return moe.experts.w2[e] @ activation(cfg, moe.experts.w1[e] @ z, moe.experts.w3[e] @ z)


def chosen(cfg: K3Config, moe: LatentMoE, x: Tensor) -> tuple[list[int], Tensor]:
    p = torch.sigmoid(moe.gate.weight @ x)
    experts = torch.topk(p + moe.gate.e_score_correction_bias, cfg.num_experts_per_token).indices.tolist()
    return experts, p[experts] / p[experts].sum() * cfg.routed_scaling_factor


def test_a_moe_layer_is_the_weighted_experts_in_latent_space_and_the_shared_ones_at_full_width(
    cfg: K3Config, random_model: RandomModel
) -> None:
    moe = layers_of(random_model(cfg).double())[1].block_sparse_moe
    x_TD = randn(24, cfg.hidden_size)
    got_TD, experts_Tk = moe(x_TD, None)
    for x, got, experts_k in zip(x_TD, got_TD, experts_Tk, strict=True):
        experts, weights = chosen(cfg, moe, x)
        z = moe.routed_expert_down_proj.weight @ x if cfg.routed_expert_hidden_size else x
        routed = sum((w * expert(cfg, moe, e, z) for e, w in zip(experts, weights, strict=True)), torch.zeros_like(z))
        if cfg.routed_expert_hidden_size:
            routed = moe.routed_expert_up_proj.weight @ normed(routed, moe.routed_expert_norm.weight, cfg.rms_norm_eps)
        assert_close(got, routed + mlp(cfg, moe.shared_experts, x))
        assert experts_k.tolist() == experts


def test_the_latent_norm_sees_the_combined_experts_and_not_each_one(k3: K3Config, random_model: RandomModel) -> None:
    moe = layers_of(random_model(k3).double())[1].block_sparse_moe
    x = randn(k3.hidden_size)
    experts, weights = chosen(k3, moe, x)
    z = moe.routed_expert_down_proj.weight @ x
    parts = [w * expert(k3, moe, e, z) for e, w in zip(experts, weights, strict=True)]
    eps, norm = k3.rms_norm_eps, moe.routed_expert_norm.weight
    after = normed(torch.stack(parts).sum(0), norm, eps)
    before = torch.stack([normed(part, norm, eps) for part in parts]).sum(0)
    got = moe(x.unsqueeze(0), None)[0][0] - mlp(k3, moe.shared_experts, x)
    assert_close(got, moe.routed_expert_up_proj.weight @ after)
    assert (got - moe.routed_expert_up_proj.weight @ before).abs().max() > 0.1


def test_the_router_scores_in_fp32(k3: K3Config) -> None:
    router = Router(k3)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(3))
    router.bfloat16()
    x_TD = randn(50, k3.hidden_size).bfloat16()
    logits_TE = router(x_TD)
    assert logits_TE.dtype == torch.float32
    exact_TE = x_TD.double() @ router.weight.double().T
    assert (logits_TE - exact_TE).abs().max() < 1e-5
    assert (F.linear(x_TD, router.weight) - exact_TE).abs().max() > 1e-3


def test_replayed_routes_change_the_forward_pass_from_their_token_on(cfg: K3Config, random_model: RandomModel) -> None:
    model = random_model(cfg).double()
    (tokens_T,), packing = tokens(12), Packing((12,))
    own = model(tokens_T, packing)
    assert torch.equal(model(tokens_T, packing, own.routed_experts_TLk).hidden_TD, own.hidden_TD)

    replay_TLk = own.routed_experts_TLk.clone()
    replay_TLk[7] = (replay_TLk[7] + 1) % cfg.num_experts
    replayed = model(tokens_T, packing, replay_TLk)
    assert torch.equal(replayed.routed_experts_TLk, replay_TLk)
    differs_T = (replayed.hidden_TD - own.hidden_TD).abs().amax(-1) > 1e-6
    assert differs_T.tolist() == [False] * 7 + [True] * 5

    replay_TLk[7] = -1  # not recorded: chooses for itself
    assert torch.equal(model(tokens_T, packing, replay_TLk).hidden_TD, own.hidden_TD)


def test_mla_is_causal_softmax_attention_over_unrotated_keys_with_a_gate(
    cfg: K3Config, random_model: RandomModel
) -> None:
    mla = layers_of(random_model(cfg).double())[2].self_attn
    assert isinstance(mla, MultiHeadLatentAttention)
    T, H, R, X, P = 9, cfg.num_attention_heads, cfg.kv_lora_rank, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
    x_TD = randn(T, cfg.hidden_size)
    if cfg.q_lora_rank is None:
        q_TC = x_TD @ mla.q_proj.weight.T
    else:
        q_TC = normed(x_TD @ mla.q_a_proj.weight.T, mla.q_a_layernorm.weight, 1e-6) @ mla.q_b_proj.weight.T
    ckv_TC = x_TD @ mla.kv_a_proj_with_mqa.weight.T
    kv_TC = normed(ckv_TC[:, :R], mla.kv_a_layernorm.weight, 1e-6) @ mla.kv_b_proj.weight.T
    q_THX, kv_THX = q_TC.view(T, H, X + P), kv_TC.view(T, H, X + cfg.v_head_dim)
    out_THV = torch.zeros(T, H, cfg.v_head_dim, dtype=torch.float64)
    for t in range(T):
        for h in range(H):
            keys = torch.cat([kv_THX[: t + 1, h, :X], ckv_TC[: t + 1, R:]], -1)
            out_THV[t, h] = torch.softmax(keys @ q_THX[t, h] * (X + P) ** -0.5, 0) @ kv_THX[: t + 1, h, X:]
    out_TC = out_THV.flatten(1)
    if cfg.mla_use_output_gate:
        out_TC = out_TC * torch.sigmoid(x_TD @ mla.g_proj.weight.T)
    assert_close(mla(x_TD, Packing((T,)), None, None), out_TC @ mla.o_proj.weight.T)


def test_a_kda_layer_is_the_papers_recurrence_token_by_token(cfg: K3Config, random_model: RandomModel) -> None:
    kda = layers_of(random_model(cfg).double())[0].self_attn
    assert isinstance(kda, KimiDeltaAttention)
    T, H, K = CHUNK + 3, cfg.kda_num_heads, cfg.kda_head_dim
    x_TD = randn(T, cfg.hidden_size)

    def projected(linear: Tensor, conv: Tensor) -> Tensor:
        y_TP = x_TD @ linear.T
        padded = torch.cat([y_TP.new_zeros(3, y_TP.shape[1]), y_TP])
        y_TP = torch.stack([(padded[t : t + 4] * conv[:, 0].T).sum(0) for t in range(T)])
        return (y_TP * torch.sigmoid(y_TP)).view(T, H, K)

    q_THK = projected(kda.q_proj.weight, kda.q_conv1d.weight)
    k_THK = projected(kda.k_proj.weight, kda.k_conv1d.weight)
    v_THK = projected(kda.v_proj.weight, kda.v_conv1d.weight)
    z_THK = (x_TD @ kda.f_a_proj.weight.T @ kda.f_b_proj.weight.T + kda.dt_bias).view(T, H, K)
    a_H1 = kda.A_log.exp().unsqueeze(-1)
    softplus_THK, bounded_THK = -a_H1 * torch.log1p(z_THK.exp()), -5 / (1 + torch.exp(-a_H1 * z_THK))
    g_THK = softplus_THK if cfg.gate_lower_bound is None else bounded_THK
    beta_TH = torch.sigmoid(x_TD @ kda.b_proj.weight.T)
    if cfg.use_full_rank_gate:
        gate_THK = (x_TD @ kda.g_proj.weight.T).view(T, H, K)
    else:
        gate_THK = (x_TD @ kda.g_a_proj.weight.T @ kda.g_b_proj.weight.T).view(T, H, K)
    out_THK = torch.zeros(T, H, K, dtype=torch.float64)
    for h in range(H):
        S_KV = torch.zeros(K, K, dtype=torch.float64)
        for t in range(T):
            q, k = (x[t, h] / (x[t, h].square().sum() + 1e-6).sqrt() for x in (q_THK, k_THK))
            S_KV = g_THK[t, h].exp()[:, None] * S_KV
            S_KV = S_KV + torch.outer(k, beta_TH[t, h] * (v_THK[t, h] - S_KV.T @ k))
            out_THK[t, h] = S_KV.T @ (q * K**-0.5)
    out_THK = normed(out_THK, kda.o_norm.weight, cfg.rms_norm_eps) * torch.sigmoid(gate_THK)
    assert_close(kda(x_TD, Packing((T,)), None, None), out_THK.flatten(1) @ kda.o_proj.weight.T)


# Construction


def test_a_model_is_made_in_its_own_type_but_for_what_keeps_fp32(cfg: K3Config) -> None:
    kept = {
        torch.bfloat16: torch.float32,
        torch.float16: torch.float32,
        torch.float32: torch.float32,
        torch.float64: torch.float64,
    }
    names = ("A_log", "dt_bias", "conv1d.weight", "e_score_correction_bias", "o_norm.weight")
    for dtype, at_least_fp32 in kept.items():
        tensors = build_model(cfg, dtype).state_dict()
        assert {name.endswith(names) for name in tensors} == {True, False}
        for name, tensor in tensors.items():
            assert tensor.dtype == (at_least_fp32 if name.endswith(names) else dtype), name


def test_a_model_is_allocated_once_and_on_the_meta_device_not_at_all(k3: K3Config, allocations: Any) -> None:
    with allocations:
        model = build_model(k3, torch.bfloat16)
    assert allocations.peak_bytes == sum(tensor.nbytes for tensor in model.state_dict().values())
    largest = build_model(PRESETS["kimi-k3"], torch.bfloat16, "meta")
    assert {tensor.device.type for tensor in largest.state_dict().values()} == {"meta"}


def test_a_type_that_is_no_floating_point_type_is_refused(k3: K3Config) -> None:
    with pytest.raises(ValueError, match=r"must be a floating point type, got torch\.int8"):
        build_model(k3, torch.int8)


def deep(preset: str, dtype: torch.dtype, quantization: str | None = None) -> K3Model:
    """All layers of a released model in their order, at a width that a test can afford."""
    released = PRESETS[preset]
    small = dict.fromkeys(("num_attention_heads", "kda_num_heads"), 2) | dict.fromkeys(
        ("kda_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16
    )
    cfg = replace(
        released,
        vocab_size=256,
        hidden_size=128,
        kv_lora_rank=32,
        q_lora_rank=released.q_lora_rank and 48,
        intermediate_size=192,
        num_experts=24,
        moe_intermediate_size=64,
        routed_expert_hidden_size=released.routed_expert_hidden_size and 96,
        expert_quantization=quantization,
        **small,
    )
    model = build_model(cfg, dtype)
    for tensor in model.state_dict().values():  # whatever memory held before
        tensor.fill_(255 if tensor.dtype == torch.uint8 else float("nan"))
    model.init_weights(torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize(
    ("preset", "quantization"), [("kimi-linear-48b-a3b", None), ("kimi-k3", None), ("kimi-k3", "mxfp4")]
)
def test_random_weights_of_all_layers_neither_blow_up_nor_die_out_in_bf16(
    preset: str, quantization: str | None
) -> None:
    model = deep(preset, torch.bfloat16, quantization)
    tokens_T = torch.randint(256, (40,), generator=torch.Generator().manual_seed(1))
    residuals: list[float] = []
    for layer in layers_of(model):
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _, inputs: residuals.append(inputs[0].float().square().mean().sqrt().item())
        )
    with torch.no_grad():
        forward = model(tokens_T, Packing((40,)))
        logits_TV = model.logits(forward.hidden_TD)
    assert len(residuals) == model.cfg.num_hidden_layers
    assert min(residuals) > 0.02
    assert max(residuals) < 5
    assert 0.5 < logits_TV.std() < 2
    assert forward.routed_experts_TLk.unique().numel() == model.cfg.num_experts


def test_random_packed_experts_have_the_spread_of_random_plain_ones() -> None:
    packed, plain = (deep("kimi-k3", torch.float32, q).state_dict() for q in ("mxfp4", None))
    for name in ("w1", "w2", "w3"):
        path = f"layers.1.block_sparse_moe.experts.{name}"
        values = unpack(packed[f"{path}_packed"], packed[f"{path}_scale"], torch.float32)
        assert values.shape == plain[path].shape
        assert 0.7 < values.std() / plain[path].std() < 1.42  # scales are powers of two
        assert len(values.unique()) == 15


def test_random_weights_are_the_same_whatever_the_storage_held(k3: K3Config) -> None:
    made = K3Model(k3), build_model(k3)
    for tensor in made[1].state_dict().values():
        tensor.fill_(float("nan"))
    for model in made:
        model.init_weights(torch.Generator().manual_seed(5))
    a, b = (model.state_dict() for model in made)
    assert all(torch.equal(a[name], b[name]) for name in a)


# The head in blocks


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 61 words is large then: 7 of them are converted at a time, and 3 rows at a time make logits."""
    for module in (model_module, wide):
        monkeypatch.setattr(module, "MAX_WEIGHT", 7 * 20)
    for module in (model_module, eager):
        monkeypatch.setattr(module, "MAX_LOGITS", 21)


@pytest.mark.parametrize("has_adapter", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_large_head_gives_the_logits_logprobs_and_gradients_of_a_small_one(
    k3: K3Config, monkeypatch: pytest.MonkeyPatch, small_blocks: None, dtype: torch.dtype, has_adapter: bool
) -> None:
    del small_blocks
    model = build_model(k3, dtype)
    model.init_weights(torch.Generator().manual_seed(0))
    if has_adapter:
        attach_lora(model, LoraConfig(2, 6.0, ("lm_head",)), torch.Generator().manual_seed(1))
        assert model.lm_head.lora_B is not None
        torch.nn.init.normal_(model.lm_head.lora_B, std=0.5, generator=torch.Generator().manual_seed(2))
    hidden_TD = randn(9, k3.hidden_size).to(dtype).requires_grad_()
    tokens_T = torch.arange(9) * 7 % 61
    trained = [p for p in model.lm_head.parameters() if p.requires_grad]

    def computed() -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        logprobs_T = model.logprobs(hidden_TD, tokens_T, 0.8)
        gradients = torch.autograd.grad((logprobs_T * torch.arange(9)).sum(), [hidden_TD, *trained])
        return model.logits(hidden_TD).detach(), logprobs_T.detach(), gradients

    logits_TV, logprobs_T, gradients = computed()
    monkeypatch.undo()
    whole_logits_TV, whole_logprobs_T, whole_gradients = computed()
    assert logits_TV.dtype == whole_logits_TV.dtype
    torch.testing.assert_close(logits_TV, whole_logits_TV, rtol=0, atol=1e-6)
    torch.testing.assert_close(logprobs_T, whole_logprobs_T, rtol=0, atol=1e-6)
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    for a, b in zip(gradients, whole_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_a_large_heads_adapter_is_never_multiplied_out(
    k3: K3Config, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    del small_blocks
    model = build_model(k3)
    model.init_weights(torch.Generator().manual_seed(0))
    attach_lora(model, LoraConfig(2, 6.0, ("lm_head",)), torch.Generator().manual_seed(1))

    def multiplied_out() -> Tensor:
        raise AssertionError("W + B A")

    monkeypatch.setattr(model.lm_head, "effective_weight", multiplied_out)
    hidden_TD = randn(9, k3.hidden_size).float()
    model.logits(hidden_TD)
    model.logprobs(hidden_TD, torch.arange(9), 1.0)
