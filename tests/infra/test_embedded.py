"""The shared server: who starts it, who finds it, what survives kill -9, and that it ends with its last client.

The server here is a few lines that answer on the keeper's socket; tests/flows/test_concurrent_runs.py has Prefect's.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from infra import embedded
from infra.embedded import EmbeddedServer, find, server_environment
from infra.flock import is_locked, lock, try_lock

SERVER = """
import http.server, os, pathlib, socket, sys, threading, time

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())

    def log_message(self, *_):
        pass

def end_with_the_keeper():
    os.read(0, 1)
    os._exit(1)

threading.Thread(target=end_with_the_keeper, daemon=True).start()
exec(pathlib.Path(sys.argv[2], "before").read_text())
server = http.server.ThreadingHTTPServer(("", 0), Health, bind_and_activate=False)
server.socket = socket.socket(fileno=int(sys.argv[1]))
server.serve_forever()
"""
CLIENT = """
import pathlib, sys
from infra.embedded import join
server = join(pathlib.Path(sys.argv[1]), "fake_server")
server.wait_until_ready()
print(server.port, flush=True)
sys.stdin.read()
"""


class Home:
    """A PREFECT_HOME, and the clients that the test started there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clients: list[subprocess.Popen[str]] = []

    def before_it_answers(self, code: str) -> None:
        """What the server does first."""
        (self.folder / "before").write_text(code)

    def client(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(self.folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.clients.append(process)
        return process

    def processes(self) -> list[psutil.Process]:
        """Keeper and server."""
        return [process for process in psutil.process_iter() if self._belongs(process)]

    def _belongs(self, process: psutil.Process) -> bool:
        try:
            arguments = process.cmdline()
            return str(self.folder) in arguments and CLIENT not in arguments
        except psutil.Error:
            return False

    def server_pid(self, port: int) -> int:
        """Asked of the server itself, however long it takes to answer."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/api/health")
        return int(connection.getresponse().read())

    def log(self) -> str:
        return (self.folder / "server" / "server.log").read_text()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    modules, folder = tmp_path / "modules", tmp_path / "home"
    modules.mkdir()
    folder.mkdir()
    (modules / "fake_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(modules), os.environ.get("PYTHONPATH", "")]))
    home = Home(folder)
    home.before_it_answers("")
    yield home
    for client in home.clients:
        client.kill()
        client.communicate()
    for process in home.processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()


def until(holds: Callable[[], object], timeout_s: float = 30) -> bool:
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def port_of(client: subprocess.Popen[str]) -> int:
    assert client.stdout is not None
    line = client.stdout.readline()
    assert line, client.stderr and client.stderr.read()
    return int(line)


def keeper_of(home: Home) -> psutil.Process:
    (keeper,) = [process for process in home.processes() if "infra.embedded" in process.cmdline()]
    return keeper


def test_clients_that_start_at_once_share_one_server_which_ends_after_the_last(home: Home) -> None:
    clients = [home.client() for _ in range(4)]
    (port,) = {port_of(client) for client in clients}
    assert len(home.processes()) == 2
    assert find(home.folder) == EmbeddedServer(home.folder, port)
    for client in clients[:3]:
        client.communicate("")
    time.sleep(embedded.GRACE_S + 1)
    assert home.server_pid(port) in [process.pid for process in home.processes()]
    clients[3].communicate("")
    assert until(lambda: not home.processes())
    assert find(home.folder) is None
    assert "nobody needs the server any more" in home.log()


def test_kill_9_of_the_only_client_leaves_no_process(home: Home) -> None:
    client = home.client()
    port_of(client)
    client.send_signal(signal.SIGKILL)
    assert until(lambda: not home.processes(), embedded.GRACE_S + 10)


def test_the_next_client_has_the_port_of_the_last_time(home: Home) -> None:
    first = home.client()
    port = port_of(first)
    first.communicate("")
    assert until(lambda: not home.processes())
    assert port_of(home.client()) == port


def test_a_port_that_others_took_meanwhile_is_given_up(home: Home) -> None:
    first = home.client()
    port = port_of(first)
    first.communicate("")
    assert until(lambda: not home.processes())
    with socket.create_server(("127.0.0.1", port)):
        assert port_of(home.client()) != port


def test_while_a_killed_server_starts_again_requests_wait_instead_of_failing(home: Home) -> None:
    port = port_of(home.client())
    killed = home.server_pid(port)
    home.before_it_answers("time.sleep(2)")
    os.kill(killed, signal.SIGKILL)
    assert until(lambda: not is_alive(killed))
    assert home.server_pid(port) != killed
    assert "ended with code -9 and is started again" in home.log()


def test_running_clients_restore_a_killed_keeper_on_the_same_port(home: Home) -> None:
    clients = [home.client() for _ in range(3)]
    port = port_of(clients[0])
    for client in clients[1:]:
        assert port_of(client) == port
    killed = keeper_of(home)
    server = home.server_pid(port)
    killed.kill()
    assert until(lambda: [p for p in home.processes() if "infra.embedded" in p.cmdline() and p.pid != killed.pid])
    assert until(lambda: not is_alive(server))
    assert until(lambda: (found := find(home.folder)) is not None and found.port == port)
    assert home.server_pid(port) != server
    assert [client.poll() for client in clients] == [None] * 3


def test_a_server_that_cannot_start_is_one_line_with_its_last_words_and_the_log(home: Home) -> None:
    home.before_it_answers("sys.exit('the database is newer than this program')")
    output, errors = home.client().communicate("")
    assert output == ""
    said = "the Prefect server ended while it started (the database is newer than this program)"
    assert errors.splitlines()[-1] == f"k3core.errors.RunError: {said}: see {home.folder}/server/server.log"


def test_a_server_that_does_not_answer_in_time_is_one_line_with_the_log(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.before_it_answers("time.sleep(600)")
    client = home.client()
    assert until(lambda: find(home.folder) is not None)
    server = find(home.folder)
    assert server is not None
    monkeypatch.setattr(embedded, "START_TIMEOUT_S", 0.5)
    with pytest.raises(embedded.RunError, match=r"did not answer within 0.5 s: see .*server\.log"):
        server.wait_until_ready()
    assert client.poll() is None


def test_a_home_that_nobody_can_write_to_names_the_settings_that_help(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"PREFECT_HOME .*/file: .*: set it to a folder.*or PREFECT_API_URL"):
        embedded.join(tmp_path / "file", "fake_server")


def test_a_home_where_another_machine_works_is_refused_with_what_helps(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    keeper = lock(tmp_path / "server" / "keeper.lock")
    (tmp_path / "server" / "server.json").write_text('{"port": 1, "keeper": 2, "server": 3, "host": "another"}')
    with pytest.raises(embedded.RunError, match=r"processes of another work in PREFECT_HOME .* set PREFECT_API_URL"):
        embedded.join(tmp_path, "fake_server")
    os.close(keeper)


def test_the_server_gets_the_users_settings_but_not_those_of_a_client(tmp_path: Path) -> None:
    mine = {"PREFECT_SERVER_DATABASE_TIMEOUT": "7", "PREFECT_API_URL": "http://elsewhere/api", "PATH": "/bin"}
    given = server_environment(mine, tmp_path, 4711)
    assert given["PREFECT_SERVER_DATABASE_TIMEOUT"] == "7"
    assert given["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert given["PREFECT_SERVER_API_PORT"] == "4711"
    assert given["PATH"] == "/bin"
    assert "PREFECT_API_URL" not in given


def test_a_shared_lock_lets_others_share_and_an_exclusive_one_lets_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = lock(path, shared=True)
    second = try_lock(path, shared=True)
    assert second is not None
    assert try_lock(path) is None
    assert not is_locked(path)
    os.close(first)
    os.close(second)
    alone = lock(path)
    assert is_locked(path)
    assert try_lock(path, shared=True) is None
    os.close(alone)
    assert not is_locked(path)
