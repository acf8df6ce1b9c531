"""An adapter merged into its base: W + scale B A for every target, or an error that names what was not merged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3core.checkpoint import merge as merge_module
from k3core.checkpoint.adapter import Adapter, adapter_of, attach_adapter, model_matrices
from k3core.checkpoint.adapter_keys import expert_path
from k3core.checkpoint.hf import iter_tensors, load_model, open_checkpoint, save_checkpoint
from k3core.checkpoint.merge import Merge, MergeReport, merge_adapter, merged, merged_packed
from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig, LoraOverride, attach_lora, detach_lora
from k3core.model.model import K3Model
from k3core.model.precision import cast_model
from k3core.model.weights import is_adapter_tensor, named_tensors
from k3kernels.mxfp4 import pack, unpack
from k3kernels.packing import Packing

RandomModel = Callable[[K3Config], K3Model]
RandomTensors = Callable[..., dict[str, Tensor]]

EXPERTS = ("w1", "w2", "w3")
OVERRIDES = (LoraOverride("w2", 2, 7.0), LoraOverride("layers.1.self_attn.o_proj", 4, 1.0))
TOKENS, PACKING = torch.arange(30), Packing((30,))


def every_target(cfg: K3Config) -> LoraConfig:
    return LoraConfig(3, 6.0, tuple(sorted({path.rsplit(".", 1)[-1] for path in model_matrices(cfg)})), OVERRIDES)


def random_adapter(cfg: K3Config, lora: LoraConfig, size: float = 0.1, dtype: torch.dtype = torch.float32) -> Adapter:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for path, (*experts, out_features, in_features) in model_matrices(cfg).items():
        if not lora.is_target(path):
            continue
        rank, _ = lora.rank_alpha(path)
        for module in [expert_path(path, e) for e in range(experts[0])] if experts else [path]:
            A = torch.randn(rank, in_features, generator=generator, dtype=torch.float64)
            B = torch.randn(out_features, rank, generator=generator, dtype=torch.float64)
            tensors |= {f"{module}.lora_A": A.to(dtype), f"{module}.lora_B": (size * B).to(dtype)}
    return Adapter(lora, tensors)


def updates(cfg: K3Config, adapter: Adapter) -> dict[str, Tensor]:
    """scale B A by matrix, worked out without what is tested: 3 for rank 3 and alpha 6 and so on."""
    found = {}
    for name, A in adapter.tensors.items():
        if name.endswith("lora_A"):
            matrix = name.removesuffix(".lora_A")
            scale = 3.5 if matrix.endswith(".w2") else 0.25 if matrix == "layers.1.self_attn.o_proj" else 2.0
            found[matrix] = scale * (adapter.tensors[f"{matrix}.lora_B"] @ A)
    assert found
    assert all(found[m].shape == model_matrices(cfg)[m][-2:] for m in found if "experts." not in m)
    return found


def logits(model: K3Model) -> Tensor:
    with torch.no_grad():
        return model.logits(model(TOKENS, PACKING).hidden_TD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_target_is_w_plus_scale_b_a_and_nothing_else_changes(
    cfg: K3Config, random_model: RandomModel, dtype: torch.dtype
) -> None:
    model = random_model(cfg).to(dtype)
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    adapter = random_adapter(cfg, every_target(cfg), dtype=dtype)
    report = merge_adapter(model, adapter)
    update = updates(cfg, adapter)
    for name, tensor in named_tensors(model).items():
        matrix = name.removesuffix(".weight")
        assert torch.equal(tensor, before[name] + update[matrix] if matrix in update else before[name]), name
        assert (matrix in update) == (not torch.equal(tensor, before[name])), name
    num_experts = sum(6 if len(shape) == 3 else 1 for shape in model_matrices(cfg).values())
    assert {tensor.name for tensor in report.merged} == set(update)
    assert len(report.merged) == num_experts
    assert report.num_tensors == len(before)
    assert report.num_parameters == sum(tensor.numel() for tensor in before.values())
    assert report.num_merged_parameters == sum(u.numel() for u in update.values())
    assert report.worst.rounding_error < 1e-5


def test_the_merged_model_computes_what_the_adapted_one_does(cfg: K3Config, random_model: RandomModel) -> None:
    adapter = random_adapter(cfg, every_target(cfg), size=0.02)
    adapted, plain = random_model(cfg), random_model(cfg)
    attach_adapter(adapted, adapter)
    assert (logits(adapted) - logits(plain)).abs().max() > 0.1
    merge_adapter(plain, adapter)
    torch.testing.assert_close(logits(plain), logits(adapted), rtol=0, atol=1e-5)


def test_a_trained_adapter_is_merged_into_its_own_model(k3: K3Config, random_model: RandomModel) -> None:
    model, lora = random_model(k3), LoraConfig(3, 6.0, ("o_proj", "w2"))
    attach_lora(model, lora, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            if name.endswith("lora_B"):
                tensor.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    expected, adapter = logits(model), adapter_of(model, lora)
    with pytest.raises(ValueError, match=r"lora_A: an adapter's, among the weights to merge into"):
        merge_adapter(model, adapter)
    detach_lora(model)
    assert not torch.allclose(logits(model), expected, rtol=0, atol=1e-3)
    merge_adapter(model, adapter)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_summed_in_fp32_and_rounded_once(
    cfg: K3Config, random_model: RandomModel, dtype: torch.dtype
) -> None:
    model = random_model(cfg)
    cast_model(model, dtype)
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    adapter = random_adapter(cfg, every_target(cfg))
    report = merge_adapter(model, adapter)
    for matrix, update in updates(cfg, adapter).items():
        stored = named_tensors(model)[f"{matrix}.weight"]
        assert torch.equal(stored, (before[f"{matrix}.weight"].float() + update).to(dtype)), matrix
    assert {tensor.stored for tensor in report.merged} == {str(dtype).removeprefix("torch.")}
    assert 1e-5 < report.worst.rounding_error < 0.1


def test_an_update_that_vanishes_in_rounding_is_counted() -> None:
    weight = torch.full((4, 6), 1.0, dtype=torch.bfloat16)
    A, B = torch.ones(1, 6), torch.tensor([[0.0], [1e-4], [-1e-4], [0.25]])
    adapter = Adapter(LoraConfig(1, 1.0, ("q_proj",)), {"q_proj.lora_A": A, "q_proj.lora_B": B})
    out, record = merged("q_proj", weight, adapter)
    assert torch.equal(out, torch.tensor([1.0, 1.0, 1.0, 1.25], dtype=torch.bfloat16)[:, None].expand(4, 6))
    assert (record.num_elements, record.num_updated, record.num_unchanged) == (24, 18, 12)
    assert record.rounding_error == pytest.approx((2e-8 / (0.0625 + 2e-8)) ** 0.5, rel=1e-3)
    assert record.stored == "bfloat16"
    _, lost = merged("q_proj", weight[:3], replace(adapter, tensors={"q_proj.lora_A": A, "q_proj.lora_B": B[:3]}))
    assert lost.rounding_error == 1.0
    _, none = merged("q_proj", weight[:1], replace(adapter, tensors={"q_proj.lora_A": A, "q_proj.lora_B": B[:1]}))
    assert (none.num_updated, none.num_unchanged, none.rounding_error) == (0, 0, 0.0)


def test_a_large_matrix_is_merged_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, A, B = (torch.randn(shape, generator=generator) for shape in ((23, 8), (3, 8), (23, 3)))
    adapter = Adapter(LoraConfig(3, 6.0, ("q_proj",)), {"q_proj.lora_A": A, "q_proj.lora_B": B})
    whole, whole_record = merged("q_proj", weight, adapter)
    for block in (1, 40, 8 * 23):
        monkeypatch.setattr(merge_module, "BLOCK", block)
        out, record = merged("q_proj", weight, adapter)
        torch.testing.assert_close(out, whole, rtol=0, atol=1e-6)
        assert (record.num_elements, record.num_updated) == (whole_record.num_elements, whole_record.num_updated)


def test_a_target_that_never_comes_is_named_and_the_merge_fails(k3: K3Config, random_model: RandomModel) -> None:
    adapter = random_adapter(k3, LoraConfig(3, 6.0, ("o_proj", "w1")))
    weights = dict(named_tensors(random_model(k3)))
    del weights["layers.2.self_attn.o_proj.weight"]
    del weights["layers.3.block_sparse_moe.experts.4.w1.weight"]
    message = r"never came: layers\.2\.self_attn\.o_proj, layers\.3\.block_sparse_moe\.experts\.4\.w1$"
    with pytest.raises(ValueError, match=message):
        dict(Merge(weights.items(), adapter))


def test_a_weight_of_another_shape_is_named(k3: K3Config, random_model: RandomModel) -> None:
    adapter = random_adapter(k3, LoraConfig(3, 6.0, ("o_proj",)))
    weights = dict(named_tensors(random_model(k3)))
    weights["layers.2.self_attn.o_proj.weight"] = torch.zeros(20, 11)
    with pytest.raises(
        ValueError, match=r"^layers\.2\.self_attn\.o_proj: the weight is \[20, 11\], the adapter's \[20, 10\]"
    ):
        dict(Merge(weights.items(), adapter))


def test_an_adapter_of_another_model_is_refused_before_anything_is_merged(
    k3: K3Config, random_model: RandomModel
) -> None:
    model = random_model(k3)
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    adapter = random_adapter(replace(k3, kda_head_dim=4), LoraConfig(3, 6.0, ("q_proj", "o_proj")))
    with pytest.raises(ValueError, match=r"does not fit the model: layers\.\{0-1,3\}\.self_attn\.q_proj\.lora_B"):
        merge_adapter(model, adapter)
    assert all(torch.equal(before[name], tensor) for name, tensor in named_tensors(model).items())


def test_a_sum_that_is_not_finite_is_named() -> None:
    weight = torch.full((2, 2), 60000.0, dtype=torch.float16)
    factors = {"q_proj.lora_A": torch.ones(1, 2), "q_proj.lora_B": torch.full((2, 1), 60000.0)}
    adapter = Adapter(LoraConfig(1, 1.0, ("q_proj",)), factors)
    with pytest.raises(ValueError, match=r"^q_proj: W \+ scale B A is not finite in float16"):
        merged("q_proj", weight, adapter)


@pytest.fixture
def packed(k3_packed: K3Config, random_tensors: RandomTensors) -> dict[str, Tensor]:
    """Scales near 1, so that updates of 0.1 are neither lost nor all."""
    tensors = random_tensors(k3_packed)
    for name, tensor in tensors.items():
        if name.endswith("weight_scale"):
            tensor.copy_(124 + tensor % 3)
    return tensors


def unpacked(tensors: dict[str, Tensor], matrix: str) -> Tensor:
    return unpack(tensors[f"{matrix}.weight_packed"], tensors[f"{matrix}.weight_scale"], torch.float32)


def test_packed_experts_merged_as_bf16_are_the_unpacked_ones_plus_the_update(
    k3_packed: K3Config, packed: dict[str, Tensor]
) -> None:
    adapter = random_adapter(k3_packed, LoraConfig(3, 6.0, (*EXPERTS, "o_proj"), OVERRIDES))
    merge = Merge(packed.items(), adapter, "bf16")
    out = dict(merge)
    for matrix, update in updates(k3_packed, adapter).items():
        if ".experts." in matrix:
            assert f"{matrix}.weight_packed" not in out
            assert torch.equal(out[f"{matrix}.weight"], (unpacked(packed, matrix) + update).to(torch.bfloat16))
    report = merge.report()
    assert {t.stored for t in report.merged} == {"bfloat16"}
    assert report.num_tensors == len(packed) - sum(name.endswith("_scale") for name in packed)
    assert report.num_merged_parameters == sum(u.numel() for u in updates(k3_packed, adapter).values())


def test_packed_experts_stay_packed_on_request_and_groups_without_an_update_keep_their_bytes(
    k3_packed: K3Config, packed: dict[str, Tensor]
) -> None:
    adapter = random_adapter(k3_packed, LoraConfig(3, 6.0, ("w1", "w2")))
    matrix = "layers.1.block_sparse_moe.experts.2.w1"
    adapter.tensors[f"{matrix}.lora_A"][:, 32:] = 0.0  # of two groups of a row
    adapter.tensors[f"{matrix}.lora_B"][5] = 0.0
    merge = Merge(packed.items(), adapter, "mxfp4")
    out = dict(merge)
    assert out.keys() == packed.keys()
    codes, scale = out[f"{matrix}.weight_packed"], out[f"{matrix}.weight_scale"]
    assert torch.equal(codes[:, 16:], packed[f"{matrix}.weight_packed"][:, 16:])
    assert torch.equal(scale[:, 1:], packed[f"{matrix}.weight_scale"][:, 1:])
    assert torch.equal(codes[5], packed[f"{matrix}.weight_packed"][5])
    old, new = unpacked(packed, matrix), unpacked(out, matrix)
    update = 2.0 * (adapter.tensors[f"{matrix}.lora_B"] @ adapter.tensors[f"{matrix}.lora_A"])
    record = next(t for t in merge.report().merged if t.name == matrix)
    assert record.stored == "mxfp4"
    assert record.num_updated == 31 * 32
    assert record.num_unchanged == int(((update != 0) & (old == new)).sum())
    assert record.num_unchanged > 0
    error = (new - (old + update)).norm() / update.norm()
    assert record.rounding_error == pytest.approx(float(error), rel=1e-4)
    assert record.rounding_error > 0.01
    # To the nearest point of each group's grid: no further than half its largest step.
    step = 2.0 ** (scale.repeat_interleave(32, 1).float() - 127)
    assert bool(((new - (old + update)).abs() <= 2 * step).all())


@pytest.mark.parametrize("size", [1e-5, 1e-3, 0.02, 0.5])
def test_repacked_an_update_never_does_more_harm_than_left_out(
    k3_packed: K3Config, packed: dict[str, Tensor], size: float
) -> None:
    merge = Merge(packed.items(), random_adapter(k3_packed, LoraConfig(3, 6.0, EXPERTS), size=size), "mxfp4")
    dict(merge)
    assert max(tensor.rounding_error for tensor in merge.report().merged) <= 1.0


def test_a_largest_value_just_below_a_power_of_two_is_not_cut_to_three_quarters_of_it() -> None:
    old = torch.zeros(2, 32)
    old[:, 0], old[:, 1], old[:, 2] = 4.0, 3.0, -4.0
    codes, scale = pack(old)
    A, B = torch.zeros(1, 32), torch.tensor([[-0.01], [1.0]])
    A[0, :2], A[0, 2] = torch.tensor([1.0, 3.0]), -3.5
    adapter = Adapter(LoraConfig(1, 1.0, ("w1",)), {"experts.0.w1.lora_A": A, "experts.0.w1.lora_B": B})
    tensors, record = merged_packed("experts.0.w1", codes, scale, adapter, "mxfp4")
    new = unpack(*tensors, torch.float32)
    assert new[0, :3].tolist() == [4.0, 3.0, -4.0]  # of 3.99, 2.97 and -3.965
    assert new[1, :3].tolist() == [4.0, 6.0, -8.0]  # of 5, 6 and -7.5
    assert record.rounding_error < 1.0


def test_a_model_with_packed_experts_is_merged_in_place(k3_packed: K3Config, packed: dict[str, Tensor]) -> None:
    adapter = random_adapter(k3_packed, LoraConfig(3, 6.0, ("w1", "o_proj")))
    model = K3Model(k3_packed)
    cast_model(model, torch.bfloat16)
    own = named_tensors(model)
    for name, tensor in packed.items():
        own[name].copy_(tensor)
    merge_adapter(model, adapter)
    expected = dict(Merge(packed.items(), adapter, "mxfp4"))
    assert all(torch.equal(named_tensors(model)[name], tensor) for name, tensor in expected.items())


def test_halves_of_a_packed_matrix_may_come_in_any_order(k3_packed: K3Config, packed: dict[str, Tensor]) -> None:
    adapter = random_adapter(k3_packed, LoraConfig(3, 6.0, EXPERTS))
    forwards, backwards = dict(Merge(packed.items(), adapter)), dict(Merge(reversed(packed.items()), adapter))
    assert forwards.keys() == backwards.keys()
    assert all(torch.equal(forwards[name], backwards[name]) for name in forwards)


@pytest.mark.parametrize(("form", "experts"), [("k3", "keep"), ("kimi_linear", "keep"), ("k3_packed", "bf16")])
def test_a_checkpoint_is_merged_on_its_way_from_folder_to_folder(
    tmp_path: Path, random_model: RandomModel, request: pytest.FixtureRequest, form: str, experts: str
) -> None:
    """Read back, the merged folder computes what base and adapter do: a merge that fell back to the base would show."""
    cfg: K3Config = request.getfixturevalue(form)
    model = random_model(cfg) if cfg.expert_quantization is None else K3Model(cfg)
    tensors = named_tensors(model)
    if cfg.expert_quantization is not None:
        plain = random_model(replace(cfg, expert_quantization=None))
        tensors = dict(named_tensors(plain))
    save_checkpoint(
        tmp_path / "base", cfg, tensors, dtype=torch.float32, experts="mxfp4" if "packed" in form else "keep"
    )
    adapter = random_adapter(cfg, every_target(cfg), size=0.02)
    merge = Merge(iter_tensors(open_checkpoint(tmp_path / "base")), adapter)
    save_checkpoint(tmp_path / "merged", cfg, merge, dtype=torch.float32, experts=experts)
    adapted = load_model(tmp_path / "base", torch.float32)
    attach_adapter(adapted, adapter)
    whole, base = load_model(tmp_path / "merged", torch.float32), load_model(tmp_path / "base", torch.float32)
    apart = (logits(whole) - logits(adapted)).abs()
    moved = (logits(adapted) - logits(base)).abs()
    if experts == "keep":
        assert apart.max() < 1e-5
    else:  # rounded to bf16, a weight may turn the choice of a token's experts, so the worst logit says nothing
        assert apart.median() < 0.1 * moved.median()
    assert moved.max() > 0.1
    assert len(merge.report().merged) == len(adapter.tensors) // 2


def test_a_merge_that_fails_leaves_no_checkpoint(tmp_path: Path, k3: K3Config, random_model: RandomModel) -> None:
    weights = named_tensors(random_model(k3))
    adapter = random_adapter(k3, LoraConfig(3, 6.0, ("lm_head",)))
    adapter.tensors["lm_head.lora_B"][0] = 1e38
    with pytest.raises(ValueError, match="lm_head: W "):
        save_checkpoint(tmp_path / "merged", k3, Merge(weights.items(), adapter))
    assert list(tmp_path.iterdir()) == []


def test_weights_pass_one_at_a_time(k3: K3Config, random_model: RandomModel) -> None:
    """Nothing but halves of packed matrices is held back."""
    weights = named_tensors(random_model(k3))
    adapter = random_adapter(k3, every_target(k3))
    given: list[str] = []

    def counted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            given.append(name)
            yield name, tensor

    for number, (name, _) in enumerate(Merge(counted(), adapter)):
        assert given[-1] == name
        assert len(given) == number + 1
    assert not any(is_adapter_tensor(name) for name in given)


def test_the_report_says_what_was_merged_and_what_rounding_lost(k3: K3Config, random_model: RandomModel) -> None:
    model = random_model(k3)
    cast_model(model, torch.bfloat16)
    report = merge_adapter(model, random_adapter(k3, LoraConfig(3, 6.0, ("o_proj", "w1")), size=1e-4))
    total = sum(tensor.numel() for tensor in named_tensors(model).values())
    first, second, third = report.lines()
    assert first == (
        f"merged 29 of {len(named_tensors(model))} tensors, {report.num_merged_parameters} of {total} parameters "
        "(29 as bfloat16)"
    )
    assert second == f"rounding left {report.num_unchanged} of {report.num_updated} updated elements as they were"
    assert 0 < report.num_unchanged < report.num_updated
    assert third.endswith(f"of the update, in {report.worst.name}")
    assert isinstance(report, MergeReport)
