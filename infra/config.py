"""The one config tree, read and written: a TOML file plus `key=value` overrides in, a checked frozen RunConfig out."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from infra.config_errors import explain
from infra.config_rules import Problem, contradictions
from infra.init_checkpoint import resolved, written_in
from infra.settings import POOL_OF as POOL_OF
from infra.settings import ChatConfig as ChatConfig
from infra.settings import PoolsConfig as PoolsConfig
from infra.settings import RunConfig as RunConfig
from infra.settings import TrackingConfig as TrackingConfig
from infra.task_settings import TasksConfig as TasksConfig

SHIPPED = Path(__file__).parent / "configs"

# TOML has no null: a setting that may be off is written `"none"` (on the command line: key=none).
NONE = "none"


class ConfigError(ValueError):
    """What is wrong with a config, one line each. Raised instead of a partly honoured config."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__("\n".join(self.problems))


_ADAPTER = TypeAdapter(RunConfig)


def shipped_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.toml")))


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """`path` is a TOML file or the bare name of a shipped config; an override is `section.key=value`.

    With `warm_start.init`, [model] is that of the folder's config.json, so that the config holds what the run works on.
    Raises ConfigError with every problem found. Lines about a setting of the file start with the file's name.
    """
    file = _find(path)
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError([f"{file.name}: not TOML: {error}"]) from error
    return parse(text, file.name, overrides, with_init=True)


def parse(text: str, name: str, overrides: Sequence[str] = (), *, with_init: bool = False) -> RunConfig:
    """The same for a file's text; `name` is what its problems are called by.

    with_init False: as the text has it, whatever became of the folder: a stored config holds its run's architecture.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"{name}: not TOML: {error}"]) from error
    changes, malformed = _parse_overrides(overrides)
    for key, value in changes.items():
        _set(data, key.split("."), value)

    problems, written = list(malformed), _written(data)
    tree, found = resolved(data, written) if with_init else (data, [])
    for keys, message in (*found, *_problems(tree, written)):
        from_command_line = any(_overlap(key, change) for key in keys for change in changes)
        problems.append(message if from_command_line else f"{name}: {message}")
    if problems:
        raise ConfigError(problems)
    return _build(tree)


def from_tree(settings: RunConfig | Mapping[str, Any]) -> RunConfig:
    """A config that came as JSON, as a form sends it: with every default written out. Raises ConfigError."""
    if isinstance(settings, RunConfig):
        return settings
    settings, found = resolved(settings, written_in(settings))
    problems = [message for _, message in (*found, *_problems(settings, ()))]
    if problems:
        raise ConfigError(problems)
    return _build(settings)


def dump(cfg: RunConfig) -> str:
    """TOML that `load` reads back to an equal config. Settings that others leave unread are left out."""
    lines: list[str] = []
    tables: list[str] = []
    for section in fields(cfg):
        value = getattr(cfg, section.name)
        if not is_dataclass(value):
            lines.append(f"{section.name} = {_toml(value)}")
            continue
        if section.name == "tokenizer" and cfg.warm_start.init is not None:
            continue
        tables += ["", f"[{section.name}]"]
        for entry in fields(value):
            if section.name == "train" and cfg.train.mode != "lora" and entry.name.startswith("lora_"):
                continue
            tables.append(f"{entry.name} = {_toml(getattr(value, entry.name))}")
    return "\n".join([*lines, *tables]) + "\n"


def digest(cfg: RunConfig, sections: Collection[str]) -> str:
    """sha256 over the canonical JSON of these top-level names: the cache key of a stage that reads only them."""
    tree = asdict(cfg)
    assert set(sections) <= set(tree), f"not in RunConfig: {set(sections) - set(tree)}"
    canonical = json.dumps({name: tree[name] for name in sections}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _find(path: str | Path) -> Path:
    file = Path(path)
    if file.is_file():
        return file
    shipped = SHIPPED / f"{path}.toml"
    if file.suffix == "" and file.parent == Path() and shipped.is_file():
        return shipped
    raise ConfigError([f"{path}: no such file, and not a shipped config ({', '.join(shipped_names())})"])


def _parse_overrides(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Values are TOML; what is not TOML is taken as text, so that run=demo needs no quotes."""
    changes: dict[str, Any] = {}
    malformed: list[str] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            malformed.append(f"{override}: expected key=value, for example train.learning_rate=1e-4")
            continue
        try:
            parsed = tomllib.loads(f"value = {text}")
        except tomllib.TOMLDecodeError:
            parsed = {}
        changes[key] = parsed["value"] if parsed.keys() == {"value"} else text.strip()
    return changes, malformed


def _set(data: dict[str, Any], keys: Sequence[str], value: object) -> None:
    for key in keys[:-1]:
        if not isinstance(data.get(key), dict):
            data[key] = {}
        data = data[key]
    data[keys[-1]] = value


def _overlap(key: str, change: str) -> bool:
    """One names the other or a part of it."""
    return f"{key}.".startswith(f"{change}.") or f"{change}.".startswith(f"{key}.")


def _build(data: Mapping[str, Any]) -> RunConfig:
    # JSON, because strict validation takes only instances for dataclasses and tuples unless the input is JSON.
    return _ADAPTER.validate_json(json.dumps(_nones(RunConfig, data), default=str))


def _nones(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """`"none"` becomes None where the setting may be off."""
    hints = get_type_hints(cls)
    out: dict[str, Any] = {}
    for key, value in data.items():
        hint = hints.get(key)
        if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
            out[key] = _nones(hint, value)
        else:
            out[key] = None if value == NONE and NoneType in get_args(hint) else value
    return out


def _problems(data: Mapping[str, Any], written: Collection[str]) -> Iterator[Problem]:
    """Faulty settings fall back to their defaults, so that contradictions among the others are found as well."""
    faulty: set[str] = set()
    try:
        cfg = _build(data)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            faulty.add(_dotted(detail["loc"][:2]))
            yield (_dotted(detail["loc"]),), explain(detail, _known_keys())
        cfg = _build(_without(data, faulty))
    for keys, message in contradictions(cfg, written):
        if faulty.isdisjoint(keys) and faulty.isdisjoint(key.split(".")[0] for key in keys):
            yield keys, message


def _without(data: Mapping[str, Any], faulty: Collection[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in data.items():
        if key in faulty:
            continue
        if isinstance(value, dict):
            value = {name: inner for name, inner in value.items() if f"{key}.{name}" not in faulty}
        kept[key] = value
    return kept


def _dotted(loc: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in loc)


def _written(data: Mapping[str, Any]) -> set[str]:
    """Dotted keys that the file or the command line sets, whatever their values."""
    written: set[str] = set()
    for key, value in data.items():
        written |= {f"{key}.{inner}" for inner in value} if isinstance(value, dict) else {key}
    return written


def _known_keys() -> dict[str, tuple[str, ...]]:
    """Section name ("" for the top level) to its keys."""
    known = {"": tuple(entry.name for entry in fields(RunConfig))}
    for name, hint in get_type_hints(RunConfig).items():
        if is_dataclass(hint):
            known[name] = tuple(entry.name for entry in fields(hint))
    return known


def _toml(value: object) -> str:
    if value is None:
        return _toml(NONE)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    # JSON's escapes are TOML's, but for the one control character that JSON leaves bare.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
