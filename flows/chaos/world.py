"""The servers of a chaos test: the local stack, with a misbehaving network in front of its S3 and a clock that jumps.

`python -m flows.chaos.world FOLDER` supervises them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from infra import stack
from infra.checks import port_accepts
from infra.faults.rules import Rule
from infra.services import Program, Service
from infra.stack import PROJECT
from infra.supervisor import is_supervised, is_up, read_state, supervise

MARK = "K3_CHAOS"  # in the environment of every process of the test
PROXY = "s3-faults"
CLOCK = "clock"  # the file that says how far the nodes' clocks are off
DISK = "disk"  # the folder that fills up
DISK_BYTES = 64 << 20
FLOW_RUN = ("PREFECT__FLOW_RUN_ID", "PREFECT_FLOW_RUN_ID")
# A quick test needs quick signs of life; a product that runs for hours has time.
NODE = {"K3_HEARTBEAT_S": "3", "OMP_NUM_THREADS": "1", "PREFECT_CLIENT_MAX_RETRIES": "8"}


@dataclass(frozen=True, slots=True)
class World:
    """folder: absolute."""

    folder: Path
    ports: Mapping[str, int]

    @property
    def proxy_url(self) -> str:
        return f"http://127.0.0.1:{self.ports[PROXY]}"

    def pid(self, service: str) -> int | None:
        state = read_state(self.folder)
        return None if state is None else next((s["pid"] for s in state["services"] if s["name"] == service), None)

    def is_up(self) -> bool:
        state = read_state(self.folder)
        return state is not None and is_supervised(self.folder) and is_up(state)

    def inject(self, *rules: Rule) -> None:
        httpx.post(f"{self.proxy_url}/__faults", json=[asdict(rule) for rule in rules]).raise_for_status()

    def calm(self) -> None:
        httpx.delete(f"{self.proxy_url}/__faults").raise_for_status()

    def jump(self, seconds: int) -> None:
        (self.folder / CLOCK).write_text(f"{seconds:+d}s\n")

    def flow_processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """(flow run id, process) of every process that carries out a flow run."""
        for process in self.processes():
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            run = next((environment[name] for name in FLOW_RUN if environment.get(name)), None)
            if run is not None:
                yield run, process

    def processes(self) -> Iterator[psutil.Process]:
        """All that the test has started, by the mark in their environment."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.folder) and process.pid != os.getpid():
                    yield process
            except psutil.Error:
                continue


def prepare(folder: Path) -> World:
    """Chooses what stays the same for the whole test. Starts nothing."""
    stack.make_folder(folder)
    prepared = stack.prepare(folder)
    extra = folder / "proxy_port.json"
    if not extra.exists():
        extra.write_text(json.dumps(stack.free_port(set(prepared.ports.values()))))
    (folder / CLOCK).write_text("+0s\n")
    (folder / DISK).mkdir(exist_ok=True)
    return World(folder, {**prepared.ports, PROXY: json.loads(extra.read_text())})


def client_environment(world: World) -> dict[str, str]:
    """What the test itself needs, past the proxy: it looks at what really lies in the store."""
    return {**stack.environment(world.folder), MARK: str(world.folder), "PREFECT_HOME": str(world.folder / "client")}


def programs(world: World) -> list[Program]:
    s3 = f"http://127.0.0.1:{world.ports['s3']}"
    faulty = {
        **NODE,
        "AWS_ENDPOINT_URL_S3": world.proxy_url,
        "K3_CACHE": str(world.folder / DISK / "cache"),
        "K3_CACHE_BYTES": str(DISK_BYTES // 2),
        "TMPDIR": str(world.folder / DISK),
        **_false_clock(world),
    }
    marked = [
        replace(one, env={**one.env, MARK: str(world.folder)}) for one in stack.programs(stack.load(world.folder))
    ]
    listed: list[Program] = []
    for one in marked:
        is_node = isinstance(one, Service) and one.pool is not None
        listed.append(replace(one, env={**one.env, **faulty}, after=(*one.after, PROXY)) if is_node else one)
        if one.name == "bucket":
            proxy = ["--listen", str(world.ports[PROXY]), "--target", s3]
            listed.append(
                Service(
                    name=PROXY,
                    argv=[sys.executable, "-m", "infra.faults.proxy", *proxy],
                    env={**one.env},
                    cwd=PROJECT,
                    after=("s3",),
                    ready=port_accepts("127.0.0.1", world.ports[PROXY]),
                )
            )
    return [_impatient(one) if one.name == "reaper" else one for one in listed]


def _impatient(reaper: Program) -> Program:
    windows = ["--pending-s", "30", "--cancelling-s", "30"]
    env = {**reaper.env, "K3_HEARTBEAT_S": NODE["K3_HEARTBEAT_S"]}
    return replace(reaper, argv=[*reaper.argv, *windows], env=env)


def _false_clock(world: World) -> dict[str, str]:
    """The nodes' wall clock follows a file; their steady clock stays steady, as it does when an operator sets the time."""
    found = importlib.util.find_spec("libfaketime")
    if found is None or found.origin is None:
        raise ValueError("libfaketime is not installed: pip install 'k3rl[test]'")
    library = Path(found.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(world.folder / CLOCK),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DISABLE_SHM": "1",
    }


def wait_until(happens: Callable[[], Any], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not happens():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.5)


if __name__ == "__main__":
    here = Path(sys.argv[1]).absolute()
    sys.exit(supervise(here, lambda: programs(prepare(here))))
