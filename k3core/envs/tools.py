"""The tools of a workspace. A call that is wrong gets a short `error: ...` to read, and the episode goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import PurePosixPath
from typing import ClassVar

import regex
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from k3core.envs.environment import Limits, ToolSpec
from k3core.envs.workspace import ToolError, Workspace
from k3core.types import ToolCall

__all__ = ["TOOLS", "ToolResult", "ToolSpec", "run_call"]

NO_MATCHES = "no matches"
MAX_PATTERN_CHARS = 200
MAX_QUANTIFIED_GROUPS = 4
MAX_REPEATS = 100


class _Arguments(BaseModel):
    """Strict: no coercion ("3" is no integer, nor is true), no unknown argument. The docstring describes the tool."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    tool: ClassVar[str]


class _Glob(_Arguments):
    """List files whose path matches a pattern; * stays within a folder, ** crosses folders."""

    tool = "glob"
    pattern: str


class _Grep(_Arguments):
    """Search for a regular expression, case-sensitive, line by line; prints file:text, in one file the text alone."""

    tool = "grep"
    pattern: str
    path: str = "."


class _Read(_Arguments):
    """Print a text file, or `limit` of its lines from line `offset` on (the first line is 1)."""

    tool = "read"
    path: str
    offset: int = Field(default=1, ge=1)
    limit: int = Field(default=500, ge=1)


class _Write(_Arguments):
    """Create a file or replace its whole content."""

    tool = "write"
    path: str
    content: str


class _Edit(_Arguments):
    """Replace `old`, which must occur exactly once in the file, by `new`."""

    tool = "edit"
    path: str
    old: str
    new: str


class _Finish(_Arguments):
    """End the work. Call it when every requested file is written."""

    tool = "finish"


_Call = _Glob | _Grep | _Read | _Write | _Edit | _Finish
_MODELS: tuple[type[_Call], ...] = (_Glob, _Grep, _Read, _Write, _Edit, _Finish)


def _spec(model: type[_Arguments]) -> ToolSpec:
    schema = model.model_json_schema()
    properties = {
        name: {key: value for key, value in field.items() if key != "title"}
        for name, field in schema["properties"].items()
    }
    parameters = {
        "type": "object",
        "properties": properties,
        "required": schema.get("required", []),
        "additionalProperties": False,
    }
    return ToolSpec(model.tool, model.__doc__ or "", parameters)


TOOLS: tuple[ToolSpec, ...] = tuple(_spec(model) for model in _MODELS)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the policy reads, at most `max_output_bytes` long. ok is False when the policy's call was at fault."""

    content: str
    ok: bool


def run_call(call: ToolCall, workspace: Workspace, limits: Limits) -> ToolResult:
    """Raises InfrastructureError for faults of ours, nothing for those of the policy."""
    try:
        content, ok = _run(_parse(call), workspace, limits), True
    except ToolError as error:
        content, ok = f"error: {error}", False
    return ToolResult(_truncate(content, limits.max_output_bytes), ok)


def _parse(call: ToolCall) -> _Call:
    model = next((model for model in _MODELS if model.tool == call.name), None)
    if model is None:
        raise ToolError("unknown tool")
    if call.arguments is None:
        raise ToolError(call.error or "arguments could not be parsed")
    try:
        return model.model_validate(dict(call.arguments))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ToolError(f"{where}: {first['msg']}" if where else first["msg"]) from None


def _run(call: _Call, workspace: Workspace, limits: Limits) -> str:
    match call:
        case _Glob():
            return "\n".join(_glob(call.pattern, workspace)) or NO_MATCHES
        case _Grep():
            return "\n".join(_grep(call.pattern, call.path, workspace, limits)) or NO_MATCHES
        case _Read():
            lines = _lines(workspace.read(call.path))
            if call.offset > max(len(lines), 1):
                raise ToolError(f"offset {call.offset} is past the last line, {len(lines)}")
            return "\n".join(lines[call.offset - 1 : call.offset - 1 + call.limit]) or "(empty)"
        case _Write():
            return f"wrote {workspace.write(call.path, call.content)}"
        case _Edit():
            text = workspace.read(call.path)
            count = text.count(call.old) if call.old else 0
            if count != 1:
                raise ToolError(f"old must occur exactly once; it occurs {count} times")
            return f"edited {workspace.write(call.path, text.replace(call.old, call.new))}"
        case _Finish():
            workspace.files()  # nobody finishes in a workspace that is gone
            return "finished"


def _glob(pattern: str, workspace: Workspace) -> list[str]:
    patterns = pattern.split("/")
    return [name for name in workspace.files() if _path_matches(name.split("/"), patterns)]


def _path_matches(parts: list[str], patterns: list[str]) -> bool:
    """`reachable` holds how many parts the patterns so far can have consumed, so no pattern is exponential."""
    reachable = {0}
    for pattern in patterns:
        if not reachable:
            return False
        if pattern == "**":
            reachable = set(range(min(reachable), len(parts) + 1))
        else:
            reachable = {n + 1 for n in reachable if n < len(parts) and fnmatchcase(parts[n], pattern)}
    return len(parts) in reachable


def _grep(pattern: str, path: str, workspace: Workspace, limits: Limits) -> list[str]:
    """Stops early once there is more than may be shown.

    The limit counts what this thread computes: a machine that stands still for seconds must not change what the policy
    reads, and with it the run.
    """
    compiled = _compile(pattern)
    deadline = time.thread_time() + limits.tool_timeout_s
    hits: list[str] = []
    size_bytes = 0
    for hit in _search(compiled, path, workspace, deadline):
        hits.append(hit)
        size_bytes += len(hit.encode()) + 1
        if size_bytes > limits.max_output_bytes + 1:
            break
    return hits


def _search(compiled: regex.Pattern[str], path: str, workspace: Workspace, deadline: float) -> Iterator[str]:
    names = workspace.files(path)
    is_one_file = list(names) == [PurePosixPath(path).as_posix()]
    for name in names:
        try:
            text = workspace.read(name)
        except ToolError:
            if is_one_file:
                raise
            continue  # a binary document among others is no error of the pattern's
        for line in _lines(text):
            remaining_s = deadline - time.thread_time()
            try:
                if remaining_s <= 0:
                    raise TimeoutError
                found = compiled.search(line, timeout=remaining_s)
            except TimeoutError:
                raise ToolError("the pattern takes too long") from None
            if found:
                yield line if is_one_file else f"{name}:{line}"


def _compile(pattern: str) -> regex.Pattern[str]:
    """Compile a pattern whose compiled size is bounded.

    Matching has a time limit but compiling has none, and `regex` copies the body of every counted repeat and twice
    that of every repeated group: `((a{999}){999}){999}` would take all memory. Hence the bounds, and neither
    recursion, flags, comments nor fuzzy matching.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ToolError(f"pattern is longer than {MAX_PATTERN_CHARS} characters")
    bare = regex.sub(r"\\[pPN]\{\w*\}|\\.", "_", pattern, flags=regex.DOTALL)
    counted = regex.findall(r"\{[0-9]*,?[0-9]*\}", bare)
    if bare.count("{") != len(counted):
        raise ToolError(r"bad pattern: write \{ for a brace")
    if prod(max((1, *map(int, regex.findall("[0-9]+", repeat)))) for repeat in counted) > MAX_REPEATS:
        raise ToolError(f"bad pattern: more than {MAX_REPEATS} repeats")
    if regex.search(r"\(\?(?!:|=|!|<=|<!|i\))", bare):
        raise ToolError("bad pattern: (? may only begin (?: (?= (?! (?<= (?<! or (?i)")
    if len(regex.findall(r"\)[*+?{]", bare)) > MAX_QUANTIFIED_GROUPS:
        raise ToolError(f"bad pattern: more than {MAX_QUANTIFIED_GROUPS} repeated groups")
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ToolError(f"bad pattern: {error}") from None


def _lines(text: str) -> list[str]:
    """Split at \\n alone, so that line numbers agree between tools; a final newline starts no line."""
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _truncate(text: str, max_bytes: int) -> str:
    data = text.encode(errors="replace")  # an argument's name is echoed, and may hold half a surrogate pair
    if len(data) <= max_bytes:
        return data.decode()
    marker = f"\n[truncated at {max_bytes} bytes]"
    return data[: max(0, max_bytes - len(marker))].decode(errors="ignore") + marker
