"""transformers' KimiLinearForCausalLM as the judge: the same checkpoint, read by both, gives the same logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k3core.checkpoint.hf import load_model, save_checkpoint
from k3core.model.config import K3Config
from k3core.model.model import K3Model
from k3core.model.state import SlotState
from k3core.model.weights import named_tensors
from k3kernels.packing import Packing

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

Judge = Any  # a KimiLinearForCausalLM

FP32_ATOL = 1e-5  # of logits whose standard deviation is 1: some 80 ulps, after 5 layers summed in other orders
# docs/numerics.md, "What bf16 does to logits": rms of the difference to fp32, in standard deviations of the logits.
BF16_RMS_PER_LAYER = 3 * 2**-9
BF16_MAX_PER_RMS = 10
KEPT = ("A_log", "dt_bias", "conv1d.weight", "e_score_correction_bias", "o_norm.weight")
LENGTHS = (1, 37, 80, 16, 3)


def document(**changes: Any) -> dict[str, Any]:
    """A config.json of the released form; layers are counted from 1."""
    layers, full = changes.pop("num_hidden_layers", 4), changes.pop("full_attn_layers", [3, 4])
    linear = {
        "full_attn_layers": full,
        "kda_layers": [layer for layer in range(1, layers + 1) if layer not in full],
        "num_heads": changes.pop("kda_num_heads", 3),
        "head_dim": changes.pop("kda_head_dim", 16),
        "short_conv_kernel_size": 4,
    }
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "torch_dtype": "bfloat16",
        "vocab_size": 300,
        "hidden_size": 64,
        "head_dim": 16,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
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
        "num_nextn_predict_layers": 0,
        "linear_attn_config": linear,
        "tie_word_embeddings": False,
        "model_max_length": 4096,
        "rope_theta": 10000.0,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "pad_token_id": 267,
        "use_cache": True,
    } | changes


SHAPES: dict[str, dict[str, Any]] = {
    "last two layers full": document(),
    "wide heads, two shared experts": document(
        num_hidden_layers=5,
        full_attn_layers=[4, 5],
        kda_num_heads=2,
        kda_head_dim=32,
        num_shared_experts=2,
        num_experts=6,
        num_experts_per_token=3,
        v_head_dim=20,
        rms_norm_eps=1e-4,  # kv_a_layernorm and q_a_layernorm keep theirs
    ),
    "full first, low rank queries, no renormalisation": document(
        full_attn_layers=[1, 4],
        q_lora_rank=24,
        num_attention_heads=2,
        num_key_value_heads=2,
        moe_renormalize=False,
        routed_scaling_factor=1.0,
        rms_norm_eps=1e-4,
    ),
}


@torch.no_grad()
def randomise(judge: Judge, decided_routes: bool = False) -> None:
    """Every weight, well scaled. decided_routes: selection biases so far apart that rounding changes no choice."""
    generator = torch.Generator().manual_seed(0)
    for name, p in [*judge.named_parameters(), *judge.named_buffers()]:
        if name.endswith("norm.weight"):
            p.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("dt_bias"):
            p.normal_(-4.0, 1.0, generator=generator)
        elif name.endswith("A_log"):
            p.normal_(0.0, 0.5, generator=generator)
        elif name.endswith("e_score_correction_bias"):
            p.normal_(0.0, 0.2, generator=generator)
            if decided_routes:
                p.copy_(2.0 * torch.randperm(len(p), generator=generator))
        elif name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
            p.normal_(0.0, 0.3 * p.shape[-1] ** -0.5, generator=generator)
        else:
            p.normal_(0.0, 1.0 if "embed" in name else p.shape[-1] ** -0.5, generator=generator)


def build_judge(folder: Path, config: dict[str, Any]) -> Judge:
    (folder / "config.json").write_text(json.dumps(config))
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32
    ).eval()


def read_judge(folder: Path, dtype: torch.dtype) -> Judge:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Judge, K3Model]:
    """A folder that transformers wrote, the model it wrote, and ours, read from there."""
    folder = tmp_path_factory.mktemp("checkpoint")
    judge = build_judge(folder, SHAPES[request.param])
    randomise(judge)
    judge.save_pretrained(folder)
    return folder, judge, load_model(folder, torch.float32)


def sequences(vocab_size: int, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


# Ours


@torch.no_grad()
def prefill(model: K3Model, pieces: Sequence[Tensor], state: SlotState | None = None) -> list[Tensor]:
    """Logits of packed sequences; with a state, sequence n goes on from slot n."""
    slots_N = None if state is None else torch.arange(len(pieces))
    forward = model(torch.cat(list(pieces)), Packing(tuple(map(len, pieces))), None, state, slots_N)
    return list(model.logits(forward.hidden_TD).split([len(piece) for piece in pieces]))


@torch.no_grad()
def decode(model: K3Model, rows: Sequence[Tensor], state: SlotState) -> list[Tensor]:
    """Logits of each row of tokens, fed one by one, all rows together; those that have ended wait."""
    parts: list[list[Tensor]] = [[] for _ in rows]
    for t in range(max(map(len, rows))):
        is_active_N = torch.tensor([t < len(row) for row in rows])
        tokens_N = torch.stack([row[min(t, len(row) - 1)] for row in rows])
        logits_NV = model.logits(model.decode(tokens_N, state, is_active_N).hidden_TD)
        for n in is_active_N.nonzero().flatten().tolist():
            parts[n].append(logits_NV[n])
    return [torch.stack(part) for part in parts]


def prefill_and_decode(
    model: K3Model, rows: Sequence[Tensor], cuts: Sequence[int], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Prefill to each cut, decode 5 tokens, prefill 3 more, decode the rest."""
    state = SlotState(model.cfg, len(rows), max(map(len, rows)), dtype)
    parts = [prefill(model, [row[:cut] for row, cut in zip(rows, cuts, strict=True)], state)]
    for feed, start, end in ((decode, 0, 5), (prefill, 5, 8), (decode, 8, None)):
        pieces = [row[cut:][start:end] for row, cut in zip(rows, cuts, strict=True)]
        parts.append(feed(model, pieces, state))
    return [torch.cat(of_one) for of_one in zip(*parts, strict=True)]


# The judge


@torch.no_grad()
def judged(judge: Judge, rows: Sequence[Tensor]) -> list[Tensor]:
    """Each sequence alone, without a cache."""
    return [judge(input_ids=row[None]).logits[0] for row in rows]


@torch.no_grad()
def judged_with_cache(judge: Judge, rows: Sequence[Tensor], cuts: Sequence[int]) -> list[Tensor]:
    """Each sequence alone through a DynamicCache: its first tokens at once, the others one by one."""
    results = []
    for row, cut in zip(rows, cuts, strict=True):
        cache = transformers.DynamicCache(config=judge.config)
        parts = []
        for piece in ([row[:cut]] if cut else []) + list(row[cut:].split(1)):
            out = judge(input_ids=piece[None], cache=cache, use_cache=True)
            parts.append(out.logits[0])
            cache = out.cache
        results.append(torch.cat(parts))
    return results


def assert_equal_logits(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    apart = max(float((a.double() - b.double()).abs().max()) for a, b in zip(got, want, strict=True))
    print(f"largest difference of logits: {apart:.1e}")  # shown by pytest -s
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=FP32_ATOL, msg=of_sequence(n))


def of_sequence(n: int) -> Callable[[str], str]:
    return lambda message: f"sequence {n}: {message}"


# fp32


def test_packed_prefill_gives_the_judges_logits(shape: tuple[Path, Judge, K3Model]) -> None:
    _, judge, model = shape
    rows = sequences(model.cfg.vocab_size)
    want = judged(judge, rows)
    assert 0.5 < want[2].std() < 2
    assert_equal_logits(prefill(model, rows), want)


def test_decode_from_nothing_gives_the_judges_cached_logits(shape: tuple[Path, Judge, K3Model]) -> None:
    _, judge, model = shape
    rows = sequences(model.cfg.vocab_size, (1, 24, 19))
    state = SlotState(model.cfg, len(rows), 24)
    assert_equal_logits(decode(model, rows, state), judged_with_cache(judge, rows, [0, 0, 0]))


def test_prefill_and_decode_in_turns_give_the_judges_cached_logits(shape: tuple[Path, Judge, K3Model]) -> None:
    _, judge, model = shape
    rows, cuts = sequences(model.cfg.vocab_size, (30, 40, 22, 76)), (1, 16, 5, 64)
    want = judged_with_cache(judge, rows, cuts)
    assert_equal_logits(prefill_and_decode(model, rows, cuts), want)


def test_the_judge_reads_what_was_saved(
    kimi_linear: K3Config, random_model: Callable[[K3Config], K3Model], tmp_path: Path
) -> None:
    cfg = replace(kimi_linear, hidden_size=32, moe_intermediate_size=16)  # the judge's experts want 16-byte rows
    model = random_model(cfg)
    save_checkpoint(tmp_path, cfg, named_tensors(model), dtype=torch.float32)
    judge = read_judge(tmp_path, torch.float32)
    rows = sequences(cfg.vocab_size)
    assert_equal_logits(prefill(model, rows), judged(judge, rows))
    rows, cuts = sequences(cfg.vocab_size, (30, 40, 22)), (1, 16, 5)
    assert_equal_logits(prefill_and_decode(model, rows, cuts), judged_with_cache(judge, rows, cuts))


# bf16


@pytest.fixture(scope="module")
def bf16_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers whose weights are bf16 numbers; what a model keeps in fp32 is not."""
    folder = tmp_path_factory.mktemp("bf16")
    judge = build_judge(folder, document(num_hidden_layers=8, full_attn_layers=[4, 7, 8], num_shared_experts=2))
    randomise(judge, decided_routes=True)
    for name, p in judge.named_parameters():
        if not name.endswith(KEPT):
            p.data = p.data.bfloat16().float()
    judge.save_pretrained(folder)
    return folder


def difference(got: Sequence[Tensor], want: Sequence[Tensor]) -> tuple[float, float]:
    """(rms, largest) in standard deviations of the logits."""
    delta, scale = torch.cat(list(got)).double() - torch.cat(list(want)).double(), torch.cat(list(want)).double().std()
    return float(delta.square().mean().sqrt() / scale), float(delta.abs().max() / scale)


def assert_within(measured: tuple[float, float], num_layers: int, num_models: int) -> None:
    """Independent roundings of two bf16 models add in squares."""
    print(f"bf16: rms {measured[0]:.4f}, largest {measured[1]:.3f} of the logits' standard deviation")  # pytest -s
    rms, largest = measured
    bound = BF16_RMS_PER_LAYER * (num_layers * num_models) ** 0.5
    assert rms < bound
    assert largest < BF16_MAX_PER_RMS * bound


def test_in_bf16_both_stay_within_the_bound_of_fp32_and_of_each_other(bf16_folder: Path) -> None:
    exact, model = load_model(bf16_folder, torch.float32), load_model(bf16_folder, torch.bfloat16)
    rows, L = sequences(exact.cfg.vocab_size), exact.cfg.num_hidden_layers
    want, got = prefill(exact, rows), prefill(model, rows)
    of_judge = judged(read_judge(bf16_folder, torch.bfloat16), rows)
    assert_within(difference(got, want), L, 1)
    assert_within(difference(of_judge, want), L, 1)
    assert_within(difference(of_judge, got), L, 2)
    assert difference(got, want)[0] > 0.1 * BF16_RMS_PER_LAYER * L**0.5  # it is bf16 that was measured


def test_in_bf16_prefill_and_decode_in_turns_stay_within_the_bound(bf16_folder: Path) -> None:
    exact, model = load_model(bf16_folder, torch.float32), load_model(bf16_folder, torch.bfloat16)
    rows, cuts = sequences(exact.cfg.vocab_size, (30, 40, 22, 76)), (1, 16, 5, 64)
    want = prefill(exact, rows)
    got = prefill_and_decode(model, rows, cuts, torch.bfloat16)
    assert_within(difference(got, want), exact.cfg.num_hidden_layers, 1)
    assert_within(difference(got, prefill(model, rows)), exact.cfg.num_hidden_layers, 2)


def test_ours_keeps_in_fp32_what_the_judge_rounds(bf16_folder: Path) -> None:
    """transformers in bf16 rounds A_log, taps and the output norm's weight; dt_bias and the router's bias it keeps."""
    exact, model = load_model(bf16_folder, torch.float32), load_model(bf16_folder, torch.bfloat16)
    of_judge = dict(read_judge(bf16_folder, torch.bfloat16).model.layers[0].self_attn.named_parameters())
    rounded = ("forget_gate.A_log", "conv1d.weight", "o_norm.weight")
    assert {name: of_judge[name].dtype for name in rounded} == dict.fromkeys(rounded, torch.bfloat16)
    assert of_judge["forget_gate.dt_bias"].dtype == torch.float32
    wants = dict([*exact.named_parameters(), *exact.named_buffers()])
    kept = [(name, p) for name, p in [*model.named_parameters(), *model.named_buffers()] if name.endswith(KEPT)]
    assert len(kept) == 5 * 6 + 7  # of five KDA layers, and the selection bias of seven routers
    for name, p in kept:
        assert p.dtype == torch.float32, name
        assert torch.equal(p, wants[name]), name
    assert not torch.equal(wants["layers.0.self_attn.A_log"], of_judge["forget_gate.A_log"].float().flatten())
