"""The plan against the code that it speaks of: models on the meta device, every storage followed as it comes and goes."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import k3kernels.mla.eager as mla_eager
import k3kernels.moe.eager as moe_eager
from k3core.model.config import K3Config
from k3core.model.layers import Linear
from k3core.model.lora import LoraConfig, attach_lora
from k3core.model.model import K3Model, build_model
from k3core.model.moe import Experts
from k3core.model.presets import PRESETS
from k3core.plan import (
    ATTENTION,
    MACHINES,
    Machine,
    Mesh,
    Training,
    cuts,
    largest_context,
    packed,
    plan,
    present_targets,
)
from k3core.plan import step as step_module
from k3core.plan.activations import head_ledger, kept_bytes, layer_ledger, local_part, prefill_ledger
from k3core.plan.calibration import Calibration
from k3core.plan.ledger import Ledger
from k3core.plan.states import num_factors, weights
from k3kernels.packing import Packing

GIB = 1 << 30
K3, LINEAR, TINY = PRESETS["kimi-k3"], PRESETS["kimi-linear-48b-a3b"], PRESETS["tiny"]
H200 = MACHINES["h200"]
GATES = ("g_a_proj", "g_b_proj")
MLPS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


class Storages(TorchDispatchMode):
    """Bytes of all storages that operations made and that still live. `ignored`: tensors that were there before."""

    def __init__(self, ignored: Iterator[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.refs: dict[int, object] = {tensor.untyped_storage()._cdata: tensor for tensor in ignored}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.refs:
                    self.refs[key] = weakref.ref(storage, lambda _, key=key, size=size: self._gone(key, size))
                    self.now += size
                    self.peak = max(self.peak, self.now)
        return out

    def _gone(self, key: int, size: int) -> None:
        del self.refs[key]
        self.now -= size


class FusedAttention(torch.autograd.Function):
    """What a fused kernel keeps and makes; the one for the meta device would make all scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, normalizer = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, normalizer)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _, normalizer = ctx.saved_tensors
        grad = grad.contiguous()
        accumulator, delta = torch.empty_like(q, dtype=torch.float32), torch.empty_like(normalizer)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        del accumulator, delta, grad
        return grads


def even_spans(in_order: Tensor, num_experts: int) -> list[tuple[int, int, int]]:
    """Where no data is, every expert gets as many rows."""
    rows = in_order.numel()
    each = -(-rows // num_experts)
    return [(e, e * each, min((e + 1) * each, rows)) for e in range(num_experts) if e * each < rows]


@pytest.fixture
def without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_eager, "_spans", even_spans)
    fused = lambda q, k, v, **_: FusedAttention.apply(q, k, v)  # noqa: E731
    monkeypatch.setattr(mla_eager.F, "scaled_dot_product_attention", fused)


def with_lora(model: K3Model, rank: int, targets: tuple[str, ...]) -> K3Model:
    """As attach_lora leaves it, on the meta device."""
    model.requires_grad_(False)

    def factor(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(*shape, device="meta"))

    for path, module in model.named_modules():
        if isinstance(module, Linear) and path.rsplit(".", 1)[-1] in targets:
            out_features, in_features = module.weight.shape
            module.lora_A, module.lora_B, module.lora_scale = factor(rank, in_features), factor(out_features, rank), 1.0
        if isinstance(module, Experts):
            for name in ("w1", "w2", "w3"):
                if name in targets:
                    E, out_features, in_features = module.shape(name)
                    setattr(module, f"{name}_lora_A", factor(E, rank, in_features))
                    setattr(module, f"{name}_lora_B", factor(E, out_features, rank))
    return model


def measured(cfg: K3Config, lengths: tuple[int, ...], targets: tuple[str, ...]) -> tuple[int, int]:
    """(largest number of bytes alive in the backward pass of the layers, of the head) beside the weights."""
    model = with_lora(build_model(cfg, torch.bfloat16, "meta"), 64, targets)
    num_tokens = sum(lengths)
    tokens_T = torch.empty(num_tokens, dtype=torch.long, device="meta")
    replay_TLk = tokens_T.new_empty(num_tokens, len(cfg.moe_layers), cfg.num_experts_per_token)
    storages = Storages(iter([*model.parameters(), *model.buffers()]))
    storages.now = replay_TLk.numel() * 8
    with storages:
        forward = model(tokens_T, Packing(lengths, "meta"), replay_TLk, activation_checkpointing=True)
        hidden_MD = forward.hidden_TD.index_select(0, tokens_T)
        del forward
        storages.peak = storages.now
        loss = model.logprobs(hidden_MD, tokens_T, 1.0).sum()
        gradient = torch.autograd.grad(loss, hidden_MD)
        head, storages.peak = storages.peak, storages.now
        hidden_MD.backward(gradient)
    return storages.peak, head


def computed(cfg: K3Config, lengths: tuple[int, ...], targets: tuple[str, ...]) -> tuple[float, float]:
    at = local_part(cfg, Mesh(), Training(lengths, targets=targets))
    inputs, routes = kept_bytes(at)
    layers = [(i + 1) * inputs + layer_ledger(at, i).peak for i in range(cfg.num_hidden_layers)]
    # Of the factors only the last layer's have gradients yet.
    factors = 4 * num_factors(cfg, 64, present_targets(cfg, targets)) / cfg.num_hidden_layers
    return max(layers) + routes + factors, head_ledger(at).peak + len(layers) * inputs + routes


def three_layers(base: K3Config, kind: str) -> K3Config:
    is_mla, is_moe = kind.startswith("MLA"), kind.endswith("MoE")
    return replace(
        base,
        num_hidden_layers=3,
        full_attn_layers=(1, 2, 3) if is_mla else (),
        first_k_dense_replace=0 if is_moe else 3,
        intermediate_size=1024 if kind.endswith("narrow") else base.intermediate_size,
        num_experts=16,
        vocab_size=4096,
    )


@pytest.mark.usefixtures("without_data")
@pytest.mark.parametrize(
    ("base", "kind", "lengths", "targets"),
    [
        (LINEAR, "KDA, MoE", (2048,), ATTENTION + GATES),
        (LINEAR, "KDA, dense", (1500, 500), ATTENTION),
        (LINEAR, "MLA, MoE", (4096, 4096), ATTENTION),
        (LINEAR, "MLA, MoE", (4096,), ATTENTION + MLPS),
        (LINEAR, "MLA, dense", (4000, 100), ("o_proj",)),
        (K3, "KDA, MoE", (1024, 1024), ATTENTION),
        (K3, "KDA, MoE", (1024,), MLPS),
        (K3, "KDA, narrow", (1400,), ATTENTION),  # largest: the recurrence, in three segments
        (K3, "KDA, narrow", (400,), ATTENTION),  # in one
        (K3, "KDA, narrow", (3200,), ("v_proj",)),
        (K3, "KDA, dense", (400,), ATTENTION),
        (LINEAR, "KDA, dense", (512,), ATTENTION),
        (K3, "MLA, MoE", (4096,), ATTENTION),
        (K3, "MLA, dense", (4096,), ("q_b_proj",)),
    ],
)
def test_a_layers_peak_is_that_of_the_code(
    base: K3Config, kind: str, lengths: tuple[int, ...], targets: tuple[str, ...]
) -> None:
    cfg = three_layers(base, kind)
    layers, _ = measured(cfg, lengths, targets)
    expected, _ = computed(cfg, lengths, targets)
    assert expected == pytest.approx(layers, rel=0.06)


@pytest.mark.usefixtures("without_data")
@pytest.mark.parametrize("base", [LINEAR, K3])
@pytest.mark.parametrize("kind", ["KDA, MoE", "KDA, dense", "MLA, MoE"])
def test_a_prefills_peak_is_near_that_of_the_code(base: K3Config, kind: str) -> None:
    """A forward pass that keeps nothing."""
    cfg = three_layers(base, kind)
    model = build_model(cfg, torch.bfloat16, "meta")
    tokens_T = torch.empty(2048, dtype=torch.long, device="meta")
    storages = Storages(iter([*model.parameters(), *model.buffers()]))
    with torch.no_grad(), storages:
        model(tokens_T, Packing((2048,), "meta"))
    at = local_part(cfg, Mesh(), Training((2048,), targets=("o_proj",)))
    peaks = [prefill_ledger(at, layer).peak for layer in range(cfg.num_hidden_layers)]
    assert max(peaks) == pytest.approx(storages.peak, rel=0.2)


@pytest.mark.usefixtures("without_data")
def test_the_heads_peak_is_no_less_than_that_of_the_code() -> None:
    """On a GPU 16-bit operands are multiplied as they are; here a block of the head is converted as well."""
    cfg = replace(three_layers(LINEAR, "MLA, dense"), vocab_size=163_840)
    _, head = measured(cfg, (4096,), ("o_proj",))
    _, expected = computed(cfg, (4096,), ("o_proj",))
    assert expected == pytest.approx(head, rel=0.2)


@pytest.mark.parametrize("cfg", [TINY, LINEAR, replace(K3, num_hidden_layers=5, full_attn_layers=(4, 5))])
def test_the_weights_are_those_of_the_model(cfg: K3Config) -> None:
    model = build_model(cfg, torch.bfloat16, "meta")
    assert weights(cfg, 1, 1).num_bytes == sum(t.numel() * t.itemsize for t in model.state_dict().values())


@pytest.mark.parametrize("targets", [("q_proj",), ATTENTION, ("w1", "w3"), ("lm_head", "kv_a_proj_with_mqa", "w2")])
def test_the_factors_are_those_that_are_attached(targets: tuple[str, ...]) -> None:
    model = K3Model(TINY)
    attach_lora(model, LoraConfig(4, 4.0, targets), torch.Generator().manual_seed(0))
    attached = sum(p.numel() for name, p in model.named_parameters() if name.endswith(("lora_A", "lora_B")))
    assert num_factors(TINY, 4, targets) == attached


def test_every_linear_of_the_model_can_be_a_target() -> None:
    for cfg in (TINY, three_layers(LINEAR, "KDA, MoE"), three_layers(LINEAR, "MLA, dense")):
        modules = build_model(cfg, torch.bfloat16, "meta").named_modules()
        linears = {path.rsplit(".", 1)[-1] for path, module in modules if isinstance(module, Linear)}
        assert set(present_targets(cfg, tuple(sorted(linears)))) == linears
        assert present_targets(cfg, ("gate", "embed_tokens", "norm", "mlp_res_proj")) == ()


def test_a_target_that_the_model_lacks_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"targets q_prj: no matrix of this model \(did you mean q_proj\?\); it has "
    ) as caught:
        plan(TINY, H200, Mesh(), Training((64,), targets=("q_prj",)))
    assert "\n" not in str(caught.value)


def test_kimi_linear_fits_on_one_h200_and_k3_does_not_on_sixteen() -> None:
    targets = present_targets(LINEAR, ATTENTION)
    made = plan(LINEAR, H200, Mesh(), Training((16384,), targets=targets))
    assert made.fits
    assert made.peak.name == "backward"
    assert 98 * GIB < made.peak_bytes < 104 * GIB
    sixteen = Mesh(fsdp=16, ep=16)
    assert not plan(K3, H200, sixteen, Training((16384,))).fits
    assert plan(K3, H200, sixteen, Training((8192,))).fits


def test_the_longest_context_fits_and_the_next_does_not() -> None:
    for cfg, mesh in ((LINEAR, Mesh()), (K3, Mesh(fsdp=16, ep=16)), (K3, Mesh(fsdp=8, cp=4, ep=32))):
        training = Training((1,), targets=present_targets(cfg, ATTENTION), rollout_sequences=8)
        found = largest_context(cfg, H200, mesh, training)
        assert found % mesh.cp == 0
        assert plan(cfg, H200, mesh, replace(training, lengths=(found,))).fits
        assert not plan(cfg, H200, mesh, replace(training, lengths=(found + mesh.cp,))).fits


def test_no_context_fits_where_the_weights_do_not() -> None:
    assert largest_context(K3, H200, Mesh(), Training((1,))) == 0
    assert largest_context(TINY, Machine("x", 1e18), Mesh(), Training((1,), targets=("o_proj",))) == 1 << 24


def test_twice_the_shards_hold_half_the_state() -> None:
    for mode in ("lora", "full"):
        training = Training((4096,), mode)
        one, two = (
            {row.name: row.num_bytes for row in plan(K3, H200, Mesh(fsdp=fsdp, ep=8), training).peak.rows}
            for fsdp in (8, 16)
        )
        for name in ("weights", "gradients", "AdamW moments"):
            assert one[name] == pytest.approx(2 * two[name])


def test_full_training_holds_eighteen_bytes_a_parameter() -> None:
    """bf16 weights, and in fp32 a master copy, a gradient and two moments: 2 + 4 + 4 + 8."""
    made = plan(LINEAR, Machine("x", 2e12), Mesh(), Training((512,), "full"))
    state = sum(row.num_bytes for row in made.phases[2].rows if row.name != "AdamW's step")
    assert state == pytest.approx(18 * 49.1227e9, rel=1e-3)


def test_packed_experts_are_unpacked_for_full_training() -> None:
    made = plan(K3, H200, Mesh(fsdp=64, ep=64), Training((512,), "full"))
    assert made.cfg.expert_quantization is None
    assert made.notes[0].startswith("experts are unpacked")


def test_experts_that_every_rank_has_whole_are_not_gathered() -> None:
    rest = plan(K3, H200, Mesh(fsdp=16, ep=16), Training((512,)))
    all_of_them = plan(K3, H200, Mesh(fsdp=16, ep=1), Training((512,)))
    sizes = [
        {row.name: row.num_bytes for row in made.phases[0].rows}["gathered layers"] for made in (rest, all_of_them)
    ]
    assert sizes[0] < 4 * GIB
    assert sizes[1] > 30 * GIB


def test_rollouts_hold_a_cache_of_every_token_and_a_state_of_every_sequence() -> None:
    made = plan(K3, H200, Mesh(fsdp=16, ep=16), Training((4096,), rollout_sequences=40))
    rows = {row.name: row.num_bytes for row in made.phases[3].rows}
    assert rows["MLA cache"] == 3 * 4096 * 24 * 576 * 2  # 40 over 16: three on the fullest
    assert rows["KDA states and windows"] == 3 * 69 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2)
    assert "gradients" not in rows
    longer = plan(K3, H200, Mesh(fsdp=16, ep=16), Training((8192,), rollout_sequences=40))
    twice = {row.name: row.num_bytes for row in longer.phases[3].rows}
    assert twice["a prefill's own tensors"] == pytest.approx(2 * rows["a prefill's own tensors"], rel=0.01)


def test_one_gpu_sends_nothing() -> None:
    assert plan(TINY, H200, Mesh(), Training((64,), targets=("o_proj",))).flows == ()


def test_traffic_by_hand() -> None:
    """Two ranks that share out tiny's experts: each sends half of what is not its own, rows of width 48 in bf16."""
    training = Training((64,), targets=("o_proj",), rank=2)
    made = plan(TINY, H200, Mesh(fsdp=2, ep=2), training)
    sent = {flow.name: flow.num_bytes for flow in made.flows}
    rows = 64 * 2 * 3  # tokens, experts of each, MoE layers
    assert sent["dispatch of rows to experts"] == 3 * rows * 48 * 2 / 2
    assert sent["combine of the experts' rows"] == sent["dispatch of rows to experts"]
    held = weights(TINY, 1, 2)
    assert sent["all-gather of weights"] == pytest.approx(2 * (held.num_bytes - sum(held.experts)) / 2)
    assert sent["reduce-scatter of gradients"] == pytest.approx(4 * num_factors(TINY, 2, ("o_proj",)) / 2)
    assert all(flow.link == "NVLink" and flow.seconds == flow.num_bytes / 326e9 for flow in made.flows)


def test_ranks_beyond_a_node_use_the_network() -> None:
    made = plan(K3, H200, Mesh(fsdp=16, ep=8), Training((512,)))
    links = {flow.name: flow.link for flow in made.flows}
    assert links["dispatch of rows to experts"] == "NVLink"
    assert links["all-gather of weights"] == "network"


@pytest.mark.parametrize(
    ("mesh", "training", "line"),
    [
        (Mesh(fsdp=8, ep=3), Training((64,)), "mesh ep=3 and fsdp x cp = 8: ep must divide it"),
        (Mesh(fsdp=5, ep=5), Training((64,)), "mesh ep=5 and num_experts 896: experts are shared out whole"),
        (Mesh(tp=5), Training((64,)), "mesh tp=5 and num_attention_heads 96: tp must divide it"),
        (Mesh(cp=3), Training((64,)), "mesh cp=3 and sequences of [64] tokens: cp must divide them"),
        (Mesh(fsdp=0), Training((64,)), "mesh fsdp=0: must be at least 1"),
        (Mesh(), Training(()), "lengths []: at least one sequence"),
        (Mesh(), Training((0, 3)), "lengths [0, 3]: at least one sequence of at least one token"),
        (Mesh(), Training((64,), rank=0), "rank 0: must be at least 1"),
        (Mesh(), Training((64,), trained_share=0.0), "trained_share 0: must be > 0 and <= 1"),
        (Mesh(), Training((64,), rollout_sequences=-1), "rollout_sequences -1: must not be negative"),
    ],
)
def test_what_cannot_be_split_is_refused_in_one_line(mesh: Mesh, training: Training, line: str) -> None:
    with pytest.raises(ValueError) as caught:
        plan(K3, H200, mesh, training)
    assert str(caught.value).startswith(line)


def test_all_refusals_come_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        plan(K3, H200, Mesh(fsdp=5, ep=5, tp=7), Training((64,), rank=0))
    lines = str(caught.value).splitlines()
    assert len(lines) == len(set(lines)) == 8  # experts, five widths, whole groups of packed experts, rank


def test_packed_experts_are_split_between_their_groups() -> None:
    with pytest.raises(ValueError, match="packed experts come in groups of 32 along it"):
        plan(replace(K3, moe_intermediate_size=96), H200, Mesh(tp=2), Training((64,)))


@given(
    cfg=st.sampled_from([TINY, LINEAR, K3]),
    mesh=st.builds(Mesh, *([st.sampled_from([1, 2, 3, 4, 8, 16])] * 5)),
    training=st.builds(
        Training,
        st.lists(st.integers(1, 5000), min_size=1, max_size=4).map(tuple),
        st.sampled_from(["lora", "full"]),
        st.sampled_from([1, 8, 64]),
        st.just(("o_proj", "q_a_proj")),
        st.sampled_from([0.1, 1.0]),
        st.sampled_from([0, 5]),
    ),
)
def test_any_plan_is_made_or_refused(cfg: K3Config, mesh: Mesh, training: Training) -> None:
    training = replace(training, targets=present_targets(cfg, training.targets))
    with suppress(ValueError):
        made = plan(cfg, H200, mesh, training)
        rows = [row for phase in made.phases for row in phase.rows]
        assert all(0 <= row.num_bytes < 1e18 for row in rows)
        assert made.peak_bytes == max(sum(row.num_bytes for row in phase.rows) for phase in made.phases)
        assert all(size >= 0 for _, size in made.largest)
        assert sum(size for _, size in made.largest) == pytest.approx(
            next(row.num_bytes for row in made.phases[0].rows if row.name == "layer being recomputed")
        )
        assert all(flow.num_bytes > 0 and flow.seconds > 0 for flow in made.flows)
        assert all(cut.saved_bytes > 0 for cut in cuts(made))


def test_everything_is_computed_until_something_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training((4096,), targets=("o_proj",))
    before = plan(LINEAR, H200, Mesh(), training)
    assert {row.source for phase in before.phases for row in phase.rows} == {"computed"}
    found = Calibration("layer being recomputed", "kimi_linear", 1.25, "H200", "2026-12-01", "16K tokens")
    monkeypatch.setattr(
        step_module, "calibration", lambda row, family: found if (row, family) == (found.row, found.family) else None
    )
    after = plan(LINEAR, H200, Mesh(), training)
    for old, new in zip(before.phases[0].rows, after.phases[0].rows, strict=True):
        is_it = new.name == found.row
        assert new.source == ("measured" if is_it else "computed")
        assert new.num_bytes == pytest.approx(old.num_bytes * (1.25 if is_it else 1.0))


def test_the_first_cut_saves_most() -> None:
    found = cuts(plan(K3, H200, Mesh(fsdp=16, ep=16), Training((16384, 16384))))
    assert [cut.saved_bytes for cut in found] == sorted((cut.saved_bytes for cut in found), reverse=True)
    assert found[0].change == "half the --batch-tokens"
    assert any(cut.term == "weights" and cut.change.startswith("fsdp=32") for cut in found)


def test_sequences_that_make_up_a_batch() -> None:
    assert packed(1000) == (1000,)
    assert packed(1000, 2500) == (1000,) * 3
    assert packed(1000, 10) == (1000,)


def test_the_ledger_remembers_what_was_alive_when_there_was_most() -> None:
    ledger = Ledger()
    ledger.hold("a", 3)
    ledger.spike("b", 4)
    ledger.free("a", "never held")
    ledger.hold("c", 6)
    assert (ledger.peak, ledger.at_peak, ledger.now) == (7, {"a": 3, "b": 4}, 6)


def test_a_gpu_machine_needs_nothing_but_torch() -> None:
    code = (
        "import sys, k3core.plan, k3core.model.presets, k3core.model.sizes, k3core.model.random_weights; "
        "print({'pydantic', 'blake3', 'zstandard', 'tokenizers', 'rich', 'typer'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
