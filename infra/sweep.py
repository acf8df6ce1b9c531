"""A sweep: one config at every point of a grid of settings, and what came of it, best first."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra.config import ConfigError, RunConfig, load
from infra.stages.evaluate import find_evaluation, read_report
from infra.store import Store
from k3core.eval.compare import Comparison, compare, mean_and_stderr
from k3core.types import EvalReport

TAG = "k3.sweep"

_NAMED_BY_THE_SWEEP = ("run", "root")
_BRACKETS = {"[": 1, "]": -1, "{": 1, "}": -1}


@dataclass(frozen=True, slots=True)
class Point:
    """values: what the grid sets here, key -> TOML text. overrides: all that is set beside the config's file."""

    sweep: str
    values: Mapping[str, str]
    overrides: tuple[str, ...]
    cfg: RunConfig

    @property
    def label(self) -> str:
        return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.values.items())


@dataclass(frozen=True, slots=True)
class Estimate:
    mean: float
    stderr: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that ended well has both estimates and no error; any other has an error, and no number stands for it.

    report: the last evaluation.
    """

    point: Point
    before: Estimate | None = None
    after: Estimate | None = None
    report: EvalReport | None = None
    error: str | None = None


def parse_grid(grid: Sequence[str]) -> dict[str, list[str]]:
    """`KEY=VALUE,VALUE,...`; commas within brackets or quotes belong to a value. Raises ValueError, one line."""
    axes: dict[str, list[str]] = {}
    for text in grid:
        key, equals, values = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ValueError(f"--grid {text}: expected KEY=VALUE,VALUE,... for example seed=0,1,2")
        if key in _NAMED_BY_THE_SWEEP:
            raise ValueError(f"--grid {key}: the runs of a sweep are named by their values and lie in one root")
        if key in axes:
            raise ValueError(f"--grid {key}: given twice; write all its values in one: {key}=A,B")
        axes[key] = _split(values)
        if "" in axes[key]:
            raise ValueError(f"--grid {text}: an empty value")
        if len(set(axes[key])) < len(axes[key]):
            raise ValueError(f"--grid {text}: a value occurs twice")
    if not axes:
        raise ValueError("--grid: what is to be varied? for example --grid train.learning_rate=1e-4,5e-4")
    return axes


def points(config: str, overrides: Sequence[str], grid: Mapping[str, Sequence[str]], name: str | None) -> list[Point]:
    """Every combination, checked. Raises ConfigError with each problem once, and ValueError for an impossible name."""
    name = name or load(config, overrides).run
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"--name {name}: letters, digits, '.', '_' and '-' only")
    made: list[Point] = []
    problems: dict[str, None] = {}
    names: set[str] = set()
    for combination in itertools.product(*grid.values()):
        values = dict(zip(grid, combination, strict=True))
        run = _run_name(name, combination, names)
        names.add(run)
        settings = (*overrides, *(f"{key}={value}" for key, value in values.items()), f"run={run}")
        try:
            cfg = load(config, settings)
            settings = (*settings, _tags(cfg, name))
            made.append(Point(name, values, settings, load(config, settings)))
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise ConfigError(problems)
    return made


def outcome_of(point: Point) -> Outcome:
    """What the store has of a run that ended well."""
    store, cfg = Store(point.cfg.root), point.cfg
    records = [find_evaluation(store, cfg.run, step) for step in (0, cfg.steps)]
    if None in records:
        missing = [step for step, record in zip((0, cfg.steps), records, strict=True) if record is None]
        return Outcome(point, error=f"no evaluation of step {missing[0]} in {cfg.root}/{cfg.run}")
    reports = [read_report(store, record) for record in records if record is not None]
    try:
        before, after = (Estimate(*mean_and_stderr(report, "reward")) for report in reports)
    except ValueError as error:  # too few grades for a mean with an error
        return Outcome(point, error=str(error))
    return Outcome(point, before, after, reports[-1])


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Best first, failures last; equal ones in the grid's order."""
    return sorted(outcomes, key=lambda o: (o.after is None, -(o.after.mean if o.after is not None else 0.0)))


def against(first: Outcome, other: Outcome, confidence: float) -> Comparison | str:
    """`other` minus `first` over the same prompts, or why that cannot be said."""
    if first.report is None or other.report is None:
        return "no evaluation"
    if first.report.suite_sha256 != other.report.suite_sha256:
        return "another suite"
    if first.report.sampling != other.report.sampling:
        return "other sampling"
    return compare(first.report, other.report, "reward", confidence)


def _split(text: str) -> list[str]:
    """At commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        depth += _BRACKETS.get(character, 0)
        if character == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _run_name(sweep: str, values: Sequence[str], taken: set[str]) -> str:
    """`{sweep}-{values}`, as far as a run's name can hold them; told apart by a number where that is not enough."""
    short = [re.sub(r"[^A-Za-z0-9.+-]+", "_", value).replace("+", "").strip("._-") for value in values]
    name = "-".join([sweep, *(part or "x" for part in short)])
    numbered = (f"{name}.{number}" for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([name], numbered) if candidate not in taken)


def _tags(cfg: RunConfig, sweep: str) -> str:
    kept = [tag for tag in cfg.tracking.tags if not tag.startswith(f"{TAG}=")]
    listed = ", ".join('"' + tag.replace("\\", "\\\\").replace('"', '\\"') + '"' for tag in [*kept, f"{TAG}={sweep}"])
    return f"tracking.tags=[{listed}]"
