"""JSON documents with one canonical byte form that carry their own digest, so that no altered byte goes unnoticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from k3core.errors import IntegrityError

SEAL = "self_sha256"


def canonical_json(document: Mapping[str, Any]) -> bytes:
    """Sorted keys, no spaces, ASCII. Raises ValueError for what JSON cannot say: NaN, infinity, a tensor."""
    try:
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except TypeError as error:
        raise ValueError(f"not a JSON document: {error}") from error


def parse_canonical(data: bytes, file: str) -> dict[str, Any]:
    """The inverse. Raises IntegrityError unless `data` is exactly the canonical form of a JSON object."""
    try:
        document = json.loads(data)
        is_canonical = isinstance(document, dict) and canonical_json(document) == data
    except ValueError as error:
        raise IntegrityError(
            f"{file}: expected a JSON document, found {len(data)} bytes that are not: {error}"
        ) from error
    if not is_canonical:
        raise IntegrityError(f"{file}: expected a JSON object in canonical form, found other bytes")
    assert isinstance(document, dict)
    return document


def seal(document: Mapping[str, Any]) -> dict[str, Any]:
    assert SEAL not in document, "sealed twice"
    return {**document, SEAL: hashlib.sha256(canonical_json(document)).hexdigest()}


def unseal(document: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The document without its digest. Raises IntegrityError when the digest is missing or another one."""
    content = {key: value for key, value in document.items() if key != SEAL}
    found = hashlib.sha256(canonical_json(content)).hexdigest()
    if document.get(SEAL) != found:
        raise IntegrityError(f"{file}: expected content with sha256 {document.get(SEAL)}, found {found}")
    return content
