from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig
from k3core.model.model import ROWS, K3Model, build_model
from k3core.rl.batch import Batch, make_batch
from k3core.rl.optim import OptimConfig
from k3core.rl.trainer import Trainer
from k3core.types import Trajectory
from k3kernels.linear_logprob import MAX_LOGITS
from k3kernels.packing import Packing

MakeTrajectory = Callable[..., Trajectory]
OPTIM = OptimConfig(learning_rate=0.01)


@pytest.fixture
def batch(make_trajectory: MakeTrajectory) -> Batch:
    return make_batch([make_trajectory(0), make_trajectory(1, turn=6)], [1.0, -1.0], [0, 1], router_replay=True)


def nll(logprobs_M: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs_M.mean(), {}


def not_finite(value: float) -> Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]:
    return lambda logprobs_M: (logprobs_M.sum() + value, {})


def no_gradient(logprobs_M: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Finite, with a gradient that is not: the square root has a vertical tangent at 0."""
    return (logprobs_M - logprobs_M.detach()).abs().sqrt().sum(), {}


def train(trainer: Trainer, batch: Batch, steps: int) -> None:
    for _ in range(steps):
        for _ in range(2):
            trainer.forward_backward(batch.tokens_T, batch.packing, batch.target_M, nll, batch.replay_TLk)
        assert trainer.optim_step().applied


def everything(trainer: Trainer) -> dict[str, Tensor]:
    weights, optimizer = trainer.save()
    return weights | optimizer


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """They are dropped."""
    found = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.optimizer.zero_grad()
    return found


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes, backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_log_softmax_of_the_logits_before(cfg: K3Config, batch: Batch, temperature: float) -> None:
    trainer = Trainer(cfg, OPTIM)
    with torch.no_grad():
        logprobs_M = trainer.logprobs(batch.tokens_T, batch.packing, batch.target_M, batch.replay_TLk, temperature)
        hidden_TD = trainer.model(batch.tokens_T, batch.packing, batch.replay_TLk).hidden_TD
        full_TV = torch.log_softmax(trainer.model.logits(hidden_TD) / temperature, -1)
    expected_M = full_TV[batch.target_M - 1].gather(1, batch.tokens_T[batch.target_M, None]).squeeze(1)
    assert logprobs_M.dtype == torch.float32
    assert torch.allclose(logprobs_M.double(), expected_M, rtol=0, atol=1e-6)


@pytest.fixture
def wide() -> Trainer:
    """One layer under a vocabulary as large as K3's: logits are by far its largest tensors."""
    wide_cfg = K3Config(
        vocab_size=160_000,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        full_attn_layers=(1,),
        q_lora_rank=4,
        kv_lora_rank=4,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=4,
        intermediate_size=8,
    )
    return Trainer(wide_cfg, OPTIM)


def test_logits_are_made_at_the_trained_positions_only(wide: Trainer) -> None:
    target_M = torch.arange(290, 300)
    with LargestTensor() as largest:
        wide.forward_backward(torch.arange(300), Packing((300,)), target_M, nll)
    assert largest.numel == ROWS * wide.model.cfg.vocab_size  # rounded up, from 10 of 300


def test_no_more_than_max_logits_are_made_at_a_time_and_the_gradient_is_that_of_all_at_once(wide: Trainer) -> None:
    tokens_T = torch.randint(wide.model.cfg.vocab_size, (300,), generator=torch.Generator().manual_seed(0))
    packing, target_M = Packing((140, 160)), torch.cat([torch.arange(10, 140), torch.arange(200, 300)])
    assert len(target_M) * wide.model.cfg.vocab_size > 2 * MAX_LOGITS
    saved: list[int] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            logprobs_M = wide.logprobs(tokens_T, packing, target_M, None, 1.0)
        nll(logprobs_M)[0].backward()
    assert MAX_LOGITS / 2 < largest.numel <= MAX_LOGITS
    assert 0 < sum(saved) < MAX_LOGITS  # nor do the blocks wait together for the backward pass

    blocks = gradients(wide)
    logits_MV = wide.model.logits(wide.model(tokens_T, packing).hidden_TD[target_M - 1])
    torch.nn.functional.cross_entropy(logits_MV, tokens_T[target_M]).backward()
    whole = gradients(wide)
    assert blocks.keys() == whole.keys()
    for name, gradient in whole.items():
        assert torch.allclose(blocks[name], gradient, rtol=1e-5, atol=1e-6), name


def test_a_sequences_first_token_cannot_be_trained(cfg: K3Config, batch: Batch) -> None:
    """It would be predicted from the last token of the sequence before it."""
    with pytest.raises(AssertionError, match="nothing comes before"):
        Trainer(cfg, OPTIM).logprobs(batch.tokens_T, batch.packing, torch.tensor([batch.packing.lengths[0]]), None, 1.0)


def test_without_a_trained_token_the_model_is_not_run_and_there_is_nothing_to_apply(
    cfg: K3Config, batch: Batch
) -> None:
    trainer = Trainer(cfg, OPTIM)
    passes: list[object] = []
    trainer.model.norm.register_forward_hook(lambda *_: passes.append(0))
    none_M = torch.zeros(0, dtype=torch.long)
    logprobs_M = trainer.logprobs(batch.tokens_T, batch.packing, none_M, batch.replay_TLk, 1.0)
    assert (logprobs_M.shape, logprobs_M.dtype) == ((0,), torch.float32)
    metrics = trainer.forward_backward(
        batch.tokens_T, batch.packing, none_M, lambda x: (x.sum(), {"num_tokens": torch.tensor(len(x))})
    )
    assert metrics == {"num_tokens": 0}
    assert passes == []
    result = trainer.optim_step()
    assert (result.applied, result.reason) == (False, "no parameter has a gradient")


def test_a_pass_without_a_trained_token_adds_nothing_to_the_others(cfg: K3Config, batch: Batch) -> None:
    trainer, control = Trainer(cfg, OPTIM), Trainer(cfg, OPTIM)
    trainer.forward_backward(batch.tokens_T, batch.packing, batch.target_M[:0], lambda x: (x.sum(), {}))
    for one in (trainer, control):
        one.forward_backward(batch.tokens_T, batch.packing, batch.target_M, nll)
        assert one.optim_step().applied
    assert same_bits(everything(trainer), everything(control))


def test_sequences_of_a_single_token_change_nothing_for_the_others(cfg: K3Config, batch: Batch) -> None:
    trainer, (first, second) = Trainer(cfg, OPTIM), batch.packing.lengths
    one = torch.tensor([7])
    tokens_T = torch.cat([one, batch.tokens_T[:first], one, batch.tokens_T[first:], one])
    packing = Packing((1, first, 1, second, 1))
    target_M = batch.target_M + 1 + (batch.target_M >= first)
    assert torch.equal(tokens_T[target_M], batch.tokens_T[batch.target_M])
    with torch.no_grad():
        among = trainer.logprobs(tokens_T, packing, target_M, None, 1.0)
        alone = trainer.logprobs(batch.tokens_T, batch.packing, batch.target_M, None, 1.0)
    assert torch.allclose(among, alone, rtol=0, atol=1e-5)


def test_microbatches_accumulate_into_the_gradient_of_the_whole(cfg: K3Config, batch: Batch) -> None:
    """Two different loss functions on two passes: the norm is that of their sum."""
    trainer = Trainer(cfg, OPTIM)
    norms = []
    for weights in ((1.0, 2.0), (3.0,)):
        for weight in weights:
            trainer.forward_backward(
                batch.tokens_T, batch.packing, batch.target_M, lambda x, w=weight: (w * x.mean(), {})
            )
        norms.append(trainer.optimizer.step(0.0).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (not_finite(float("nan")), "the loss is nan"),
        (not_finite(float("inf")), "the loss is inf"),
        (no_gradient, "the gradient of embed_tokens.weight is not finite"),
    ],
)
@pytest.mark.parametrize("place", ["first", "last"])
def test_one_bad_microbatch_vetoes_the_step_changes_no_bit_and_leaves_nothing_behind(
    cfg: K3Config, batch: Batch, loss: Any, reason: str, place: str
) -> None:
    trainer, control = Trainer(cfg, OPTIM), Trainer(cfg, OPTIM)
    train(trainer, batch, 1)
    train(control, batch, 1)
    before = everything(trainer)
    for function in (loss, nll) if place == "first" else (nll, loss):
        trainer.forward_backward(batch.tokens_T, batch.packing, batch.target_M, function)
    result = trainer.optim_step()
    assert (result.applied, result.reason) == (False, reason)
    assert math.isnan(result.grad_norm)
    assert same_bits(everything(trainer), before)

    train(trainer, batch, 1)
    train(control, batch, 1)
    assert same_bits(everything(trainer), everything(control))


def test_the_learning_rate_of_a_step_is_the_arguments_or_the_configs(cfg: K3Config, batch: Batch) -> None:
    def after(config_rate: float, rate: float | None) -> dict[str, Tensor]:
        trainer = Trainer(cfg, OptimConfig(learning_rate=config_rate))
        trainer.forward_backward(batch.tokens_T, batch.packing, batch.target_M, nll)
        assert trainer.optim_step(rate).applied
        return trainer.save()[0]

    assert same_bits(after(0.01, None), after(0.5, 0.01))
    assert not same_bits(after(0.01, None), after(0.02, None))


def test_saving_and_loading_into_a_fresh_trainer_continues_bit_for_bit(cfg: K3Config, batch: Batch) -> None:
    straight = Trainer(cfg, OPTIM, seed=1)
    train(straight, batch, 4)
    first, second = Trainer(cfg, OPTIM, seed=1), Trainer(cfg, OPTIM, seed=2)
    train(first, batch, 2)
    weights, optimizer = first.save()
    train(first, batch, 1)  # what was saved is a copy
    second.load(weights, optimizer)
    train(second, batch, 2)
    assert same_bits(everything(second), everything(straight))


def test_loading_forgets_gradients_and_a_veto(cfg: K3Config, batch: Batch) -> None:
    """A retry after a fault in the middle of an update starts from the version alone."""
    clean, broken = Trainer(cfg, OPTIM), Trainer(cfg, OPTIM)
    saved = clean.save()
    for loss in (nll, not_finite(float("nan"))):
        broken.forward_backward(batch.tokens_T, batch.packing, batch.target_M, loss)
    broken.load(*saved)
    train(clean, batch, 1)
    train(broken, batch, 1)
    assert same_bits(everything(broken), everything(clean))


def test_replayed_routes_reproduce_the_logprobs_when_they_are_its_own(cfg: K3Config, batch: Batch) -> None:
    trainer = Trainer(cfg, OPTIM)
    own_TLk = trainer.model(batch.tokens_T, batch.packing).routed_experts_TLk
    free_M, replayed_M, other_M = (
        trainer.logprobs(batch.tokens_T, batch.packing, batch.target_M, replay, 1.0)
        for replay in (None, own_TLk, (own_TLk + 1) % cfg.num_experts)
    )
    assert torch.equal(free_M, replayed_M)
    assert not torch.allclose(free_M, other_M)


def test_a_position_without_routes_chooses_for_itself(cfg: K3Config, batch: Batch) -> None:
    model = Trainer(cfg, OPTIM).model
    own_TLk = model(batch.tokens_T, batch.packing).routed_experts_TLk
    replay_TLk = (own_TLk + 1) % cfg.num_experts
    replay_TLk[5:9] = -1
    used_TLk = model(batch.tokens_T, batch.packing, replay_TLk).routed_experts_TLk
    is_free_T = (replay_TLk < 0).all(-1).all(-1)
    assert torch.equal(used_TLk[~is_free_T], replay_TLk[~is_free_T])
    assert torch.equal(used_TLk[is_free_T, 0], own_TLk[is_free_T, 0])  # nothing before the first MoE layer has changed


def test_gradients_reach_the_router_under_replayed_routes_it_would_not_choose(cfg: K3Config, batch: Batch) -> None:
    """The weights come from the full scores: an expert that the router has drifted away from can still pull it back."""
    trainer = Trainer(cfg, OPTIM)
    own_TLk = trainer.model(batch.tokens_T, batch.packing).routed_experts_TLk
    assert (own_TLk >= 2).any()
    trainer.forward_backward(
        batch.tokens_T, batch.packing, batch.target_M, nll, torch.tensor([0, 1]).expand(own_TLk.shape)
    )
    found = gradients(trainer)
    for layer in cfg.moe_layers:
        gradient_ED = found[f"layers.{layer}.block_sparse_moe.gate.weight"]
        assert gradient_ED.any(-1).tolist() == [True, True, False, False]


def test_routes_of_another_model_are_refused(cfg: K3Config, batch: Batch) -> None:
    trainer = Trainer(cfg, OPTIM)
    all_layers_TLk = torch.zeros(batch.packing.num_tokens, 3, 2, dtype=torch.long)  # as if the dense layer had routes
    with pytest.raises(ValueError, match=r"recorded experts are \(3, 2\) a token, the model's are \(2, 2\)"):
        trainer.logprobs(batch.tokens_T, batch.packing, batch.target_M, all_layers_TLk, 1.0)


# Real models


ADAPTER = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "o_proj", "kv_b_proj", "lm_head"))


def loaded(cfg: K3Config, dtype: torch.dtype) -> K3Model:
    """As a checkpoint fills it."""
    model = build_model(cfg, dtype)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def test_a_model_that_is_handed_in_is_trained_where_it_lies_and_gives_the_bits_of_one_made_here(
    cfg: K3Config, batch: Batch
) -> None:
    model = loaded(cfg, torch.float32)
    storage = model.embed_tokens.weight.data_ptr()
    given, made = Trainer(cfg, OPTIM, model=model), Trainer(cfg, OPTIM, seed=0)
    assert given.model is model
    for trainer in (given, made):
        train(trainer, batch, 2)
    assert model.embed_tokens.weight.data_ptr() == storage
    assert same_bits(everything(given), everything(made))


def test_a_model_of_another_architecture_is_refused_naming_what_differs(cfg: K3Config) -> None:
    model = loaded(replace(cfg, num_experts=6, rms_norm_eps=1e-6), torch.float32)
    with pytest.raises(ValueError, match=r"num_experts 6 in place of 4, rms_norm_eps 1e-06 in place of 1e-05"):
        Trainer(cfg, OPTIM, model=model)


@pytest.mark.parametrize("recompute", [False, True])
def test_an_adapter_learns_over_a_frozen_bf16_model_in_fp32(cfg: K3Config, batch: Batch, recompute: bool) -> None:
    trainer = Trainer(cfg, OPTIM, ADAPTER, model=loaded(cfg, torch.bfloat16), activation_checkpointing=recompute)
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    assert trainer.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    losses = []
    for _ in range(5):
        losses.append(
            trainer.forward_backward(
                batch.tokens_T, batch.packing, batch.target_M, lambda x: (-x.mean(), {"nll": -x.mean().detach()})
            )["nll"].item()
        )
        assert {name for name, p in trainer.model.named_parameters() if p.grad is not None} == {
            name for name, p in trainer.model.named_parameters() if p.requires_grad
        }
        assert trainer.optim_step().applied
    assert losses[-1] < losses[0] - 0.1
    for name, p in trainer.model.named_parameters():
        if name in base:
            assert torch.equal(p, base[name]), name
        else:
            assert (p.dtype, p.grad) == (torch.float32, None), name
            assert {t.dtype for t in trainer.optimizer.optimizer.state[p].values()} == {torch.float32}


def test_recomputed_layers_train_to_the_same_bits(cfg: K3Config, batch: Batch) -> None:
    kept, recomputed = Trainer(cfg, OPTIM), Trainer(cfg, OPTIM, activation_checkpointing=True)
    passes: list[Trainer] = []
    for trainer in (kept, recomputed):
        trainer.model.layers[0].self_attn.register_forward_pre_hook(lambda *_, trainer=trainer: passes.append(trainer))
        train(trainer, batch, 2)
    assert same_bits(everything(kept), everything(recomputed))
    assert (passes.count(kept), passes.count(recomputed)) == (4, 8)


def test_full_parameters_in_bf16_are_refused(cfg: K3Config) -> None:
    with pytest.raises(
        ValueError, match=r"full parameters in torch\.bfloat16 cannot be trained .* torch\.float32, or train a LoRA"
    ):
        Trainer(cfg, OPTIM, dtype=torch.bfloat16)


def test_full_parameters_of_packed_experts_are_refused_and_an_adapter_over_them_is_trained(
    cfg: K3Config, batch: Batch
) -> None:
    packed = replace(cfg, routed_expert_hidden_size=32, moe_intermediate_size=32, expert_quantization="mxfp4")
    with pytest.raises(ValueError, match=r"packed experts cannot be trained .*w1_packed and 5 more"):
        Trainer(packed, OPTIM)
    trainer = Trainer(packed, OPTIM, ADAPTER, model=loaded(packed, torch.bfloat16), activation_checkpointing=True)
    trainer.forward_backward(batch.tokens_T, batch.packing, batch.target_M, nll, batch.replay_TLk)
    assert trainer.optim_step().applied


def test_a_model_without_anything_to_train_is_refused(cfg: K3Config) -> None:
    model = loaded(cfg, torch.float32).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        Trainer(cfg, OPTIM, model=model)


def test_an_adapter_is_saved_without_its_base(cfg: K3Config, batch: Batch) -> None:
    trainer = Trainer(cfg, OPTIM, ADAPTER)
    train(trainer, batch, 1)
    whole, state = trainer.save()
    adapter, same_state = trainer.save(adapter_only=True)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert adapter.keys() == trained < whole.keys()
    assert same_bits(adapter, {name: whole[name] for name in trained})
    assert same_bits(state, same_state)


def test_the_step_of_a_lora_adapter_holds_no_second_copy_of_the_base(
    cfg: K3Config, batch: Batch, allocations: Any
) -> None:
    """The experts are by far the largest tensors of this model; a pass and a step must not make a quarter of them."""
    large = replace(cfg, num_experts=64, moe_intermediate_size=64, routed_expert_hidden_size=128)
    trainer = Trainer(large, OPTIM, ADAPTER, model=loaded(large, torch.bfloat16), activation_checkpointing=True)
    base_bytes = sum(p.nbytes for p in trainer.model.parameters() if not p.requires_grad)
    experts = trainer.model.layers[1].block_sparse_moe.experts
    assert base_bytes > 3_000_000
    with allocations:
        trainer.forward_backward(batch.tokens_T, batch.packing, batch.target_M, nll)
        assert trainer.optim_step().applied
    assert allocations.peak_bytes < base_bytes / 4
    assert experts.w1.grad is None
