from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from infra import doctor
from infra.config import load
from infra.config_doctor import diagnose_config, num_parameters, weight_bytes
from infra.doctor import Finding, check_root, diagnose, local_folder, size


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    named = {finding.name: finding for finding in findings}
    assert len(named) == len(findings)
    return named


def test_a_whole_machine_has_nothing_required_missing(tmp_path: Path) -> None:
    found = by_name(diagnose(str(tmp_path)))
    expected = {"python", "torch", "prefect", "mlflow", "zstandard", "tokenizers", "s3fs", "triton", "gpu", "threads"}
    assert expected | {"sqlite", "root", "disk"} <= found.keys()
    assert [finding.name for finding in found.values() if finding.required and not finding.ok] == []
    assert not found["triton"].required
    assert not found["gpu"].required
    assert all(finding.remedy == "" for finding in found.values() if finding.ok)
    assert all("\n" not in finding.detail + finding.remedy for finding in found.values())


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "zstandard", "triton", "s3fs")
    found = by_name(diagnose())
    assert found["zstandard"] == Finding("zstandard", False, True, "not installed", "pip install 'zstandard>=0.24'")
    assert not found["triton"].required
    assert found["triton"].remedy.endswith("(the GPU kernels)")
    assert not found["s3fs"].required


def test_s3fs_is_required_for_an_s3_root(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "s3fs")
    assert by_name(diagnose("s3://bucket/runs"))["s3fs"].required


def test_a_version_outside_the_requirements_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "3.18.0" if name == "mlflow" else installed(name))
    found = by_name(diagnose())
    assert not found["mlflow"].ok
    assert found["mlflow"].detail.startswith("3.18.0 is outside ")
    assert "<3.18" in found["mlflow"].remedy
    assert found["torch"].ok  # 2.13.0+cpu lies inside >=2.11,<2.15


def test_a_package_that_does_not_load_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.importlib.import_module

    def broken(name: str) -> object:
        if name == "torch":
            raise OSError("libcudart.so.13: cannot open shared object file\nmore")
        return real(name)

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    found = by_name(diagnose())
    assert not found["torch"].ok
    assert found["torch"].detail.endswith("does not load: libcudart.so.13: cannot open shared object file")
    assert "gpu" not in found


def test_the_doctor_is_imported_without_torch_or_any_other_dependency() -> None:
    code = "import infra.doctor, sys; print({'torch', 'prefect', 'mlflow', 'triton', 'pydantic'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_too_many_threads_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set())
    threads = by_name(diagnose())["threads"]
    assert not threads.ok
    assert "OMP_NUM_THREADS" in threads.remedy


def test_a_root_below_a_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = check_root(str(tmp_path / "file" / "runs"), 0)
    assert not finding.ok
    assert finding.required
    assert finding.remedy == "choose another folder with root=..."


def test_a_full_disk_is_found_and_nothing_is_created(tmp_path: Path) -> None:
    root, disk = check_root(f"file://{tmp_path}/deep/runs", 1 << 60)
    assert root.ok
    assert not disk.ok
    assert "1,048,576.0 TiB needed" in disk.detail
    assert list(tmp_path.iterdir()) == []


def test_an_object_store_is_asked_whether_two_may_write_to_it(s3_root: str) -> None:
    (finding,) = check_root(s3_root, 1 << 60)
    assert finding.ok
    assert "conditional writes hold" in finding.detail
    assert local_folder("memory://x") is None


def test_an_object_store_that_refuses_us_is_named_without_the_secret(
    s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    (finding,) = check_root(s3_root, 0)
    assert not finding.ok
    assert "AWS_" in finding.detail
    assert "not-the-secret" not in finding.detail


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (3 << 20, "3 MiB")])
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def sglang_url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_sglang_is_asked_only_when_configured(sglang_url: str) -> None:
    assert "sglang" not in by_name(diagnose())
    assert by_name(diagnose(sglang_url=f"{sglang_url}/"))["sglang"].ok
    assert not by_name(diagnose(sglang_url=f"{sglang_url}/wrong"))["sglang"].ok


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense"])
def test_an_absent_sglang_is_an_optional_finding(url: str) -> None:
    finding = by_name(diagnose(sglang_url=url))["sglang"]
    assert not finding.ok
    assert not finding.required


def test_tiny_runs_anywhere(tmp_path: Path) -> None:
    assert all(finding.ok for finding in diagnose_config(load("tiny", [f"root={tmp_path}"])))


def test_the_real_architectures_have_their_published_sizes() -> None:
    assert num_parameters(load("k3_full").model) == pytest.approx(2.779e12, rel=1e-3)
    assert num_parameters(load("k3_lora").model) == num_parameters(load("k3_full").model)
    assert num_parameters(load("linear48b_lora").model) == pytest.approx(48e9, rel=0.03)


@pytest.mark.parametrize("name", ["linear48b_lora", "k3_lora", "k3_full"])
def test_a_real_model_says_in_a_line_each_what_it_needs(name: str) -> None:
    findings = by_name([finding for finding in diagnose_config(load(name)) if not finding.ok])
    assert findings.keys() == {"model", "checkpoint"}
    assert all(finding.required for finding in findings.values())
    assert findings["model"].remedy == "this run needs GPUs with that much memory; `tiny` runs anywhere"
    assert findings["checkpoint"].detail.endswith(": no such folder")
    assert "hf download" in findings["checkpoint"].remedy


def test_packed_experts_need_the_bytes_that_they_have() -> None:
    """2.73e12 of K3's values lie packed in 17/32 byte each, the others in float32."""
    assert weight_bytes(load("k3_lora").model) == pytest.approx(2.723e12 * 17 / 32 + 0.056e12 * 4, rel=1e-2)
    assert weight_bytes(load("k3_full").model) == pytest.approx(2.779e12 * 4, rel=1e-3)


def test_an_absent_benchmark_is_found(tmp_path: Path) -> None:
    overrides = ["environment.name=lab", f"environment.path={tmp_path}/lab"]
    finding = by_name(diagnose_config(load("tiny", overrides)))["environment"]
    assert not finding.ok
    (tmp_path / "lab").mkdir()
    assert by_name(diagnose_config(load("tiny", overrides)))["environment"].ok


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    installed = metadata.version

    def version(name: str) -> str:
        if name in names:
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "version", version)
