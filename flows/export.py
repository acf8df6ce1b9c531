"""A version leaves as a folder for other programs: written, listed, and how to load it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from flows.byte_bar import byte_bar
from flows.tables import print_table
from infra.doctor import size
from infra.export import Exported, Form, Wish, export_version
from infra.store import Store
from k3core.checkpoint.hf import ExpertForm

WEIGHTS = ".safetensors"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def as_wish(
    run: str, step: int | None, form: str | None, experts: str | None, like: Path | None, dtype: str | None
) -> Wish:
    """From the command line's words, which it has checked."""
    return Wish(
        run,
        step,
        cast(Form | None, form),
        cast(ExpertForm | None, experts),
        like,
        None if dtype is None else DTYPES[dtype],
    )


def run_export(root: str, wish: Wish, out: Path) -> int:
    with byte_bar("write", before="rebuild") as on_bytes:
        done = export_version(Store(root), wish, out, on_bytes)
    print_table(_table(done.files))
    for line in (_summary(done), *done.notes, *_commands(done)):
        print(line)
    return 0


def _table(files: Mapping[str, int]) -> Table:
    """Files of weights are one row."""
    shards = {name: num_bytes for name, num_bytes in files.items() if name.endswith(WEIGHTS)}
    rows = {name: num_bytes for name, num_bytes in files.items() if name not in shards}
    first, *others = shards
    heading = f"{first} and {len(others)} more" if others else first
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("file")
    table.add_column("size", justify="right")
    for name, num_bytes in {heading: sum(shards.values()), **rows}.items():
        table.add_row(Text(name), size(num_bytes))
    return table


def _summary(done: Exported) -> str:
    version = f"{done.version.run}@{done.version.step}"
    what = {"weights": "weights", "merged": "base with its adapter merged", "adapter": "adapter"}[done.form]
    said = f"{done.folder}: {version}, {what}, {done.num_tensors:,} tensors, {size(sum(done.files.values()))}"
    if done.like is not None:
        said += f", like {done.like}"
    if done.num_rounded:
        said += f"; {done.num_rounded:,} tensors were rounded to the type that they are stored in"
    return said


def _commands(done: Exported) -> list[str]:
    out, run = shlex.quote(str(done.folder)), done.version.run
    if done.form != "adapter":
        loads = [f"SGLang: python -m sglang.launch_server --model-path {out} --trust-remote-code"]
        if done.family == "kimi_linear":
            loads = [f"transformers: AutoModelForCausalLM.from_pretrained({str(done.folder)!r})", *loads]
        return loads
    base = "BASE" if done.base is None else str(done.base)
    loads = [
        f"SGLang: python -m sglang.launch_server --model-path {shlex.quote(base)} --trust-remote-code"
        f" --enable-lora --lora-paths {run}={out}"
    ]
    if done.family == "kimi_linear":
        model = f"AutoModelForCausalLM.from_pretrained({base!r})"
        loads = [f"peft: PeftModel.from_pretrained({model}, {str(done.folder)!r})", *loads]
    if done.base is None:
        loads = [f"its base is {run}@0: k3 export {run}@0 BASE", *loads]
    return loads
