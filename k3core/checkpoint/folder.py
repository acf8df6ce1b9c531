"""A checkpoint's folder as it lies on disk: config.json, index and headers, and all that is wrong with them.

No data is read here. What is opened fits its config exactly: every tensor of the model is there once, in a shape and
type that can be read, in a file that holds it whole.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3core.checkpoint.names import (
    READABLE_DTYPES,
    Shape,
    collapse,
    expected_shapes,
    expert_matrix,
    hf_name,
    internal_name,
    is_foreign,
    is_packed,
    readable_shapes,
)
from k3core.checkpoint.safetensors_io import Entry, Header, read_header
from k3core.errors import IntegrityError
from k3core.model.config import MXFP4, K3Config
from k3core.model.hf_config import Layout, from_hf, layout_of

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
MAX_JSON_BYTES = 200_000_000


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor: its name in the files, the file, and its place there."""

    hf_name: str
    file: str
    entry: Entry


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened folder.

    tensors: by internal name in the order of `expected_shapes`, then those of the vision parts by their own name.
    headers: of every file that holds any of them, by name. total_bytes: of all tensors.
    """

    folder: Path
    document: Mapping[str, Any]
    cfg: K3Config
    layout: Layout
    tensors: Mapping[str, Stored]
    headers: Mapping[str, Header]
    total_bytes: int

    @property
    def model_tensors(self) -> dict[str, Stored]:
        """Without the vision parts."""
        return {name: stored for name, stored in self.tensors.items() if not is_foreign(name)}


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """Reads config.json, the index and every header.

    Raises ValueError with a line for everything that is wrong: in the config, absent files, and every tensor that is
    missing, unexpected, there twice, misshapen or of another type, by its name and file. Raises IntegrityError when a
    file itself is broken: cut short, or with a header that does not describe it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "a file" if folder.is_file() else "nothing"
        raise ValueError(f"{folder}: expected a folder with {CONFIG} and safetensors files, found {what}")
    document = read_json_object(folder / CONFIG)
    try:
        cfg = from_hf(document)
    except ValueError as error:
        raise ValueError("\n".join(f"{folder / CONFIG}: {line}" for line in str(error).splitlines())) from error
    layout = layout_of(document)
    weight_map = _weight_map(folder)
    headers, absent = _headers(folder, weight_map)
    problems = [f"{INDEX} names {file}, which is not there ({n} tensors)" for file, n in absent.items()]
    problems += _index_problems(weight_map, headers)
    stored, doubles = _by_internal_name(headers, cfg)
    problems += doubles
    elsewhere = {internal_name(name, cfg) for name, file in weight_map.items() if file in absent}
    problems += _tensor_problems(cfg, layout, stored, elsewhere)
    if problems:
        raise ValueError(f"{folder}: {len(problems)} fault(s)\n" + "\n".join(f"  {line}" for line in problems))
    tensors = {name: stored[name] for name in expected_shapes(cfg)}
    tensors |= {name: stored[name] for name in stored if is_foreign(name)}
    total_bytes = sum(each.entry.num_bytes for each in tensors.values())
    return Checkpoint(folder, document, cfg, layout, tensors, headers, total_bytes)


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises ValueError when it cannot be read or is no JSON object."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_JSON_BYTES:  # reading a pipe would wait for ever
            raise ValueError(f"{path}: expected a file of at most {MAX_JSON_BYTES} bytes, found something else")
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON object, found {len(text)} bytes that are not: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(document).__name__}")
    return document


def _weight_map(folder: Path) -> dict[str, str]:
    """HF name to file; for a single file without an index, the file under the empty name."""
    has_single = (folder / SINGLE).exists()
    if not (folder / INDEX).exists():
        if has_single:
            return {"": SINGLE}
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        found = f"{len(others)} other safetensors files ({others[0]}, ...)" if others else "no safetensors file"
        raise ValueError(f"{folder}: expected {INDEX} or {SINGLE}, found {found}: fetch the checkpoint whole")
    weight_map = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX}: expected an object weight_map from tensor to file")
    for name, file in weight_map.items():
        # A name with a folder in it would let an index point anywhere.
        if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file or "\0" in file:
            raise ValueError(f"{folder / INDEX}: {name}: expected the name of a safetensors file, found {file!r}")
    if has_single and SINGLE not in weight_map.values():
        raise ValueError(f"{folder}: holds {SINGLE} beside an {INDEX} that does not name it: remove one of the two")
    return weight_map


def _headers(folder: Path, weight_map: Mapping[str, str]) -> tuple[dict[str, Header], dict[str, int]]:
    """Of every file, and the number of tensors of each that is not there. Raises IntegrityError listing broken files."""
    files = sorted(set(weight_map.values()))
    absent = {file: 0 for file in files if not (folder / file).exists()}
    for file in weight_map.values():
        if file in absent:
            absent[file] += 1
    headers, unreadable, broken = {}, [], []
    for file in files:
        if file in absent:
            continue
        try:
            headers[file] = read_header(folder / file)
        except IntegrityError as error:
            broken.append(str(error))
        except ValueError as error:
            unreadable.append(str(error))
    if broken:
        raise IntegrityError("\n".join(broken + unreadable))
    if unreadable:
        raise ValueError("\n".join(unreadable))
    return headers, absent


def _index_problems(weight_map: Mapping[str, str], headers: Mapping[str, Header]) -> Iterator[str]:
    if "" in weight_map:
        return
    misplaced: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if file in headers and name not in headers[file].entries:
            misplaced.setdefault(file, []).append(name)
    for file, names in misplaced.items():
        yield from (f"{INDEX} places {name} in {file}, which does not hold it" for name in collapse(names))
    for file, header in headers.items():
        unlisted = [name for name in header.entries if weight_map.get(name) != file]
        yield from (f"{file} holds {name}, which {INDEX} does not place there" for name in collapse(unlisted))


def _by_internal_name(headers: Mapping[str, Header], cfg: K3Config) -> tuple[dict[str, Stored], list[str]]:
    found: dict[str, Stored] = {}
    problems = []
    for file, header in headers.items():
        for hf, entry in header.entries.items():
            name = internal_name(hf, cfg)
            if name in found:
                first = found[name]
                problems.append(f"there twice: {first.hf_name} in {first.file} and {hf} in {file}")
            else:
                found[name] = Stored(hf, file, entry)
    return found, problems


def _tensor_problems(cfg: K3Config, layout: Layout, stored: Mapping[str, Stored], elsewhere: set[str]) -> Iterator[str]:
    """elsewhere: internal names that the index places in absent files."""
    plain = {m for name in stored if (m := expert_matrix(name)) is not None and not is_packed(name)}
    packed = {m for name in stored if (m := expert_matrix(name)) is not None and is_packed(name)}
    described = 3 * cfg.num_experts * len(cfg.moe_layers)
    if described > 2 * len(stored) + 10_000:  # more than can be named in sensible time
        yield f"{CONFIG} describes {described} expert matrices, the files hold {len(stored)} tensors in all"
        return
    line = _quantization_problem(cfg, stored, plain, packed)
    if line is not None:
        yield line
    expected = _expected_as_stored(cfg, plain, packed)
    missing = [name for name in expected if name not in stored and name not in elsewhere]
    yield from (f"missing: {name}" for name in collapse(hf_name(name, layout) for name in missing))
    by_file: dict[str, list[str]] = {}
    for name, each in stored.items():
        if name not in expected and not is_foreign(name):
            by_file.setdefault(each.file, []).append(each.hf_name)
    for file, names in by_file.items():
        yield from (f"unexpected: {name} in {file}" for name in collapse(names))
    lines = (_misfit(name, shape, stored[name]) for name, shape in expected.items() if name in stored)
    yield from collapse(line for line in lines if line is not None)


def _expected_as_stored(cfg: K3Config, plain: Collection[str], packed: Collection[str]) -> dict[str, Shape]:
    """Each expert matrix in the form that it is stored in, or as config.json says where it is in neither or both."""
    as_said = expected_shapes(cfg)
    if not (plain and cfg.expert_quantization is not None) and not (packed and cfg.expert_quantization is None):
        return as_said
    expected = {name: shape for name, shape in as_said.items() if expert_matrix(name) is None}
    for form in (None, MXFP4):
        try:
            shapes = expected_shapes(replace(cfg, expert_quantization=form))
        except ValueError:  # a width that cannot be packed: what is packed all the same is unexpected
            continue
        for name, shape in shapes.items():
            matrix = expert_matrix(name)
            is_in_neither = matrix not in plain and matrix not in packed
            is_wanted = matrix in (plain if form is None else packed) or (
                form == cfg.expert_quantization and is_in_neither
            )
            if matrix is not None and is_wanted:
                expected[name] = shape
    return expected


def _misfit(name: str, shape: Shape, stored: Stored) -> str | None:
    shapes = readable_shapes(name, shape)
    dtypes = ("U8",) if is_packed(name) else READABLE_DTYPES
    entry = stored.entry
    if entry.shape in shapes and entry.dtype in dtypes:
        return None
    return (
        f"{stored.hf_name} in {stored.file}: {entry.dtype} {list(entry.shape)} in place of "
        f"{' or '.join(dtypes)} {' or '.join(str(list(each)) for each in shapes)}"
    )


def _quantization_problem(
    cfg: K3Config, stored: Mapping[str, Stored], plain: Collection[str], packed: Collection[str]
) -> str | None:
    """What config.json says of the experts against what is stored.

    Packed or not is seen from the tensors, since the block's own list of exceptions is no truth.
    """
    block = "quantization_config (in text_config, where there is one)"
    if plain and packed:
        is_fewer_plain = len(plain) <= len(packed)
        fewer, what = (plain, "plain") if is_fewer_plain else (packed, "packed")
        names = collapse(sorted(fewer))
        return f"experts are partly packed; these alone are {what}: {', '.join(names)}"
    if plain and cfg.expert_quantization is not None:
        dtypes = sorted({stored[f"{matrix}.weight"].entry.dtype for matrix in plain})
        return (
            f"{CONFIG} says by its {block} that experts are packed, and all {len(plain)} expert matrices are plain "
            f"{'/'.join(dtypes)}: remove the block, or engines read garbage"
        )
    if packed and cfg.expert_quantization is None:
        return (
            f"{CONFIG} has no {block}, and all {len(packed)} expert matrices are packed (weight_packed, weight_scale): "
            "put back the block of the checkpoint that they come from"
        )
    return None
