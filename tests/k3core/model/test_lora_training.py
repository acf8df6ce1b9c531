"""LoRA from its zero start to what is served: every matrix that can be a target, in training, merged and in decode."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from k3core.model.config import K3Config
from k3core.model.layers import Linear
from k3core.model.lora import LoraConfig, attach_lora
from k3core.model.model import K3Model
from k3core.model.moe import Experts
from k3core.model.state import SlotState
from k3core.model.weights import is_adapter_tensor
from k3core.rl.optim import OptimConfig
from k3core.rl.trainer import Trainer
from k3core.rollout.engine import K3Engine
from k3core.rollout.protocol import GenerateRequest
from k3core.types import SamplingParams
from k3kernels.packing import Packing

TARGETS = (
    *("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("gate_proj", "up_proj", "down_proj", "routed_expert_down_proj", "routed_expert_up_proj", "w1", "w2", "w3"),
    "lm_head",
)
ALL = LoraConfig(rank=2, alpha=6.0, targets=TARGETS)
CFG = K3Config(
    vocab_size=61,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    full_attn_layers=(3,),
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=6,
    kda_num_heads=2,
    kda_head_dim=8,
    intermediate_size=24,
    num_experts=4,
    moe_intermediate_size=8,
    routed_expert_hidden_size=12,
)
TOKENS_T = torch.arange(2, 32)
PACKING = Packing((12, 18))


def with_random_b(lora: LoraConfig, dtype: torch.dtype = torch.float64) -> K3Model:
    model = K3Model(CFG)
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    attach_lora(model, lora, generator)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.normal_(0.0, 0.05, generator=generator)
    return model.to(dtype)


def merged(model: K3Model) -> K3Model:
    """The same function without branches."""
    plain = K3Model(CFG).to(model.embed_tokens.weight.dtype)
    tensors = {name: t for name, t in model.state_dict().items() if "lora_" not in name}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            tensors[f"{path}.weight"] = module.effective_weight().detach()
        if isinstance(module, Experts):
            for name in ("w1", "w2", "w3"):
                if (pair := module.lora(name)) is not None:
                    update = pair.scale * (pair.B_EOr @ pair.A_ErI).detach()
                    tensors[f"{path}.{name}"] = tensors[f"{path}.{name}"] + update
    plain.load_state_dict(tensors)
    return plain


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def prefill_and_decode(model: K3Model) -> tuple[Tensor, Tensor]:
    """Logits after a prefill of both sequences and after one more token for each."""
    state = SlotState(CFG, 2, 40, dtype=model.embed_tokens.weight.dtype)
    with torch.no_grad():
        prefill = model(TOKENS_T, PACKING, None, state, torch.arange(2))
        decode = model.decode(torch.tensor([7, 8]), state, torch.tensor([True, True]))
        return model.logits(prefill.hidden_TD[PACKING.last_N]), model.logits(decode.hidden_TD)


def test_the_targets_of_these_tests_are_all_that_there_are() -> None:
    leaves = {path.rsplit(".", 1)[-1] for path, module in K3Model(CFG).named_modules() if isinstance(module, Linear)}
    assert leaves | {"w1", "w2", "w3"} == set(TARGETS)


def test_fresh_lora_changes_nothing_bit_for_bit() -> None:
    plain, adapted = Trainer(CFG, OptimConfig(), seed=3), Trainer(CFG, OptimConfig(), ALL, seed=3)
    target_M = torch.cat([torch.arange(3, 12), torch.arange(15, 30)])
    with torch.no_grad():
        logprobs = [t.logprobs(TOKENS_T, PACKING, target_M, None, 1.0) for t in (plain, adapted)]
        served = [prefill_and_decode(t.model) for t in (plain, adapted)]
    assert torch.equal(*logprobs)
    for a, b in zip(*served, strict=True):
        assert torch.equal(a, b)


def test_only_the_adapter_moves_and_all_of_it() -> None:
    trainer = Trainer(CFG, OptimConfig(learning_rate=0.01), ALL)
    before, _ = trainer.save()
    for _ in range(2):  # A's gradient is zero until B has moved
        trainer.forward_backward(TOKENS_T, PACKING, torch.arange(3, 12), lambda x: (-x.mean(), {}))
        assert trainer.optim_step().applied
    after, optimizer = trainer.save()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if is_adapter_tensor(name)}
    assert all("lora_" in name for name in optimizer)


def test_a_targeted_matrix_alone_moves() -> None:
    trainer = Trainer(CFG, OptimConfig(learning_rate=0.01), LoraConfig(2, 4.0, ("kv_b_proj", "w2")))
    before, _ = trainer.save()
    trainer.forward_backward(TOKENS_T, PACKING, torch.arange(3, 12), lambda x: (-x.mean(), {}))
    trainer.optim_step()
    after, _ = trainer.save()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(name.endswith(("kv_b_proj.lora_B", "w2.lora_B")) for name in moved)


@pytest.mark.parametrize("target", TARGETS)
def test_the_branch_equals_the_merged_matrix_in_training_prefill_and_decode(target: str) -> None:
    model = with_random_b(LoraConfig(2, 6.0, (target,)))
    plain = merged(model)
    with torch.no_grad():
        logits = [m.logits(m(TOKENS_T, PACKING).hidden_TD) for m in (model, plain)]
    assert torch.allclose(*logits, rtol=0, atol=1e-10)
    fresh = K3Model(CFG).double()
    fresh.load_state_dict({name: t for name, t in model.state_dict().items() if "lora_" not in name})
    for a, b, without in zip(
        prefill_and_decode(model), prefill_and_decode(plain), prefill_and_decode(fresh), strict=True
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)
        assert not torch.allclose(a, without, rtol=0, atol=1e-6)  # and the branch does something there


def test_all_branches_together_equal_the_merged_model_in_fp32() -> None:
    model = with_random_b(ALL, torch.float32)
    for a, b in zip(prefill_and_decode(model), prefill_and_decode(merged(model)), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-5)


def test_an_unknown_target_is_refused_naming_it_and_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"train\.lora_targets: \['qproj', 'w4'\] name no matrix") as refusal:
        Trainer(CFG, OptimConfig(), LoraConfig(2, 4.0, ("w4", "q_proj", "qproj")))
    for target in TARGETS:
        assert f"'{target}'" in str(refusal.value)


@pytest.mark.parametrize("target", ["kv_b_proj", "q_proj", "w2", "lm_head"])
def test_a_known_adapter_changes_what_the_engine_serves_and_it_serves_what_the_trainer_has(target: str) -> None:
    """An adapter that never reaches the engine looks like a slow policy for months."""
    lora = LoraConfig(2, 4.0, (target,))
    trainer = Trainer(CFG, OptimConfig(), lora)
    engine = K3Engine(CFG, stop_token=60, num_slots=1, max_length=64, lora=lora)
    context = list(range(2, 14))

    def served(step: int) -> tuple[list[int], list[float]]:
        engine.load(step, trainer.save()[0])
        request = GenerateRequest("prompt", context, SamplingParams(max_tokens=12), seed=0)
        generation = asyncio.run(engine.generate(request))
        engine.release("prompt")
        assert set(generation.policy_step_T.tolist()) == {step}
        return generation.tokens_T.tolist(), generation.logprobs_T.tolist()

    def computed(tokens: list[int]) -> list[float]:
        whole_T = torch.tensor(context + tokens)
        with torch.no_grad():
            return trainer.logprobs(
                whole_T, Packing((len(whole_T),)), torch.arange(len(context), len(whole_T)), None, 1.0
            ).tolist()

    tokens, logprobs = served(0)
    assert logprobs == pytest.approx(computed(tokens), abs=1e-5)
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            if name.endswith("lora_B"):
                p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view(p.shape))
    changed_tokens, changed_logprobs = served(1)
    assert changed_logprobs[0] != pytest.approx(logprobs[0], abs=1e-3) or changed_tokens[0] != tokens[0]
    assert changed_logprobs == pytest.approx(computed(changed_tokens), abs=1e-5)
