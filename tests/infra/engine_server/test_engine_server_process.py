"""A real process: a client that goes away frees its slot, and SIGTERM lets running turns finish."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

PROGRAM = """
import time
from engines import MODEL, SlowEngine, TOKENIZER
from infra.engine_server.server import serve
from infra.engine_server.settings import Made, ServerSettings

def slowly():
    print("it loads", flush=True)
    time.sleep(60)

make_engine = slowly if LOADS_FOR_EVER else lambda: Made(SlowEngine())
serve(ServerSettings(make_engine, TOKENIZER, MODEL, 10**7, port=0, drain_s=10), lambda url: print(url, flush=True))
"""


@contextmanager
def process(program: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """It, and the first line that it prints."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    server = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server, server.stdout.readline().strip()
    finally:
        server.kill()
        server.wait()


def test_a_closed_socket_frees_the_slot_and_sigterm_drains() -> None:
    with process(f"LOADS_FOR_EVER = False\n{PROGRAM}") as (server, url):
        ask = {"prompt": "a", "max_tokens": 10**6}
        with httpx.stream("POST", f"{url}/v1/completions", json=ask | {"stream": True}) as r:
            lines = r.iter_lines()  # kept: a collected iterator closes the stream
            next(lines)
            assert "k3_running 1.0" in httpx.get(f"{url}/metrics").text
        wait_for(lambda: "k3_running 0.0" in httpx.get(f"{url}/metrics").text)
        assert "k3_aborted_total 1.0" in httpx.get(f"{url}/metrics").text
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=ask, timeout=0.3)
        wait_for(lambda: "k3_aborted_total 2.0" in httpx.get(f"{url}/metrics").text)
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


def test_a_server_that_is_told_to_end_does_not_wait_for_its_weights() -> None:
    with process(f"LOADS_FOR_EVER = True\n{PROGRAM}") as (server, line):
        assert line == "it loads"
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 12
    while time.monotonic() < deadline:
        if is_true():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")
