"""`k3 chaos`: whole tiny runs on real servers, under random faults; then everything that must hold is checked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from rich import box
from rich.console import Console
from rich.table import Table

from flows.chaos.faults import FAULTS, Scene, schedule
from flows.chaos.invariants import Outcome, broken_versions, leaks, outcome, torn_objects
from flows.chaos.world import DISK, DISK_BYTES, World, wait_until
from flows.submit import submit
from infra.config import RunConfig
from infra.console import say
from infra.stack import PROJECT
from infra.store import Store
from infra.supervisor import failure, last_lines, read_state
from k3core.errors import RunError

T = TypeVar("T")

PAUSE_S = (4.0, 18.0)  # between two faults: some in each stage, and now and then two in one
COMMANDS = 6  # so often one run may need the command that continues it
RUN_S = 900.0  # for one try of a run


@dataclass(slots=True)
class Trial:
    """One run. faults: (kind, what was done), or (kind, None) where there was no target. commands: that continued it."""

    run: str
    faults: list[tuple[str, str | None]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)

    @property
    def commands(self) -> int:
        return len(self.ends) - 1


def run_chaos(world: World, cfg: RunConfig, num_faults: int, per_run: int, seed: int, out: Path | None) -> int:
    """1 when something that must hold did not."""
    random = Random(seed)
    kinds = schedule(num_faults, random)
    began = time.monotonic()
    trials: list[Trial] = []
    with servers(world), get_client(sync_client=True) as client:
        store = Store(_root(client))
        quiet = trial(world, client, replace(cfg, run="undisturbed"), [], random)
        if quiet.ends != ["Completed"]:
            raise RuntimeError(f"the undisturbed run ended {quiet.ends}: nothing to compare with")
        expected = outcome(store, "undisturbed", cfg.steps)
        say(f"undisturbed: {quiet.seconds:.0f} s, weights {expected.weights_sha256[-1][:16]}")
        while kinds:
            mine, kinds = kinds[:per_run], kinds[per_run:]
            done = trial(world, client, replace(cfg, run=f"chaos-{len(trials):02d}"), mine, random)
            done.violations += violations(world, client, store, done.run, cfg.steps, expected)
            kinds += mine[len(done.faults) :]  # the run was over before their turn
            trials.append(done)
            _say_trial(done)
    left = [f"process {p.pid} outlives the servers: {' '.join(p.cmdline()[:4])}" for p in world.processes()]
    _report(trials, left, time.monotonic() - began)
    if out is not None:
        document = {"seed": seed, "trials": [asdict(one) for one in trials], "left": left}
        out.write_text(json.dumps(document, indent=1))
    return 1 if left or any(one.violations for one in trials) else 0


@contextmanager
def servers(world: World) -> Iterator[None]:
    """The stack, from its start until everything is stopped. A disk of its own, where this machine lets us mount one."""
    disk = world.folder / DISK
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], capture_output=True
    ).returncode == 0  # fmt: skip
    with (world.folder / "supervisor.log").open("wb") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "flows.chaos.world", str(world.folder)], cwd=PROJECT, stdout=log, stderr=log
        )
    say(f"the servers start; logs in {world.folder}/logs")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the end of this command ends the servers too
    try:
        while not world.is_up():  # the supervisor knows how long each may take
            if supervisor.poll() is not None:
                raise RunError(why_not_up(world.folder))
            time.sleep(0.5)
        yield
    finally:
        supervisor.terminate()
        supervisor.wait(120)
        if mounted:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def why_not_up(folder: Path) -> str:
    """A line, and below it the last words of the log that it names."""
    state = read_state(folder)
    why, words = (state and failure(state)) or ("the supervisor ended", last_lines(folder / "supervisor.log"))
    return "\n  ".join([f"the servers did not start: {why}", *words])


def trial(world: World, client: SyncPrefectClient, cfg: RunConfig, kinds: list[str], random: Random) -> Trial:
    """Starts the run, lets faults happen to it, continues it by the one command until it is complete."""
    done = Trial(cfg.run)
    began = time.monotonic()
    over = Event()
    loop: list[UUID] = []

    def start() -> UUID:
        return _patiently(lambda: submit(cfg)).id

    loop.append(start())

    def again() -> None:
        start()

    scene = Scene(world, client, random, lambda: loop[-1], again)
    disturber = Thread(target=_disturb, args=(scene, kinds, done, over), daemon=True)
    disturber.start()
    while True:
        done.ends.append(_end_of(client, loop[-1]))
        if done.ends[-1] == "Completed" or len(done.ends) > COMMANDS:
            break
        loop.append(start())
    over.set()
    disturber.join(120)
    _patiently(world.calm)
    world.jump(0)
    done.seconds = time.monotonic() - began
    if done.ends[-1] != "Completed":
        done.violations.append(f"not complete after {COMMANDS} commands: {done.ends}")
    return done


def _disturb(scene: Scene, kinds: list[str], done: Trial, over: Event) -> None:
    for kind in kinds:
        if over.wait(scene.random.uniform(*PAUSE_S)):
            return
        deadline = time.monotonic() + 60
        while (what := _inject(scene, kind)) is None and time.monotonic() < deadline and not over.wait(0.5):
            pass  # its target does not run just now
        done.faults.append((kind, what))
        say(f"  {done.run}: {kind}: {what or 'no target within a minute'}")


def _inject(scene: Scene, kind: str) -> str | None:
    try:
        return FAULTS[kind](scene)
    except httpx.HTTPError:
        return None  # the server that it goes through is down from the fault before


def _end_of(client: SyncPrefectClient, run: UUID) -> str:
    """The name of the state that the run stays in: a crashed loop is taken up again by the reaper."""
    deadline = time.monotonic() + RUN_S
    last_crash: float | None = None
    while time.monotonic() < deadline:
        time.sleep(1.0)
        flow_run: FlowRun = _patiently(lambda: client.read_flow_run(run))
        state = flow_run.state
        if state is None or not state.is_final():
            last_crash = None
            continue
        if state.type != StateType.CRASHED:
            return str(state.name)
        last_crash = last_crash or time.monotonic()
        if time.monotonic() - last_crash > 45.0:
            return "Crashed"
    return f"still {state.name if state else 'unknown'} after {RUN_S:g} s"


def _patiently(ask: Callable[[], T]) -> T:
    """The test itself outlives the outages that it causes."""
    deadline = time.monotonic() + 180
    while True:
        try:
            return ask()
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def violations(
    world: World, client: SyncPrefectClient, store: Store, run: str, steps: int, expected: Outcome
) -> list[str]:
    found = _patiently(lambda: leaks(world, client))
    wait_until(world.is_up, 120.0, "the servers' recovery")
    try:
        made = outcome(store, run, steps)
    except ValueError as error:
        return [*found, str(error)]
    for name in ("weights_sha256", "batches_sha256", "optimizer_steps"):
        if getattr(made, name) != getattr(expected, name):
            found.append(f"{name}: {getattr(made, name)}, undisturbed {getattr(expected, name)}")
    return [*found, *broken_versions(store, run, steps), *torn_objects(store, run)]


def _root(client: SyncPrefectClient) -> str:
    return str(client.read_deployment_by_name("rl_training/rl-training").parameters["cfg"]["root"])


def _say_trial(one: Trial) -> None:
    verdict = "; ".join(one.violations) or "holds"
    say(f"{one.run}: {len(one.faults)} faults, {' -> '.join(one.ends)}, {one.seconds:.0f} s: {verdict}")


def _report(trials: list[Trial], left: list[str], seconds: float) -> None:
    done = Counter(kind for one in trials for kind, what in one.faults if what is not None)
    missed = Counter(kind for one in trials for kind, what in one.faults if what is None)
    table = Table("fault", "done", "no target", "runs", "by command", "violations", box=box.SIMPLE)
    for kind in (kind for kind in FAULTS if done[kind] or missed[kind]):
        hit = [one for one in trials if any(k == kind and what is not None for k, what in one.faults)]
        by_command = sum(one.commands > 0 for one in hit)
        bad = sum(bool(one.violations) for one in hit)
        table.add_row(kind, str(done[kind]), str(missed[kind] or ""), str(len(hit)), str(by_command or ""), str(bad))
    Console(width=100).print(table)
    runs = Counter("by itself" if one.commands == 0 else "by command" for one in trials)
    say(
        f"{sum(done.values())} faults of {len(done)} kinds in {len(trials)} runs, {seconds:.0f} s: {runs['by itself']} runs"
        f" completed by themselves, {runs['by command']} after {sum(one.commands for one in trials)} commands;"
        f" {sum(bool(one.violations) for one in trials)} runs with a violation, {len(left)} processes left behind"
    )
    for one in trials:
        for violation in one.violations:
            say(f"  {one.run}: {violation}")
    for line in left:
        say(f"  {line}")
