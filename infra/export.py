"""A published version as a folder that other programs load: a checkpoint, or an adapter for one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from infra.config import RunConfig
from infra.doctor import size
from infra.host_weights import HostWeights
from infra.init_checkpoint import absence, folder_of
from infra.mapped_weights import map_weights
from infra.policies import read_version, stats
from infra.pruned import Pruned
from infra.scratch import scratch_folder
from infra.stages.context import Context
from infra.stages.init import changes_since
from infra.stages.prepare import find_inputs
from infra.store import Store
from infra.tokenizer_files import token_ids, tokenizer_files
from infra.version_chain import find_steps
from k3core.checkpoint.adapter import Adapter, model_matrices, save_adapter
from k3core.checkpoint.folder import CONFIG, INDEX, read_json_object
from k3core.checkpoint.hf import (
    GENERATION_CONFIG,
    MAX_COPIED_BYTES,
    WEIGHT_SUFFIXES,
    Checkpoint,
    ExpertForm,
    SaveSummary,
    open_checkpoint,
    save_checkpoint,
)
from k3core.checkpoint.merge import Merge, PackedExperts
from k3core.checkpoint.names import collapse
from k3core.checkpoint.new_folder import new_folder, refuse_taken, sync
from k3core.checkpoint.peft_targets import uncrossed_experts
from k3core.checkpoint.tensors import TORCH_DTYPES, to_torch
from k3core.model.hf_config import to_hf
from k3core.types import PolicyVersion

Form = Literal["weights", "adapter", "merged"]
OnBytes = Callable[[int, int], None]  # (written, of)
Weighted = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a person asked for. step None: the newest; form None: what the version holds; experts None: as they are.

    like: a checkpoint whose layout, types and small files the new folder takes over; None: that which the run started
    from, while it is there as it was. dtype None: bf16 for weights without a `like`, an adapter's own type.
    """

    run: str
    step: int | None = None
    form: Form | None = None
    experts: ExpertForm | None = None
    like: Path | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """files: name -> bytes. num_rounded: tensors of which a value was rounded to its stored type; 0 of an adapter.

    like: the folder whose layout was taken over. base: the folder that an adapter stands on, None where only the
    version `run`@0 is its base. notes: lines for a person.
    """

    folder: Path
    version: PolicyVersion
    form: Form
    family: str
    files: Mapping[str, int]
    num_tensors: int
    num_rounded: int
    like: Path | None
    base: Path | None
    notes: tuple[str, ...]


def export_version(store: Store, wish: Wish, out: Path, on_bytes: OnBytes) -> Exported:
    """Writes the folder `out`, whole or not at all.

    The version is rebuilt in a file beside `out`, every link verified, and goes from there tensor by tensor. Raises
    ValueError for a version that is not there or was pruned, for wishes that do not go together, and for a folder that
    is taken; IntegrityError when the store's bytes are not what was published.
    """
    refuse_taken(out)
    inputs = find_inputs(store, wish.run)
    if inputs is None:
        raise ValueError(f"run {wish.run!r} was never started in {store.root}; choose the folder with --root")
    context = Context.open(inputs, store.root)
    version = _version(store, wish)
    form = _form(version, wish)
    beside = Path(os.path.abspath(out)).parent
    _require_space(store, version, beside)
    try:
        with scratch_folder(beside, f".{out.name}-version-") as scratch:
            source = _Source(HostWeights(scratch, store), version)
            if form == "adapter":
                return _export_adapter(context, source, wish, out)
            return _export_weights(context, source, form, wish, out, on_bytes)
    except Pruned as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Source:
    """The tensors of a version, from files that are mapped."""

    host: HostWeights
    version: PolicyVersion

    def base(self) -> Weighted:
        version = self.version
        if version.kind == "adapter":
            below = read_version(self.host.store, version.run, 0)
            if below is None:
                raise ValueError(
                    f"{version.weights.uri}: an adapter, but step 0 of run {version.run!r} is not published"
                )
            version = below
        mapped = map_weights(self.host.at(version))
        return ((name, to_torch({name: raw})[name]) for name, raw in mapped.items())

    def adapter(self) -> dict[str, Tensor]:
        return to_torch(map_weights(self.host.at(self.version)))


def _export_adapter(context: Context, source: _Source, wish: Wish, out: Path) -> Exported:
    cfg, version = context.cfg, source.version
    lora = cfg.train.lora
    assert lora is not None, "adapters come from mode lora"
    base = _base_folder(cfg)
    tensors = source.adapter()
    save_adapter(out, cfg.model, Adapter(lora, tensors, "" if base is None else str(base)), wish.dtype)
    notes = []
    if lost := collapse(uncrossed_experts(cfg.model, lora, model_matrices(cfg.model))):
        notes.append(f"peft has no place for {', '.join(lost)} and leaves them out without a word: use --merged there")
    return Exported(
        out, version, "adapter", cfg.model.family, _sizes(out), len(tensors), 0, None, base, tuple(notes)
    )  # fmt: skip


def _base_folder(cfg: RunConfig) -> Path | None:
    """The checkpoint whose weights are those of step 0: none once supervised steps have moved them."""
    init = cfg.warm_start.init
    return None if init is None or cfg.warm_start.steps > 0 else Path(os.path.abspath(folder_of(init)))


def _export_weights(
    context: Context, source: _Source, form: Form, wish: Wish, out: Path, on_bytes: OnBytes
) -> Exported:
    cfg = context.cfg
    like, notes = _like(context, wish)
    is_like = like is not None and wish.dtype is None
    experts = wish.experts or "keep"
    dtype = wish.dtype or torch.bfloat16
    weights: Weighted | Merge = source.base()
    if form == "merged":
        assert cfg.train.lora is not None, "adapters come from mode lora"
        packs: PackedExperts = "bf16" if experts == "bf16" or cfg.model.expert_quantization is None else "mxfp4"
        base = _as_stored(source.base(), like if is_like else None, dtype)
        weights = Merge(base, Adapter(cfg.train.lora, source.adapter()), packs)

    def save(folder: Path) -> SaveSummary:
        return save_checkpoint(
            folder,
            cfg.model,
            iter(weights),
            like=like if is_like else None,
            experts=experts,
            dtype=dtype,
            progress=lambda done, of, _: on_bytes(done, of),
        )

    summary = save(out) if is_like else _save_dressed(context, save, None if like is None else like.folder, dtype, out)
    if is_like and summary.left_out:
        notes.append(f"not copied, for their size or kind: {', '.join(summary.left_out)}")
    if isinstance(weights, Merge):
        notes += weights.report().lines()
    return Exported(
        out,
        source.version,
        form,
        cfg.model.family,
        _sizes(out),
        summary.num_tensors,
        summary.num_rounded,
        like.folder if like is not None and is_like else None,
        None,
        tuple(notes),
    )


def _as_stored(base: Weighted, like: Checkpoint | None, dtype: torch.dtype) -> Weighted:
    """In the type of the file where that changes no value, as of a base that was widened to be trained above: a sum is
    then rounded once, to that type, and the merge's report says what it cost."""
    for name, weight in base:
        at = None if like is None else like.tensors.get(name)
        wanted = dtype if at is None else TORCH_DTYPES[at.entry.dtype]
        narrow = weight.to(wanted) if weight.is_floating_point() and wanted.is_floating_point else weight
        yield name, narrow if torch.equal(narrow.to(weight.dtype), weight) else weight


def _save_dressed(
    context: Context, save: Callable[[Path], SaveSummary], source: Path | None, dtype: torch.dtype, out: Path
) -> SaveSummary:
    """In the family's own layout, with the small files of `source`, else with the run's tokenizer."""
    with new_folder(out) as partial:
        summary = save(partial / "checkpoint")
        for path in sorted((partial / "checkpoint").iterdir()):
            path.rename(partial / path.name)
        (partial / "checkpoint").rmdir()
        document = read_json_object(partial / CONFIG)
        files = _own_files(context, document) if source is None else _files_of(context, source, dtype)
        for name, data in files.items():
            (partial / name).write_bytes(data)
            sync(partial / name)
    return summary


def _own_files(context: Context, document: dict[str, Any]) -> dict[str, bytes]:
    """The run's tokenizer, and the documents that name its control tokens. document: config.json as it was written."""
    tokenizer = context.tokenizer()
    ids = {f"{role}_token_id": token_id for role, token_id in token_ids(tokenizer).items()}
    for part in _parts(document):
        part.update(ids)
    return tokenizer_files(tokenizer) | {CONFIG: _pretty(document), GENERATION_CONFIG: _pretty(ids)}


def _files_of(context: Context, source: Path, dtype: torch.dtype) -> dict[str, bytes]:
    """What lies beside a checkpoint's weights, and its config.json with what is another now."""
    small = {
        path.name: path
        for path in sorted(source.iterdir())
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES) and path.name not in (CONFIG, INDEX)
    }
    files = {name: path.read_bytes() for name, path in small.items() if path.stat().st_size <= MAX_COPIED_BYTES}
    document = to_hf(context.cfg.model, like=read_json_object(source / CONFIG))
    for part in _parts(document):
        part.update({key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in part})
    return files | {CONFIG: _pretty(document)}


def _parts(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The wrapper and its text part, where there is one."""
    return [part for part in (document, document.get("text_config")) if isinstance(part, dict)]


def _like(context: Context, wish: Wish) -> tuple[Checkpoint | None, list[str]]:
    """What to take after, and what to say of it."""
    if wish.like is not None:
        return open_checkpoint(wish.like), []
    init = context.cfg.warm_start.init
    if init is None:
        return None, []
    instead = "written in the family's own layout, with the run's tokenizer"
    if (missing := absence(init)) is not None:
        return None, [f"{missing.detail}: {instead}"]
    if changed := changes_since(context.store, context.cfg, context.inputs):
        return None, [f"{line} since the run started: {instead}" for line in changed]
    return open_checkpoint(folder_of(init)), []


def _version(store: Store, wish: Wish) -> PolicyVersion:
    step = wish.step
    if step is None:
        steps = find_steps(store, wish.run)
        if not steps:
            raise ValueError(f"{wish.run}: nothing is published in {store.root} yet")
        step = steps[-1]
    version = read_version(store, wish.run, step)
    if version is None:
        raise ValueError(
            f"{wish.run} has no version {step} in {store.root}; `k3 delta stats {wish.run}` shows what it has"
        )
    return version


def _form(version: PolicyVersion, wish: Wish) -> Form:
    name = f"{version.run}@{version.step}"
    if wish.form is not None and version.kind != "adapter":
        raise ValueError(f"--{wish.form}: {name} holds whole weights and no adapter; leave it out")
    form: Form = wish.form or ("adapter" if version.kind == "adapter" else "weights")
    if form == "adapter":
        for flag, value in (("--experts", wish.experts), ("--like", wish.like)):
            if value is not None:
                raise ValueError(f"{flag}: {name} is exported as an adapter, which has no such thing; add --merged")
    if wish.like is not None and wish.dtype is not None:
        raise ValueError("--like and --dtype: the types are those of the folder that it is to be like; leave one out")
    return form


def _require_space(store: Store, version: PolicyVersion, beside: Path) -> None:
    found = stats(store, version.run, [version.step, 0])
    needed = sum(
        found[step].bytes_full for step in ({version.step, 0} if version.kind == "adapter" else {version.step})
    )
    nearest = next(folder for folder in (beside, *beside.parents) if folder.is_dir())
    free = shutil.disk_usage(nearest).free
    if free < needed:
        raise ValueError(
            f"{beside}: rebuilding the version takes {size(needed)} there beside the export, {size(free)} are free"
        )


def _sizes(folder: Path) -> dict[str, int]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths}


def _pretty(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
