from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from flows import bench_logprob
from flows.bench_logprob import Batch, Case, Measured, measure_logprob, run_case
from flows.cli import main


def test_memory_in_blocks_is_small_beside_whole_logits_and_is_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In processes of their own, by what the kernel counts; whole logits must be seen to take what they take."""
    size = ["--tokens", "2000", "--vocab", "60000", "--width", "16", "--trained", "0.5", "--out", str(tmp_path)]
    assert main(["bench", "logprob", *size]) == 0
    written = json.loads((tmp_path / "logprob.json").read_text())
    peaks = {case["name"]: case["peak_extra_bytes"] for case in written["cases"]}
    one_of_all_logits = 4 * 1000 * 60_000
    assert peaks["whole logits, forward"] > one_of_all_logits
    assert peaks["in blocks, forward"] < peaks["whole logits, forward"] / 2
    assert peaks["in blocks, forward and backward"] < peaks["whole logits, forward and backward"] / 2
    assert written["largest_difference_nat"] <= 1e-6
    assert written["batch"]["num_trained"] == 1000
    assert written["machine"]["packages"]["torch"]
    assert "largest difference from whole logits" in capsys.readouterr().out


def measured(case: Case, extra_bytes: int, logprob: float) -> Measured:
    return Measured(case, extra_bytes, 1.0, np.full(3, logprob, np.float32), np.ones((3, 2), np.float32))


@pytest.mark.parametrize(
    ("peak_bytes", "logprob", "complaint"),
    [
        (2 << 30, -12.0, "a pass in blocks took 2.00 GiB, more than 1.5"),
        (1 << 30, -12.1, "logprobs differ by 0.1 nat from whole logits, more than 1e-06"),
        (1 << 30, float("nan"), "logprobs differ by nan nat"),
    ],
)
def test_too_much_memory_and_other_logprobs_are_a_failure(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    peak_bytes: int,
    logprob: float,
    complaint: str,
) -> None:
    def fake(_batch: Batch, case: Case) -> Measured:
        return measured(case, peak_bytes, logprob) if case.in_blocks else measured(case, 9 << 30, -12.0)

    monkeypatch.setattr(bench_logprob, "_in_a_process", fake)
    assert measure_logprob(Batch(60, 100, 8, 0.05, "fp32"), True, tmp_path) == 1
    assert complaint in capsys.readouterr().out


def test_an_unknown_dtype_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "logprob", "--dtype", "int4", "--out", str(tmp_path)]) == 2
    assert "--dtype: expected one of bf16, fp32, got 'int4'" in capsys.readouterr().err


def test_cases_of_one_batch_compute_the_same_logprobs() -> None:
    batch = Batch(50, 300, 8, 0.1, "bf16")
    runs = [run_case(batch, case) for case in (*bench_logprob.CASES, *bench_logprob.WHOLE_CASES)]
    for run in runs:
        assert run.logprobs_M.shape == (5,)
        np.testing.assert_allclose(run.logprobs_M, runs[0].logprobs_M, rtol=0, atol=1e-6)
        assert (run.gradient_MD is not None) == run.case.backward
