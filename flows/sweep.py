"""`k3 sweep`: one config at every point of a grid, here or on the work pools, and which point did best."""

from __future__ import annotations

import os
import queue
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.submit import LOOP, submit
from infra.config import RunConfig
from infra.config_doctor import diagnose_config
from infra.config_rules import TRACKING_URI
from infra.console import bars, say, stage_bar
from infra.descendants import dies_with_this_process
from infra.embedded import join
from infra.stages.summary import ui_commands
from infra.stages.track import tracking_uri
from infra.store import Store
from infra.sweep import TAG, Outcome, Point, against, outcome_of, ranked
from infra.sweep_figure import plot_sweep
from infra.tracking.links import LOCAL_UI, compare_runs
from k3core.errors import IntegrityError

POLL_S = 2.0
WIDTH = 120  # of the table where there is no terminal
STOP_TIMEOUT_S = 20.0

_STEP = re.compile(r"step +(\d+)/(\d+) ")
_END = None  # of a child's output

Ended = tuple[int, str | None]  # which point, and why it failed
Lines = queue.Queue[tuple[int, str | None]]


@dataclass(slots=True)
class Child:
    """A `k3 train` of this sweep. `last` is what it said last."""

    process: subprocess.Popen[str]
    bar: ExitStack
    progress: Callable[[int, int], None]
    last: str = ""


def run_sweep(config: str, points: Sequence[Point], parallel: int | None) -> int:
    """0 when every run ended well, 1 when one failed, 2 when none could start. Started again, it continues them all."""
    obstacles = {
        f"{finding.name}: {finding.detail}: {finding.remedy}"
        for point in points
        for finding in diagnose_config(point.cfg)
        if finding.required and not finding.ok
    }
    for line in sorted(obstacles):
        print(line, file=sys.stderr)
    if obstacles:
        return 2
    name = points[0].sweep
    folder = _folder(points[0].cfg.root, name)
    folder.mkdir(parents=True, exist_ok=True)
    if is_deployed():
        points, ended = _submit_all(points, name, parallel)
    else:
        _share_a_server(points[0].cfg.root)
        ended = run_here(config, points, parallel or 1, folder)
    outcomes: dict[int, Outcome] = {}
    with bars(), closing(ended):
        for index, error in ended:
            outcomes[index] = Outcome(points[index], error=error) if error else _read(points[index])
            say(f"{points[index].cfg.run}: {_short(outcomes[index])}")
    return report([outcomes[index] for index in range(len(points))], name, folder)


def report(outcomes: Sequence[Outcome], name: str, folder: Path) -> int:
    """Prints the table and says where the picture and MLflow's comparison are."""
    best_first = ranked(outcomes)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table(best_first, name))
    picture = folder / "comparison.png"
    plot_sweep(best_first, f"{name}: {len(outcomes)} runs", picture)
    say(f"picture: {picture}")
    _say_where_mlflow_compares(outcomes[0].point.cfg, name, [outcome.point.cfg.run for outcome in best_first])
    for outcome in outcomes:
        if outcome.error is not None:
            say(f"failed:  {outcome.point.cfg.run}: {outcome.error}")
    return 1 if any(outcome.error for outcome in outcomes) else 0


def table(best_first: Sequence[Outcome], name: str) -> Table:
    """The difference is to the first row, paired by prompt."""
    confidence = best_first[0].point.cfg.evaluate.confidence
    shown = Table(title=f"{name}, best first")
    for key in best_first[0].point.values:
        shown.add_column(key.rpartition(".")[2], overflow="fold")
    for column in ("before", "after", "difference", f"{confidence:.0%} interval"):
        shown.add_column(column, justify="right", no_wrap=True)
    for outcome in best_first:
        cells = [escape(value) for value in outcome.point.values.values()]
        if outcome.before is None or outcome.after is None:
            shown.add_row(*cells, "failed", "", "", "")
            continue
        estimates = [f"{estimate.mean:.3f} ± {estimate.stderr:.3f}" for estimate in (outcome.before, outcome.after)]
        shown.add_row(*cells, *estimates, *_difference(best_first[0], outcome, confidence))
    return shown


def run_here(config: str, points: Sequence[Point], parallel: int, folder: Path) -> Generator[Ended]:
    """`parallel` processes at a time; each one's whole output is kept in `folder`. Closed early, it ends them all.

    Children are started by this thread alone: the kernel ends them with the thread that started them.
    """
    lines: Lines = queue.Queue()
    waiting = list(range(len(points)))
    running: dict[int, Child] = {}
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                index = waiting.pop(0)
                running[index] = _start(train_command(config, points[index]), points[index], folder, index, lines)
            index, line = lines.get()
            child = running[index]
            if line is not _END:
                _hear(points[index], child, line)
                continue
            child.bar.close()
            code = child.process.wait()
            del running[index]
            yield index, None if code == 0 else child.last or f"ended with code {code}"
    finally:
        _end(running.values())


def train_command(config: str, point: Point) -> list[str]:
    """What a person would type for this one point."""
    return [sys.executable, "-m", "flows.cli", "train", config, *point.overrides]


def is_deployed() -> bool:
    """Whether there is a server that has the loop. A server without it only records what runs here."""
    url = get_current_settings().api.url
    if url is None:
        return False
    try:
        with get_client(sync_client=True) as client:
            client.read_deployment_by_name(LOOP)
    except ObjectNotFound:
        say(f"{url} has no deployment {LOOP}: the runs are processes of this machine")
        return False
    except httpx.ConnectError as error:
        raise ValueError(f"PREFECT_API_URL {url}: no server answers there; start it, or unset the variable") from error
    return True


def _submit_all(points: Sequence[Point], name: str, parallel: int | None) -> tuple[list[Point], Generator[Ended]]:
    """With the root that the deployment gives to runs that name none, which is where their results will be."""
    first = submit(points[0].cfg, [f"{TAG}={name}"])
    root = str(first.parameters["cfg"]["root"])
    there = [replace(point, cfg=replace(point.cfg, root=root)) for point in points]
    return there, run_deployed(there, name, parallel or len(points), {0: str(first.id)})


def run_deployed(points: Sequence[Point], name: str, parallel: int, submitted: dict[int, str]) -> Generator[Ended]:
    """Asks the server how they are. Closed early, it leaves those that run there alone."""
    waiting = [index for index in range(len(points)) if index not in submitted]
    with get_client(sync_client=True) as client, stage_bar(name) as progress:
        while waiting or submitted:
            while waiting and len(submitted) < parallel:
                index = waiting.pop(0)
                submitted[index] = str(submit(points[index].cfg, [f"{TAG}={name}"]).id)
            for index, flow_run in list(submitted.items()):
                state = client.read_flow_run(UUID(flow_run)).state
                if state is None or not state.is_final():
                    continue
                del submitted[index]
                progress(len(points) - len(waiting) - len(submitted), len(points))
                yield index, None if state.is_completed() else f"{state.name}: {state.message}"
            if submitted:
                time.sleep(POLL_S)


def _share_a_server(root: str) -> None:
    """Runs that follow each other find the same Prefect server, instead of each waiting for one to start."""
    if get_current_settings().api.url is None:
        home = os.environ.get("PREFECT_HOME") or Store(root).local_path(".prefect") or "~/.k3rl/prefect"
        join(Path(home))


def _start(command: list[str], point: Point, folder: Path, index: int, lines: Lines) -> Child:
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=dies_with_this_process(),
    )
    log = folder / f"{point.cfg.run}.log"

    def read() -> None:
        assert process.stdout is not None
        with log.open("w") as kept:
            print(shlex.join(command), file=kept, flush=True)
            for line in process.stdout:
                print(line, end="", file=kept, flush=True)
                lines.put((index, line.rstrip()))
        lines.put((index, _END))

    threading.Thread(target=read, daemon=True).start()
    bar = ExitStack()
    return Child(process, bar, bar.enter_context(stage_bar(point.cfg.run)))


def _hear(point: Point, child: Child, line: str) -> None:
    if line.strip():
        child.last = line.strip()
    if found := _STEP.match(line):
        child.progress(int(found[1]), int(found[2]))
        if "| eval" in line:
            say(f"{point.cfg.run}: {line}")


def _end(children: Iterable[Child]) -> None:
    still = [child for child in children if child.process.poll() is None]
    for child in still:
        child.process.terminate()
    for child in still:
        try:
            child.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        child.bar.close()


def _read(point: Point) -> Outcome:
    """A broken file is one run's misfortune and does not keep the others' results from being shown."""
    try:
        return outcome_of(point)
    except IntegrityError as error:
        return Outcome(point, error=str(error))


def _say_where_mlflow_compares(cfg: RunConfig, name: str, runs: Sequence[str]) -> None:
    is_local = Store(cfg.root).local_path("mlflow.db") is not None
    if not is_local and not (cfg.tracking.mlflow_uri or os.environ.get(TRACKING_URI)):
        return  # the workers know their server, this machine does not
    url = compare_runs(tracking_uri(cfg), cfg.tracking.experiment, TAG, name, runs)
    if url is not None and url.startswith(LOCAL_UI):
        say(f"MLflow:  {ui_commands(cfg)['MLflow'].partition('   #')[0]}   # then {url}")
    elif url is not None:
        say(f"MLflow:  {url}")


def _folder(root: str, name: str) -> Path:
    """Beside the runs, or here when they lie elsewhere."""
    return Store(root).local_path(f"sweeps/{name}") or Path("sweeps") / name


def _short(outcome: Outcome) -> str:
    if outcome.before is None or outcome.after is None:
        return f"failed: {outcome.error}"
    return f"reward {outcome.before.mean:.3f} -> {outcome.after.mean:.3f} ± {outcome.after.stderr:.3f}"


def _difference(first: Outcome, outcome: Outcome, confidence: float) -> tuple[str, str]:
    if outcome is first:
        return "", ""
    found = against(first, outcome, confidence)
    if isinstance(found, str):
        return found, ""
    return f"{found.difference:+.3f}", f"[{found.ci_low:+.3f}, {found.ci_high:+.3f}]"
