"""Nouns <-> bytes. The only place with their schema version.

One zstd frame around {"schema", "type", "value"}; arrays as dtype, shape and base64, so that every bit returns.
A field that a noun got later has a default, which is what a record without it is read as: the schema stays.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin

import numpy as np
import zstandard
from pydantic import ConfigDict, TypeAdapter, ValidationError

from k3core.errors import IntegrityError
from k3core.types import (
    CriterionResult,
    EvalReport,
    Message,
    PolicyVersion,
    Prompt,
    Ref,
    SamplingParams,
    Score,
    ScoredGroup,
    Supports,
    ToolCall,
    Trajectory,
)

SCHEMA = 1
NOUNS: tuple[type[Any], ...] = (
    CriterionResult,
    EvalReport,
    Message,
    PolicyVersion,
    Prompt,
    Ref,
    SamplingParams,
    Score,
    ScoredGroup,
    Supports,
    ToolCall,
    Trajectory,
)
ARRAY_KEYS = frozenset({"dtype", "shape", "base64"})
CONFIG = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
LEVEL = 3

T = TypeVar("T")


def encode(value: Any) -> bytes:
    """A noun, or a list or tuple of one kind of noun; equal values give equal bytes.

    Inside free-form mappings a tuple returns as a list. Raises ValueError for what has no byte form: an object that is
    no noun, a key that is no string.
    """
    many = isinstance(value, (list, tuple))
    kinds = {type(item) for item in (value if many else [value])}
    if len(kinds) > 1 or not kinds <= set(NOUNS):
        raise ValueError(f"expected nouns of one kind, found {sorted(kind.__name__ for kind in kinds)}")
    name = next((kind.__name__ for kind in kinds), "")
    document = {"schema": SCHEMA, "type": f"[{name}]" if many else name, "value": _to_json(value)}
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True)
    # NaN and infinities stay what they are: Python reads back the words that it writes.
    return compressor.compress(json.dumps(document, separators=(",", ":")).encode("ascii"))


def decode(data: bytes, type_: type[T], file: str = "record") -> T:
    """`type_` is a noun, `list[noun]` or `tuple[noun, ...]`; a list may be read as a tuple.

    Raises IntegrityError naming `file` for torn bytes, another schema and another type.
    """
    noun, is_expected = _expected(type_)
    document = _decompress(data, file)
    if document.get("schema") != SCHEMA:
        raise IntegrityError(f"{file}: expected record schema {SCHEMA}, found {document.get('schema')}")
    if document.get("type") not in is_expected:
        raise IntegrityError(f"{file}: expected {is_expected[0]}, found {document.get('type')}")
    value = document.get("value")
    many = get_origin(type_) is not None
    try:
        # A tuple's configuration reaches the dataclasses inside; pydantic takes none for a dataclass itself.
        items = TypeAdapter(tuple[noun, ...], config=CONFIG).validate_python(value if many else [value])  # type: ignore[valid-type]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise IntegrityError(f"{file}: expected {is_expected[0]}, found {where}: {first['msg']}") from error
    result: Any = items[0] if not many else list(items) if get_origin(type_) is list else items
    return result


def _expected(type_: Any) -> tuple[type, tuple[str, ...]]:
    """The noun, and the type names that may stand in the record."""
    if get_origin(type_) in (list, tuple):
        noun = get_args(type_)[0]
        names: tuple[str, ...] = (f"[{noun.__name__}]", "[]")
    else:
        noun, names = type_, (type_.__name__,)
    assert noun in NOUNS, f"{type_} is not a noun or a list of one"
    return noun, names


def _decompress(data: bytes, file: str) -> dict[str, Any]:
    try:
        header = zstandard.get_frame_parameters(data)
        if not header.has_checksum:
            raise IntegrityError(f"{file}: expected a checksummed zstd frame, found one without")
        text = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        document = json.loads(text, object_hook=_from_json)
    except (zstandard.ZstdError, ValueError, TypeError) as error:
        raise IntegrityError(f"{file}: expected a record, found {len(data)} other bytes: {error}") from error
    if not isinstance(document, dict):
        raise IntegrityError(f"{file}: expected a record, found a {type(document).__name__}")
    return document


def _to_json(value: Any) -> Any:
    if isinstance(value, NOUNS):
        return {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise ValueError(f"an array of {value.dtype} has no byte form; use a numeric dtype")
        return {
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "base64": base64.b64encode(value.tobytes()).decode("ascii"),
        }
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"mapping keys must be strings, found {[k for k in value if not isinstance(k, str)][:3]}")
        if value.keys() == ARRAY_KEYS:
            raise ValueError(
                f"a mapping with exactly the keys {sorted(ARRAY_KEYS)} would be read as an array; rename one"
            )
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError(f"a {type(value).__name__} has no byte form; use a string, number, list, mapping or array")


def _from_json(value: dict[str, Any]) -> Any:
    if value.keys() != ARRAY_KEYS:
        return value
    shape = tuple(value["shape"])
    dtype = np.dtype(value["dtype"])
    data = base64.b64decode(value["base64"], validate=True)
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"array {dtype}{list(shape)} does not fit {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape).copy()
