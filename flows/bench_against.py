"""`python -m flows.bench_against REVISION`: how much faster the rollout stage is than it was at another revision.

The other revision's files come from git and run beside this tree's, each in a process of its own that stays, with its
own config of that name and so with its own default for the number of engine processes. Both serve the same weights and
take turns on the same prompts, which no engine has seen before; each one's first turn is not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated

import psutil
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from flows.bench_machine import describe_machine

HERE = Path(__file__).resolve().parent.parent


class PairError(RuntimeError):
    """The two sides cannot be compared, or one of them failed."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One rollout stage. tokens: sampled ones; asked: what names its prompts; sampling: the rule they were drawn by;
    other_cores: how many cores other programs kept busy in the meantime, which a stage that uses all cores feels most."""

    attempt: int
    seconds: float
    tokens: int
    asked: object
    sampling: dict[str, object]
    weights_sha256: str
    other_cores: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    lowest: float
    highest: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f}, from {self.lowest:.2f} to {self.highest:.2f}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Turns of the other revision and of this tree, attempt by attempt."""

    before: Sequence[Turn]
    now: Sequence[Turn]

    def __post_init__(self) -> None:
        """Raises PairError unless both sides did the same work."""
        for a, b in zip(self.before, self.now, strict=True):
            for key in ("attempt", "weights_sha256", "asked"):
                if getattr(a, key) != getattr(b, key):
                    raise PairError(f"attempt {a.attempt}: the two revisions differ in {key}: no pair")
            shared = a.sampling.keys() & b.sampling.keys()  # a setting that came later is off by default
            if differ := sorted(key for key in shared if a.sampling[key] != b.sampling[key]):
                raise PairError(
                    f"attempt {a.attempt}: the two revisions differ in sampling {', '.join(differ)}: no pair"
                )

    @property
    def speed_up(self) -> Spread:
        """How many times faster the stage is, over the attempts."""
        return Spread.of([a.seconds / b.seconds for a, b in zip(self.before, self.now, strict=True)])

    @property
    def token_speed_up(self) -> Spread:
        """The same of tokens a second: another rounding draws other tokens, and so a few more or fewer of them."""
        return Spread.of([b.tokens_per_s / a.tokens_per_s for a, b in zip(self.before, self.now, strict=True)])

    @property
    def fastest(self) -> float:
        """Of each side's fastest turn: what other programs do to a turn only ever makes it slower."""
        return min(turn.seconds for turn in self.before) / min(turn.seconds for turn in self.now)

    def table(self, names: tuple[str, str]) -> Table:
        table = Table(box=box.SIMPLE, pad_edge=False)
        table.add_column("tree")
        for heading in ("seconds, median", "fastest", "slowest", "tokens/s, median", "cores of others"):
            table.add_column(heading, justify="right")
        for name, turns in zip(names, (self.before, self.now), strict=True):
            seconds = Spread.of([turn.seconds for turn in turns])
            others = statistics.mean(turn.other_cores for turn in turns)
            speed = statistics.median(turn.tokens_per_s for turn in turns)
            times = (f"{value:.2f}" for value in (seconds.median, seconds.lowest, seconds.highest))
            table.add_row(name, *times, f"{speed:,.0f}", f"{others:.2f}")
        return table


@dataclass(frozen=True, slots=True)
class Side:
    """A tree's process, which runs the stage each time it is asked to."""

    name: str
    process: subprocess.Popen[str]

    def take_turn(self, attempt: int) -> Turn:
        """Raises PairError when the process has ended."""
        if self.process.poll() is None:
            before = self._clocks()
            _pipe(self.process.stdin).write(f"{attempt}\n")
            _pipe(self.process.stdin).flush()
            if line := _pipe(self.process.stdout).readline():
                seconds, busy, own = (b - a for a, b in zip(before, self._clocks(), strict=True))
                return Turn(**json.loads(line), other_cores=max(0.0, busy - own) / seconds)
        raise PairError(f"{self.name}: its process ended with {self.process.wait()}; its own words are above")

    def _clocks(self) -> tuple[float, float, float]:
        """Seconds that went by, that the cores were busy, and that they were busy with this side."""
        cores, family = psutil.cpu_times(), psutil.Process(self.process.pid)
        times = [process.cpu_times() for process in (family, *family.children(recursive=True))]
        return time.perf_counter(), cores.user + cores.nice + cores.system, sum(t.user + t.system for t in times)


def compare(
    revision: str, config: str, overrides: Sequence[str], weights: Path | None, repeats: int, out: Path, at_least: float
) -> int:
    """Prints a table and writes rollout_against.json. 1 when the speed-up's median is below `at_least`."""
    machine = describe_machine(("numpy", "torch"))
    commits = [_git("rev-parse", "--short", name).strip() for name in (revision, "HEAD")]
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "flows", "infra", "k3core", "kernels")
    with tempfile.TemporaryDirectory(prefix="k3-bench-") as temporary, ExitStack() as sides:
        folder = Path(temporary)
        _extract(revision, folder / "tree")
        if weights is None:
            weights = folder / "weights.safetensors"
            _run_to_end(_command("policy", folder / "warm", weights, config, overrides), HERE)
        trees = {commits[0]: folder / "tree", "this tree": HERE}
        before, now = (
            sides.enter_context(_side(name, tree, _command("turns", folder / str(n), weights, config, overrides)))
            for n, (name, tree) in enumerate(trees.items())
        )
        for side in (before, now):
            side.take_turn(0)  # builds engines and starts processes
        turns: dict[str, list[Turn]] = {before.name: [], now.name: []}
        for attempt in range(1, repeats + 1):
            for side in (before, now) if attempt % 2 else (now, before):
                turns[side.name].append(side.take_turn(attempt))
    pair = Pair(turns[before.name], turns[now.name])

    cores, cpu, load = machine["cores"], machine["cpu"], machine["load_average"]
    print(f"rollout stage of {config}, {repeats} repeats in turn; {cores} cores of {cpu}, load {load:.1f}")
    Console().print(pair.table((before.name, now.name)))
    print(f"speed-up {pair.speed_up}; of tokens a second {pair.token_speed_up}; of the fastest {pair.fastest:.2f}")
    out.mkdir(parents=True, exist_ok=True)
    document = {
        "config": config,
        "overrides": list(overrides),
        "commits": {"before": commits[0], "now": commits[1], "now_has_changes": bool(changed)},
        "before": [{**asdict(turn), "tokens_per_s": turn.tokens_per_s} for turn in pair.before],
        "now": [{**asdict(turn), "tokens_per_s": turn.tokens_per_s} for turn in pair.now],
        "speed_up": asdict(pair.speed_up),
        "token_speed_up": asdict(pair.token_speed_up),
        "speed_up_of_the_fastest": pair.fastest,
        "machine": machine,
    }
    (out / "rollout_against.json").write_text(json.dumps(document, indent=1) + "\n")
    print(out / "rollout_against.json")
    return 0 if pair.speed_up.median >= at_least else 1


def _command(what: str, root: Path, weights: Path, config: str, overrides: Sequence[str]) -> list[str]:
    # -P: the folder of the script, which is this tree's, is not searched for modules.
    script = HERE / "flows" / "rollout_turns.py"
    return [sys.executable, "-P", str(script), what, str(root), str(weights.resolve()), config, *overrides]


def _environment(tree: Path) -> dict[str, str]:
    """As `make demo` sets it, with the tree's packages before any that are installed."""
    path = os.pathsep.join((str(tree), str(tree / "kernels")))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@contextmanager
def _side(name: str, tree: Path, command: Sequence[str]) -> Iterator[Side]:
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree, env=_environment(tree)
    ) as process:
        try:
            yield Side(name, process)
        finally:
            _pipe(process.stdin).close()  # it ends when there is nothing more to read


def _run_to_end(command: Sequence[str], tree: Path) -> None:
    if code := subprocess.run(command, cwd=tree, env=_environment(tree), check=False).returncode:
        raise PairError(f"the warm start ended with {code}; its own words are above")


def _extract(revision: str, tree: Path) -> None:
    """The revision's files: nothing of git's own is changed, and nothing is left behind."""
    archive = tree.with_suffix(".tar")
    _git("archive", "--format=tar", f"--output={archive}", revision)
    with tarfile.open(archive) as files:
        files.extractall(tree, filter="data")
    archive.unlink()


def _git(*arguments: str) -> str:
    done = subprocess.run(("git", "-C", str(HERE), *arguments), capture_output=True, text=True, check=False)
    if done.returncode:
        raise PairError(
            f"git {' '.join(arguments)}: {done.stderr.strip()} (a clone with its whole history has every revision)"
        )
    return done.stdout


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def bench(
    revision: Annotated[str, typer.Argument(help="Commit, branch or tag of this repository.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Of both configs.")] = None,
    config: Annotated[str, typer.Option(help="Each tree's own one of that name.")] = "tiny",
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A policy's safetensors; made by the config's warm start if left out."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Of each.")] = 5,
    at_least: Annotated[float, typer.Option(help="The exit status is 1 for a smaller speed-up.")] = 0.0,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For the JSON.")] = Path("bench"),
) -> None:
    """Seconds of one rollout stage: at another revision, and now."""
    try:
        sys.exit(compare(revision, config, overrides or (), weights, repeats, out, at_least))
    except PairError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    typer.run(bench)
