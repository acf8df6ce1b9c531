"""The benchmark tables of kernels/README.md come from the files in kernels/bench/results, figure by figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"
MACHINE = {"device": "a GPU", "driver": "1", "cuda": "2", "torch": "3", "triton": "4", "python": "5"}
SECTIONS = {
    "0.3%": {"floor_ms": 2.0, "timings": [{"name": "read", "median_ms": 2.0}]},
    "17.0%": {"floor_ms": 2.0, "timings": [{"name": "read", "median_ms": 2.0}, {"name": "fused", "median_ms": 3.0}]},
}


def run_table(*arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, KERNELS / "bench/table.py", *arguments], capture_output=True, text=True, check=False
    )


def test_a_row_holds_the_medians_and_their_multiples_of_the_floor(tmp_path):
    results, readme = tmp_path / "op.json", tmp_path / "README.md"
    results.write_text(json.dumps({"machine": MACHINE, "sections": SECTIONS}))
    readme.write_text("before\n<!-- op.json -->\nold\n<!-- end of op.json -->\nafter\n")
    assert run_table(results, readme).returncode == 0
    assert readme.read_text() == (
        "before\n<!-- op.json -->\n"
        "a GPU; driver 1, cuda 2, torch 3, triton 4, python 5.\n\n"
        "|  | 0.3% | 17.0% |\n| --- | ---: | ---: |\n| read | 2.000 (1.00) | 2.000 (1.00) |\n| fused |  | 3.000 (1.50) |\n"
        "<!-- end of op.json -->\nafter\n"
    )


def test_a_layer_has_a_line_for_each_form_with_its_time_as_a_multiple_of_ours(tmp_path):
    def row(by: str, ms: float, bits: bool) -> dict[str, object]:
        timing = {"median_ms": ms, "spread_ms": 0.5}
        kept = {"timing": timing, "peak_gib": 3.0, "same_bits": bits, "errors": {"out": 1e-3, "input": 2e-3}}
        return {"what": "KDA layer", "by": by, "tokens": 8192} | kept

    results = tmp_path / "block.json"
    results.write_text(
        json.dumps({"machine": MACHINE, "rows": [row("ours", 10.0, True), row("reference", 25.0, False)]})
    )
    assert run_table(results).stdout.splitlines()[-2:] == [
        "| KDA layer | 8,192 | ours | 10.0 ± 0.5 |  | 3.0 | 2.0e-03 (input) | yes |",
        "| KDA layer | 8,192 | reference | 25.0 ± 0.5 | 2.50 | 3.0 | 2.0e-03 (input) | no |",
    ]


def test_a_readme_without_a_place_for_the_table_is_refused_and_kept(tmp_path):
    results, readme = tmp_path / "op.json", tmp_path / "README.md"
    results.write_text(json.dumps({"machine": MACHINE, "sections": SECTIONS}))
    readme.write_text("<!-- op.json -->\n")
    assert "lacks the lines <!-- op.json -->" in run_table(results, readme).stderr
    assert readme.read_text() == "<!-- op.json -->\n"


def test_the_readme_shows_the_figures_of_every_results_file():
    readme = (KERNELS / "README.md").read_text()
    for results in (KERNELS / "bench/results").glob("*.json"):
        assert f"<!-- {results.name} -->\n{run_table(results).stdout}<!-- end of {results.name} -->\n" in readme
