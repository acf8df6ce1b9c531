"""`k3 plan`, for the command line."""

# Imports of the project stand inside, as in flows/cli.py, which adds this command.

from __future__ import annotations

from typing import Annotated, Literal

import typer

Mode = Literal["lora", "full"]


def plan(
    model: Annotated[str, typer.Option(metavar="PRESET|PATH", help="tiny, kimi-linear-48b-a3b, kimi-k3; or a folder.")],
    gpus: Annotated[int, typer.Option(min=1, help="How many, of all nodes together.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the longest sequence.")] = 16384,
    train: Annotated[str, typer.Option(metavar="lora|full", help="An adapter, or all weights.")] = "lora",
    mesh: Annotated[
        str | None, typer.Option(metavar="AXIS=N,...", help="fsdp, ep, cp, tp: fsdp over all GPUs without it.")
    ] = None,
    gpu_memory: Annotated[str, typer.Option(metavar="h100|h200|b200|BYTES", help="Of one GPU.")] = "h200",
    rank: Annotated[int, typer.Option(min=1, help="Of the adapter.")] = 64,
    targets: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Modules with an adapter; attention without it.")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Packed into one pass of each data rank; one sequence without it.")
    ] = None,
    rollout_sequences: Annotated[int, typer.Option(min=0, help="Decoded at once on these GPUs, in turn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> int:
    """Say what a training step takes of each GPU, what fits, what to cut first, and the longest context that fits."""
    from flows.plan_report import report

    if train not in ("lora", "full"):
        raise typer.BadParameter(f"expected lora or full, got {train!r}.", param_hint="--train")
    mode: Mode = "lora" if train == "lora" else "full"
    return report(model, gpus, context, mode, mesh, gpu_memory, rank, targets, batch_tokens, rollout_sequences, as_json)
