"""The Prefect server of those who have none: one for all processes that work in one PREFECT_HOME, as long as they do.

The first process starts a keeper, the others find it. The keeper opens the port, starts the server on it, starts it
again when it was killed, and ends both some seconds after the last client is gone. Everybody is known by the lock that
he holds, so however a process ends, kill -9 included, the others see it. In the folder {home}/server:

  keeper.lock   held by the keeper, for itself alone
  clients.lock  held by each client, shared; who gets it alone knows that there is no client
  start.lock    held while somebody looks for the keeper and perhaps starts one
  server.json   the port, the processes and their machine
  server.log    what the keeper did, and the server's warnings

The keeper itself listens on the port, which its server only accepts from: while a server starts, requests wait instead
of failing, and nobody else can take the port.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.flock import is_locked, lock, try_lock
from k3core.errors import RunError

# How a server differs from what `prefect server start` gives; a value that the environment has wins. Nothing here is
# scheduled, waits for a worker or triggers an automation, and the database is one SQLite file.
SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
}

START_TIMEOUT_S = 120.0
GRACE_S = 3.0  # without a client
STEADY_S = 60.0  # a server that ended by itself and lived for less would do it again
STOP_TIMEOUT_S = 15.0
LOOK_EVERY_S = 0.25
LOG_MAX_BYTES = 4_000_000

SERVER_MODULE = "flows.embedded_server"  # a process of its own: it imports Prefect, this module does not
# Of this installation, whatever packages of the same names lie in the working directory.
_RUN_MODULE = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1));"
    " runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)

_clients: dict[Path, int] = {}


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """Where it answers. It may still be starting; requests wait for it."""

    home: Path
    port: int
    module: str = field(default=SERVER_MODULE, kw_only=True)

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def ui_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return _folder(self.home) / "server.log"

    def wait_until_ready(self) -> None:
        """From here on this process restores the keeper when it is killed. Raises RunError, which names the log."""
        self._wait()
        threading.Thread(target=_restore, args=(self,), daemon=True, name="prefect-keeper").start()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(self.port):
            if not is_locked(_folder(self.home) / "keeper.lock"):
                raise RunError(f"the Prefect server ended while it started ({_last_line(self.log)}): see {self.log}")
            if time.monotonic() > deadline:
                raise RunError(f"the Prefect server did not answer within {START_TIMEOUT_S:g} s: see {self.log}")


def join(home: Path, module: str = SERVER_MODULE) -> EmbeddedServer:
    """The server of `home`, started if need be; it lives at least as long as this process.

    module: what is run, given the descriptor of the listening socket; it must end when its stdin closes.
    Raises ValueError for a home that no server can work in, RunError for one where another machine works.
    """
    home = home.expanduser().resolve()
    folder = _folder(home)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if home not in _clients:
            _clients[home] = lock(folder / "clients.lock", shared=True)  # waits for a keeper that is about to end
        return _find_or_start(home, module)
    except OSError as error:
        raise ValueError(
            f"PREFECT_HOME {home}: {error.strerror or error}: set it to a folder of yours on a local disk, or"
            " PREFECT_API_URL to a server that runs"
        ) from error


def find(home: Path) -> EmbeddedServer | None:
    """The server that others keep there now, without joining them."""
    folder = _folder(home)
    if not folder.is_dir() or not is_locked(folder / "keeper.lock"):
        return None
    state = _read_state(folder)
    return EmbeddedServer(home, state["port"]) if "keeper" in state else None


def _find_or_start(home: Path, module: str) -> EmbeddedServer:
    folder = _folder(home)
    start = lock(folder / "start.lock")
    try:
        keeper = None if is_locked(folder / "keeper.lock") else _start_keeper(home, module)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            state = _read_state(folder)
            if "keeper" in state and (keeper is None or state["keeper"] == keeper.pid):
                if state["host"] != socket.gethostname():
                    raise RunError(
                        f"processes of {state['host']} work in PREFECT_HOME {home}, and its SQLite database serves one"
                        " machine: set PREFECT_API_URL to a Prefect server for both, or PREFECT_HOME to another folder"
                    )
                return EmbeddedServer(home, state["port"], module=module)
            if (keeper is not None and keeper.poll() is not None) or time.monotonic() > deadline:
                log = folder / "server.log"
                raise RunError(f"the Prefect server could not be started ({_last_line(log)}): see {log}")
            time.sleep(0.02)
    finally:
        os.close(start)


def _restore(server: EmbeddedServer) -> None:
    """Waits until the keeper is gone, while this process needs it: somebody killed it, or all processes of its job."""
    try:
        while True:
            os.close(lock(_folder(server.home) / "keeper.lock", shared=True))
            again = _find_or_start(server.home, server.module)
            if again.port != server.port:
                raise RunError(f"port {server.port} of the Prefect server was taken by another process")
            again._wait()
    except (RunError, OSError) as error:
        print(f"k3: {error}", file=sys.stderr)


def _start_keeper(home: Path, module: str) -> subprocess.Popen[bytes]:
    log = _folder(home) / "server.log"
    if log.exists() and log.stat().st_size > LOG_MAX_BYTES:
        log.replace(log.with_name("server.log.1"))
    with log.open("ab") as output:
        return subprocess.Popen(
            _python(__name__, str(home), module),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # it outlives this process, its terminal, and Ctrl-C there
        )


def keep(home: Path, module: str) -> int:
    """The keeper's life; its output is the log. Code 1 when a server cannot run here."""
    folder = _folder(home)
    if _lock_soon(folder / "keeper.lock") is None:
        return 0
    before = _read_state(folder)
    (folder / "server.json").unlink(missing_ok=True)
    listener = _listen(before.get("port", 0), patience_s=5.0 if "keeper" in before else 0.0)
    port = listener.getsockname()[1]
    server, started = _start_server(home, module, listener), time.monotonic()
    _write_state(folder, _state(port, server.pid))
    unused_since: float | None = None
    while True:
        try:
            code = server.wait(timeout=LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            pass
        else:
            if code >= 0 and time.monotonic() - started < STEADY_S:
                _write_state(folder, {"port": port})
                return 1  # the log ends with the server's own words, which the clients hand on
            _say(f"the server ended with code {code} and is started again")
            server, started = _start_server(home, module, listener), time.monotonic()
            _write_state(folder, _state(port, server.pid))
        alone = try_lock(folder / "clients.lock")
        if alone is None:
            unused_since = None
            continue
        unused_since = unused_since or time.monotonic()
        if time.monotonic() - unused_since < GRACE_S:
            os.close(alone)
            continue
        _stop(server)
        _write_state(folder, {"port": port})
        _say("nobody needs the server any more: it is stopped")
        return 0


def _lock_soon(path: Path) -> int | None:
    """Others look at the lock now and then, which takes a moment; None when another keeper has it."""
    for _ in range(100):
        if (descriptor := try_lock(path)) is not None:
            return descriptor
        time.sleep(0.05)
    return None


def _listen(port: int, patience_s: float) -> socket.socket:
    """On the port of the last time, so that addresses stay valid, or on a free one.

    patience_s: how long that port is waited for, where clients of a keeper that was killed still use it.
    """
    deadline = time.monotonic() + patience_s
    while True:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen(1024)
            return listener
        except OSError:
            listener.close()
            if port == 0:
                raise
            if time.monotonic() >= deadline:
                port = 0
            else:
                time.sleep(0.05)


def _start_server(home: Path, module: str, listener: socket.socket) -> subprocess.Popen[bytes]:
    port = listener.getsockname()[1]
    server = subprocess.Popen(
        _python(module, str(listener.fileno()), str(home)),
        env=server_environment(os.environ, home, port),
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno()],
    )
    _say(f"server of {home} at http://127.0.0.1:{port}, process {server.pid}, keeper {os.getpid()}")
    return server


def server_environment(environment: Mapping[str, str], home: Path, port: int) -> dict[str, str]:
    """The client's, without what is meant for its own Prefect alone."""
    own = {"PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_LOGGING_LEVEL", "PREFECT_SERVER_API_BASE_PATH"}
    kept = {name: value for name, value in environment.items() if name not in own}
    address = {"PREFECT_SERVER_API_HOST": "127.0.0.1", "PREFECT_SERVER_API_PORT": str(port)}
    return {**SETTINGS, **kept, **address, "PREFECT_HOME": str(home)}


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", "/api/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException) as error:
        if not isinstance(error, TimeoutError):
            time.sleep(0.05)
        return False
    finally:
        connection.close()


def _folder(home: Path) -> Path:
    return home / "server"


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / "server.json").read_text())
    except FileNotFoundError:
        return {}
    return state


def _state(port: int, server: int) -> dict[str, Any]:
    return {"port": port, "keeper": os.getpid(), "server": server, "host": socket.gethostname()}


def _write_state(folder: Path, state: Mapping[str, Any]) -> None:
    written = folder / "server.json.tmp"
    written.write_text(json.dumps(state))
    written.replace(folder / "server.json")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"


def _say(line: str) -> None:
    print(f"{time.strftime('%F %T')} {line}", flush=True)


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-c", _RUN_MODULE, str(Path(__file__).parents[1]), module, *arguments]


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1]), sys.argv[2]))
