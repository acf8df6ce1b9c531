"""The supervisor: its decisions as functions; then real processes, killed in every way that leaves something behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.descendants import MARK
from infra.services import (
    ATTEMPTS,
    MISSES,
    STEADY_S,
    OneShot,
    Program,
    Service,
    State,
    Status,
    after_check,
    after_end,
    after_start,
    after_wait,
    check_order,
    how_it_ended,
    may_start,
    may_stop,
    pause_s,
)
from infra.supervisor import (
    AlreadyRuns,
    bound_log,
    failure,
    is_supervised,
    last_lines,
    log_path,
    read_state,
    supervise,
)

WAIT_S = 60.0


def service(name: str, *after: str, **settings: Any) -> Service:
    return Service(name=name, argv=[name], env={}, after=after, ready=lambda _started: True, **settings)


def one_shot(name: str, *after: str) -> OneShot:
    return OneShot(name=name, argv=[name], env={}, after=after)


STACK: list[Program] = [service("db"), one_shot("schema", "db"), service("web", "schema"), service("files")]


def statuses(**states: State) -> dict[str, Status]:
    """Those not named wait; a process is there in the states that have one."""
    alive = (State.STARTING, State.HEALTHY, State.SILENT, State.STOPPING)
    found = {program.name: Status() for program in STACK}
    return found | {name: Status(state=state, pid=1 if state in alive else None) for name, state in states.items()}


def names(programs: list[Program]) -> list[str]:
    return [program.name for program in programs]


def test_a_program_starts_only_when_all_that_it_comes_after_is_healthy_or_done() -> None:
    assert names(may_start(STACK, statuses(), 0.0)) == ["db", "files"]
    assert names(may_start(STACK, statuses(db=State.STARTING, files=State.STARTING), 0.0)) == []
    assert names(may_start(STACK, statuses(db=State.HEALTHY), 0.0)) == ["schema", "files"]
    assert names(may_start(STACK, statuses(db=State.HEALTHY, schema=State.DONE), 0.0)) == ["web", "files"]


def test_a_restart_waits_for_its_pause_and_for_what_is_needed_however_many_steps_away() -> None:
    ended = statuses(db=State.HEALTHY, schema=State.DONE, files=State.HEALTHY)
    ended["web"] = Status(state=State.RESTARTING, since=100.0, ends=3)
    assert may_start(STACK, ended, 101.9) == []
    assert names(may_start(STACK, ended, 102.0)) == ["web"]
    ended["db"] = Status(state=State.STARTING, pid=1)
    assert may_start(STACK, ended, 200.0) == []


def test_stopping_goes_in_reverse_and_skips_what_does_not_run() -> None:
    everything = statuses(db=State.HEALTHY, schema=State.DONE, web=State.SILENT, files=State.HEALTHY)
    assert names(may_stop(STACK, everything)) == ["web", "files"]
    assert names(may_stop(STACK, everything | {"web": Status(state=State.STOPPED)})) == ["db", "files"]
    assert may_stop(STACK, statuses(web=State.RESTARTING, db=State.FAILED)) == []


@given(st.lists(st.sampled_from(list(State)), min_size=len(STACK), max_size=len(STACK)))
def test_nothing_is_stopped_while_something_that_needs_it_runs(states: list[State]) -> None:
    mixed = statuses(**dict(zip(names(STACK), states, strict=True)))
    chosen = names(may_stop(STACK, mixed))
    if mixed["web"].pid or mixed["schema"].pid:
        assert "db" not in chosen
    if any(status.pid for status in mixed.values()):
        assert chosen  # a stop always gets on


def test_pauses_double_up_to_half_a_minute() -> None:
    assert [pause_s(ends) for ends in (1, 2, 3, 4, 7, 8, 1000)] == [0.5, 1.0, 2.0, 4.0, 30.0, 30.0, 30.0]


def test_a_program_that_never_was_healthy_is_given_up_after_a_few_attempts() -> None:
    status, now = Status(), 0.0
    for attempt in range(1, ATTEMPTS + 1):
        status = after_end(STACK[0], after_start(status, 7, now), how_it_ended(3), now)
        assert status.state is (State.FAILED if attempt == ATTEMPTS else State.RESTARTING)
    assert status.reason == "ended with code 3, 3 times"
    assert status.restarts == ATTEMPTS - 1


def test_a_service_that_was_healthy_is_never_given_up_and_a_steady_one_restarts_at_once() -> None:
    status = Status()
    for _ in range(50):
        status = after_check(after_start(status, 7, 0.0), True, 0.0)
        status = after_end(STACK[0], status, how_it_ended(-9), 1.0)
        assert status.state is State.RESTARTING
    assert (status.ends, status.restarts, status.reason) == (50, 49, "was ended by SIGKILL")
    status = after_end(STACK[0], after_check(after_start(status, 7, 0.0), True, 0.0), "", STEADY_S)
    assert pause_s(status.ends) == 0.5


def test_a_one_shot_is_done_with_code_0_and_tried_again_with_another() -> None:
    started = after_start(Status(), 7, 0.0)
    assert after_end(STACK[1], started, how_it_ended(0), 1.0).state is State.DONE
    assert after_end(STACK[1], started, how_it_ended(1), 1.0).state is State.RESTARTING
    assert after_end(STACK[0], started, how_it_ended(0), 1.0).reason == "ended with code 0"


def test_a_service_is_silent_after_several_missed_answers_and_healthy_after_one() -> None:
    status = after_check(after_start(Status(), 7, 0.0), True, 0.0)
    for _ in range(MISSES - 1):
        status = after_check(status, False, 1.0)
        assert status.state is State.HEALTHY
    status = after_check(status, False, 1.0)
    assert status.state is State.SILENT
    assert after_check(status, True, 2.0).state is State.HEALTHY


def test_a_start_that_takes_too_long_fails_unless_the_service_had_been_healthy() -> None:
    started = after_start(Status(), 7, 0.0)
    assert after_wait(STACK[0], started, STACK[0].start_timeout_s - 1.0) == started
    assert after_wait(STACK[0], started, STACK[0].start_timeout_s).state is State.FAILED
    assert after_wait(STACK[0], started, STACK[0].start_timeout_s).pid == 7  # it still has to be stopped
    again = after_start(after_end(STACK[0], after_check(started, True, 1.0), "x", 2.0), 8, 3.0)
    assert after_wait(STACK[0], again, 3.0 + STACK[0].start_timeout_s).state is State.SILENT


@pytest.mark.parametrize(
    ("programs", "line"),
    [
        ([service("a"), service("a")], "a: two programs have this name"),
        ([service("a", "b"), service("b")], "a: comes after b, which is not listed above it"),
    ],
)
def test_an_impossible_order_is_refused(programs: list[Program], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        check_order(programs)


def test_a_large_log_moves_aside_while_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with open(path, "ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        bound_log(path, limit_bytes=100)
        assert path.stat().st_size == 100
        writer.write(b"y")
        bound_log(path, limit_bytes=100)
        writer.write(b"after\n")
    assert path.read_bytes() == b"after\n"
    assert (tmp_path / "a.log.1").read_bytes() == b"x" * 100 + b"y"


def test_the_last_lines_of_a_log_are_shown_without_its_empty_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert last_lines(path) == []
    path.write_text("".join(f"{number}\n\n" for number in range(100)))
    assert last_lines(path, 2) == ["98", "99"]


# The real stack below: each service starts a child in a session of its own, as Prefect does with flow runs, says on its
# port that it lives, and both note how they begin and end.
CHILD = """
import signal, sys, time
def end(*_):
    with open(sys.argv[2], "a") as file:
        file.write(sys.argv[1] + "'s child ends\\n")
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""

SERVICE = """
import signal, socket, subprocess, sys, time
child_code, name, port, journal, *how = sys.argv[1:]
def note(word):
    with open(journal, "a") as file:
        file.write(f"{name} {word}\\n")
def end(*_):
    note("ends")
    sys.exit()
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in how else end)
child = subprocess.Popen(
    [sys.executable, "-S", "-c", child_code, name, journal], start_new_session=True, stdout=subprocess.PIPE
)
child.stdout.readline()
note("begins")
if "mute" not in how:
    listener = socket.create_server(("127.0.0.1", int(port)))
while True:
    time.sleep(600)
"""

STACK_SCRIPT = """
import sys
from pathlib import Path
from infra.checks import port_accepts
from infra.services import OneShot, Service
from infra.supervisor import supervise
service_code, child_code, folder, journal, ports, *rest = sys.argv[1:]
ports = dict(each.split("=") for each in ports.split(","))
how = dict(each.split("=") for each in rest)
python = [sys.executable, "-S", "-c"]
def service(name, *after, **settings):
    argv = [*python, service_code, child_code, name, ports[name], journal, *filter(None, [how.get(name)])]
    ready = port_accepts("127.0.0.1", int(ports[name]))
    return Service(name=name, argv=argv, env={"SECRET": "hunter2"}, after=after, ready=ready, **settings)
programs = [
    service("db", start_timeout_s=float(how.get("patience", 60))),
    OneShot(name="schema", argv=[*python, "open(%r, 'a').write('schema\\\\n')" % journal], env={}, after=("db",)),
    service("web", "schema", stop_timeout_s=float(how.get("end", 30)), children_work=True),
]
sys.exit(supervise(Path(folder), lambda: programs))
"""


class Running:
    """A supervisor with two services in a process of its own. Everything that it started is known by its mark."""

    def __init__(self, tmp_path: Path, *how: str) -> None:
        self.folder, self.journal = tmp_path / "stack", tmp_path / "journal"
        ports = ",".join(f"{name}={_free_port()}" for name in ("db", "web"))
        code = [sys.executable, "-c", STACK_SCRIPT, SERVICE, CHILD]
        command = [*code, str(self.folder), str(self.journal), ports, *how]
        self.guard = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)

    def state(self) -> dict[str, Any]:
        return read_state(self.folder) or {"services": [], "pid": None, "failed": None}

    def of(self, name: str) -> dict[str, Any]:
        return next((each for each in self.state()["services"] if each["name"] == name), {"restarts": 0, "pid": None})

    def wait_until_up(self) -> None:
        wait_for(lambda: [each["state"] for each in self.state()["services"]] == ["healthy", "done", "healthy"])

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK, "").startswith(f"{self.folder}#"):
                    found.append(process)
            except psutil.Error:
                continue
        return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def begin(*how: str) -> Running:
        started.append(Running(tmp_path, *how))
        return started[-1]

    yield begin
    for running in started:
        running.guard.kill()
        for process in running.processes():
            process.kill()
        running.guard.wait()


def test_services_start_in_order_and_stop_in_reverse(start: Callable[..., Running]) -> None:
    running = start()
    running.wait_until_up()
    assert len(running.processes()) == 4
    running.guard.terminate()
    assert running.guard.wait(WAIT_S) == 0
    words = running.journal.read_text().splitlines()
    assert words[:3] == ["db begins", "schema", "web begins"]
    assert words[3:5] == ["web's child ends", "web ends"]  # its children work
    assert words[5:] == ["db ends", "db's child ends"]
    assert running.processes() == []
    assert [each["state"] for each in running.state()["services"]] == ["stopped", "done", "stopped"]


def test_a_killed_service_comes_back_without_what_it_left_behind(start: Callable[..., Running]) -> None:
    running = start()
    running.wait_until_up()
    before = {process.pid for process in running.processes()}
    os.kill(running.of("db")["pid"], signal.SIGKILL)
    wait_for(lambda: running.of("db")["restarts"] == 1)
    running.wait_until_up()
    after = {process.pid for process in running.processes()}
    assert len(after) == 4
    assert len(before & after) == 2  # web and its child
    assert running.of("db")["reason"] == "was ended by SIGKILL"


def test_what_a_service_leaves_may_finish_where_it_works_and_is_cleared_away_then(
    start: Callable[..., Running],
) -> None:
    running = start()
    running.wait_until_up()
    leader = running.of("web")["pid"]
    (child,) = psutil.Process(leader).children()
    os.kill(leader, signal.SIGKILL)
    wait_for(lambda: running.of("web")["restarts"] == 1)
    running.wait_until_up()
    assert child.status() != psutil.STATUS_ZOMBIE
    child.kill()
    wait_for(lambda: not child.is_running())  # its new parent has reaped it


@pytest.mark.parametrize("victims", [["supervisor"], ["guard"], ["supervisor", "guard"]])
def test_no_process_outlives_a_killed_supervisor(start: Callable[..., Running], victims: list[str]) -> None:
    running = start()
    running.wait_until_up()
    pids = {"supervisor": running.state()["pid"], "guard": running.guard.pid}
    marked = {process.pid for process in running.processes()}
    assert len(marked) == 4
    for each in (signal.SIGSTOP, signal.SIGKILL):  # nobody sees another's death before its own
        for victim in victims:
            os.kill(pids[victim], each)
    running.guard.wait(WAIT_S)
    if victims == ["supervisor", "guard"]:  # both in one moment: the grandchildren live until the next start
        wait_for(lambda: len(running.processes()) == 2)
        start()
        wait_for(lambda: not marked & {process.pid for process in running.processes()})
    else:
        wait_for(lambda: running.processes() == [])
        wait_for(lambda: not is_supervised(running.folder))


def test_a_service_that_ignores_the_stop_signal_is_killed(start: Callable[..., Running]) -> None:
    running = start("web=stubborn", "end=1")
    running.wait_until_up()
    running.guard.terminate()
    assert running.guard.wait(WAIT_S) == 0
    words = running.journal.read_text().splitlines()
    assert words[2:] == ["web begins", "web's child ends", "db ends", "db's child ends"]
    assert running.processes() == []


def test_a_service_that_never_answers_fails_the_start_and_everything_is_stopped(start: Callable[..., Running]) -> None:
    running = start("db=mute", "patience=1")
    assert running.guard.wait(WAIT_S) == 1
    assert running.processes() == []
    assert running.state()["failed"] == "db"
    why, words = failure(running.state()) or ("", [])
    log = log_path(running.folder, "db")
    assert (why, words) == (f"db did not answer within 1 s: see {log}", last_lines(log))
    assert running.of("web")["state"] == "stopped"


def test_a_second_supervisor_of_the_folder_is_refused_in_one_line(start: Callable[..., Running]) -> None:
    running = start()
    running.wait_until_up()
    with pytest.raises(AlreadyRuns, match=r"servers already run from this folder; `k3 down` stops them"):
        supervise(running.folder, list)
    assert "healthy" in json.dumps(running.state())  # and the first one's state stays


def test_the_state_file_holds_no_environment(start: Callable[..., Running]) -> None:
    running = start()
    running.wait_until_up()
    assert b"hunter2" in Path(f"/proc/{running.of('db')['pid']}/environ").read_bytes()
    assert "hunter2" not in (running.folder / "state.json").read_text()


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from infra.services import OneShot; from infra.supervisor import supervise;"
        "sys.exit(supervise(Path(sys.argv[1]), lambda: [OneShot(name='x', argv=['/no/such'], env={})]))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.DEVNULL).returncode == 1
    state = read_state(tmp_path)
    assert state is not None
    assert state["services"][0]["reason"] == "could not be started: No such file or directory, 3 times"
    assert last_lines(tmp_path / "logs" / "x.log", 1) == ["/no/such: No such file or directory"]
