"""What `k3 model check` and `k3 model init` do with a checkpoint's folder."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

from flows.byte_bar import byte_bar
from flows.model_source import find_model
from flows.quantities import amount, size
from k3core.checkpoint.hf import Checkpoint, open_checkpoint, save_checkpoint
from k3core.errors import IntegrityError
from k3core.model.config import MXFP4
from k3core.model.random_weights import random_tensors
from k3core.model.rules import model_problems
from k3core.model.sizes import num_parameters, stored_bytes

CHUNK_BYTES = 1 << 24


def check_checkpoint(folder: Path, digest: bool) -> int:
    """1 with every problem when the folder is not the checkpoint that its config.json describes."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    try:
        found = open_checkpoint(folder)
    except (ValueError, IntegrityError) as error:
        print(error)
        return 1
    if digest:
        _print_digests(found)
    model = found.model_tensors
    others = len(found.tensors) - len(model)
    print(
        f"{folder}: {found.layout}, {amount(num_parameters(found.cfg))} parameters: all {len(model):,} tensors are there "
        f"in {len(found.headers)} files, {size(found.total_bytes)}"
        + (f", {others} of them of the vision parts" if others else "")
    )
    return 0


def write_random(source: str, out: Path, seed: int, packed: bool) -> int:
    """Refuses, before the first byte, what the disk has no room for or what cannot be packed."""
    cfg = find_model(source).cfg
    cfg = replace(cfg, expert_quantization=MXFP4 if packed else None)
    if faults := [line for _, line in model_problems(cfg, str)]:
        raise ValueError("\n".join(f"{source}: {line}" for line in faults))
    needed, free = sum(stored_bytes(cfg).values()), shutil.disk_usage(_existing(out)).free
    if needed > free:
        raise ValueError(f"{source}: its weights take {size(needed)}, and the disk of {out} has {size(free)} left")
    with byte_bar("write") as on_bytes:
        written = save_checkpoint(
            out,
            cfg,
            random_tensors(cfg, seed),
            experts="mxfp4" if packed else "keep",
            progress=lambda done, of, _: on_bytes(done, of),
        )
    print(f"{out}: {amount(num_parameters(cfg))} random parameters, {len(written.files)} files, {size(written.bytes)}")
    return 0


def _existing(path: Path) -> Path:
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def _print_digests(found: Checkpoint) -> None:
    paths = [found.folder / file for file in sorted(found.headers)]
    total, done = sum(path.stat().st_size for path in paths), 0
    with byte_bar("read") as on_bytes:
        for path in paths:
            sha256 = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    sha256.update(chunk)
                    done += len(chunk)
                    on_bytes(done, total)
            print(f"{sha256.hexdigest()}  {path.name}", flush=True)
