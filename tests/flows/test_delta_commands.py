"""`k3 delta compact | gc | diff | stats`, as a person calls them, in a terminal of 100 columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient

from flows.cli import main
from infra.aliases import aliased_steps
from infra.policies import load, publish, publish_adapter, read_version
from infra.serving import acked_base, serve, served_sha256
from infra.store import Store
from k3core.checkpoint.tensors import from_torch, to_torch
from k3core.types import PolicyVersion


class Acknowledging:
    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name

    def load(self, version: PolicyVersion) -> str:
        return served_sha256(self.store, version)


def weights_at(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(64, 64, generator=generator)
    w[0, :step] += 0.5 * step
    half = torch.ones(128, dtype=torch.bfloat16)
    half[:step] = 1.0 + step
    return {"layers.0.w": w, "layers.1.half": half, "layers.2.fixed": torch.zeros(8)}


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Run "demo": bases 0 and 5, deltas between and after them to 7, served to 7."""
    store = Store(str(tmp_path))
    engines = [Acknowledging(store, "a"), Acknowledging(store, "b")]
    for step in range(8):
        base = acked_base(store, "demo", step)
        version, _ = publish(store, "demo", step, from_torch(weights_at(step)), base, full_every=5, level=3, tags={})
        serve(store, version, engines, 10)
    return str(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert main(["delta", *args]) == code
    printed = capsys.readouterr()
    return printed.out + printed.err


def rows(printed: str) -> dict[str, list[str]]:
    """The table's rows by their first cell."""
    return {cells[0]: cells for line in printed.splitlines() if (cells := re.split(r"\s{2,}", line.strip()))[0]}


def test_stats_shows_chains_what_was_sent_and_what_is_served(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, "stats", "demo", "--root", root, "--floor")
    table = rows(printed)
    assert table["0"][1:4] == ["base", "1", table["0"][3]]
    assert [table[str(step)][1] for step in (4, 5, 7)] == ["delta", "base", "delta*"]
    assert table["4"][2:4] == ["3", "5"], "it stands on step 3, and five files rebuild it"
    assert table["7"][2:4] == ["6", "3"]
    assert table["0"][-1].endswith("%"), "no floor for a version that is whole"
    assert table["7"][-1].endswith("bytes")
    assert "* served: step 7, acknowledged by a, b" in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_compact_writes_a_copy_of_the_served_version_and_changes_nothing_else(
    root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = read_version(Store(root), "demo", 7)
    printed = run(capsys, "compact", "demo", "--root", root)
    assert printed.startswith("demo step 7: one whole copy in place of 3 files\nfile://")
    assert "demo step 7 has a whole copy already" in run(capsys, "compact", "demo", "7", "--root", root)
    assert run(capsys, "compact", "demo", "5", "--root", root) == "demo step 5 is whole already\n"
    assert read_version(Store(root), "demo", 7) == before
    assert rows(run(capsys, "stats", "demo", "--root", root))["7"][3] == "1"
    assert "8 of 8 versions" in run(capsys, "verify", "demo", "--root", root)
    assert main(["delta", "compact", "demo", "9", "--root", root]) == 2
    assert capsys.readouterr().err.startswith("step 9 of demo is not published in ")


def test_gc_shows_what_may_go_and_deletes_it_only_when_told(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = {path for path in Path(root).rglob("*") if path.is_file()}
    printed = run(capsys, "gc", "demo", "--root", root, "--mlflow", "none")
    assert "stays: step 7 (served)" in printed
    assert "stays: step 5, 6 (not older than step 5, on which the served version stands)" in printed
    assert re.search(r"policies/000000/payload-\w+\.safetensors +\d+ KiB +no live version needs step 0", printed)
    assert re.search(r"5 files, \d+ KiB, may go; `--yes` deletes them\n$", printed)
    assert max(map(len, printed.splitlines())) <= 100
    assert {path for path in Path(root).rglob("*") if path.is_file()} == files
    assert "deleted 5 files, " in run(capsys, "gc", "demo", "--root", root, "--mlflow", "none", "--yes")
    assert run(capsys, "gc", "demo", "--root", root, "--mlflow", "none").endswith("nothing may go\n")
    printed = run(capsys, "verify", "demo", "--root", root)
    assert re.search(
        r"\n     1  delta    pruned by gc at 20\S+ \S+ UTC \(no live version needs step 0\); use step 5\n", printed
    )
    assert printed.endswith("3 of 8 versions of demo are bit for bit what was published; 5 were pruned\n")
    assert "); use step 5" in run(capsys, "reconstruct", "demo", "1", "--out", f"{root}/x", "--root", root, code=1)


def test_gc_keeps_what_it_is_told_to_keep(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("gc", "demo", "--root", root, "--mlflow", "none")
    assert "3 files" in run(capsys, *args, "--keep-step", "1")
    assert "nothing may go" in run(capsys, *args, "--keep-last", "4")
    run(capsys, *args, "--yes")
    assert "gone: step 1 was to be kept, but was pruned before" in run(capsys, *args, "--keep-step", "1")
    assert main(["delta", *args, "--keep-step", "12"]) == 2
    assert "demo: step 12 is to be kept, but it is not published (steps 0 to 7)" in capsys.readouterr().err


def test_gc_keeps_the_registrys_champion_and_refuses_when_it_cannot_ask(
    root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["delta", "gc", "demo", "--root", root]) == 2
    assert "no mlflow.db here, so nobody knows which version is the champion" in capsys.readouterr().err
    uri = f"sqlite:///{root}/mlflow.db"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    client.create_registered_model("mine")
    for run_name, step, alias in (("demo", "2", "champion"), ("other", "1", "candidate")):
        tags = {"k3.run": run_name, "k3.step": step}
        registered = client.create_model_version("mine", source=f"file://{root}/demo", tags=tags)
        client.set_registered_model_alias("mine", alias, registered.version)
    assert aliased_steps(uri, "demo") == {2: "champion"}
    printed = run(capsys, "gc", "demo", "--root", root)
    assert "stays: step 2 (to be kept, champion)" in printed
    assert "2 files" in printed


def test_diff_tells_tensor_by_tensor_what_changed_and_by_how_much(
    root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run(capsys, "diff", "demo", "1", "3", "--root", root)
    table = rows(printed)
    assert table["layers.0.w"][1:] == ["F32", "4,096", "3", "0.07%", "1.5"]
    assert table["layers.1.half"][1:] == ["BF16", "128", "3", "2.34%", "3"]
    assert printed.index("layers.1.half") < printed.index("layers.0.w"), "the largest difference first"
    assert "layers.2.fixed" not in printed
    assert [cells for name, cells in table.items() if "tensors" in name and len(cells) > 1] == [
        ["1 tensors", "BF16", "128", "3", "2.34%", "3"],
        ["2 tensors", "F32", "4,104", "3", "0.07%", "1.5"],
    ]
    assert "demo step 1 and step 3: 2 of 3 common tensors differ" in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert "... and 1 more" in run(capsys, "diff", "demo", "1", "3", "--root", root, "--top", "1")
    assert "0 of 3 common tensors differ" in run(capsys, "diff", "demo", "3", "3", "--root", root)


def test_diff_names_what_is_in_one_version_only_and_what_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(str(tmp_path))
    base = {"w": torch.tensor([1.0, float("nan")]), "gone": torch.ones(2), "shaped": torch.ones(2)}
    publish(store, "demo", 0, from_torch(base), None, 5, 3, {})
    publish_adapter(store, "demo", 1, from_torch({"w": torch.tensor([1.0, 2.0]), "shaped": torch.ones(3)}), {})
    printed = run(capsys, "diff", "demo", "0", "1", "--root", str(tmp_path))
    assert rows(printed)["w"][1:] == ["F32", "2", "1", "50.00%", "not finite"]
    assert "only in step 0: gone" in printed
    assert "of another dtype or shape: shaped" in printed


def test_a_difference_is_exact_for_every_dtype() -> None:
    from infra.policy_diff import difference

    pairs = {
        torch.float32: (1.0, 1.5, 0.5),
        torch.bfloat16: (1.0, 1.5, 0.5),
        torch.float16: (1.0, -1.0, 2.0),
        torch.float8_e4m3fn: (1.0, 1.5, 0.5),
        torch.uint8: (255, 1, 254.0),
        torch.int64: (-5, 5, 10.0),
        torch.uint16: (65535, 0, 65535.0),
        torch.bool: (True, False, 1.0),
        torch.complex64: (3 + 4j, 0, 5.0),
    }
    for dtype, (a, b, gap) in pairs.items():
        before, after = (from_torch({"t": torch.tensor([x, a]).to(dtype)}) for x in (a, b))
        (found,) = difference(before, after).tensors
        assert (found.num_elements, found.num_changed, found.max_abs) == (2, 1, gap), dtype
    zeros = (from_torch({"t": torch.tensor([x])}) for x in (0.0, -0.0))
    assert [(t.num_changed, t.max_abs) for t in difference(*zeros).tensors] == [(1, 0.0)]


def test_reconstruct_after_compaction_and_collection_is_bit_for_bit(
    root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "compact", "demo", "--root", root)
    run(capsys, "gc", "demo", "--keep-last", "1", "--root", root, "--mlflow", "none", "--yes")
    store = Store(root)
    version = read_version(store, "demo", 7)
    assert version is not None
    found = to_torch(load(store, version))
    assert all(torch.equal(found[name], tensor) for name, tensor in weights_at(7).items())
    assert not list(Path(root, "demo/policies").glob("*/payload-*"))
