"""Does a server answer? Checks for a supervisor; none raises for a server that is not there."""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import urllib.error
import urllib.parse
import urllib.request
from datetime import datetime
from typing import Any

from infra.services import Check

TIMEOUT_S = 5.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SILENCE = (OSError, http.client.HTTPException, json.JSONDecodeError)


def http_answers(url: str, word: bytes = b"") -> Check:
    """GET gives status 200, and `word` in the body."""

    def check(_started: float) -> bool:
        try:
            with _open(urllib.request.Request(url)) as response:
                return word in response.read()
        except _SILENCE:
            return False

    return check


def port_accepts(host: str, port: int) -> Check:
    def check(_started: float) -> bool:
        try:
            with socket.create_connection((host, port), timeout=TIMEOUT_S):
                return True
        except OSError:
            return False

    return check


def all_of(*checks: Check) -> Check:
    return lambda started: all(check(started) for check in checks)


def worker_beats(api_url: str, pool: str, name: str) -> Check:
    """Prefect has heard from the worker since its process started."""

    def check(started: float) -> bool:
        try:
            workers = ask_prefect(api_url, f"/work_pools/{pool}/workers/filter", {})
        except _SILENCE:
            return False
        beats = [worker["last_heartbeat_time"] for worker in workers if worker["name"] == name]
        return any(beat is not None and datetime.fromisoformat(beat).timestamp() >= started - 1 for beat in beats)

    return check


def ask_prefect(api_url: str, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    """The JSON of one request to Prefect's API, with the credentials that Prefect's own variables name.

    Raises urllib.error.HTTPError (an OSError) for a status of 400 and above.
    """
    headers = {"Content-Type": "application/json"}
    if login := os.environ.get("PREFECT_API_AUTH_STRING"):
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    elif key := os.environ.get("PREFECT_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(api_url.rstrip("/") + path, data=data, headers=headers, method=method)
    with _open(request) as response:
        answer = response.read()
    return json.loads(answer) if answer else None


def _open(request: urllib.request.Request) -> Any:
    """Loopback is never asked through a proxy, whatever the environment says."""
    is_here = urllib.parse.urlsplit(request.full_url).hostname in _LOOPBACK
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({})) if is_here else urllib.request.build_opener()
    return opener.open(request, timeout=TIMEOUT_S)
