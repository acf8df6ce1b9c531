"""Versions leave as folders: to the byte where nothing changed, merged or as an adapter, and never by halves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infra import policies
from infra.config import RunConfig, load
from infra.export import Exported, Wish, export_version
from infra.gc import Keep, collect, live
from infra.pool import _pools
from infra.stages.prepare import prepare_run
from infra.stages.publish import publish_step
from infra.stages.warm_start import warm_start
from infra.store import Store
from k3core.checkpoint.adapter import load_adapter
from k3core.checkpoint.hf import iter_tensors, open_checkpoint
from k3core.checkpoint.names import is_packed
from k3core.checkpoint.tensors import from_torch, to_torch
from k3core.errors import IntegrityError
from k3core.rl.trainer import Trainer
from k3core.tokenizer import Tokenizer
from k3core.types import PolicyVersion
from k3kernels.mxfp4 import unpack

InitFolder = Callable[[str], Path]
Tensors = dict[str, Tensor]

LORA = ("train.mode=lora", "train.lora_rank=4", "train.lora_alpha=8", 'train.lora_targets=["o_proj"]')
WITH_EXPERTS = (*LORA, 'train.lora_targets=["o_proj", "w2"]')
NOW = datetime(2026, 3, 1, tzinfo=UTC)


@dataclasses.dataclass(frozen=True)
class Run:
    cfg: RunConfig
    store: Store
    folder: Path

    def export(self, out: Path, **wish: Any) -> Exported:
        return export_version(self.store, Wish(self.cfg.run, **wish), out, lambda _done, _of: None)

    def tensors(self, step: int) -> Tensors:
        version = policies.read_version(self.store, self.cfg.run, step)
        assert version is not None
        return to_torch(policies.load(self.store, version))

    def publish(self, step: int, tensors: Tensors, full_every: int = 10) -> PolicyVersion:
        parent = policies.read_version(self.store, self.cfg.run, step - 1)
        version, _ = policies.publish(self.store, self.cfg.run, step, from_torch(tensors), parent, full_every, 1, {})
        return version

    def publish_adapter(self, lora_B: float) -> Tensors:
        """Of step 1, with factors as an update might leave them."""
        trainer = Trainer(self.cfg.model, self.cfg.train.optim, self.cfg.train.lora, seed=5)
        generator = torch.Generator().manual_seed(0)
        adapter, _ = trainer.save(adapter_only=True)
        for name, tensor in adapter.items():
            if name.endswith("lora_B"):
                tensor.normal_(0, lora_B, generator=generator)
        policies.publish_adapter(self.store, self.cfg.run, 1, from_torch(adapter), {})
        return adapter


@pytest.fixture
def begun(tmp_path: Path, init_folder: InitFolder) -> Callable[..., Run]:
    """A run from a checkpoint of this kind whose step 0 is published."""

    def begin(kind: str, *overrides: str) -> Run:
        _pools.clear()
        folder = init_folder(kind)
        path = tmp_path / "mine.toml"
        path.write_text(f'run = "mine"\nroot = "{tmp_path}/runs"\n[warm_start]\ninit = "{folder}"\nsteps = 0\n')
        cfg = load(path, ["control.enabled=false", *overrides])
        inputs = prepare_run(cfg)
        publish_step(inputs, cfg.root, warm_start(inputs, cfg.root), None)
        return Run(cfg, Store(cfg.root), folder)

    return begin


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored(folder: Path) -> Tensors:
    return dict(iter_tensors(open_checkpoint(folder)))


def moved(tensors: Tensors) -> Tensors:
    return {name: t + 0.25 if name.endswith("o_proj.weight") else t for name, t in tensors.items()}


@pytest.mark.parametrize("kind", ["k3", "k3_packed", "kimi_linear"])
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_what_did_not_change_leaves_as_it_came_byte_for_byte(
    begun: Callable[..., Run], tmp_path: Path, kind: str, mode: str
) -> None:
    """Documents, small files and all; packed experts too where mode full had unpacked them."""
    run = begun(kind, *(LORA if mode == "lora" else ()))
    done = run.export(tmp_path / "out", step=0, experts="mxfp4" if (kind, mode) == ("k3_packed", "full") else None)
    assert contents(tmp_path / "out") == contents(run.folder)
    assert (done.form, done.num_rounded, done.like) == ("weights", 0, run.folder)
    assert done.files == {name: len(data) for name, data in contents(run.folder).items()}


def test_a_delta_leaves_as_the_weights_that_it_makes(begun: Callable[..., Run], tmp_path: Path) -> None:
    run = begun("kimi_linear")
    changed = moved(run.tensors(0))
    assert run.publish(1, changed).kind == "delta"
    done = run.export(tmp_path / "out")
    found, before = stored(tmp_path / "out"), stored(run.folder)
    assert done.version.step == 1
    for name, tensor in changed.items():
        assert torch.equal(found[name], tensor.to(before[name].dtype))
    assert not torch.equal(found["layers.0.self_attn.o_proj.weight"], before["layers.0.self_attn.o_proj.weight"])
    different = {name for name, data in contents(tmp_path / "out").items() if contents(run.folder)[name] != data}
    assert different
    assert all(name.endswith(".safetensors") for name in different)


@pytest.mark.parametrize("kind", ["k3", "kimi_linear"])
def test_a_chosen_type_loses_nothing_and_keeps_the_small_files(
    begun: Callable[..., Run], tmp_path: Path, kind: str
) -> None:
    run = begun(kind)
    changed = {name: t + 1e-6 for name, t in run.tensors(0).items()}
    run.publish(1, changed)
    done = run.export(tmp_path / "out", dtype=torch.float32)
    found = stored(tmp_path / "out")
    assert found.keys() == changed.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in changed.items())
    assert (done.num_rounded, done.like) == (0, None)
    document = json.loads((tmp_path / "out" / "config.json").read_text())
    assert document["dtype"] == document.get("text_config", document)["dtype"] == "float32"
    for name in ("LICENSE", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (run.folder / name).read_bytes()


def test_a_run_from_scratch_leaves_with_its_tokenizer_and_the_ids_of_it(tmp_path: Path) -> None:
    cfg = load("smoke", [f"root={tmp_path}/runs", "tokenizer.corpus_prompts=40"])
    inputs, store = prepare_run(cfg), Store(cfg.root)
    tensors, _ = Trainer(cfg.model, cfg.train.optim, None, seed=3).save()
    policies.publish(store, cfg.run, 0, from_torch(tensors), None, 10, 1, {})
    done = Run(cfg, store, tmp_path).export(tmp_path / "out", dtype=torch.float32)
    assert open_checkpoint(tmp_path / "out").cfg == cfg.model
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in stored(tmp_path / "out").items())
    tokenizer = Tokenizer.from_folder(tmp_path / "out")
    assert tokenizer.sha256 == inputs.tokenizer.sha256
    for document in (json.loads((tmp_path / "out" / f"{name}config.json").read_text()) for name in ("", "generation_")):
        assert document["eos_token_id"] == tokenizer.control["<|end_of_msg|>"]
        assert document["bos_token_id"] == tokenizer.control["[BOS]"]
    assert done.notes == ()


@pytest.mark.parametrize("kind", ["k3", "k3_packed", "kimi_linear"])
def test_an_adapter_leaves_as_it_is_and_names_its_base(begun: Callable[..., Run], tmp_path: Path, kind: str) -> None:
    run = begun(kind, *WITH_EXPERTS)
    adapter = run.publish_adapter(0.1)
    done = run.export(tmp_path / "out")
    found = load_adapter(tmp_path / "out", run.cfg.model)
    assert found.tensors.keys() == adapter.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in adapter.items())
    assert found.lora.scale("layers.0.self_attn.o_proj") == 2.0
    assert (done.form, done.base, found.base_model) == ("adapter", run.folder, str(run.folder))
    assert set(done.files) == {"adapter_config.json", "adapter_model.safetensors"}


def test_an_adapter_whose_base_the_run_trained_names_no_folder(begun: Callable[..., Run], tmp_path: Path) -> None:
    run = begun("kimi_linear", *LORA, "warm_start.steps=1", "warm_start.rows=1", "warm_start.expert_steps=0")
    run.publish_adapter(0.1)
    assert run.export(tmp_path / "out").base is None
    assert load_adapter(tmp_path / "out", run.cfg.model).base_model == ""


def test_an_adapter_with_experts_that_peft_would_drop_says_so(begun: Callable[..., Run], tmp_path: Path) -> None:
    run = begun("kimi_linear", *LORA, 'train.lora_targets=["o_proj", "w1"]')
    run.publish_adapter(0.1)
    (note,) = run.export(tmp_path / "out").notes
    assert note.startswith("peft has no place for layers.{1-2}.block_sparse_moe.experts.w1 and leaves them out")


@pytest.mark.parametrize("experts", [None, "bf16"])
def test_a_merge_adds_the_adapter_and_leaves_all_else_in_place(
    begun: Callable[..., Run], tmp_path: Path, experts: str | None
) -> None:
    run = begun("k3_packed", *LORA)
    adapter = run.publish_adapter(0.1)
    done = run.export(tmp_path / "out", form="merged", experts=experts)
    found, before = stored(tmp_path / "out"), stored(run.folder)
    for name, tensor in before.items():
        matrix = name.removesuffix(".weight")
        if f"{matrix}.lora_A" in adapter:
            A, B = adapter[f"{matrix}.lora_A"], adapter[f"{matrix}.lora_B"]
            assert torch.equal(found[name], (tensor.float() + 2.0 * (B @ A)).bfloat16())
            assert not torch.equal(found[name], tensor)
        elif experts is None or not is_packed(name):
            assert torch.equal(found[name], tensor)
        elif name.endswith("_packed"):
            matrix = name.removesuffix(".weight_packed")
            values = unpack(tensor, before[f"{matrix}.weight_scale"], torch.bfloat16)
            assert torch.equal(found[f"{matrix}.weight"], values)
    text = json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]
    assert ("quantization_config" in text) == (experts is None)
    assert done.notes[0].startswith("merged 3 of 102 tensors, ")
    assert done.notes[0].endswith("(3 as bfloat16)"), "what rounding cost is counted in the type of the file"


def test_a_merge_into_packed_experts_moves_only_the_groups_that_it_touches(
    begun: Callable[..., Run], tmp_path: Path
) -> None:
    run = begun("k3_packed", *LORA, 'train.lora_targets=["w2"]')
    adapter = run.publish_adapter(0.3)
    done = run.export(tmp_path / "out", form="merged")
    found, before = stored(tmp_path / "out"), stored(run.folder)
    targeted = {name for name in before if is_packed(name) and name.rpartition(".")[0].endswith("w2")}
    assert all(torch.equal(found[name], before[name]) for name in before.keys() - targeted)
    assert any(not torch.equal(found[name], before[name]) for name in targeted)
    assert len(adapter) == len(targeted)
    assert done.notes[0].startswith("merged 8 of 102 tensors, ")


@pytest.mark.parametrize(
    ("wish", "line"),
    [
        ({"run": "other"}, "run 'other' was never started in "),
        ({"step": 7}, "mine has no version 7 in "),
        ({"step": 0, "form": "merged"}, "--merged: mine@0 holds whole weights and no adapter; leave it out"),
        ({"step": 0, "form": "adapter"}, "--adapter: mine@0 holds whole weights and no adapter; leave it out"),
        ({"experts": "bf16"}, "--experts: mine@1 is exported as an adapter, which has no such thing; add --merged"),
        ({"like": Path("x")}, "--like: mine@1 is exported as an adapter, which has no such thing; add --merged"),
        (
            {"form": "merged", "like": Path("x"), "dtype": torch.float32},
            "--like and --dtype: the types are those of the folder that it is to be like; leave one out",
        ),
        ({"form": "merged", "like": Path("no/such")}, "no/such: expected a folder"),
    ],
)
def test_a_wish_that_makes_no_sense_is_one_line(
    begun: Callable[..., Run], tmp_path: Path, wish: dict[str, Any], line: str
) -> None:
    run = begun("k3", *LORA)
    run.publish_adapter(0.1)
    with pytest.raises(ValueError, match=r".") as caught:
        export_version(run.store, Wish(**({"run": "mine"} | wish)), tmp_path / "out", lambda _done, _of: None)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_folder_that_holds_something_is_not_written_to(begun: Callable[..., Run], tmp_path: Path) -> None:
    run = begun("k3")
    (tmp_path / "out").mkdir()
    run.export(tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match="is not empty"):
        run.export(tmp_path / "out", dtype=torch.float32)
    assert contents(tmp_path / "out") == before


def test_a_pruned_version_says_since_when_and_what_to_take(begun: Callable[..., Run], tmp_path: Path) -> None:
    run = begun("k3")
    tensors = run.tensors(0)
    for step in (1, 2, 3):
        tensors = moved(tensors)
        run.publish(step, tensors, full_every=1)
    (tmp_path / "runs" / "mine" / "serving.json").unlink()  # the pointer of this test's step 0 would keep them all
    collect(run.store, live(run.store, "mine", Keep(last=1), NOW), NOW)
    with pytest.raises(ValueError, match=r"no live version needs step 1.*use step 3") as caught:
        run.export(tmp_path / "out", step=1)
    assert not isinstance(caught.value, IntegrityError)
    run.export(tmp_path / "out", step=3)


def test_broken_bytes_leave_nothing_behind(begun: Callable[..., Run], tmp_path: Path) -> None:
    run = begun("k3")
    (payload,) = (tmp_path / "runs" / "mine" / "policies" / "000000").glob("payload-*")
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    with pytest.raises(IntegrityError, match=payload.name):
        run.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("is_gone", [True, False])
def test_without_the_folder_that_it_came_from_a_version_leaves_in_the_familys_own_layout(
    begun: Callable[..., Run], tmp_path: Path, is_gone: bool
) -> None:
    run = begun("kimi_linear")
    if is_gone:
        run.folder.rename(tmp_path / "away")
    else:
        (run.folder / "tokenizer_config.json").write_text("{}")
    done = run.export(tmp_path / "out", step=0)
    assert done.like is None
    assert ("no such folder" in done.notes[0]) == is_gone
    assert done.notes[0].endswith("written in the family's own layout, with the run's tokenizer")
    theirs = stored(tmp_path / "away" if is_gone else run.folder)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in stored(tmp_path / "out").items())
    assert Tokenizer.from_folder(tmp_path / "out").sha256 == pinned_tokenizer(run)


def pinned_tokenizer(run: Run) -> str:
    pinned = run.store.read_manifest("mine/run.json")
    assert pinned is not None
    sha256: str = pinned["tokenizer"]["sha256"]
    return sha256
