"""A real S3 server behind a proxy that injects faults, and roots of each kind. Started once, when a test asks for it."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.faults.proxy import FaultProxy
from infra.seaweed import WeedPorts, end_weed, wait_until_healthy, weed_command, write_config

ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key-that-is-never-shown"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("seaweed")
    data, config, ports = folder / "data", folder / "s3.json", WeedPorts.free()
    data.mkdir()
    write_config(config, ACCESS_KEY, SECRET_KEY)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(weed_command(data, ports, config), cwd=folder, stdout=log, stderr=log)
    try:
        wait_until_healthy(server, ports)
        yield f"http://127.0.0.1:{ports.s3}"
    finally:
        end_weed(server, ports)


@pytest.fixture(scope="session")
def s3_proxy(s3_server: str) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server) as proxy:
        yield proxy


@pytest.fixture
def s3_root(s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder of one's own on the server, reached through the proxy, which has no faults at first."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL_S3": s3_proxy.url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    s3_proxy.clear()
    yield f"s3://k3-tests/{uuid.uuid4().hex}"
    s3_proxy.clear()


@pytest.fixture(params=["path", "file", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("s3_root"))
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/store"
    return str(tmp_path / "a store") if request.param == "path" else f"file://{tmp_path}/store"
