import stat
import subprocess
from pathlib import Path

import pytest

from infra.seaweed import WeedPorts, end_weed, wait_until_healthy, weed_command, write_config
from infra.store import Store
from k3core.errors import RunError


@pytest.mark.usefixtures("s3_root")
def test_what_a_server_answered_survives_its_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, config, ports = tmp_path / "data", tmp_path / "s3.json", WeedPorts.free()
    data.mkdir()
    write_config(config, "key", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{ports.s3}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    store = Store("s3://k3-tests/run")

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("ab") as log:
            server = subprocess.Popen(weed_command(data, ports, config), cwd=tmp_path, stdout=log, stderr=log)
        try:
            wait_until_healthy(server, ports)
        except RunError:
            end_weed(server, ports)
            raise
        return server

    server = start()
    try:
        ref = store.put("k", b"bytes")
        version = store.swap("latest", {"step": 1}, None)
    finally:
        end_weed(server, ports)
    server = start()
    try:
        assert store.get(ref) == b"bytes"
        assert store.read_pointer("latest") == ({"step": 1}, version)
    finally:
        end_weed(server, ports)


def test_a_server_that_ends_is_not_waited_for() -> None:
    ended = subprocess.Popen(["false"])
    ended.wait()
    with pytest.raises(RunError, match="ended with code 1"):
        wait_until_healthy(ended, WeedPorts.free())


def test_the_secret_is_for_its_owner_alone(tmp_path: Path) -> None:
    config = tmp_path / "s3.json"
    config.write_text("open to all")
    config.chmod(0o666)
    write_config(config, "key", "secret")
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert '"secretKey": "secret"' in config.read_text()


def test_ports_that_collide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected ports that all differ"):
        weed_command(tmp_path, WeedPorts(master=20000, volume=10000, filer=3, s3=4), tmp_path / "s3.json")
    with pytest.raises(ValueError, match="expected ports that all differ"):
        weed_command(tmp_path, WeedPorts(1, 2, 3, 3, 5, 6, 7, 8), tmp_path / "s3.json")
    command = weed_command(tmp_path, WeedPorts(1, 2, 3, 4), tmp_path / "s3.json")
    assert {"-master.port=1", "-master.port.grpc=10001", "-s3.port=4", "-s3.port.grpc=10004"} <= set(command)
    assert "-master.telemetry=false" in command
