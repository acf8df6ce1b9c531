"""pydantic's findings in the words of the person who wrote the TOML."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence

from pydantic_core import ErrorDetails

EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dataclass_type": "a section",
}
BOUNDS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}


def explain(detail: ErrorDetails, known: Mapping[str, Sequence[str]]) -> str:
    """The line about one setting. `known` maps section names ("" for the top level) to their keys."""
    if detail["type"] == "value_error":  # a section's own check, which names the key itself
        return str(detail["ctx"]["error"])
    return f"{'.'.join(str(part) for part in detail['loc'])}: {_fault(detail, known)}"


def _fault(detail: ErrorDetails, known: Mapping[str, Sequence[str]]) -> str:
    kind, value, ctx = detail["type"], _show(detail["input"]), detail.get("ctx", {})
    if kind == "unexpected_keyword_argument":
        return f"unknown key{_suggestion(detail['loc'], known)}"
    if kind in EXPECTED:
        return f"expected {EXPECTED[kind]}, got {value}"
    if kind in BOUNDS:
        sign, limit = BOUNDS[kind]
        return f"must be {sign} {ctx[limit]:g}, got {value}"
    if kind == "literal_error":
        return f"must be {ctx['expected']}, got {value}"
    if kind in ("string_too_short", "too_short"):
        return "must not be empty"
    if kind == "string_pattern_mismatch":
        return f"must be letters, digits, '.', '_' or '-', starting with a letter or digit, got {value}"
    return f"{detail['msg'][0].lower()}{detail['msg'][1:]}, got {value}"


def _suggestion(loc: Sequence[int | str], known: Mapping[str, Sequence[str]]) -> str:
    """The nearest key of the same section, else the same key of another section, else all keys of this one."""
    section, key = ".".join(str(part) for part in loc[:-1]), str(loc[-1])
    near = difflib.get_close_matches(key, known[section], n=1)
    elsewhere = [f"{name}.{key}".lstrip(".") for name, keys in known.items() if name != section and key in keys]
    candidates = near or elsewhere[:1]
    if candidates:
        return f" (did you mean {candidates[0]}?)"
    return f" (known: {', '.join(known[section])})"


def _show(value: object) -> str:
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    return json.dumps(value, ensure_ascii=False)
