"""JSON inside chat messages: written as the released chat encoders write it, read strictly."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

JsonType = Literal["string", "number", "boolean", "null", "object", "array"]
JSON_TYPES: tuple[JsonType, ...] = ("string", "number", "boolean", "null", "object", "array")


def dump_arguments(value: Any) -> str:
    """Keys in their order, blanks after , and :. Raises ValueError on NaN and infinities."""
    return _dump(value, sort_keys=False, separators=(", ", ": "))


def dump_schema(value: Any) -> str:
    """Compact, keys sorted at every depth: equal declarations are equal texts. Raises ValueError as above."""
    return _dump(value, sort_keys=True, separators=(",", ":"))


def load_json(text: str) -> Any:
    """JSON as the RFC has it: no NaN, no infinity, no repeated key, no lone surrogate. Raises ValueError."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("it holds a lone surrogate") from error
    return value


def type_of(value: Any) -> JsonType:
    """Raises ValueError for what JSON has no type for."""
    match value:
        case str():
            return "string"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case None:
            return "null"
        case Mapping():
            return "object"
        case list() | tuple():
            return "array"
    raise ValueError(f"an argument of type {type(value).__name__} has no XTML type: use JSON's types")


def _dump(value: Any, sort_keys: bool, separators: tuple[str, str]) -> str:
    try:
        return json.dumps(
            value,
            sort_keys=sort_keys,
            separators=separators,
            ensure_ascii=False,
            allow_nan=False,
            default=_dict_of,
        )
    except RecursionError as error:
        raise ValueError("a value is nested too deeply to be written as JSON") from error
    except TypeError as error:
        raise ValueError(f"a value cannot be written as JSON: {error}") from error


def _dict_of(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} is no type of JSON's")
    return dict(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits} is too large")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is repeated")
    return value
