"""warm_start.init: a run that starts from a checkpoint's folder has that checkpoint's architecture and tokenizer."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from infra.config_rules import SUPERVISED, Problem
from k3core.checkpoint.folder import CONFIG, read_json_object
from k3core.model.config import MXFP4, K3Config
from k3core.model.hf_config import from_hf

INIT = "warm_start.init"
_FIELDS = tuple(entry.name for entry in fields(K3Config))
# The released config.json has no key for it, and engines disagree: the run's own config may say it.
_NOT_RELEASED = ("latent_norm_eps",)


@dataclass(frozen=True, slots=True)
class Absence:
    """Why no checkpoint can be opened there, and what to do about it."""

    detail: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.detail}; {self.remedy}"


def folder_of(init: str) -> Path:
    return Path(init).expanduser()


def absence(init: str) -> Absence | None:
    """None where there is a folder with a config.json."""
    folder, said = folder_of(init), f"{INIT} {json.dumps(init)}"
    if "://" in init:
        return Absence(
            f"{said}: not a local folder", "copy the checkpoint to a disk that this machine sees, and name that"
        )
    if folder.is_file():
        return Absence(f"{said}: a file", f"name the folder that holds {CONFIG} and the safetensors files")
    if not folder.is_dir():
        fetch = f"hf download NAME --local-dir {shlex.quote(init)}"
        return Absence(f"{said}: no such folder", f"download the checkpoint into it ({fetch}), or name where it lies")
    if not (folder / CONFIG).is_file():
        return Absence(f"{said}: holds no {CONFIG}", "name the folder that holds the checkpoint, or download it whole")
    return None


def read_config(init: str) -> dict[str, Any]:
    """The folder's config.json. Raises ValueError, one line."""
    return read_json_object(folder_of(init) / CONFIG)


def architecture(init: str, mode: str) -> K3Config:
    """Of the model that a run of this train.mode works on. Raises ValueError with every problem, a line each.

    Mode "lora" keeps packed experts as they are; mode "full" trains them, so it unpacks them.
    """
    try:
        stored = from_hf(read_config(init))
    except ValueError as error:
        path = str(folder_of(init) / CONFIG)
        lines = (line if line.startswith(path) else f"{path}: {line}" for line in str(error).splitlines())
        raise ValueError("\n".join(lines)) from error
    return stored if mode == "lora" else replace(stored, expert_quantization=None)


def resolved(data: Mapping[str, Any], written: Collection[str]) -> tuple[Mapping[str, Any], list[Problem]]:
    """A config's tree with the [model] of its `warm_start.init`, and what beside it disagrees.

    written: dotted keys that a person set. Where the folder is not there, the [model] that is written stands: that of a
    run whose checkpoint went away since, or of a plan for a machine that has it. No run starts without the folder.
    """
    init = _of(data, "warm_start").get("init")
    if not isinstance(init, str) or init == "none":
        return data, []
    model = _of(data, "model")
    own = [name for name in _FIELDS if f"model.{name}" in written]
    if (problem := absence(init)) is not None:
        return data, [] if own else [((INIT,), str(problem))]
    try:
        stored = asdict(architecture(init, mode := _of(data, "train").get("mode", "full")))
    except ValueError as error:
        return data, [((INIT,), f"{INIT}: {line}") for line in str(error).splitlines()]
    document = read_config(init)
    problems: list[Problem] = []
    for name in own:
        ours, theirs = _plain(model[name]), _plain(stored[name])
        if ours == theirs:
            continue
        is_unsaid = name in _NOT_RELEASED and name not in document.get("text_config", document)
        if is_unsaid or (name == "expert_quantization" and mode != "lora"):  # packed there: a contradiction of its own
            stored[name] = model[name]
            continue
        line = (
            f"model.{name} {json.dumps(ours)} and {INIT} {json.dumps(init)}, whose {CONFIG} says {json.dumps(theirs)}: "
            "remove the line, or name another checkpoint"
        )
        problems.append(((f"model.{name}", INIT), line))
    # Not a rule for every config: what a stage reads of its run has the arms of the defaults.
    if stored["expert_quantization"] == MXFP4 and _of(data, "control").get("enabled", True):
        line = f"control.enabled true and {INIT} {json.dumps(init)}, whose experts are packed: {SUPERVISED}; set it to false"
        problems.append((("control.enabled", INIT), line))
    root, run = str(data.get("root", "runs")), str(data.get("run", ""))
    if root.partition("://")[0] in (root, "file") and _is_same(
        folder_of(init), Path(root.removeprefix("file://"), run)
    ):
        line = (
            f"run {json.dumps(run)} and {INIT} {json.dumps(init)}: the run would write into the checkpoint's own folder"
        )
        problems.append((("run", "root", INIT), f"{line}; give it another name, or another root"))
    unknown = {name: value for name, value in model.items() if name not in _FIELDS}
    return {**data, "model": {**unknown, **stored}}, problems


def written_in(tree: Mapping[str, Any]) -> set[str]:
    """Of a tree with every default written out, the keys of [model] that were meant: all of them, where it is not the
    default one, so that somebody filled it in or a folder did; else none."""
    plain = {name: _plain(value) for name, value in asdict(K3Config()).items()}
    model = {name: _plain(value) for name, value in _of(tree, "model").items()}
    return {f"model.{name}" for name in model} if {**plain, **model} != plain else set()


def _is_same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()


def _of(data: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    found = data.get(section)
    return found if isinstance(found, Mapping) else {}


def _plain(value: object) -> object:
    """As JSON has it, with "none" as null."""
    if value == "none":
        return None
    return list(value) if isinstance(value, tuple) else value
