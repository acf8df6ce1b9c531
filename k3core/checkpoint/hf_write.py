"""Tensors into a new checkpoint folder, one at a time, each straight to its place in its file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from k3core.checkpoint.folder import INDEX, Checkpoint, open_checkpoint
from k3core.checkpoint.hf_plan import Plan, Slot, plan_like, plan_new
from k3core.checkpoint.hf_read import Progress, check_for, fresh_tensor
from k3core.checkpoint.names import (
    PACKED,
    SCALE,
    Shape,
    collapse,
    expected_shapes,
    expert_matrix,
    is_foreign,
    is_packed,
)
from k3core.checkpoint.new_folder import new_folder, refuse_taken, sync
from k3core.checkpoint.safetensors_io import CHUNK_BYTES, DTYPES, WORDS, TensorReader, write_bytes, write_tensor
from k3core.model.config import MXFP4, K3Config
from k3core.model.hf_config import Layout
from k3kernels.mxfp4 import pack, repack, unpack

GIVEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

ExpertForm = Literal["keep", "bf16", "mxfp4"]

MAX_COPIED_BYTES = 100_000_000
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True, slots=True)
class SaveSummary:
    """files: written, by name. bytes: of all of them. num_rounded: tensors of which a stored value differs from the
    given one. copied: small files from `like`; left_out: its files that were not, for their size or kind."""

    folder: Path
    files: tuple[str, ...]
    bytes: int
    num_tensors: int
    num_rounded: int
    copied: tuple[str, ...]
    left_out: tuple[str, ...]


def save_checkpoint(
    folder: Path | str,
    cfg: K3Config,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    like: Path | str | Checkpoint | None = None,
    experts: ExpertForm = "keep",
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = 5 * 10**9,
    layout: Layout | None = None,
    check_finite: bool = True,
    progress: Progress | None = None,
) -> SaveSummary:
    """A folder that transformers and SGLang load: shards, index, config.json.

    tensors: by internal name, in any order; all of cfg's, none else. No more than one tensor is held at a time; of
    packed experts that are to be unpacked, both halves. Each is rounded to nearest even where its stored type is
    narrower; what a model keeps in fp32 is stored so.
    like: a folder whose files, order, types, spellings, header metadata and small files the new one takes over, its
    vision tensors included: what did not change comes out byte for byte. It decides over dtype and layout; shard_bytes
    counts only where experts change their form.
    experts: "keep" writes them as cfg says; "bf16" unpacked, without a quantization block; "mxfp4" packed, where a group
    of values equal to that in `like` keeps its bytes.
    layout: "kimi_k3_text" writes K3 without the wrapper, for SGLang's text class; otherwise the family's.

    The same arguments give the same bytes. The folder appears whole or not at all. Raises ValueError for a target that
    is taken, too little space, tensors that do not fit cfg, and numbers that are not finite (unless check_finite is
    off; a NaN scale always), and what `open_checkpoint` raises of `like`.
    """
    folder = Path(folder)
    refuse_taken(folder)
    like = open_checkpoint(like) if isinstance(like, Path | str) else like
    cfg, plan = _plan(cfg, like, experts, dtype, shard_bytes, layout)
    given = _given_shapes(cfg, experts)
    if isinstance(tensors, Mapping):
        _require_all(tensors, given, plan)
    _require_space(folder, plan)
    with new_folder(folder) as partial:
        writer = _Writer(folder, partial, plan, like, given, experts, check_finite)
        with _one_line(folder):
            writer.make_files()
        total = sum(slot.entry.num_bytes for slot in plan.slots.values())
        for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
            writer.add(name, tensor)
            if progress is not None:
                progress(writer.num_bytes, total, name)
        writer.require_complete()
        with _one_line(folder):
            copied, left_out = _copy_small_files(partial, plan, like)
            writer.finish()
            files = sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file())
            num_bytes = sum((partial / file).stat().st_size for file in files)
    return SaveSummary(folder, tuple(files), num_bytes, len(plan.slots), writer.num_rounded, copied, left_out)


def _plan(
    cfg: K3Config,
    like: Checkpoint | None,
    experts: ExpertForm,
    dtype: torch.dtype,
    shard_bytes: int,
    layout: Layout | None,
) -> tuple[K3Config, Plan]:
    if experts not in ("keep", "bf16", "mxfp4"):
        raise ValueError(f"experts {experts!r}: expected keep, bf16 or mxfp4")
    if dtype not in WORDS or not dtype.is_floating_point:
        raise ValueError(f"dtype {dtype}: a checkpoint holds bfloat16, float16 or float32")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes {shard_bytes}: must be at least 1")
    if experts != "keep":
        cfg = replace(cfg, expert_quantization=MXFP4 if experts == "mxfp4" else None)
    expert_dtype = torch.bfloat16 if experts == "bf16" else dtype
    if like is None:
        return cfg, plan_new(cfg, layout or cfg.family, dtype, expert_dtype, shard_bytes)
    if layout is not None and layout != like.layout:
        raise ValueError(
            f"layout {layout}: like {like.folder} has layout {like.layout}, which the new folder takes over"
        )
    return cfg, plan_like(cfg, like, expert_dtype, shard_bytes)


def _given_shapes(cfg: K3Config, experts: ExpertForm) -> dict[str, Shape]:
    """Of every tensor that may be given: both forms of the experts, where one becomes the other."""
    shapes = expected_shapes(cfg)
    if experts == "bf16":
        try:
            shapes |= expected_shapes(replace(cfg, expert_quantization=MXFP4))
        except ValueError:  # a width that was never packed
            return shapes
    if experts == "mxfp4":
        shapes |= expected_shapes(replace(cfg, expert_quantization=None))
    return shapes


def _require_all(tensors: Mapping[str, Tensor], given: Mapping[str, Shape], plan: Plan) -> None:
    problems = [line for name, tensor in tensors.items() if (line := _problem(name, tensor, given)) is not None]
    names = set(tensors)
    missing = [name for name in plan.slots if not is_foreign(name) and not _sources(name, names)]
    problems = collapse([*problems, *(f"missing {name}" for name in missing)])
    if problems:
        raise ValueError("tensors do not fit the model:\n" + "\n".join(f"  {line}" for line in problems))


def _sources(name: str, names: set[str]) -> bool:
    """Whether stored tensor `name` can be made of what is given."""
    matrix = expert_matrix(name)
    if name in names or matrix is None:
        return name in names
    if is_packed(name):
        return f"{matrix}.weight" in names
    return f"{matrix}{PACKED}" in names and f"{matrix}{SCALE}" in names


def _problem(name: str, tensor: Tensor, given: Mapping[str, Shape]) -> str | None:
    shape = given.get(name)
    if shape is None:
        remedy = ""
        if name.endswith((".lora_A", ".lora_B")):
            remedy = ": an adapter's; merge it into the weights first, or save it as an adapter"
        elif expert_matrix(name) is not None:
            remedy = ': experts in another form than cfg.expert_quantization says; choose experts="bf16" or "mxfp4"'
        return f"unexpected {name}{remedy}"
    is_of_kind = tensor.dtype == torch.uint8 if is_packed(name) else tensor.dtype in GIVEN_DTYPES
    if tuple(tensor.shape) == shape and is_of_kind:
        return None
    kind = "uint8" if is_packed(name) else "bfloat16, float16, float32 or float64"
    return f"{name}: {tensor.dtype} {list(tensor.shape)} in place of {kind} {list(shape)}"


def _require_space(folder: Path, plan: Plan) -> None:
    place = folder.resolve().parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < plan.total_bytes:
        raise ValueError(f"{folder}: needs {plan.total_bytes} bytes, {place} has {free} left")


class _Writer:
    """Puts each given tensor into its slots, converted; knows what is still missing."""

    def __init__(
        self,
        folder: Path,
        partial: Path,
        plan: Plan,
        like: Checkpoint | None,
        given: Mapping[str, Shape],
        experts: ExpertForm,
        check_finite: bool,
    ) -> None:
        self.folder, self.partial, self.plan, self.like = folder, partial, plan, like
        self.given, self.check_finite = given, check_finite
        self.num_rounded, self.num_bytes = 0, 0
        self._halves: dict[str, Tensor] = {}
        self._missing = dict.fromkeys(name for name in plan.slots if not is_foreign(name))
        keeps_bytes = experts == "mxfp4" and like is not None and like.cfg.expert_quantization == MXFP4
        self._old = like if keeps_bytes else None

    def make_files(self) -> None:
        """Headers, room for the tensors, and the vision parts' tensors."""
        for file, header in self.plan.headers.items():
            with open(self.partial / file, "wb") as opened:
                opened.write(header)
                opened.truncate(self.plan.sizes[file])
        if self.like is None:
            return
        with TensorReader(self.like.folder) as reader:
            for name, slot in self.plan.slots.items():
                if not is_foreign(name):
                    continue
                source = self.like.tensors[name]
                with self._file(slot) as fd:
                    for start in range(0, slot.entry.num_bytes, CHUNK_BYTES):
                        size = min(CHUNK_BYTES, slot.entry.num_bytes - start)
                        data = reader.raw(source.file, name, source.entry.offset + start, size)
                        write_bytes(fd, data, slot.entry.offset + start)
                self.num_bytes += slot.entry.num_bytes

    def add(self, name: str, tensor: Tensor) -> None:
        if (problem := _problem(name, tensor, self.given)) is not None:
            raise ValueError(problem)
        matrix = expert_matrix(name)
        if name in self.plan.slots:
            self._write(name, tensor)
        elif not is_packed(name):
            self._pack(f"{matrix}", tensor)
        else:
            if name in self._halves or f"{matrix}.weight" not in self._missing:
                raise ValueError(f"{name}: given twice")
            self._halves[name] = tensor
            if f"{matrix}{PACKED}" in self._halves and f"{matrix}{SCALE}" in self._halves:
                self._unpack(f"{matrix}")

    def _pack(self, matrix: str, values: Tensor) -> None:
        names = f"{matrix}{PACKED}", f"{matrix}{SCALE}"
        values = values.detach()
        try:
            if self._old is None:
                codes, scale = pack(values)
            else:
                with TensorReader(self._old.folder) as reader:
                    old = [fresh_tensor(reader, self._old, name, True).to(values.device) for name in names]
                codes, scale = repack(values, *old)
        except ValueError as error:
            raise ValueError(f"{matrix}.weight: {error}") from error
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        self.num_rounded += not torch.equal(unpack(codes, scale, wide), values.to(wide))
        for name, tensor in zip(names, (codes, scale), strict=True):
            self._write(name, tensor)

    def _unpack(self, matrix: str) -> None:
        codes, scale = (self._halves.pop(f"{matrix}{suffix}") for suffix in (PACKED, SCALE))
        name = f"{matrix}.weight"
        is_bf16 = DTYPES[self.plan.slots[name].entry.dtype] == torch.bfloat16
        self._write(name, unpack(codes, scale, torch.bfloat16 if is_bf16 else torch.float32))

    def _write(self, name: str, tensor: Tensor) -> None:
        if name not in self._missing:
            raise ValueError(f"{name}: given twice")
        slot = self.plan.slots[name]
        if name.endswith("A_log"):
            heads = tensor.detach().flatten().cpu()
            tensor = heads.new_zeros(slot.entry.shape)
            tensor.view(-1)[: len(heads)] = heads
        check = check_for(name, slot.entry.dtype, self.check_finite)
        with _one_line(self.folder), self._file(slot) as fd:
            self.num_rounded += write_tensor(fd, name, slot.entry, tensor, check)
        self.num_bytes += slot.entry.num_bytes
        del self._missing[name]

    def require_complete(self) -> None:
        if self._missing:
            lines = "".join(f"\n  missing {name}" for name in collapse(self._missing))
            raise ValueError(f"tensors do not fit the model:{lines}")

    def finish(self) -> None:
        """Documents, then the index, each on the disk before the next."""
        for file in self.plan.headers:
            sync(self.partial / file)
        for file in sorted(self.plan.documents, key=lambda each: each == INDEX):
            (self.partial / file).write_bytes(self.plan.documents[file])
            sync(self.partial / file)

    @contextmanager
    def _file(self, slot: Slot) -> Iterator[int]:
        fd = os.open(self.partial / slot.file, os.O_WRONLY)
        try:
            yield fd
        finally:
            os.close(fd)


def _copy_small_files(partial: Path, plan: Plan, like: Checkpoint | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """From like, all but weights, hidden folders and what is large: names of the copied and of those left out."""
    if like is None:
        return (), ()
    copied, left_out = [], []
    for folder, subfolders, files in os.walk(like.folder):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for file in sorted(files):
            source = Path(folder) / file
            name = str(source.relative_to(like.folder))
            if name in plan.headers or name in plan.documents or name == INDEX or name in like.headers:
                continue
            if file.endswith(WEIGHT_SUFFIXES) or not source.is_file() or source.stat().st_size > MAX_COPIED_BYTES:
                left_out.append(name)
                continue
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            sync(target)
            copied.append(name)
    return tuple(copied), tuple(left_out)


@contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        file = f" ({error.filename})" if error.filename else ""
        raise ValueError(f"{folder}: cannot be written: {error.strerror}{file}") from error
