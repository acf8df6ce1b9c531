"""The command line. Exit codes: 0 done, 1 it failed or found something wrong, 2 what was asked makes no sense."""

# Imports of the project stand inside the commands, against the rule of the project: torch, Prefect and MLflow take
# ten seconds, and `k3 --help` must not wait for a run.

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3core.errors import IntegrityError, RunError

if TYPE_CHECKING:
    from infra.config import RunConfig
    from infra.doctor import Finding

PACKAGES = ("flows", "tasks", "infra", "k3core", "k3kernels")

# Of what runs below a command; a value that is already set wins.
ENVIRONMENT = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",  # 25 s on two idle cores; Prefect waits for 20
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "OMP_NUM_THREADS": "1",  # the tiny model is slower with two threads than with one
}

# The base class of usage errors, which typer does not export; it has the members of this one that are used here.
USAGE_ERROR: type[typer.BadParameter] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    help="Reinforcement learning for the Kimi K3 architecture.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
delta = typer.Typer(help="Published versions: check, measure and rebuild them.", rich_markup_mode=None)
app.add_typer(delta, name="delta")

Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A TOML file, or the name of a shipped config: tiny, smoke, ...")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change: gspo.clip_low=0.02")
]
Version = Annotated[str, typer.Argument(metavar="RUN[@STEP]", help="A version; the run's newest without a step.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]
Root = Annotated[str, typer.Option(help="Where runs are stored: a folder, file:// or s3://.")]
Steps = Annotated[str | None, typer.Option(metavar="STEP|FIRST-LAST", help="Which versions; all when left out.")]


def main(args: Sequence[str] | None = None) -> int:
    """The exit code. A usage error is one line; an unexpected one keeps its traceback."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        code = app(args, prog_name="k3", standalone_mode=False)
    except USAGE_ERROR as error:
        command = error.ctx.command_path if error.ctx else "k3"
        print(f"{command}: {error.format_message()} See `{command} --help`.", file=sys.stderr)
        return 2
    except (IntegrityError, RunError) as error:
        print(f"k3: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        if not _is_for_a_person(error):
            raise
        print(error, file=sys.stderr)
        return 2
    return int(code or 0)


@app.callback(invoke_without_command=True)
def no_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and stop.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over under the next free name instead of continuing the run.")
    ] = False,
) -> int:
    """Warm start, RL, evaluation, report. The same command continues a run that was stopped."""
    from flows.plan import print_plan, under_a_free_name
    from infra.config_doctor import diagnose_config

    cfg = _load(config, overrides)
    if fresh:
        cfg = under_a_free_name(cfg)
    obstacles = [finding for finding in diagnose_config(cfg) if finding.required and not finding.ok]
    if dry_run:
        print_plan(cfg)
    for finding in obstacles:
        print(f"{finding.name}: {finding.detail}: {finding.remedy}", file=sys.stderr)
    if dry_run or obstacles:
        return 0 if dry_run else 2

    _embed_prefect(cfg.root, cfg.run)
    server = os.environ.get("PREFECT_API_URL", "its Prefect server starts first")
    print(f"{cfg.run}: into {cfg.root.rstrip('/')}/{cfg.run} ({server})", flush=True)
    from flows.rl import run_training

    return run_training(cfg)


@app.command("eval")
def evaluate(version: Version, root: Root = "runs") -> int:
    """Evaluate a published version on the held-out prompts."""
    run, step = _version(version, "VERSION")
    _embed_prefect(root, run)
    from flows.evaluate import run_evaluation

    return run_evaluation(root, run, step)


@app.command()
def rollout(version: Version, root: Root = "runs") -> int:
    """Let a published version work on prompts, and show the transcripts with their grades."""
    run, step = _version(version, "VERSION")
    _embed_prefect(root, run)
    from flows.evaluate import run_rollout

    return run_rollout(root, run, step)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A version, RUN@STEP.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another: how much better is B than A?")],
    root: Root = "runs",
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="Of the interval.")] = 0.95,
) -> int:
    """Compare two versions on the same evaluation prompts; the paired difference, its interval, a picture."""
    versions = _version(a, "A"), _version(b, "B")
    _embed_prefect(root, versions[1][0])
    from flows.compare import run_compare

    return run_compare(root, *versions, confidence)


@app.command()
def doctor(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="Can this machine run it?")] = None,
    overrides: Overrides = None,
    root: Annotated[str | None, typer.Option(help="Where runs will be stored; with a CONFIG, use root=...")] = None,
    sglang_url: Annotated[str | None, typer.Option(help="Ask this SGLang server as well.")] = None,
) -> int:
    """Say what is missing on this machine, and for which feature."""
    from infra.doctor import diagnose

    if config is not None and root is not None:
        raise typer.BadParameter("with a CONFIG, use root=...", param_hint="--root")
    findings = diagnose(root or "runs", sglang_url)
    can_load = all(finding.ok for finding in findings if finding.name in ("torch", "pydantic"))
    if config is not None and can_load:
        from infra.config_doctor import diagnose_config

        cfg = _load(config, overrides)
        checks = diagnose_config(cfg)
        replaced = {check.name for check in checks}
        findings = [finding for finding in diagnose(cfg.root, sglang_url) if finding.name not in replaced] + checks
    for finding in findings:
        _print_finding(finding)
    missing = [finding.name for finding in findings if finding.required and not finding.ok]
    print(f"not ready: {', '.join(missing)}" if missing else "ready")
    return 1 if missing else 0


@delta.command("verify")
def delta_verify(run: Run, root: Root = "runs", steps: Steps = None) -> int:
    """Rebuild versions from their bases and deltas, and compare every byte with what was published."""
    from flows.delta import verify_versions

    return verify_versions(root, run, _range(steps))


@delta.command("stats")
def delta_stats(run: Run, root: Root = "runs", steps: Steps = None) -> int:
    """Show the size of each version, and how much of the weights changed."""
    from flows.delta import print_stats

    return print_stats(root, run, _range(steps))


@delta.command("reconstruct")
def delta_reconstruct(
    run: Run,
    step: Annotated[int, typer.Argument(metavar="STEP", min=0)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The safetensors file to write.")],
    root: Root = "runs",
) -> int:
    """Write one version as a safetensors file."""
    from flows.delta import reconstruct

    if not out.parent.is_dir():
        raise typer.BadParameter(f"{out.parent} is not a folder.", param_hint="--out")
    return reconstruct(root, run, step, out)


def _is_for_a_person(error: ValueError) -> bool:
    """This project raises ValueError for what a person wrote; one from a library is a fault, and shows where."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    module = innermost.tb_frame.f_globals["__name__"] if innermost is not None else ""
    return module.partition(".")[0] in PACKAGES


def _load(config: str, overrides: list[str] | None) -> RunConfig:
    """Prints the warnings; raises ConfigError, one line for each problem."""
    from infra.config import load
    from infra.config_rules import warnings

    cfg = load(config, overrides or ())
    for line in warnings(cfg):
        print(f"warning: {line}", file=sys.stderr)
    return cfg


def _embed_prefect(root: str, run: str) -> None:
    """Prefect's database and results lie beside the runs, unless the user's environment says where they are.

    Must come before Prefect is imported, which reads its settings once.
    """
    from infra.store import Store

    home = Store(root).local_path(".prefect") or Path.home() / ".k3rl" / "prefect"
    os.environ.setdefault("PREFECT_HOME", str(home))
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)  # its server opens a database there
    os.environ.setdefault("PREFECT_LOCAL_STORAGE_PATH", str(home / "results" / run))
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")  # errors are said once, by us, where they end a run


def _print_finding(finding: Finding) -> None:
    state = "ok" if finding.ok else "missing" if finding.required else "optional"
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    print(f"{state:9} {finding.name:12} {finding.detail}{remedy}")


def _version(text: str, argument: str) -> tuple[str, int | None]:
    """RUN@STEP, or RUN for its newest version."""
    run, at, step = text.partition("@")
    if not run or (at and not step.isdecimal()):
        raise typer.BadParameter(f"expected RUN@STEP or RUN, got {text!r}.", param_hint=argument)
    return run, int(step) if at else None


def _range(text: str | None) -> range | None:
    """STEP or FIRST-LAST, both included."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise typer.BadParameter(f"expected STEP or FIRST-LAST, got {text!r}.", param_hint="--steps")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise typer.BadParameter(f"{first} comes after {last}.", param_hint="--steps")
    return range(first, last + 1)


if __name__ == "__main__":
    sys.exit(main())
