"""`k3 up`, `k3 down`, `k3 status`, `k3 env`, `k3 worker`: the servers of infra/stack.py, for the command line."""

# Imports of the project stand inside, as in flows/cli.py, which adds these commands.

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from k3core.errors import RunError

Folder = Annotated[Path, typer.Option("--dir", metavar="FOLDER", help="Where the servers keep data, logs and secrets.")]
HERE = Path(".k3")
RECOVER_S = 120.0  # what runs already is given so long to become healthy
STOP_S = 180.0  # all time-outs of an orderly stop together


def add_commands(app: typer.Typer) -> None:
    for command in (up, down, status, env, worker):
        app.command()(command)


def up(folder: Folder = HERE) -> int:
    """Start the servers of this machine: PostgreSQL, S3, Prefect, MLflow, and a worker for each pool."""
    from infra.supervisor import is_supervised, read_state

    folder = folder.absolute()
    state = read_state(folder) if is_supervised(folder) else None
    if state is not None and state["is_stopping"]:
        print("the servers are still stopping", flush=True)
        _wait_until(lambda: not is_supervised(folder), STOP_S)
    if is_supervised(folder):
        print(f"already up in {folder}", flush=True)
        return _show_start(folder, None)
    return _show_start(folder, _start_detached(folder))


def down(
    folder: Folder = HERE,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove the data as well: runs, metrics, databases.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before removing data.")] = False,
) -> int:
    """Stop the servers. The data stay, unless told otherwise."""
    from infra.supervisor import is_supervised, read_state

    folder = folder.absolute()
    if not is_supervised(folder):
        print(f"nothing runs from {folder}")
    else:
        _stop(folder)
        state = read_state(folder)
        alone = [each["name"] for each in state["services"] if each["kind"] == "service"] if state else []
        print(f"stopped: {', '.join(alone)}")
    if not delete:
        return 0
    if not yes and not _confirmed(f"Remove all runs, metrics and databases in {folder}?"):
        print("nothing is removed")
        return 1
    _remove(folder)
    return 0


def status(folder: Folder = HERE) -> int:
    """Show each server: its state, process, memory, restarts and address. Code 1 unless all are healthy."""
    from rich.console import Console
    from rich.table import Table

    from infra.supervisor import is_supervised, is_up, read_state

    folder = folder.absolute()
    state = read_state(folder)
    if state is None or not is_supervised(folder):
        print(f"nothing runs from {folder}; `k3 up` starts the servers")
        return 1
    table = Table("service", "state", "pid", "MB", "restarts", "address", box=None, pad_edge=False)
    for each in state["services"]:
        if each["kind"] == "service" or each["state"] != "done":
            table.add_row(
                each["name"],
                each["state"],
                str(each["pid"] or ""),
                _memory_mb(each["pid"]),
                str(each["restarts"]),
                each["url"] or "",
            )
    Console(highlight=False, soft_wrap=True).print(table)
    for each in state["services"]:
        if each["reason"]:
            print(f"{each['name']}: the process before {each['reason']}; log: {each['log']}")
    return 0 if is_up(state) else 1


def env(
    folder: Folder = HERE,
    for_worker: Annotated[bool, typer.Option("--worker", help="As `k3 worker` on another machine needs it.")] = False,
) -> int:
    """Print `export` lines for the shell: eval "$(k3 env)". They hold secrets."""
    from infra.stack import environment

    for name, value in environment(folder.absolute(), for_worker=for_worker).items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def worker(
    pool: Annotated[
        str, typer.Argument(metavar="POOL", help="The work pool to work for: cpu, gpu-rollout, gpu-train.")
    ],
    folder: Annotated[Path | None, typer.Option("--dir", metavar="FOLDER", help="[default: .k3/POOL]")] = None,
    host: Annotated[
        str, typer.Option(help="This machine's address, at which the others reach its engine or trainer.")
    ] = "127.0.0.1",
) -> int:
    """Work for a pool of servers elsewhere (see `k3 env --worker`), in the foreground until SIGTERM.

    The pool's own limit counts all machines together: prefect work-pool set-concurrency-limit gpu-rollout 2.
    """
    from infra.stack import pool_programs, worker_environment
    from infra.supervisor import last_lines, log_path, read_state, supervise
    from infra.work_pools import POOLS

    if pool not in POOLS:
        raise typer.BadParameter(f"expected one of {', '.join(POOLS)}, got {pool!r}.", param_hint="POOL")
    folder = (folder or HERE / pool).absolute()
    name = f"{pool}-{socket.gethostname()}"
    environment = worker_environment(folder, host)
    code = supervise(folder, lambda: pool_programs(pool, name, environment))
    state = read_state(folder)
    if state is not None and state["failed"] is not None:
        for line in last_lines(log_path(folder, state["failed"])):
            print(f"  {line}", file=sys.stderr)
    return code


def _start_detached(folder: Path) -> subprocess.Popen[bytes]:
    """The supervisor, in a session of its own: it outlives this command and its terminal."""
    from infra.stack import PROJECT, make_folder
    from infra.supervisor import log_path, state_path

    log = log_path(folder, "supervisor")
    make_folder(folder)
    state_path(folder).unlink(missing_ok=True)
    log.parent.mkdir(mode=0o700, exist_ok=True)
    with open(log, "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "infra.stack", "run", str(folder)],
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _show_start(folder: Path, supervisor: subprocess.Popen[bytes] | None) -> int:
    """A line for each server that has become healthy, then where they are. An interrupt stops what was started here."""
    from rich.console import Console

    from infra.supervisor import is_supervised, is_up, read_state

    began = time.monotonic()
    shown: set[str] = set()
    console = Console(highlight=False, soft_wrap=True)
    try:
        with console.status("starting") as spinner:
            while True:
                if supervisor is not None and supervisor.poll() is not None:
                    break
                if supervisor is None and (not is_supervised(folder) or time.monotonic() - began > RECOVER_S):
                    break
                if (state := read_state(folder)) is not None:
                    pending = _show_progress(state, shown, console.print if supervisor else _ignore, began)
                    spinner.update(f"waiting for {', '.join(pending)}")
                    if is_up(state):
                        break
                time.sleep(0.1)
    except KeyboardInterrupt:
        if supervisor is not None:
            supervisor.terminate()
            supervisor.wait()
        raise RunError("interrupted; nothing runs") from None
    state = read_state(folder)
    if state is not None and is_up(state) and is_supervised(folder):
        _print_addresses(state, folder, time.monotonic() - began)
        return 0
    raise _why_not_up(folder, state, is_ours=supervisor is not None)


def _why_not_up(folder: Path, state: Mapping[str, Any] | None, *, is_ours: bool) -> RunError:
    """One line; the last words of the log that it names go to stderr before it."""
    from infra.supervisor import failure, last_lines, log_path

    if state is None:
        log = log_path(folder, "supervisor")
        return RunError(f"{' '.join(last_lines(log, 1)) or 'the supervisor ended'} (log: {log})")
    if (failed := failure(state)) is not None:
        why, words = failed
        for line in words:
            print(f"  {line}", file=sys.stderr)
        return RunError(f"{why}. Everything is stopped.")
    if not is_ours and not state["is_stopping"]:
        late = [each["name"] for each in state["services"] if each["state"] not in ("healthy", "done")]
        return RunError(f"{', '.join(late)}: not healthy after {RECOVER_S:g} s; `k3 status` says more")
    log = log_path(folder, "supervisor")
    return RunError(f"the servers were stopped while they started (log: {log})")


def _show_progress(
    state: Mapping[str, Any], shown: set[str], show: Callable[[str], None], began: float
) -> Sequence[str]:
    """The names of those that are not healthy yet."""
    for each in state["services"]:
        if each["state"] in ("healthy", "done") and each["name"] not in shown:
            shown.add(each["name"])
            show(f"{each['name']:14} {each['state']:8} {time.monotonic() - began:6.1f} s")
    return [each["name"] for each in state["services"] if each["name"] not in shown]


def _ignore(_line: str) -> None:
    """What runs already needs no line."""


def _print_addresses(state: Mapping[str, Any], folder: Path, seconds: float) -> None:
    from infra.postgres import data_folder

    data = data_folder(folder)
    also = "" if data.parent == folder else f" (PostgreSQL's data: {data})"
    print(f"up after {seconds:.0f} s; data and logs in {folder}{also}\n")
    for each in state["services"]:
        if each["url"]:
            print(f"  {each['name']:14} {each['url']}")
    where = "" if folder == HERE.absolute() else f" --dir {shlex.quote(str(folder))}"
    print(f'\nNext:\n  eval "$(k3 env{where})"\n  prefect deployment run rl_training/rl-training')


def _stop(folder: Path) -> None:
    from infra.supervisor import is_supervised, read_state

    _wait_until(lambda: read_state(folder) is not None or not is_supervised(folder), 10.0)
    state = read_state(folder)
    if state is None:
        return
    with suppress(ProcessLookupError):  # killed a moment ago: what guards it clears up
        os.kill(state["pid"], signal.SIGTERM)
    if not _wait_until(lambda: not is_supervised(folder), STOP_S):
        os.kill(state["pid"], signal.SIGKILL)
        if not _wait_until(lambda: not is_supervised(folder), 10.0):
            raise RunError(f"{folder}: process {state['pid']} could not be stopped")


def _wait_until(is_true: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _confirmed(question: str) -> bool:
    """Nobody there to ask, or an interrupt, is a no."""
    try:
        return typer.confirm(question)
    except typer.Abort:
        print()
        return False


def _remove(folder: Path) -> None:
    """What the stack made, and nothing else that may lie in the folder."""
    from infra.postgres import data_folder
    from infra.stack import MADE_FILES, MADE_FOLDERS

    if not (folder / "ports.json").exists():
        raise RunError(f"{folder}: no servers were ever started from this folder; nothing is removed")
    if (data := data_folder(folder)).parent != folder and data.parent.exists():
        shutil.rmtree(data.parent)  # with what was set aside there
    for name in MADE_FOLDERS:
        if (folder / name).exists():
            shutil.rmtree(folder / name)
    for name in MADE_FILES:
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
    print(f"removed what the servers had kept in {folder}")


def _memory_mb(pid: int | None) -> str:
    """Of a service with all that it started; pages that several share count once."""
    import psutil

    if pid is None:
        return ""
    total = 0
    try:
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            total += process.memory_full_info().pss
    except psutil.Error:
        return ""
    return f"{total / 2**20:.0f}"
