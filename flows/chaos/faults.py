"""The faults of a chaos test. Each does one thing to the servers, and says what it did, or that there was no target."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Cancelling

from flows.chaos.world import DISK, DISK_BYTES, World
from infra.faults.rules import Rule
from infra.work_pools import POOLS

Inject = Callable[["Scene"], str | None]

STORM_S = 6.0
CLOCK_S = 600  # S3 refuses signatures that are a quarter of an hour off; this is within


class Scene:
    """What a fault may touch: the servers, the API, and the run that goes on. `submit` triggers the same run again."""

    def __init__(
        self,
        world: World,
        client: SyncPrefectClient,
        random: Random,
        loop: Callable[[], UUID],
        submit: Callable[[], None],
    ) -> None:
        self.world, self.client, self.random, self.loop, self.submit = world, client, random, loop, submit

    def kill_service(self, name: str, with_signal: int = signal.SIGKILL) -> str | None:
        pid = self.world.pid(name)
        if pid is None:
            return None
        with suppress(ProcessLookupError):
            os.kill(pid, with_signal)
            return f"{name} ({pid})"
        return None

    def storm(self, rule: Rule, seconds: float) -> str:
        self.world.inject(rule)
        time.sleep(seconds)
        self.world.calm()
        return f"{rule.fault} for {seconds:g} s"

    def next_requests(self, *rules: Rule) -> str:
        self.world.inject(*rules)
        return ", ".join(f"{rule.fault} of the next {rule.limit}" for rule in rules)


def kill_loop(scene: Scene) -> str | None:
    return _kill_flows(scene, lambda run: run == str(scene.loop()))


def kill_stage(scene: Scene) -> str | None:
    return _kill_flows(scene, lambda run: run != str(scene.loop()))


def kill_worker(scene: Scene) -> str | None:
    return scene.kill_service(f"{scene.random.choice(list(POOLS))}-1")


def kill_worker_and_flows(scene: Scene) -> str | None:
    """As when a machine is lost: nobody is left to say what happened."""
    pool = scene.random.choice(list(POOLS))
    worker = scene.world.pid(f"{pool}-1")
    if worker is None:
        return None
    with suppress(psutil.NoSuchProcess):
        family = [psutil.Process(worker), *psutil.Process(worker).children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return f"{pool}-1 and {len(family) - 1} processes below it"
    return None


def freeze_resident(scene: Scene) -> str | None:
    name = scene.random.choice(["engine", "trainer"])
    if scene.kill_service(name, signal.SIGSTOP) is None:
        return None
    time.sleep(8)
    scene.kill_service(name, signal.SIGCONT)
    return f"{name} for 8 s"


def fill_disk(scene: Scene) -> str:
    """The nodes' scratch disk, where the cache and temporary files lie."""
    hog = Path(scene.world.folder / DISK / "hog")
    with suppress(OSError), hog.open("wb") as file:
        for _ in range(DISK_BYTES >> 20):
            file.write(b"\0" * (1 << 20))
    time.sleep(STORM_S)
    hog.unlink()
    return f"{DISK_BYTES >> 20} MiB full for {STORM_S:g} s"


def jump_clock(scene: Scene) -> str:
    seconds = scene.random.choice([CLOCK_S, -CLOCK_S])
    scene.world.jump(seconds)
    time.sleep(STORM_S)
    scene.world.jump(0)
    return f"{seconds:+d} s, and back after {STORM_S:g} s"


def cancel_run(scene: Scene) -> str:
    run = scene.loop()
    scene.client.set_flow_run_state(run, Cancelling(message="a person cancelled it"))
    return f"loop {run}"


def trigger_again(scene: Scene) -> str:
    scene.submit()
    return "the same run, while it goes on"


def _kill_flows(scene: Scene, chosen: Callable[[str], bool]) -> str | None:
    killed = []
    for run, process in scene.world.flow_processes():
        if chosen(run):
            with suppress(psutil.NoSuchProcess):
                process.kill()
                killed.append(process.pid)
    return f"process {killed[0]} of its flow run" if killed else None


UPLOADS, DOWNLOADS = "PUT|POST", "GET"
FAULTS: Mapping[str, Inject] = {
    "kill the loop's process": kill_loop,
    "kill a stage's process": kill_stage,
    "kill a worker": kill_worker,
    "kill a worker and its flows": kill_worker_and_flows,
    "kill the engine": lambda scene: scene.kill_service("engine"),
    "kill the trainer": lambda scene: scene.kill_service("trainer"),
    "freeze engine or trainer": freeze_resident,
    "kill PostgreSQL": lambda scene: scene.kill_service("postgres"),
    "kill the Prefect server": lambda scene: scene.kill_service("prefect"),
    "kill the MLflow server": lambda scene: scene.kill_service("mlflow"),
    "kill S3": lambda scene: scene.kill_service("s3"),
    "S3: storm of 503": lambda scene: scene.storm(Rule("slow_down", probability=0.7), STORM_S),
    "S3: connections reset": lambda scene: scene.storm(Rule("reset", probability=0.5), STORM_S),
    "S3: uploads cut in the middle": lambda scene: scene.next_requests(Rule("cut_request", UPLOADS, limit=3)),
    "S3: answers lost": lambda scene: scene.next_requests(Rule("lose_answer", UPLOADS, limit=3)),
    "S3: downloads cut short": lambda scene: scene.next_requests(
        Rule("truncate", DOWNLOADS, limit=2), Rule("truncate_silently", DOWNLOADS, limit=2)
    ),
    "disk full": fill_disk,
    "clock jumps": jump_clock,
    "cancel the run": cancel_run,
    "trigger the run twice": trigger_again,
}


def schedule(count: int, random: Random) -> list[str]:
    """Every kind as often as every other, but for the remainder, in random order."""
    kinds: list[str] = []
    while len(kinds) < count:
        kinds += random.sample(list(FAULTS), len(FAULTS))
    chosen = kinds[:count]
    random.shuffle(chosen)
    return chosen
