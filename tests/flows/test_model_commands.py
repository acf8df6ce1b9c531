"""`k3 model info | check | init | merge` and `k3 plan`, as a person calls them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flows import model_check
from flows.cli import main
from flows.quantities import amount, count, duration, size
from k3core.checkpoint.adapter import adapter_of, save_adapter
from k3core.checkpoint.hf import iter_tensors, load_model, open_checkpoint, save_checkpoint
from k3core.model.config import MXFP4, K3Config
from k3core.model.hf_config import to_hf
from k3core.model.lora import LoraConfig, attach_lora
from k3core.model.random_weights import random_tensors
from k3core.model.sizes import num_parameters

PACKABLE = K3Config(
    vocab_size=300,
    hidden_size=64,
    num_hidden_layers=3,
    full_attn_layers=(3,),
    routed_expert_hidden_size=32,
    moe_intermediate_size=64,
    num_experts=4,
)


@pytest.fixture
def packable(tmp_path: Path) -> str:
    path = tmp_path / "packable.json"
    path.write_text(json.dumps(to_hf(PACKABLE)))
    return str(path)


@pytest.fixture
def checkpoint(tmp_path: Path, packable: str, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = tmp_path / "random"
    assert main(["model", "init", packable, str(folder), "--seed", "3", "--packed"]) == 0
    capsys.readouterr()
    return folder


def run(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert main(list(args)) == code
    printed = capsys.readouterr()
    return printed.out + printed.err


def document(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(capsys, *args, "--json", code=code))
    return found


def test_info_shows_the_released_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "model", "info", "kimi-k3")
    assert "2.779e12 parameters, 105.4e9 active on a token" in out
    for said in ("2,779,484,476,000", "105,364,017,760", "1,559,965,606,912", "8 blocks", "27,648", "434,110,464"):
        assert said in out
    assert "…" not in out
    assert "49.1e9 parameters, 3.5e9 active on a token" in run(capsys, "model", "info", "kimi-linear-48b-a3b")


def test_info_as_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    facts = document(capsys, "model", "info", "kimi-k3")
    parts = facts["parameters"]["parts"].values()
    assert sum(part["parameters"] for part in parts) == facts["parameters"]["total"] == 2_779_484_476_000
    assert sum(part["active"] for part in parts) == facts["parameters"]["active"]
    assert sum(facts["stored"]["by_type"].values()) == facts["stored"]["bytes"]
    assert facts["layers"]["mla"][-3:] == [88, 92, 93]
    assert facts["layers"]["attn_res_blocks"][-1] == [85, 93]
    assert facts["sequence"]["bank_rows"] == 8
    assert facts["config"]["expert_quantization"] == "mxfp4"


def test_info_holds_what_is_on_disk_against_the_config(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = document(capsys, "model", "info", str(checkpoint))
    assert facts["on_disk"]["by_type"] == facts["stored"]["by_type"]
    assert facts["on_disk"]["tensors"] == facts["stored"]["tensors"]
    assert "on disk" in run(capsys, "model", "info", str(checkpoint))


def test_info_of_a_broken_checkpoint_still_shows_the_model(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next(checkpoint.glob("*.safetensors")).unlink()
    out = run(capsys, "model", "info", str(checkpoint), code=1)
    assert f"{num_parameters(PACKABLE):,}" in out
    assert "which is not there" in out
    assert "on disk" not in out


def test_info_names_keys_that_are_not_read(packable: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(packable)
    found = json.loads(path.read_text())
    found["text_config"]["linear_attn_config"]["new_gate"] = True
    path.write_text(json.dumps(found))
    out = run(capsys, "model", "info", packable)
    assert "carried along without being read: text_config.linear_attn_config.new_gate" in out


def test_a_random_checkpoint_is_whole_and_the_same_each_time(
    checkpoint: Path, packable: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "all " in run(capsys, "model", "check", str(checkpoint))
    assert run(capsys, "model", "init", packable, str(tmp_path / "again"), "--seed", "3", "--packed")
    assert run(capsys, "model", "init", packable, str(tmp_path / "other"), "--seed", "4", "--packed")
    digests = {
        name: run(capsys, "model", "check", str(tmp_path / name), "--digest").split()[0] for name in ("again", "other")
    }
    (file,) = checkpoint.glob("*.safetensors")
    assert digests["again"] == hashlib.sha256(file.read_bytes()).hexdigest() != digests["other"]
    model = load_model(checkpoint)
    assert model.cfg.expert_quantization == "mxfp4"


def test_a_random_checkpoint_without_packing_has_plain_experts(
    packable: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "model", "init", packable, str(tmp_path / "plain"), "--seed", "0")
    assert document(capsys, "model", "info", str(tmp_path / "plain"))["config"]["expert_quantization"] is None


def test_check_lists_every_problem(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint / "config.json"
    found = json.loads(path.read_text())
    found["text_config"] |= {"hidden_act": "gelu", "num_expert_group": 8}
    path.write_text(json.dumps(found))
    lines = run(capsys, "model", "check", str(checkpoint), code=1).splitlines()
    assert len(lines) == 2
    assert all("config.json: text_config." in line for line in lines)


def test_check_finds_a_file_that_was_cut_short(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = checkpoint.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-10])
    assert file.name in run(capsys, "model", "check", str(checkpoint), code=1)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            ["model", "info", "kimi"],
            "kimi: no such file or folder, and not a preset (tiny, kimi-linear-48b-a3b, kimi-k3)",
        ),
        (["model", "check", "no/such"], "no/such: no such folder"),
        (["model", "init", "tiny", "out"], "k3 model init: Missing option '--seed'."),
        (["plan"], "k3 plan: Missing option '--model'."),
        (["plan", "--model", "tiny", "--train", "qlora"], "k3 plan: Invalid value for --train: expected lora or full"),
        (["plan", "--model", "tiny", "--gpu-memory", "a100"], "--gpu-memory a100: expected h100, h200, b200, or a num"),
        (["plan", "--model", "tiny", "--gpu-memory", "-3"], "--gpu-memory -3: expected h100, h200, b200, or a number"),
        (["plan", "--model", "tiny", "--mesh", "pp=2"], "--mesh pp=2: expected each of fsdp, ep, cp, tp at most once"),
        (
            ["plan", "--model", "tiny", "--mesh", "ep=2,ep=2"],
            "--mesh ep=2,ep=2: expected each of fsdp, ep, cp, tp at m",
        ),
        (
            ["plan", "--model", "tiny", "--gpus", "6", "--mesh", "fsdp=4"],
            "--mesh fsdp=4 and --gpus 6: fsdp x cp x tp = 4 must divide the GPUs",
        ),
        (
            ["plan", "--model", "kimi-k3", "--gpus", "5", "--mesh", "fsdp=5,ep=5"],
            "mesh ep=5 and num_experts 896: experts are shared out whole",
        ),
        (["plan", "--model", "tiny", "--targets", "q_prj"], "targets q_prj: no matrix of this model (did you mean q_p"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_code_2(
    args: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    out = run(capsys, *args, code=2)
    assert out.startswith(line)
    assert out.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_packed_is_refused_for_each_width(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run(capsys, "model", "init", "tiny", str(tmp_path / "out"), "--seed", "0", "--packed", code=2).splitlines()
    assert [line.split()[1] for line in lines] == ["routed_expert_hidden_size", "moe_intermediate_size"]
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_the_disk_has_no_room_for_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 10**9

    monkeypatch.setattr(model_check.shutil, "disk_usage", lambda _: Usage)
    out = run(capsys, "model", "init", "kimi-k3", str(tmp_path / "k3"), "--seed", "0", "--packed", code=2)
    assert out == f"kimi-k3: its weights take 1.42 TiB, and the disk of {tmp_path / 'k3'} has 954 MiB left\n"


def test_a_plan_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "plan", "--model", "kimi-linear-48b-a3b")
    for said in (
        "91.5 GiB",
        "computed",
        "fits, with",
        "the longest context that fits is",
        "140 GiB",
        "layer 26: KDA and MoE",
    ):
        assert said in out
    assert "…" not in out
    out = run(capsys, "plan", "--model", "kimi-k3", "--gpus", "16", "--mesh", "fsdp=16,ep=16", code=1)
    for said in ("does not fit", "too much on each GPU", "dispatch of rows to experts", "weights: fsdp=32", "note: "):
        assert said in out


def test_a_plan_as_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("plan", "--model", "kimi-k3", "--gpus", "64", "--mesh", "fsdp=32,ep=32", "--rollout-sequences", "128")
    made = document(capsys, *args, "--context", "16384", "--batch-tokens", "32768", "--gpu-memory", "b200")
    assert made["mesh"]["dp"] == 2
    assert made["training"]["lengths"] == [16384, 16384]
    for phase in made["phases"]:
        assert sum(row["num_bytes"] for row in phase["rows"]) == pytest.approx(phase["bytes"], abs=1)
    assert made["peak"]["bytes"] == max(phase["bytes"] for phase in made["phases"])
    assert made["largest_context"] > 0
    assert {flow["axis"] for flow in made["traffic"]} == {"fsdp", "ep", "dp"}


def test_the_bar_is_as_long_as_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of 91.5 GiB on a GPU of 139.8: 64 of the bar's 98 columns."""
    lines = run(capsys, "plan", "--model", "kimi-linear-48b-a3b").splitlines()
    (bar,) = (line for line in lines if line.startswith("AAAA"))
    assert bar.count("A") == 64
    assert len(bar.rstrip()) == 98
    assert bar.rstrip().endswith("·")
    too_small = run(capsys, "plan", "--model", "kimi-linear-48b-a3b", "--gpu-memory", "46e9", code=1).splitlines()
    (bar,) = (line for line in too_small if line.startswith("AAAA"))
    assert "·" not in bar


def test_the_mesh_is_all_fsdp_when_it_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = document(capsys, "plan", "--model", "kimi-k3", "--gpus", "48", "--context", "1024")["mesh"]
    assert (mesh["fsdp"], mesh["ep"], mesh["gpus"]) == (48, 16, 48)


def test_quantities_have_three_digits() -> None:
    assert [size(n) for n in (0, 1023, 1024, 10_240, 1_048_576, 1_559_965_606_912)] == [
        *("0 B", "1,023 B", "1.00 KiB", "10.0 KiB", "1.00 MiB", "1.42 TiB")
    ]
    assert [amount(n) for n in (999, 1000, 99_960, 2_779_484_476_000)] == ["999", "1.00 K", "100 K", "2.78 T"]
    assert [count(n) for n in (595_740, 3_484_459_904, 2_779_484_476_000)] == ["595,740", "3.5e9", "2.779e12"]
    assert [duration(s) for s in (4.2566, 0.0438, 2e-5)] == ["4.26 s", "43.8 ms", "20 us"]


@pytest.mark.parametrize(("packed", "experts"), [(False, "bf16"), (True, "bf16"), (True, "mxfp4")])
def test_a_peft_folder_is_merged_into_a_checkpoint(
    packed: bool, experts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    cfg = replace(PACKABLE, expert_quantization=MXFP4 if packed else None)
    save_checkpoint(base, cfg, random_tensors(PACKABLE, 1), experts="mxfp4" if packed else "keep")
    model, lora = load_model(base, torch.float32), LoraConfig(2, 4.0, ("o_proj", "w2"))
    attach_lora(model, lora, torch.Generator().manual_seed(0))
    for name, p in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(2))
    adapter = adapter_of(model, lora)
    save_adapter(folder, cfg, adapter)
    said = run(capsys, "model", "merge", str(base), str(folder), str(out), "--experts", experts)
    num = len(adapter.tensors) // 2
    assert f"merged {num} of " in said
    before, after = (dict(iter_tensors(open_checkpoint(path))) for path in (base, out))
    for name in (name.removesuffix(".lora_A") for name in adapter.tensors if name.endswith(".lora_A")):
        A, B = adapter.tensors[f"{name}.lora_A"], adapter.tensors[f"{name}.lora_B"]
        if f"{name}.weight" in before:
            assert torch.equal(after[f"{name}.weight"], (before[f"{name}.weight"].float() + 2 * (B @ A)).bfloat16())
    assert (f"layers.1.block_sparse_moe.experts.0.w2.weight{'_packed' if experts == 'mxfp4' else ''}") in after
    untouched = "layers.1.block_sparse_moe.gate.weight"
    assert torch.equal(after[untouched], before[untouched])
    assert main(["model", "merge", str(base), str(folder), str(out)]) == 2, "a folder that holds something is kept"


def test_what_cannot_be_merged_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    save_checkpoint(base, PACKABLE, random_tensors(PACKABLE, 1))
    for arguments in (
        (str(base), str(tmp_path / "none"), str(out)),
        (str(tmp_path / "none"), str(base), str(out)),
        (str(base), str(base), str(out), "--experts", "mxfp4"),
        (str(base), str(base), str(out), "--experts", "int8"),
    ):
        assert main(["model", "merge", *arguments]) == 2
        captured = capsys.readouterr()
        assert len((captured.out + captured.err).strip().splitlines()) == 1
        assert not out.exists()
