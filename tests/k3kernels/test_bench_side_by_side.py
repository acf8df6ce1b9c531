"""What the benches beside peers make of measurements: ratios, tables, failures, limits, files; and their dry runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

KERNELS = Path(__file__).parents[2] / "kernels"
sys.path.insert(0, str(KERNELS / "bench"))

import bench_attn_res  # noqa: E402
import bench_block  # noqa: E402
import bench_kda  # noqa: E402
import harness  # noqa: E402
import peers  # noqa: E402
import side_by_side  # noqa: E402
from operations import OTHERS, operation_of  # noqa: E402
from side_by_side import Case, Results, Row, attempt, fastest, table, violations  # noqa: E402

CASE = Case("forward", 4096)
MACHINE: dict[str, object] = {"device": "a GPU", "driver": "1", "cuda": "2", "torch": "3", "triton": "4", "python": "5"}


def row(peer: str, ms: float, variant: str = "", case: Case = CASE, **fields: object) -> Row:
    made = Row(case, peer, variant, harness.Timing(peer, (ms, ms, ms)), floor_ms=0.5)
    return replace(made, **fields)  # type: ignore[arg-type]


ROWS = [
    row("fla", 6.0),
    row("cudnn", 4.0, "inside"),
    row("cudnn", 3.0, "compiled"),
    row("ours", 2.0, errors={"o": 4e-3, "q": 1e-3}, peak_gib=1.5, same_bits=True),
]


def test_a_ratio_is_a_peers_fastest_time_over_the_rows():
    cells = table(ROWS, ("fla", "cudnn"))
    by_name = {line[2]: dict(zip(cells[0], line, strict=True)) for line in cells[1:]}
    assert by_name["ours"]["fla / this"] == "3.00"
    assert by_name["ours"]["cudnn / this"] == "1.50"
    assert by_name["cudnn, inside"]["cudnn / this"] == "0.75"
    assert by_name["ours"]["x floor"] == "4.00"
    assert by_name["ours"]["worst error"] == "4.0e-03 (o)"
    assert by_name["ours"]["same bits"] == "yes"


def test_a_peer_is_compared_at_the_same_case_alone():
    rows = [row("fla", 6.0, case=Case("forward", 8192)), row("fla", 7.0, case=Case("forward", 4096, "list")), ROWS[3]]
    assert fastest(rows, CASE, "fla") is None
    assert table(rows, ("fla",))[3][6] == ""


def test_a_failure_becomes_a_row_without_a_figure():
    def measure(blank: Row) -> Row:
        raise torch.OutOfMemoryError(f"no memory for {blank.peer}\nand more")

    failed = attempt(Row(CASE, "fla", floor_ms=0.5), measure)
    assert failed.failed == "OutOfMemoryError: no memory for fla"
    assert failed.timing is None
    assert fastest([failed], CASE, "fla") is None
    cells = table([failed, ROWS[3]], ("fla",))
    assert cells[1][3].startswith("failed: OutOfMemoryError")
    assert cells[1][4:] == [""] * (len(cells[0]) - 4)
    assert cells[2][6] == ""


def test_ours_alone_has_to_keep_to_the_limits():
    wrong = {"o": 1.0}
    rows = [row("fla", 1.0, errors=wrong, same_bits=False), row("ours", 1.0, errors=wrong), row("ours", 1.0)]
    assert len(violations(rows, {"o": 0.5})) == 1
    assert violations(rows, {"o": 1.0}) == []


@pytest.mark.parametrize("broken", [{"errors": {"o": float("nan")}}, {"same_bits": False}, {"failed": "an error"}])
def test_a_failure_of_ours_is_a_violation(broken):
    assert len(violations([row("ours", 1.0, **broken)], {"o": 1.0})) == 1


def test_a_case_measured_again_keeps_no_row_of_an_earlier_process(tmp_path):
    path = tmp_path / "op.json"
    other = Case("forward", 8192)
    for rows in (ROWS, [row("ours", 9.0, case=other), row("fla", 9.0, case=other)], [row("ours", 1.0)]):
        results = Results(path, MACHINE, {}, ("fla",))
        for each in rows:
            results.add(each)
    kept = [(each["peer"], each["size"]) for each in json.loads(path.read_text())["rows"]]
    assert kept == [("ours", 8192), ("fla", 8192), ("ours", 4096)]
    assert [each.case.size for each in results.measured_here] == [4096]


def test_a_row_comes_back_from_the_file_as_it_was(tmp_path):
    results = Results(tmp_path / "op.json", MACHINE, {}, ())
    for each in ROWS:
        results.add(each)
    assert Results(tmp_path / "op.json", MACHINE, {}, ()).rows == ROWS


def test_a_file_of_another_machine_is_refused(tmp_path):
    Results(tmp_path / "op.json", MACHINE, {}, ()).add(ROWS[0])
    with pytest.raises(ValueError, match="give another --out"):
        Results(tmp_path / "op.json", MACHINE | {"torch": "4"}, {}, ())


def test_the_table_of_a_results_file_goes_into_a_readme(tmp_path):
    results = Results(tmp_path / "op.json", MACHINE, {}, ("fla",))
    other = Case("forward", 8192)
    for each in (*ROWS, row("ours", 2.0, case=other), Row(other, "fla", failed="OutOfMemoryError: none left")):
        results.add(each)
    command = [sys.executable, KERNELS / "bench/table.py", tmp_path / "op.json"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ours = "| 2.000 ± 0.000 | 6.000 (3.00 ×) | 3.000 (1.50 ×) | 4.00 | 1.50, -, - | 4.0e-03 (o), -, - | yes |"
    assert f"| forward | 4,096 {ours}\n" in printed
    assert "| forward | 8,192 | 2.000 ± 0.000 | fails: OutOfMemoryError |  | 4.00 |  |  |  |\n" in printed


def test_a_layer_measured_again_replaces_its_row_and_leaves_the_others():
    def found(by: str, ms: float) -> dict[str, object]:
        return {"what": "KDA layer", "by": by, "ms": ms}

    earlier = {"rows": [found("ours", 9.0), found("reference", 99.0)], "profile": {"a": 1}, "machine": MACHINE}
    merged = bench_block.merged(earlier, {"rows": [found("ours", 8.0)], "profile": {"b": 2}})
    assert merged["rows"] == [found("reference", 99.0), found("ours", 8.0)]
    assert merged["profile"] == {"a": 1, "b": 2}
    assert merged["machine"] == MACHINE


@pytest.mark.parametrize(
    ("kernel", "operation"),
    [
        ("products_kernel", "experts' products"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "dense products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "MLA attention"),
        ("attn_res_gradient_kernel", "Attention Residuals"),
        ("Memcpy DtoD (Device -> Device)", OTHERS),
    ],
)
def test_a_kernels_operation_is_told_by_its_name(kernel, operation):
    assert operation_of(kernel) == operation


def test_bits_are_compared_not_values():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert harness.same_bits(nan, nan.clone())
    assert not harness.same_bits(zero, -zero)


def test_the_floor_of_kda_counts_each_tensor_once():
    row_bytes, scalar_bytes = 2 * 10 * 4 * 128, 2 * 10 * 4
    assert bench_kda.floor_bytes(10, 4, bench_kda.FORWARD) == 5 * row_bytes + scalar_bytes
    assert bench_kda.floor_bytes(10, 4, bench_kda.BOTH) == 14 * row_bytes + 3 * scalar_bytes


def test_the_exact_value_in_chunks_is_the_recurrence():
    inputs = bench_kda.as_leaves(bench_kda.draw(224, 1), torch.float64)
    grad_o_THV, none = bench_kda.draw_grad(224, 1).double(), torch.empty(0)
    chunked = bench_kda.forward_and_backward(bench_kda.run_eager, inputs, grad_o_THV, none)
    bench_kda_length = replace(bench_kda.K3, check_length=224)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_kda, "K3", bench_kda_length)
        recurrent = bench_kda.forward_and_backward(bench_kda.run_eager, inputs, grad_o_THV, none)
    assert max(harness.relative_error(chunked[name], recurrent[name]) for name in chunked) < 1e-12


@pytest.mark.parametrize("layout", [bench_attn_res.BANK, bench_attn_res.LIST])
def test_errors_taken_part_by_part_are_those_of_the_whole(layout, monkeypatch):
    inputs, grad_o_TD = bench_attn_res.draw(11, 32, layout), bench_attn_res.draw_grad(11, 32)
    got = bench_attn_res.forward_and_backward(bench_attn_res.run_eager, bench_attn_res.as_leaves(inputs), grad_o_TD)
    whole = bench_attn_res.errors_of(got, inputs, grad_o_TD)
    monkeypatch.setattr(bench_attn_res, "EXACT_TOKENS", 4)
    assert bench_attn_res.errors_of(got, inputs, grad_o_TD) == pytest.approx(whole, rel=1e-6)
    off = got | {"proj": 1.5 * got["proj"]}
    assert bench_attn_res.errors_of(off, inputs, grad_o_TD)["proj"] == pytest.approx(0.5, rel=0.02)


class Compiled:
    """Stands for a Triton function: notes what it is launched with."""

    arg_names = ("x",)

    def __init__(self) -> None:
        self.seen: list[int] = []

    @staticmethod
    def fn(x: object) -> None: ...

    def run(self, *_: object, num_warps: int, **__: object) -> None:
        self.seen.append(num_warps)
        if num_warps == self.too_large:
            raise RuntimeError("out of resource: shared memory")

    too_large = 0


def sharded(i: int, n: int, too_large: int = 0) -> list[int]:
    """Warps of the configurations that shard i launches; the one with too_large warps does not fit."""
    triton = pytest.importorskip("triton")
    tuner_class = triton.runtime.autotuner.Autotuner
    fn = Compiled()
    fn.too_large = too_large
    configs = [triton.Config({}, num_warps=warps) for warps in (1, 2, 4, 8)]
    with pytest.MonkeyPatch.context() as patch:  # puts back what the function replaces
        patch.setattr(tuner_class, "run", tuner_class.run)
        patch.setattr(tuner_class, "prune_configs", tuner_class.prune_configs)
        patch.setenv("FLA_CACHE_RESULTS", "1")
        peers.try_every_nth_configuration(i, n)
        tuner_class(fn, ("x",), configs, ["x"], None, None).run(3, grid=(1,))
    return fn.seen


def test_the_shards_together_compile_every_configuration():
    seen = [set(sharded(i, 3)) for i in range(3)]
    assert set().union(*seen) == {1, 2, 4, 8}
    assert seen[1] == {2}


def test_a_shard_whose_configuration_does_not_fit_takes_another():
    assert sharded(2, 4, too_large=4)[-1] == 1


def test_flas_choice_is_kept_in_the_form_that_it_reads():
    triton = pytest.importorskip("triton")
    kept = peers.config_to_json(triton.Config({"BK": 64}, num_warps=8, num_stages=3))
    assert (kept["kwargs"], kept["num_warps"], kept["num_stages"], kept["num_ctas"]) == ({"BK": 64}, 8, 3, 1)
    assert kept.keys() >= {"maxnreg", "ir_override"}


@pytest.mark.parametrize(
    "bench",
    [
        ("bench_kda.py", "run", "--only", "eager"),
        ("bench_attn_res.py", "run", "--only", "eager"),
        ("bench_logprob.py", "--only", "torch"),
        ("bench_router.py", "--only", "torch,compiled"),
    ],
)
def test_a_bench_runs_through_without_a_gpu(bench, tmp_path):
    script, *arguments = bench
    command = [sys.executable, KERNELS / "bench" / script, *arguments, "--dry", "--repeats", "2"]
    out = tmp_path / "out.json"
    environment = os.environ | {"PYTHONPATH": str(KERNELS), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--out", out], check=True, env=environment, capture_output=True)
    result = json.loads(out.read_text())
    assert result["rows"]
    assert all(each["failed"] is None and each["errors"] for each in result["rows"])
    assert side_by_side.Row.from_json(result["rows"][-1]).case.section
