"""The command line. Exit codes: 0 done, 1 it failed or found something wrong, 2 what was asked makes no sense."""

# Imports of the project stand inside the commands, against the rule of the project: torch, Prefect and MLflow take
# ten seconds, and `k3 --help` must not wait for a run.

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.model import model
from flows.plan import plan
from flows.serve import server
from flows.up import add_commands
from k3core.errors import IntegrityError, RunError

if TYPE_CHECKING:
    from infra.config import RunConfig
    from infra.doctor import Finding

PACKAGES = ("flows", "tasks", "infra", "k3core", "k3kernels")

# Of what runs below a command; a value that is already set wins.
ENVIRONMENT = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "OMP_NUM_THREADS": "1",  # the tiny model is slower with two threads than with one
}

# Short runs, so that many can be disturbed; what a lost process costs is tried again more often than usual.
CHAOS_DEFAULTS = ("steps=2", "control.enabled=false", "evaluate.every=2", "warm_start.steps=60", "tasks.retries=4")

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
bench = typer.Typer(help="Measure on this machine, into JSON files.", rich_markup_mode=None)
app.add_typer(bench, name="bench")
app.add_typer(model, name="model")
app.add_typer(server, name="serve")
app.command()(plan)
add_commands(app)

Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A TOML file, or the name of a shipped config: tiny, smoke, ...")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change: gspo.clip_low=0.02")
]
Version = Annotated[str, typer.Argument(metavar="RUN[@STEP]", help="A version; the run's newest without a step.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]
Root = Annotated[str, typer.Option(help="Where runs are stored: a folder, file:// or s3://.")]
Versions = Annotated[list[str], typer.Argument(metavar="RUN@STEP... [KEY=VALUE...]", help="Steps, and new settings.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="The same, as an option.")]
NewName = Annotated[str | None, typer.Option("--as", metavar="NAME", help="Of the new run; else RUN-rescore-1, ...")]
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
    from flows.dry_run import print_plan, under_a_free_name
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

    _embed_prefect(cfg.root, cfg.run, alone=True)
    print(f"{cfg.run}: into {cfg.root.rstrip('/')}/{cfg.run}", flush=True)
    from flows.rl import run_training

    return run_training(cfg)


@app.command()
def submit(config: Config, overrides: Overrides = None) -> int:
    """Start the run on the work pools of PREFECT_API_URL; the same command continues it."""
    if not os.environ.get("PREFECT_API_URL"):
        raise typer.BadParameter(
            "no server: `make up` starts one, `k3 env` prints its address.", param_hint="PREFECT_API_URL"
        )
    cfg = _load(config, overrides)
    from flows.submit import run_submit

    return run_submit(cfg)


@app.command()
def chaos(
    config: Config = "smoke",
    overrides: Overrides = None,
    faults: Annotated[int, typer.Option(min=0, help="How many, of all kinds in turn.")] = 60,
    per_run: Annotated[int, typer.Option(min=1, help="Faults that happen to one run.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the kinds, targets and times.")] = 0,
    folder: Annotated[Path, typer.Option("--dir", metavar="FOLDER", help="For servers and runs.")] = Path(".k3-chaos"),
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="A JSON file with all that happened.")] = None,
) -> int:
    """Run whole tiny runs on real servers under random faults, and check that nothing is lost or done twice."""
    from flows.chaos.world import client_environment, prepare

    cfg = _load(config, [*CHAOS_DEFAULTS, *(overrides or ())])
    world = prepare(folder.absolute())
    os.environ.update(client_environment(world))
    from flows.chaos.run import run_chaos

    return run_chaos(world, cfg, faults, per_run, seed, out)


@app.command()
def sweep(
    config: Config,
    overrides: Overrides = None,
    grid: Annotated[list[str] | None, typer.Option(metavar="KEY=A,B,...", help="What varies; may be repeated.")] = None,
    parallel: Annotated[int | None, typer.Option(min=1, help="Runs at a time; 1 here, all on work pools.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Of the sweep; else the config's run.")] = None,
) -> int:
    """Train a config at every point of a grid of settings; show which did best. The same command continues it."""
    from infra.config_rules import warnings
    from infra.sweep import parse_grid, points

    made = points(config, overrides or (), parse_grid(grid or ()), name)
    for line in dict.fromkeys(line for point in made for line in warnings(point.cfg)):
        print(f"warning: {line}", file=sys.stderr)
    from flows.sweep import run_sweep

    return run_sweep(config, made, parallel)


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
def explain(
    version: Version,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    depth: Annotated[int, typer.Option(min=0, help="How many versions to show in full.")] = 3,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Read every file and compare its digest.")] = True,
    root: Root = "runs",
) -> int:
    """Show what a version comes from, down to the warm start, and whether all of it is still there."""
    run, step = _version(version, "VERSION")
    from flows.explain import run_explain

    return run_explain(root, run, step, depth, check, as_json)


@app.command()
def export(
    version: Version,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; must not exist or be empty.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter alone: the default in mode lora.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="The base with the adapter merged into it.")] = False,
    experts: Annotated[
        str | None, typer.Option(metavar="keep|bf16|mxfp4", help="Form of the routed experts; as the run has them.")
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Whose layout to take over; what the run started from, when left out."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="bf16|fp32", help="Stored type, in the family's own layout.")
    ] = None,
    root: Root = "runs",
) -> int:
    """Write a version as a folder that transformers, SGLang or vLLM load: a checkpoint, or a PEFT adapter."""
    run, step = _version(version, "VERSION")
    if adapter and merged:
        raise typer.BadParameter(
            "one of them: an adapter, or what it makes of the base.", param_hint="--adapter, --merged"
        )
    for flag, value, known in (("--experts", experts, "keep bf16 mxfp4"), ("--dtype", dtype, "bf16 fp32")):
        if value is not None and value not in known.split():
            raise typer.BadParameter(f"expected {known.replace(' ', ' or ')}, got {value!r}.", param_hint=flag)
    from flows.export import as_wish, run_export

    form = "adapter" if adapter else "merged" if merged else None
    return run_export(root, as_wish(run, step, form, experts, like, dtype), out)


@app.command()
def rescore(words: Versions, settings: Settings = None, name: NewName = None, root: Root = "runs") -> int:
    """Grade stored trajectories again with other rewards, as a run of its own; show what changed."""
    versions, changes = _versions(words, settings)
    _embed_prefect(root, versions[-1][0])
    from flows.redo import run_rescore

    return run_rescore(root, versions, changes, name)


@app.command()
def retrain(words: Versions, settings: Settings = None, name: NewName = None, root: Root = "runs") -> int:
    """Do one update again from its stored trajectories with other settings, as a run of its own; compare the two."""
    versions, changes = _versions(words, settings)
    if len(versions) > 1:
        raise typer.BadParameter(f"one version at a time, got {len(versions)}.", param_hint="RUN@STEP")
    _embed_prefect(root, versions[0][0])
    from flows.redo import run_retrain

    return run_retrain(root, *versions[0], changes, name)


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


@app.command()
def parity(
    preset: Annotated[str, typer.Option(metavar="PRESET|PATH", help="A model: a preset, or a config.json.")] = "tiny",
    dtype: Annotated[
        list[str] | None, typer.Option(metavar="fp32|bf16", help="Of the weights; may be repeated. Both when left out.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where both compute.")] = "cpu",
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="The figures, into this file.")] = None,
) -> int:
    """Compare an engine with a trainer bit by bit, in every way that the engine computes a token. Code 1 if any differs."""
    for flag, values, known in (("--dtype", dtype or [], "fp32 bf16"), ("--device", [device], "cpu cuda")):
        for value in values:
            if value not in known.split():
                raise typer.BadParameter(f"expected {known.replace(' ', ' or ')}, got {value!r}.", param_hint=flag)
    from flows.parity import run_parity

    return run_parity(preset, list(dict.fromkeys(dtype or ["fp32", "bf16"])), device, out)


@delta.command("verify")
def delta_verify(run: Run, root: Root = "runs", steps: Steps = None) -> int:
    """Rebuild versions from their bases and deltas, and compare every byte with what was published."""
    from flows.delta import verify_versions

    return verify_versions(root, run, _range(steps))


@delta.command("stats")
def delta_stats(
    run: Run,
    root: Root = "runs",
    steps: Steps = None,
    floor: Annotated[bool, typer.Option("--floor", help="Also the entropy of each delta; loads the weights.")] = False,
) -> int:
    """Show the size of each version, what rebuilds it, and how much of the weights changed."""
    from flows.delta import print_stats

    return print_stats(root, run, _range(steps), floor)


@delta.command("diff")
def delta_diff(
    run: Run,
    a: Annotated[int, typer.Argument(metavar="A", min=0, help="A step.")],
    b: Annotated[int, typer.Argument(metavar="B", min=0, help="Another.")],
    root: Root = "runs",
    top: Annotated[int, typer.Option(min=1, help="How many tensors to show.")] = 20,
) -> int:
    """Compare two versions tensor by tensor, the largest difference first."""
    from flows.delta import print_difference

    return print_difference(root, run, a, b, top)


@delta.command("compact")
def delta_compact(
    run: Run,
    step: Annotated[int | None, typer.Argument(metavar="[STEP]", min=0, help="The served one when left out.")] = None,
    root: Root = "runs",
) -> int:
    """Write a whole copy of a version that is a delta, so that nothing before it is needed. It stays what it was."""
    from flows.delta import compact

    return compact(root, run, step)


@delta.command("gc")
def delta_gc(
    run: Run,
    root: Root = "runs",
    keep_last: Annotated[int, typer.Option(min=1, help="How many of the newest versions stay in any case.")] = 2,
    keep_step: Annotated[list[int] | None, typer.Option(help="A further version that stays; may be repeated.")] = None,
    trajectories: Annotated[
        bool, typer.Option("--trajectories", help="Those of finished steps go too: the scored groups hold them.")
    ] = False,
    mlflow: Annotated[
        str | None, typer.Option(metavar="URI", help="Whose champion and candidate stay; 'none' without MLflow.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, only show what may go.")] = False,
) -> int:
    """Delete the files that no version in use needs."""
    from flows.collect import collect_garbage
    from infra.gc import Keep

    keep = Keep(last=keep_last, steps=frozenset(keep_step or ()), trajectories=not trajectories)
    return collect_garbage(root, run, keep, mlflow, yes)


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


@bench.command("delta")
def bench_delta(
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Sizes: the published versions of this run.")] = None,
    root: Root = "runs",
    dtype: Annotated[
        str, typer.Option(metavar="bf16|mxfp4|stored", help="What engines are sent; mxfp4: routed experts packed.")
    ] = "bf16",
    experts_only: Annotated[bool, typer.Option("--experts-only", help="Of the routed experts' tensors alone.")] = False,
    full_every: Annotated[int, typer.Option(min=1, help="Steps from one whole version to the next.")] = 25,
    synthetic: Annotated[
        float | None, typer.Option(metavar="GIB", min=0.001, help="Speed on one core instead.")
    ] = None,
    lr: Annotated[float, typer.Option(min=0.0, help="Of the synthetic update.")] = 1e-6,
    repeats: Annotated[int, typer.Option(min=1, help="Of each timing.")] = 7,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For the JSON and the plot.")] = Path("bench"),
) -> int:
    """What deltas take: their size on a real run, or their speed on synthetic weights."""
    if (run is None) == (synthetic is None):
        raise typer.BadParameter("give one of them.", param_hint="--run, --synthetic")
    if run is not None:
        from flows.bench_delta import measure_run

        return measure_run(root, run, dtype, full_every, out, experts_only)
    from flows.bench_delta_speed import measure_speed

    assert synthetic is not None
    return measure_speed(synthetic, lr, repeats, out)


@bench.command("logprob")
def bench_logprob(
    tokens: Annotated[int, typer.Option(min=2, help="Of the batch.")] = 32_768,
    vocab: Annotated[int, typer.Option(min=2, help="Words of the head.")] = 163_840,
    trained: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the tokens.")] = 0.05,
    width: Annotated[int, typer.Option(min=1, help="Of the hidden states.")] = 2304,
    dtype: Annotated[str, typer.Option(metavar="bf16|fp32", help="Of hidden states and head.")] = "bf16",
    whole: Annotated[
        bool, typer.Option("--whole/--no-whole", help="Compare with whole logits, which take far more memory.")
    ] = True,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For the JSON.")] = Path("bench"),
) -> int:
    """What the logprobs of a batch take in memory: in blocks, and over whole logits."""
    from flows.bench_logprob import Batch, measure_logprob

    return measure_logprob(Batch(tokens, vocab, width, trained, dtype), whole, out)


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


def _embed_prefect(root: str, run: str, *, alone: bool = False) -> None:
    """A Prefect server for this process: the user's own, or the one that all who work beside the same runs share.

    Its database and the tasks' results lie beside the runs, unless the user's environment says where they are.
    alone: raise ValueError when another process trains this run now. Must come before Prefect reads its settings.
    """
    from rich.console import Console

    from infra.embedded import join
    from infra.run_lock import hold_run
    from infra.store import Store

    home = Path(os.environ.get("PREFECT_HOME") or Store(root).local_path(".prefect") or "~/.k3rl/prefect").expanduser()
    os.environ["PREFECT_HOME"] = str(home)
    if alone:
        hold_run(root, run, home)
    os.environ.setdefault("PREFECT_LOCAL_STORAGE_PATH", str(home / "results" / run))
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")  # errors are said once, by us, where they end a run
    logging.getLogger("websockets").setLevel(logging.CRITICAL)  # a server that went away: Prefect connects again

    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings

    if get_current_settings().api.url is not None:
        return
    server = join(home)
    os.environ["PREFECT_API_URL"], os.environ["K3_EMBEDDED_SERVER"] = server.api_url, "1"
    refresh_global_settings_context()
    print(f"Prefect: {server.ui_url}/runs, as long as a command runs here", flush=True)
    with Console(stderr=True).status("the Prefect server starts"):
        import flows.stages  # noqa: F401  # torch and MLflow, while the server starts

        server.wait_until_ready()
    if alone:
        from flows.abandoned import crash_abandoned

        crash_abandoned(root, run)


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


def _versions(words: list[str], settings: list[str] | None) -> tuple[list[tuple[str, int | None]], list[str]]:
    """Versions and settings may stand in any order: `smoke@2 reward.all_pass_weight=0.5`."""
    versions = [_version(word, "RUN@STEP") for word in words if "=" not in word]
    if not versions:
        raise typer.BadParameter("name a version.", param_hint="RUN@STEP")
    return versions, [word for word in words if "=" in word] + (settings or [])


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
