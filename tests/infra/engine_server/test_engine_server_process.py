"""A real process: a client that goes away frees its slot, and SIGTERM lets running turns finish."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

PROGRAM = """
import sys
from test_engine_server import SlowEngine, TOKENIZER
from infra.engine_server.server import serve
from infra.engine_server.settings import ServerSettings
serve(ServerSettings(SlowEngine, TOKENIZER, max_length=100, port=int(sys.argv[1]), drain_s=10))
"""


def test_a_closed_socket_frees_the_slot_and_sigterm_drains() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    server = subprocess.Popen([sys.executable, "-c", PROGRAM, str(port)], env=environment)
    try:
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 10**6, "stream": True}
        ) as r:
            lines = r.iter_lines()  # kept: a collected iterator closes the stream
            next(lines)
            text = httpx.get(f"{url}/metrics").text
            assert "k3_running 1.0" in text, [
                line
                for line in text.splitlines()
                if line.startswith(("k3_run", "k3_wait", "k3_ab", "k3_eng", "k3_gen"))
            ]
        wait_for(lambda: "k3_running 0.0" in httpx.get(f"{url}/metrics").text)
        assert "k3_aborted_total 1.0" in httpx.get(f"{url}/metrics").text
        statuses: list[int] = []
        body = {"prompt": "a", "max_tokens": 800}
        last = threading.Thread(
            target=lambda: statuses.append(httpx.post(f"{url}/v1/completions", json=body).status_code)
        )
        last.start()
        wait_for(lambda: "k3_running 1.0" in httpx.get(f"{url}/metrics").text)
        server.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.post(f"{url}/v1/completions", json=body).status_code == 503)
        last.join()
        assert statuses == [200]
        assert server.wait(10) == 0
    finally:
        server.kill()
        server.wait()


def wait_for(is_true: object) -> None:
    assert callable(is_true)
    deadline = time.monotonic() + 12
    while time.monotonic() < deadline:
        try:
            if is_true():
                return
        except httpx.ConnectError:
            pass
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")
