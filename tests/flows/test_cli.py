from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flows.cli import main
from flows.dry_run import under_a_free_name
from infra.config import load
from infra.policies import publish
from infra.stages.prepare import prepare_run
from infra.store import Store
from k3core.checkpoint.tensors import from_safetensors, from_torch, weights_sha256
from k3core.types import PolicyVersion


def test_help_imports_no_heavy_package() -> None:
    code = (
        "import sys; from flows.cli import main; main(['--help']); "
        "print({'torch', 'prefect', 'mlflow', 'pydantic', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\nset()\n")
    for command in ("train", "eval", "rollout", "compare", "delta", "doctor"):
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["train"], "k3 train: Missing argument 'CONFIG'. See `k3 train --help`."),
        (["train", "tiny", "--foo"], "k3 train: No such option: --foo"),
        (["trian", "tiny"], "k3: No such command 'trian'."),
        (["train", "tyni"], "tyni: no such file, and not a shipped config ("),
        (["train", "tiny", "rollout.stop_token_ids=[512]"], "rollout.stop_token_ids 512 and model.vocab_size 512: "),
        (["eval", "tiny@-1"], "k3 eval: Invalid value for VERSION: expected RUN@STEP or RUN, got"),
        (["train", "tiny", "gspo.clip_hihg=1"], "gspo.clip_hihg: unknown key (did you mean clip_high?)"),
        (["compare", "tiny@0"], "k3 compare: Missing argument 'B'."),
        (["compare", "tiny@0", "demo@last"], "k3 compare: Invalid value for B: expected RUN@STEP or RUN, got"),
        (["doctor", "tyni"], "tyni: no such file"),
        (["doctor", "tiny", "--root", "x"], "k3 doctor: Invalid value for --root: with a CONFIG, use root=..."),
        (["delta", "verify", "demo", "--steps", "3-"], "k3 delta verify: Invalid value for --steps: expected STEP or"),
        (["delta", "stats", "demo", "--steps", "5-3"], "k3 delta stats: Invalid value for --steps: 5 comes after 3."),
        (["delta", "reconstruct", "demo", "1", "--out", "no/such/f"], "k3 delta reconstruct: Invalid value for --out"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(
    args: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(line)
    assert printed.err.count("\n") == 1


def test_each_problem_of_a_config_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[gspo]\nclip_hihg = 0.1\n")
    assert main(["train", str(path), "steps=0", "train.learning_rate=-1"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "steps: must be >= 1, got 0",
        "train.learning_rate: must be > 0, got -1",
        "mine.toml: gspo.clip_hihg: unknown key (did you mean clip_high?)",
    ]


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny", f"root={tmp_path}", "run=demo", "seed=3", "--dry-run"]) == 0
    printed = capsys.readouterr()
    for text in ("demo, seed 3", "595,716 parameters", "20 steps of 16 prompts x 8", "every 5 steps, 50 prompts x 4"):
        assert text in printed.out
    assert printed.err == ""
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny", "steps=10", "--dry-run"]) == 0
    assert capsys.readouterr().err.startswith("warning: control.sequences 2560 and steps")


@pytest.mark.parametrize("name", ["linear48b_lora", "k3_lora", "k3_full"])
def test_a_real_model_is_planned_and_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", name, "--dry-run"]) == 0
    planned = capsys.readouterr()
    assert "GSPO" in planned.out
    assert main(["train", name]) == 2
    refused = capsys.readouterr()
    assert refused.out == ""
    assert refused.err == planned.err
    assert [line.partition(":")[0] for line in refused.err.splitlines()] == ["model", "checkpoint"]


def test_fresh_takes_the_next_free_name(tmp_path: Path) -> None:
    cfg = load("tiny", [f"root={tmp_path}", "run=demo"])
    assert under_a_free_name(cfg).run == "demo"
    for run in ("demo", "demo-2"):
        prepare_run(dataclasses.replace(cfg, run=run))
    assert under_a_free_name(cfg).run == "demo-3"
    assert under_a_free_name(load("tiny", [f"root=file://{tmp_path}", "run=demo"])).run == "demo-3"


def test_doctor_says_ready_or_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "tiny", f"root={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ready"
    assert sum(line.startswith("ok        root ") for line in lines) == 1
    (tmp_path / "file").touch()
    assert main(["doctor", "--root", f"{tmp_path}/file/runs"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "not ready: root"
    assert main(["doctor", "k3_full"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "not ready: model, checkpoint"


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Three versions of run "demo": a base and two deltas."""
    store = Store(str(tmp_path))
    version: PolicyVersion | None = None
    for step in range(3):
        weights = from_torch({"w": torch.full((64, 64), 1.0 + step)})
        version, _ = publish(store, "demo", step, weights, version, full_every=10, level=3, tags={})
    return str(tmp_path)


def test_delta_verify_rebuilds_every_version(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["delta", "verify", "demo", "--root", root]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:-1]] == [["0", "base", "ok"], ["1", "delta", "ok"], ["2", "delta", "ok"]]
    assert lines[-1].startswith("3 of 3 versions of demo")


def test_delta_verify_finds_a_missing_and_a_broken_version(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    (payload,) = Path(root, "demo/policies/000002").glob("payload-*")
    payload.write_bytes(payload.read_bytes()[:-1])
    Path(root, "demo/policies/000001/manifest.json").unlink()
    assert main(["delta", "verify", "demo", "--root", root]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["0", "base", "ok"]
    assert lines[1].endswith("missing")
    assert "ok" not in lines[2].split()
    assert lines[-1].startswith("1 of 3 versions")


def test_delta_stats_shows_sizes_and_what_is_missing(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["delta", "stats", "demo", "--root", root]) == 0
    assert "100.00%" in capsys.readouterr().out
    assert main(["delta", "stats", "demo", "--root", root, "--steps", "2-3"]) == 1
    assert "missing" in capsys.readouterr().out


def test_delta_reconstruct_writes_the_published_weights(root: str, tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    assert main(["delta", "reconstruct", "demo", "2", "--root", root, "--out", str(out)]) == 0
    expected = from_torch({"w": torch.full((64, 64), 3.0)})
    assert weights_sha256(from_safetensors(out.read_bytes())) == weights_sha256(expected)


def test_delta_of_an_unpublished_run_or_step_is_one_line(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["delta", "verify", "nosuch", "--root", root]) == 2
    assert "nothing is published in" in capsys.readouterr().err
    assert main(["delta", "reconstruct", "demo", "9", "--root", root, "--out", f"{root}/x"]) == 2
    assert capsys.readouterr().err.startswith("step 9 of demo is not published in ")


def test_broken_bytes_are_one_line_and_exit_code_1(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    (payload,) = Path(root, "demo/policies/000000").glob("payload-*")
    payload.unlink()
    assert main(["delta", "reconstruct", "demo", "0", "--root", root, "--out", f"{root}/x"]) == 1
    printed = capsys.readouterr().err
    assert "missing" in printed
    assert printed.count("\n") == 1


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError that a library raises is not what a person wrote."""
    monkeypatch.setattr("flows.delta.verify", lambda *_: torch.zeros(2).reshape(3))
    with pytest.raises(RuntimeError):
        main(["delta", "verify", "demo", "--steps", "0"])
    monkeypatch.setattr("flows.delta.verify", lambda *_: exec("raise ValueError('deep inside')", {"__name__": "lib"}))
    with pytest.raises(ValueError, match="deep inside"):
        main(["delta", "verify", "demo", "--steps", "0"])
