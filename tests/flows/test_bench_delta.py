import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flows.bench_delta import StepSizes, as_bf16, as_mxfp4, measure_step, sum_up
from flows.bench_delta_speed import synthetic
from flows.cli import main
from infra.policies import publish
from infra.store import Store
from k3core.checkpoint.tensors import from_torch, to_torch
from k3core.types import PolicyVersion


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Run "demo": four versions of 20,000 fp32 weights, each a small step from the last."""
    store, version = Store(str(tmp_path / "runs")), None
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(100, 200, generator=generator) * 0.02
    parent: PolicyVersion | None = None
    for step in range(4):
        tensors = from_torch({"w": weights, "steps": torch.tensor(step)})
        version, _ = publish(store, "demo", step, tensors, parent, full_every=3, level=1, tags={})
        parent = version
        weights = weights + 1e-5 * torch.randn(100, 200, generator=generator).clamp(-1, 1)
    return str(tmp_path / "runs")


def test_sizes_of_a_run_are_printed_and_written(root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["bench", "delta", "--run", "demo", "--root", root, "--full-every", "2", "--out", str(out)]) == 0
    written = json.loads((out / "delta-sizes.json").read_text())
    assert [row["step"] for row in written["steps"]] == [1, 2, 3]
    for row in written["steps"]:
        assert row["delta_3"] < row["delta"] < row["dense"] < row["full"]
        assert 0 < row["changed_fraction"] < 0.5
        assert row["full"] == pytest.approx(2 * 20_000, rel=0.01), "bf16 is what is measured"
    assert written["totals"]["delta"] == sum(row["delta"] for row in written["steps"])
    assert written["machine"]["packages"]["zstandard"]
    assert (out / "delta-sizes.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "compared bit for bit" in printed
    assert "98 % smaller" in printed


def test_stored_weights_can_be_measured_as_they_are(root: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["bench", "delta", "--run", "demo", "--root", root, "--dtype", "stored", "--out", str(out)]) == 0
    written = json.loads((out / "delta-sizes.json").read_text())
    assert written["steps"][0]["full"] == pytest.approx(4 * 20_000, rel=0.01)


EXPERT = "layers.1.block_sparse_moe.experts.0.w1.weight"


@pytest.fixture
def routed(tmp_path: Path) -> str:
    """Run "routed": three versions of one expert's matrix and of one that is not routed."""
    store, parent = Store(str(tmp_path / "runs")), None
    generator = torch.Generator().manual_seed(0)
    weights = {
        EXPERT: torch.randn(64, 96, generator=generator),
        "lm_head.weight": torch.randn(64, 96, generator=generator),
    }
    for step in range(3):
        parent, _ = publish(store, "routed", step, from_torch(weights), parent, full_every=3, level=1, tags={})
        weights = {
            name: w + 1e-3 * torch.randn(64, 96, generator=generator).clamp(-1, 1) for name, w in weights.items()
        }
    return str(tmp_path / "runs")


def test_versions_with_packed_experts_are_measured(
    routed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["bench", "delta", "--run", "routed", "--root", routed, "--dtype", "mxfp4", "--out", str(out)]) == 0
    written = json.loads((out / "delta-sizes.json").read_text())
    assert [row["step"] for row in written["steps"]] == [1, 2]
    for row in written["steps"]:
        assert row["full"] == pytest.approx((2 + 0.5 + 1 / 32) * 64 * 96, rel=0.05)
        assert 0 < row["changed_fraction"] < 0.5
        assert row["delta"] < row["full"]
    assert "a changed element is a byte" in capsys.readouterr().out
    alone = ["bench", "delta", "--run", "routed", "--root", routed, "--dtype", "mxfp4", "--experts-only"]
    assert main([*alone, "--out", str(out)]) == 0
    for row in json.loads((out / "delta-sizes.json").read_text())["steps"]:
        assert row["full"] == pytest.approx((0.5 + 1 / 32) * 64 * 96, rel=0.15)  # and a header
    assert "routed, mxfp4, routed experts alone: " in capsys.readouterr().out


def test_packed_experts_keep_the_bytes_of_the_version_before_where_values_did_not_change() -> None:
    """All values are 3 under scale 127; packed afresh they would be 6 under scale 126."""
    codes, scale = torch.full((4, 48), 0x55, dtype=torch.uint8), torch.full((4, 3), 127, dtype=torch.uint8)
    before = from_torch({f"{EXPERT}_packed": codes, f"{EXPERT}_scale": scale, "norm.weight": torch.ones(3).bfloat16()})
    weights = {EXPERT: torch.full((4, 96), 3.0), "norm.weight": torch.ones(3)}
    assert as_mxfp4(from_torch(weights), before) == before
    assert to_torch(as_mxfp4(from_torch(weights), {}))[f"{EXPERT}_scale"].eq(126).all()
    weights[EXPERT][2, 50] = 1.0
    codes[2, 25] = 0x52
    assert as_mxfp4(from_torch(weights), before) == before | from_torch({f"{EXPERT}_packed": codes})


def test_groups_run_over_the_ends_of_rows_that_are_no_multiple_of_32_wide() -> None:
    packed = as_mxfp4(from_torch({EXPERT: torch.ones(64, 48)}), {})
    assert {name: raw.num_elements for name, raw in packed.items()} == {
        f"{EXPERT}_packed": 64 * 48 // 2,
        f"{EXPERT}_scale": 64 * 48 // 32,
    }


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([], "k3 bench delta: Invalid value for --run, --synthetic: give one of them."),
        (["--run", "demo", "--synthetic", "1"], "k3 bench delta: Invalid value for --run, --synthetic: give one"),
        (["--run", "nosuch"], "nosuch: fewer than two versions are published in "),
        (["--run", "demo", "--dtype", "mxfp4"], "--dtype mxfp4: the run's weights have no routed experts to pack"),
        (["--run", "demo", "--experts-only"], "--experts-only: demo has no routed experts"),
        (["--run", "demo", "--dtype", "fp8"], "--dtype fp8: expected one of bf16, mxfp4, stored"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    args: list[str], line: str, root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "delta", *args, "--root", root]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(line)
    assert printed.err.count("\n") == 1


def test_a_whole_version_comes_first_and_then_every_so_many_steps() -> None:
    rows = [
        StepSizes(step, 0.1, full=1000, delta=50, delta_3=40, floor=48, dense=100, manifest=10) for step in range(50)
    ]
    totals = sum_up(rows, full_every=25)
    assert totals.saved == pytest.approx(1 - (2 * 1000 + 48 * 60) / 50_000)
    assert totals.saved_3 == pytest.approx(1 - (2 * 1000 + 48 * 50) / 50_000)


def test_an_update_that_changes_nothing_is_measured() -> None:
    weights = from_torch({"w": torch.ones(100)})
    sizes = measure_step(1, weights, weights)
    assert (sizes.delta, sizes.floor, sizes.changed_fraction) == (0, 0.0, 0.0)


def test_only_floats_are_rounded_and_ties_go_to_even() -> None:
    bits = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    rounded = as_bf16(from_torch({"w": bits, "n": torch.tensor([3])}))
    assert np.frombuffer(rounded["w"].data, np.uint16).tolist() == [0x3F80, 0x3F82]
    assert rounded["n"].dtype == "I64"


def test_speed_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--synthetic", "0.001", "--lr", "1e-5", "--repeats", "1", "--out", str(tmp_path)]
    assert main(["bench", "delta", *args]) == 0
    written = json.loads((tmp_path / "delta-speed.json").read_text())
    assert {"encode", "apply", "BLAKE3", "xxh3-128"} <= {speed["name"] for speed in written["speeds"]}
    assert written["machine"]["cpu"]
    assert "GB of new weights a second" in capsys.readouterr().out


def test_synthetic_weights_are_the_same_each_time_and_change_little() -> None:
    parent, new = synthetic(0.001, 1e-6)
    assert (parent, new) == synthetic(0.001, 1e-6)
    changed = np.frombuffer(parent["layers.0.weight"].data, np.uint16) != np.frombuffer(
        new["layers.0.weight"].data, np.uint16
    )
    assert 0.02 < changed.mean() < 0.04
