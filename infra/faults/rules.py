"""Which request gets which fault."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

Fault = Literal[
    "slow_down",  # 503, as S3 asks for fewer requests
    "internal_error",  # 500
    "throttle",  # 429
    "forbid",  # 403
    "delay",  # delay_s pass, then all goes on, whether the client still waits or not
    "reset",  # the connection, before the server hears of the request
    "cut_request",  # the server gets half of the body, then both connections break
    "corrupt_request",  # one byte of the body is another one
    "lose_answer",  # the server does it, the client's connection breaks
    "truncate",  # half of the answer's body under the right Content-Length, then the connection ends
    "truncate_silently",  # half of the answer's body under a Content-Length to match
    "corrupt",  # one byte of the answer's body is another one
    "stale",  # the answer that an earlier equal request got
]


@dataclass(frozen=True, slots=True)
class Rule:
    """A fault for requests whose method matches wholly and whose path with query contains a match of `key`.

    Of those that match, the first `skip` are spared and at most `limit` get it, each with `probability`; equal seeds
    and equal requests in the same order get equal faults.
    """

    fault: Fault
    method: str = ".*"
    key: str = ""
    probability: float = 1.0
    seed: int = 0
    skip: int = 0
    limit: int | None = None
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.fault not in get_args(Fault):
            raise ValueError(f"fault {self.fault!r}: expected one of {', '.join(get_args(Fault))}")
        for pattern in (self.method, self.key):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"rule for {self.fault}: {pattern!r} is no regular expression: {error}") from error
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError(f"rule for {self.fault}: expected a probability within 0..1, found {self.probability}")

    def matches(self, method: str, target: str) -> bool:
        return bool(re.fullmatch(self.method, method) and re.search(self.key, target))


@dataclass(slots=True)
class ActiveRule:
    rule: Rule
    num_matched: int = 0
    num_done: int = 0
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.rule.seed)

    def strikes(self, method: str, target: str) -> bool:
        rule = self.rule
        if not rule.matches(method, target):
            return False
        self.num_matched += 1
        is_spared = self.random.random() >= rule.probability or self.num_matched <= rule.skip
        if is_spared or (rule.limit is not None and self.num_done >= rule.limit):
            return False
        self.num_done += 1
        return True


def rule_of(document: Any) -> Rule:
    """From JSON. Raises ValueError for a field that a rule does not have."""
    names = [each.name for each in fields(Rule)]
    if not isinstance(document, Mapping) or "fault" not in document or not document.keys() <= set(names):
        raise ValueError(f"rule {document!r}: expected an object with `fault` and none but {', '.join(names)}")
    return Rule(**document)
