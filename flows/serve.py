"""`k3 serve engine`: a policy behind the rollout engine's HTTP APIs."""

# Imports of the project stand inside, as in flows/cli.py, which adds this command.

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from infra.engine_server.settings import Made
    from infra.engine_server.weights import Opened

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

server = typer.Typer(help="Serve a policy over HTTP.", rich_markup_mode=None)


@server.callback()
def _several_commands() -> None:
    """Keeps `engine` a word of its own while it is the only one."""


@server.command()
def engine(
    run: Annotated[
        str | None, typer.Option(metavar="RUN[@STEP]", help="A version of this run; the served one without a step.")
    ] = None,
    model: Annotated[Path | None, typer.Option(metavar="FOLDER", help="A checkpoint with its tokenizer.")] = None,
    root: Annotated[str, typer.Option(help="Where runs are stored: a folder, file:// or s3://.")] = "runs",
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PLACE", help="A PEFT folder, or an adapter of a run; may be repeated."),
    ] = None,
    host: Annotated[str, typer.Option(help="Whoever reaches it may load weights; there are no keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[str, typer.Option(help="What clients call the policy.")] = "policy",
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", dir_okay=False, writable=True, help="Append every turn, token for token, as JSON lines."
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda[:N]", help="Where the engine computes.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(metavar="fp32|bf16", help="Of the weights; fp32 on the CPU, bf16 on a GPU.")
    ] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Turns that decode together.")] = 32,
    max_waiting: Annotated[int, typer.Option(min=0, help="Turns in line; the next one is told to come later.")] = 256,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and output; 4096, or what the run trains with.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a turn whose request names no number.")] = 1024,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="Chats think before they answer; as the run does.")
    ] = None,
    drain_s: Annotated[float, typer.Option(min=0.0, help="Running turns may go on after SIGTERM.")] = 30.0,
) -> int:
    """Serve a version of a run, or a checkpoint: OpenAI's API, and token-level ones. SIGTERM ends it with code 0."""
    if (run is None) == (model is None):
        raise typer.BadParameter("give one of them.", param_hint="--run, --model")
    if record is not None and not record.parent.is_dir():
        raise typer.BadParameter(f"{record.parent} is not a folder.", param_hint="--record")
    if ":" in name or not name:
        raise typer.BadParameter("needs at least one character, and no colon.", param_hint="--name")
    if re.fullmatch("cpu|cuda(:[0-9]+)?", device) is None:
        raise typer.BadParameter(f"expected cpu, cuda or cuda:N, got {device!r}.", param_hint="--device")
    if dtype not in (None, *DTYPES):
        raise typer.BadParameter(f"expected {' or '.join(DTYPES)}, got {dtype!r}.", param_hint="--dtype")
    adapters = dict(_named(text, name) for text in adapter or ())
    from infra.engine_server.server import serve
    from infra.engine_server.settings import ServerSettings
    from k3core.chat import chat_format

    opened = in_dtype(_open(run, model, root), dtype or ("fp32" if device == "cpu" else "bf16"))
    is_thinking = opened.thinking if thinking is None else thinking
    if is_thinking and not chat_format(opened.tokenizer).has_thinking:
        raise typer.BadParameter("the tokenizer's chat format has no think channel.", param_hint="--thinking")
    length = max_length or opened.max_length or 4096
    settings = ServerSettings(
        make_engine=lambda: _make(opened, adapters, max_running, length, device),
        tokenizer=opened.tokenizer,
        model=opened.model,
        max_length=length,
        model_name=name,
        host=host,
        port=port,
        max_running=max_running,
        max_waiting=max_waiting,
        default_max_tokens=max_tokens,
        thinking=is_thinking,
        drain_s=drain_s,
        record_path=record,
    )
    serve(settings, lambda url: print(f"{name} is {opened.name}, served at {url}", flush=True))
    return 0


def in_dtype(opened: Opened, dtype: str) -> Opened:
    import torch

    return replace(opened, model=replace(opened.model, dtype=getattr(torch, DTYPES[dtype])))


def _named(text: str, policy: str) -> tuple[str, str]:
    name, equals, place = text.partition("=")
    if not (name and equals and place) or ":" in name or name == policy:
        raise typer.BadParameter(
            f"expected NAME=PLACE with a name of its own and without a colon, got {text!r}.", param_hint="--adapter"
        )
    return name, place


def _open(run: str | None, model: Path | None, root: str) -> Opened:
    from infra.engine_server.weights import open_folder, open_run

    if model is not None:
        return open_folder(model)
    assert run is not None
    name, at, step = run.partition("@")
    if not name or (at and not step.isdecimal()):
        raise typer.BadParameter(f"expected RUN@STEP or RUN, got {run!r}.", param_hint="--run")
    return open_run(root, name, int(step) if at else None)


def _make(opened: Opened, adapters: dict[str, str], max_running: int, max_length: int, device: str) -> Made:
    """adapters: by name, where they lie."""
    from infra.engine_server.settings import Made
    from infra.engine_server.weights import in_type, read_adapter
    from k3core.chat import chat_format
    from k3core.rollout.engine import K3Engine

    cfg, stop_token = opened.model.cfg, chat_format(opened.tokenizer).stop_token
    made = K3Engine(
        *(cfg, stop_token, max_running, max_length),
        lora=opened.model.lora,
        tokenizer=opened.tokenizer,
        dtype=opened.model.dtype,
        device=device,
    )
    policy = in_type(opened.read(), opened.model.dtype)
    made.load(policy.step, policy.tensors, base_sha256=policy.weights_sha256)
    for name, place in adapters.items():
        adapter = read_adapter(place, cfg, policy.base_sha256)
        made.load_adapter(name, adapter.tensors, adapter.lora)
    return Made(made, policy.base_sha256)
