"""`k3 model info | check | init | merge`, for the command line."""

# Imports of the project stand inside, as in flows/cli.py, which adds these commands.

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

model = typer.Typer(help="Model configs and checkpoints: sizes, faults, random ones.", rich_markup_mode=None)

Model = Annotated[
    str, typer.Argument(metavar="PRESET|PATH", help="tiny, kimi-linear-48b-a3b, kimi-k3; a config.json, or its folder.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Everything, as JSON.")]


@model.command()
def info(source: Model, as_json: AsJson = False) -> int:
    """Show a model's layers, parameters, bytes and state; of a folder with weights, what is on disk as well."""
    from flows.model_info import print_info

    return print_info(source, as_json)


@model.command()
def check(
    folder: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint's folder.")],
    digest: Annotated[bool, typer.Option("--digest", help="Read every file, and print its SHA-256.")] = False,
) -> int:
    """Hold a checkpoint's files against its config: every tensor, shape and type. Code 1 when something is wrong."""
    from flows.model_check import check_checkpoint

    return check_checkpoint(folder, digest)


@model.command()
def init(
    source: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; must not exist.")],
    seed: Annotated[int, typer.Option(min=0, help="Of the weights.")],
    packed: Annotated[bool, typer.Option("--packed", help="Routed experts in MXFP4.")] = False,
) -> int:
    """Write a checkpoint of random weights in the family's form, without a tokenizer."""
    from flows.model_check import write_random

    return write_random(source, out, seed, packed)


@model.command()
def merge(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="A checkpoint's folder.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A PEFT folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; must not exist or be empty.")],
    experts: Annotated[
        str, typer.Option(metavar="bf16|mxfp4", help="Form of the routed experts, where the base's are packed.")
    ] = "bf16",
) -> int:
    """Add a PEFT adapter to a checkpoint, W + scale B A, rounded once. Says how much was merged and what rounding took."""
    from flows.model_merge import merge_folders

    return merge_folders(base, adapter, out, experts)
