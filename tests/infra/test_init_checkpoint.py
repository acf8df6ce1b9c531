"""A run that starts from a checkpoint's folder: its config, its identity, its first version."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infra import policies
from infra.config import ConfigError, RunConfig, dump, from_tree, load, parse
from infra.config_doctor import diagnose_config
from infra.doctor import Finding
from infra.lineage import ancestry
from infra.pool import _pools
from infra.stages import warm_start as stage
from infra.stages.context import Context, Inputs
from infra.stages.prepare import find_inputs, prepare_run
from infra.stages.publish import publish_step
from infra.stages.record import read_record
from infra.stages.warm_start import warm_start
from infra.store import Store
from infra.tokenizer_files import tokenizer_files
from k3core.checkpoint.hf import iter_tensors, open_checkpoint
from k3core.checkpoint.names import is_packed
from k3core.checkpoint.tensors import to_torch
from k3core.errors import IntegrityError
from k3core.model.config import K3Config
from k3core.tokenizer import Tokenizer
from k3core.types import PolicyVersion, Ref
from k3kernels.mxfp4 import unpack

InitFolder = Callable[[str], Path]
LORA = ("train.mode=lora", "train.lora_rank=4", 'train.lora_targets=["o_proj"]')


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    """A small run from a folder; without [model] and [tokenizer], as a person would write it."""

    def make(folder: Path | str, *overrides: str) -> RunConfig:
        path = tmp_path / "mine.toml"
        path.write_text(f'run = "mine"\nroot = "{tmp_path}/runs"\n[warm_start]\ninit = "{folder}"\nsteps = 0\n')
        return load(path, ["control.enabled=false", "environment.max_turn_tokens=8", *overrides])

    return make


def problems(config: Callable[..., RunConfig], *arguments: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        config(*arguments)
    return caught.value.problems


def by_name(findings: list[Finding]) -> dict[str, list[Finding]]:
    named: dict[str, list[Finding]] = {}
    for finding in findings:
        named.setdefault(finding.name, []).append(finding)
    return named


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# ---- config


@pytest.mark.parametrize("kind", ["k3", "k3_packed", "kimi_linear"])
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_architecture_is_the_folders(
    config: Callable[..., RunConfig], init_folder: InitFolder, kind: str, mode: str
) -> None:
    """Mode lora keeps packed experts, mode full trains them and so unpacks them."""
    folder = init_folder(kind)
    stored = open_checkpoint(folder).cfg
    cfg = config(folder, *(LORA if mode == "lora" else ()))
    assert cfg.model == (stored if mode == "lora" else dataclasses.replace(stored, expert_quantization=None))
    assert cfg.model != K3Config()


def test_each_written_key_that_differs_is_a_line_with_both_values(
    config: Callable[..., RunConfig], init_folder: InitFolder
) -> None:
    folder = init_folder("kimi_linear")
    found = problems(
        config, folder, "model.hidden_size=64", "model.num_experts=4", "model.q_lora_rank=16", "model.hidden_act=silu"
    )
    assert found == (
        f'model.hidden_size 64 and warm_start.init "{folder}", whose config.json says 32: remove the line, or name '
        "another checkpoint",
        f'model.q_lora_rank 16 and warm_start.init "{folder}", whose config.json says null: remove the line, or name '
        "another checkpoint",
    )
    config(folder, "model.full_attn_layers=[3]", "model.q_lora_rank=none", "model.gate_lower_bound=none")


def test_a_run_that_would_write_into_the_folder_is_refused(
    config: Callable[..., RunConfig], init_folder: InitFolder
) -> None:
    folder = init_folder("k3")
    for root in (folder.parent, f"file://{folder.parent}"):
        (line,) = problems(config, folder, f"root={root}", "run=k3")
        assert line.startswith(f'run "k3" and warm_start.init "{folder}": the run would write into the checkpoint')
    config(folder, f"root={folder.parent}", "run=other")


def test_an_unknown_key_beside_a_folder_is_still_named(
    config: Callable[..., RunConfig], init_folder: InitFolder
) -> None:
    (line,) = problems(config, init_folder("k3"), "model.hiden_size=32")
    assert line == "model.hiden_size: unknown key (did you mean hidden_size?)"


def test_what_no_released_config_says_may_be_written(config: Callable[..., RunConfig], init_folder: InitFolder) -> None:
    assert config(init_folder("k3"), "model.latent_norm_eps=1e-5").model.latent_norm_eps == 1e-5


def test_a_written_tokenizer_is_refused(config: Callable[..., RunConfig], init_folder: InitFolder) -> None:
    folder = init_folder("k3")
    assert problems(config, folder, "tokenizer.vocab_size=400") == (
        f'tokenizer.vocab_size and warm_start.init "{folder}": the tokenizer is the checkpoint\'s; remove the line',
    )


def test_what_packed_experts_do_not_take_part_in_is_refused(
    config: Callable[..., RunConfig], init_folder: InitFolder
) -> None:
    folder = init_folder("k3_packed")
    cannot = "supervised steps train all parameters, and packed experts cannot be trained"
    for change, line in (
        ("warm_start.steps=5", f"warm_start.steps 5 and model.expert_quantization mxfp4: {cannot}; "),
        ("control.enabled=true", f'control.enabled true and warm_start.init "{folder}", whose experts are packed: '),
    ):
        (problem,) = problems(config, folder, *LORA, change)
        assert problem.startswith(line)
    (problem,) = problems(config, folder, "model.expert_quantization=mxfp4")
    assert problem.startswith('model.expert_quantization mxfp4 and train.mode "full": packed experts cannot be trained')
    config(folder, "warm_start.steps=5", "control.enabled=true")


@pytest.mark.parametrize(
    ("init", "line"),
    [
        (
            "hf://moonshotai/Kimi-K3",
            'warm_start.init "hf://moonshotai/Kimi-K3": not a local folder; copy the checkpoint',
        ),
        ("no/such", 'warm_start.init "no/such": no such folder; download the checkpoint into it (hf download NAME '),
        ("{empty}", 'warm_start.init "{empty}": holds no config.json; name the folder'),
        ("{file}", 'warm_start.init "{file}": a file; name the folder'),
    ],
)
def test_a_folder_that_is_not_there_is_one_line(
    config: Callable[..., RunConfig], tmp_path: Path, init: str, line: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    places = {"empty": tmp_path / "empty", "file": tmp_path / "file"}
    (problem,) = problems(config, init.format(**places))
    assert problem.removeprefix("mine.toml: ").startswith(line.format(**places))
    assert "\n" not in problem


def test_every_fault_of_a_config_json_is_a_line(config: Callable[..., RunConfig], init_folder: InitFolder) -> None:
    folder = init_folder("kimi_linear")
    edit_json(folder / "config.json", hidden_size="wide", num_shared_experts=-1)
    found = problems(config, folder)
    assert len(found) == 2
    assert all(f"warm_start.init: {folder}/config.json: " in line for line in found)


def test_a_stored_config_reloads_when_the_folder_has_gone(
    config: Callable[..., RunConfig], init_folder: InitFolder, tmp_path: Path
) -> None:
    folder = init_folder("k3_packed")
    cfg = config(folder, *LORA)
    path = tmp_path / "dumped.toml"
    path.write_text(dump(cfg))
    assert load(path) == cfg
    shutil.rmtree(folder)
    assert load(path) == cfg
    assert parse(path.read_text(), "stored") == cfg


def test_a_form_that_sends_every_default_gets_the_folders_architecture(
    config: Callable[..., RunConfig], init_folder: InitFolder
) -> None:
    folder = init_folder("kimi_linear")
    cfg = config(folder)
    tree = json.loads(json.dumps(dataclasses.asdict(cfg)))
    assert from_tree(tree) == cfg
    plain = {**tree, "model": json.loads(json.dumps(dataclasses.asdict(K3Config())))}
    assert from_tree(plain) == cfg
    with pytest.raises(ConfigError, match=r"model\.hidden_size 48 and warm_start\.init"):
        from_tree({**tree, "model": {**tree["model"], "hidden_size": 48}})
    shutil.rmtree(folder)
    assert from_tree(tree) == cfg
    with pytest.raises(ConfigError, match="no such folder"):
        from_tree(plain)


# ---- doctor


def test_the_doctor_says_what_the_checkpoint_is(config: Callable[..., RunConfig], init_folder: InitFolder) -> None:
    found = by_name(diagnose_config(config(init_folder("k3_packed"), *LORA)))
    assert all(finding.ok for findings in found.values() for finding in findings)
    assert "kimi_k3, 126 tensors, " in found["checkpoint"][0].detail
    assert "experts packed" in found["checkpoint"][0].detail
    assert "512 tokens" in found["tokenizer"][0].detail


def test_the_doctor_lists_every_fault_of_the_files(config: Callable[..., RunConfig], init_folder: InitFolder) -> None:
    folder = init_folder("k3")
    cfg = config(folder)
    shards(folder)[0].unlink()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["language_model.model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    faults = by_name(diagnose_config(cfg))["checkpoint"]
    assert len(faults) == 2
    assert all(fault.required and not fault.ok and fault.remedy and str(folder) in fault.detail for fault in faults)
    assert "model-00001-of" in faults[0].detail
    assert "language_model.model.norm.weight" in faults[1].detail


def test_the_doctor_finds_a_tokenizer_that_is_missing_or_too_large(
    config: Callable[..., RunConfig], init_folder: InitFolder
) -> None:
    folder = init_folder("k3")
    cfg = config(folder)
    (finding,) = by_name(
        diagnose_config(dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab_size=500)))
    )["tokenizer"]
    assert not finding.ok
    assert "its tokenizer has 512 tokens and its config.json vocab_size 500" in finding.detail
    (folder / "tokenizer.json").unlink()
    (finding,) = by_name(diagnose_config(cfg))["tokenizer"]
    assert not finding.ok
    assert "tokenizer.json" in finding.detail


def test_the_doctor_finds_targets_that_the_model_has_not(
    config: Callable[..., RunConfig], init_folder: InitFolder
) -> None:
    cfg = config(init_folder("kimi_linear"), "train.mode=lora")  # the default targets are K3's
    (finding,) = by_name(diagnose_config(cfg))["adapter"]
    assert not finding.ok
    assert finding.detail.startswith("train.lora_targets: ['g_proj', 'q_a_proj', 'q_b_proj'] name no matrix")


# ---- the run


def begin(cfg: RunConfig) -> tuple[Inputs, Store, Ref]:
    _pools.clear()
    inputs = prepare_run(cfg)
    return inputs, Store(cfg.root), warm_start(inputs, cfg.root)


def publish(cfg: RunConfig, inputs: Inputs, trained: Ref) -> PolicyVersion:
    version = read_record(Store(cfg.root), publish_step(inputs, cfg.root, trained, None)).policy
    assert version is not None
    return version


def first_tensors(store: Store, version: PolicyVersion) -> dict[str, Tensor]:
    return to_torch(policies.load(store, version))


def expected_tensors(folder: Path, is_packed_kept: bool) -> Mapping[str, Tensor]:
    stored = dict(iter_tensors(open_checkpoint(folder)))
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if not is_packed(name):
            tensors[name] = tensor.float()
        elif is_packed_kept:
            tensors[name] = tensor
        elif name.endswith("_packed"):
            matrix = name.removesuffix(".weight_packed")
            tensors[f"{matrix}.weight"] = unpack(tensor, stored[f"{matrix}.weight_scale"], torch.float32)
    return tensors


@pytest.mark.parametrize("kind", ["k3", "k3_packed", "kimi_linear"])
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_first_version_holds_the_checkpoints_values_to_the_bit(
    config: Callable[..., RunConfig], init_folder: InitFolder, kind: str, mode: str
) -> None:
    """And of packed experts their bytes; the engine has loaded and acknowledged just that."""
    folder = init_folder(kind)
    cfg = config(folder, *(LORA if mode == "lora" else ()))
    inputs, store, trained = begin(cfg)
    version = publish(cfg, inputs, trained)
    found, expected = first_tensors(store, version), expected_tensors(folder, mode == "lora")
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == expected[name].dtype for name in expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert Context.open(inputs, cfg.root).tokenizer().sha256 == Tokenizer.from_folder(folder).sha256
    known = ancestry(store, cfg.run, 0)
    assert known.problems == []
    assert {"init of mine", "tokenizer of mine"} <= {node.title for node in known.nodes.values()}
    described = read_record(store, trained).provenance["init"]
    assert described["folder"] == str(folder)
    assert described["files"].keys() == {path.name for path in shards(folder)}


def test_two_machines_with_equal_copies_start_from_equal_bytes(
    config: Callable[..., RunConfig], init_folder: InitFolder, tmp_path: Path
) -> None:
    folder = init_folder("k3")
    found = []
    for root in ("a", "b"):
        cfg = config(folder, f"root={tmp_path}/{root}")
        _, store, trained = begin(cfg)
        found.append(read_record(store, trained).outputs["weights"].sha256)
        assert [path.name for path in (tmp_path / root / "mine").iterdir() if path.name.startswith(".")] == []
    assert found[0] == found[1]


def change_index(folder: Path) -> str:
    edit_json(folder / "model.safetensors.index.json", metadata={"total_size": 5})
    return "model.safetensors.index.json"


def change_tokenizer(folder: Path) -> str:
    edit_json(folder / "tokenizer_config.json", chat_template="{{ messages }}")
    return "tokenizer_config.json"


def change_config(folder: Path) -> str:
    edit_json(folder / "config.json", transformers_version="5.0")
    return "config.json"


def remove_shard(folder: Path) -> str:
    path = shards(folder)[-1]
    path.unlink()
    return path.name


def change_tensor(folder: Path) -> str:
    flip_last_byte(shards(folder)[-1])
    return shards(folder)[-1].name


@pytest.mark.parametrize("change", [change_config, change_index, change_tokenizer, remove_shard, change_tensor])
def test_a_run_does_not_go_on_with_a_folder_that_has_changed(
    config: Callable[..., RunConfig], init_folder: InitFolder, change: Callable[[Path], str]
) -> None:
    folder = init_folder("k3")
    cfg = config(folder)
    begin(cfg)
    prepare_run(cfg)
    name = change(folder)
    with pytest.raises(ValueError, match="started from what was there before") as caught:
        prepare_run(cfg)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{folder / name}: ")
    assert len(lines) == 2


def test_a_folder_that_was_only_touched_or_copied_is_the_same(
    config: Callable[..., RunConfig], init_folder: InitFolder, tmp_path: Path
) -> None:
    folder = init_folder("k3")
    cfg = config(folder)
    inputs, _, _ = begin(cfg)
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    shutil.rmtree(folder)
    assert prepare_run(cfg) == inputs, "what was read is in the store"
    os.rename(tmp_path / "copy", folder)
    assert prepare_run(cfg) == inputs


def test_a_run_that_has_read_its_checkpoint_goes_on_without_it(
    config: Callable[..., RunConfig], init_folder: InitFolder
) -> None:
    folder = init_folder("k3")
    cfg = config(folder)
    inputs, store, trained = begin(cfg)
    kept = dump(cfg)
    shutil.rmtree(folder)
    stored = parse(kept, "kept")
    (finding,) = by_name(diagnose_config(stored))["checkpoint"]
    assert not finding.ok, "not published yet"
    publish(cfg, inputs, trained)
    (finding,) = by_name(diagnose_config(stored))["checkpoint"]
    assert finding.ok
    assert prepare_run(stored) == find_inputs(store, cfg.run) == inputs


def test_a_new_run_without_its_folder_is_refused(config: Callable[..., RunConfig], init_folder: InitFolder) -> None:
    folder = init_folder("k3")
    cfg = config(folder)
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="no such folder; download the checkpoint into it"):
        prepare_run(cfg)
    assert not Path(cfg.root).exists()


def test_supervised_steps_from_a_checkpoint_resume_to_the_same_bits_without_it(
    config: Callable[..., RunConfig], init_folder: InitFolder, tmp_path: Path
) -> None:
    folder = init_folder("kimi_linear")
    steps = ("warm_start.steps=4", "warm_start.expert_steps=0", "warm_start.rows=2", "warm_start.checkpoint_every=2")
    straight = config(folder, *steps)
    _, store, trained = begin(straight)
    stopped = config(folder, *steps, f"root={tmp_path}/stopped")
    inputs = prepare_run(stopped)

    class Killed(Exception):
        pass

    def kill(done: int, of: int) -> None:
        if of == 4 and done == 3:
            raise Killed

    with pytest.raises(Killed):
        warm_start(inputs, stopped.root, kill)
    shutil.rmtree(folder)
    again = warm_start(inputs, stopped.root)
    records = [read_record(store, trained), read_record(Store(stopped.root), again)]
    assert records[0].outputs["weights"].sha256 == records[1].outputs["weights"].sha256
    assert records[0].provenance["init"] == records[1].provenance["init"]
    assert records[0].metrics == records[1].metrics


def test_a_try_after_a_killed_one_must_read_what_that_one_read(
    config: Callable[..., RunConfig], init_folder: InitFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = init_folder("k3")
    cfg = config(folder)
    inputs = prepare_run(cfg)

    def power_cut(*_: object, **__: object) -> Ref:
        raise OSError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(stage.Context, "record", power_cut)
        with pytest.raises(OSError, match="power cut"):
            warm_start(inputs, cfg.root)
    flip_last_byte(shards(folder)[-1])
    with pytest.raises(ValueError, match=f"{shards(folder)[-1].name}: other tensors: run 'mine' started from"):
        warm_start(inputs, cfg.root)


def test_numbers_that_are_not_finite_are_refused_by_name(
    config: Callable[..., RunConfig], init_folder: InitFolder
) -> None:
    folder = init_folder("k3")
    path = shards(folder)[-1]
    data = bytearray(path.read_bytes())
    data[-2:] = b"\x80\x7f"  # bf16 infinity
    path.write_bytes(data)
    cfg = config(folder)
    inputs = prepare_run(cfg)
    with pytest.raises(IntegrityError, match=r"lm_head\.weight holds inf"):
        warm_start(inputs, cfg.root)
    assert not list((Path(cfg.root) / "mine" / "steps").rglob("weights*"))


def test_a_run_from_before_a_setting_existed_goes_on(tmp_path: Path) -> None:
    cfg = load("smoke", [f"root={tmp_path}", "tokenizer.corpus_prompts=40"])
    inputs = prepare_run(cfg)
    pinned = Path(tmp_path) / "smoke" / "config.toml"
    before = pinned.read_text().replace("moe_layer_freq = 1\n", "")
    assert before != pinned.read_text()
    pinned.write_text(before)
    store = Store(cfg.root)
    (tmp_path / "smoke" / "run.json").unlink()
    older = dataclasses.replace(inputs, config=store.ref("smoke/config.toml", before.encode()))
    store.commit(
        "smoke/run.json", {"config": dataclasses.asdict(older.config), "tokenizer": dataclasses.asdict(older.tokenizer)}
    )
    assert prepare_run(cfg) == older
    with pytest.raises(ValueError, match="moe_layer_freq"):
        prepare_run(dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, moe_layer_freq=2)))


@pytest.mark.parametrize("form", ["merges", "ranks"])
def test_a_tokenizer_in_files_reads_back_as_the_same(init_folder: InitFolder, tmp_path: Path, form: str) -> None:
    source = init_folder("k3")
    if form == "ranks":
        (source / "tokenizer.json").unlink()
        lines = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
        (source / "tiktoken.model").write_text("".join(lines))
        names = {256: "[BOS]", 258: "<|im_end|>", 259: "<|im_user|>", 260: "<|im_assistant|>", 266: "<|im_system|>"}
        names |= {267: "<|tool_calls_section_begin|>", 268: "<|tool_calls_section_end|>", 269: "<|tool_call_begin|>"}
        names |= {270: "<|tool_call_argument_begin|>", 271: "<|tool_call_end|>", 273: "<|im_middle|>", 511: "[PAD]"}
        entries = {str(token_id): {"content": name} for token_id, name in names.items()}
        (source / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))
    tokenizer = Tokenizer.from_folder(source)
    (tmp_path / "files").mkdir()
    for name, data in tokenizer_files(tokenizer).items():
        (tmp_path / "files" / name).write_bytes(data)
    assert Tokenizer.from_folder(tmp_path / "files").sha256 == tokenizer.sha256
    settings = json.loads((tmp_path / "files" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == ("<|im_end|>" if form == "ranks" else "<|end_of_msg|>")
